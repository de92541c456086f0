"""The text of the plan against a golden file; epochs, warnings and refusals; the same cells on a terminal."""

from __future__ import annotations

import io
import subprocess
import sys
from pathlib import Path

import pytest

from electra_dist.config import Config
from electra_dist.config_file import load_config
from electra_dist.data.corpus_manifest import CorpusManifest
from electra_dist.errors import UserError
from electra_dist.planning.plan_tables import print_plan

CONFIGS = Path(__file__).parents[2] / "configs"
GOLDEN = Path(__file__).parent / "golden"
SPECIAL = {"[PAD]": 0, "[UNK]": 1, "[CLS]": 2, "[SEP]": 3, "[MASK]": 4}


def plan_text(config: Config, corpus: CorpusManifest | None = None) -> str:
    """Return what `print_plan` prints where there is no terminal."""
    stream = io.StringIO()
    print_plan(config, corpus, stream)
    return stream.getvalue().rstrip("\n")


def _large(*overrides: str) -> Config:
    return load_config(CONFIGS / "large_25pct_mask.yaml", overrides)


def _manifest() -> CorpusManifest:
    shard = {"rows": 1000, "tokens": 500_000, "bytes": 1_024_000, "sha256": "0" * 64}
    return CorpusManifest.model_validate(
        {
            "seq_len": 512,
            "dtype": "uint16",
            "tokenizer": {"sha256": "1" * 64, "vocab_size": 30522, "lowercase": True, "special": SPECIAL},
            "shards": [{"name": f"{i}.tar", **shard} for i in range(4)],
        }
    )


def test_text_is_that_of_the_golden_file():
    assert plan_text(_large()) + "\n" == (GOLDEN / "plan_large_25pct_mask.txt").read_text()


def test_a_known_corpus_gives_epochs():
    [line] = [x for x in plan_text(_large("train.num_steps=10"), _manifest()).splitlines() if "epochs" in x]
    assert line.split(maxsplit=2) == [
        "epochs",
        "5.12",
        "s3://electra-corpus/33b-512: 4,000 rows, 2,000,000 tokens in 4 shards",
    ]


def test_fp32_and_odd_gpu_counts_are_named():
    assert "no time is predicted in fp32" in plan_text(_large("train.precision=fp32"))
    assert "plan.num_gpus 7 is not one of them" in plan_text(_large("plan.num_gpus=7"))
    with pytest.raises(
        UserError, match=r"plan\.gpu: no dense bf16 peak is known for 'TPUv3'; set plan.gpu to one of .*H200"
    ):
        plan_text(_large("plan.gpu=TPUv3"))


class _TerminalStream(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_gets_the_same_cells_in_tables(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("COLUMNS", "120")
    plain, terminal = io.StringIO(), _TerminalStream()
    print_plan(_large(), stream=plain)
    print_plan(_large(), stream=terminal)
    assert plain.getvalue() == plan_text(_large()) + "\n"
    for cell in ("335.14 M", "2.169 GFLOP", "2P + 6P + 4P/W + 8P/W", "638.6"):
        assert cell in plain.getvalue()
        assert cell in terminal.getvalue()


def test_the_plan_does_not_import_torch():
    code = "import sys, electra_dist.planning.plan_tables; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
