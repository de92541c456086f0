"""`electra-dist flops` prints the paper's table and the FLOPs of the config's run."""

from __future__ import annotations

from pathlib import Path

from electra_launcher.cli.main import app
from typer.testing import CliRunner

CONFIGS = Path(__file__).parents[3] / "configs"


def test_the_command_prints_the_papers_models_and_the_flops_of_the_run():
    result = CliRunner().invoke(app, ["flops", str(CONFIGS / "small.yaml")], terminal_width=120)
    assert result.exit_code == 0, result.output
    for name in ("ELMo", "T5-11B", "ELECTRA-1.75M"):
        assert name in result.output
    assert "3.11e+21" in result.output
    assert "1.15e+18 FLOPs for MFU" in result.output
