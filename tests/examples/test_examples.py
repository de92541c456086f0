"""The example scripts as a user runs them, each in a process of its own; what one writes the next one reads.

The scripts that start no processes are run in tests/pretrained/test_finished_run.py.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.corpus_texts import make_prose
from support.real_runs import REPOSITORY, step_records
from transformers import AutoModel

EXAMPLES = REPOSITORY / "examples"


def run_example(script: str, *arguments: object) -> str:
    """Run an example with the commands of this environment, and return its output."""
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    command = [sys.executable, str(EXAMPLES / script), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, env=environment)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


def test_every_example_is_in_the_list_and_says_how_to_run_it() -> None:
    page = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    scripts = sorted(EXAMPLES.glob("*.py"))
    assert len(scripts) == 9
    for script in scripts:
        assert f"[{script.name}]({script.name})" in page
        assert f"python examples/{script.name} " in script.read_text(encoding="utf-8")


@pytest.mark.drill  # 20 s of CPU time; the commands that the scripts start have tests of their own
def test_from_text_to_a_fine_tuned_model_and_on_from_the_exported_one(tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.mkdir()
    for number, document in enumerate(make_prose(60, seed=1)):
        (text / f"{number}.txt").write_text(document)

    trained = run_example("train_on_your_text.py", text, tmp_path / "own", "--steps", 8, "--vocab-size", 120)
    assert "8/8" in trained
    assert len(step_records(tmp_path / "own" / "run")) > 0
    assert "nothing to do" in run_example(
        "train_on_your_text.py", text, tmp_path / "own", "--steps", 8, "--vocab-size", 120
    )

    data = tmp_path / "data"
    data.mkdir()
    labelled = "".join(f"the {word} of it\t{word}\n" for word in ("he", "was") * 8)
    for name in ("train", "dev"):
        (data / f"{name}.tsv").write_text("text\tlabel\n" + labelled)
    finished = run_example(
        "export_and_finetune.py", tmp_path / "own" / "run", data, tmp_path / "tuned", "--average", "last:2"
    )
    assert "mean of the steps 6, 8" in finished
    results = json.loads((tmp_path / "tuned" / "finetuned" / "results.json").read_text())
    assert results["tasks"][0]["task"] == "custom"

    discriminator = tmp_path / "tuned" / "models" / "discriminator"
    assert AutoModel.from_pretrained(discriminator).config.hidden_size == 64
    continued = run_example(
        "continue_from_hugging_face.py", discriminator, text, tmp_path / "more", "--steps", 2, "--seq-len", 64
    )
    assert f"init_from: the weights of {discriminator}" in continued
    assert "generator: not in" in continued  # only the discriminator was named
    assert (tmp_path / "more" / "run" / "checkpoints").is_dir()
