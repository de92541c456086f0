"""Uses a corpus, a run folder and a checkpoint of an earlier commit with this one and compares every loss.

    git worktree add ../before REV && make -C ../before .venv/ready
    python tests/drills/compatibility.py --before ../before

The earlier commit builds a corpus from the documentation that Python carries, makes one run of 40 steps (2 ranks,
ZeRO-1, dropout on) and another that is stopped after half of them. This commit repeats the first run, resumes the
second one, exports the earlier checkpoint and verifies the rows of all three. Takes about 3 minutes on 2 cores.

It passes if every loss, gradient norm, receipt and evaluation is bit for bit the same, all exported files are equal,
and the identity of the run is unchanged.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the repository
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # tests/

from support.real_runs import REPOSITORY, DrillVerdict, free_port, print_verdicts

from electra_dist.run.folder import IDENTITY_FILE, RUN_VOCAB_FILE, STOP_FILE, TOKENIZER_FILE
from electra_dist.run.metrics_writer import read_metrics

NUM_STEPS = 40
COMPARED = ("step", "loss", "mlm_loss", "rtd_loss", "grad_norm", "lr", "receipt", "rows_seen", "auc", "mlm_accuracy")


class Tree:
    """A checkout with its own environment, in which commands are run."""

    def __init__(self, folder: Path, corpus: Path) -> None:
        self.folder, self.corpus = folder.resolve(), corpus
        programs = self.folder / ".venv" / "bin"
        self.environment = {**os.environ, "PATH": f"{programs}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
        self.environment |= {"DS_ACCELERATOR": "cpu"}

    def start(self, *command: str) -> subprocess.Popen[bytes]:
        """Start a command in the checkout."""
        program = str(self.folder / ".venv" / "bin" / command[0])
        return subprocess.Popen([program, *command[1:]], cwd=self.folder, env=self.environment)

    def run(self, *command: str, codes: tuple[int, ...] = (0,)) -> None:
        """Run a command to its end and check its exit code."""
        code = self.start(*command).wait()
        assert code in codes, f"{' '.join(command)} ended with {code} in {self.folder}"

    def pretrain(self, run_dir: Path) -> list[str]:
        """Return the command of a run of 40 steps."""
        settings = {
            "run_dir": run_dir,
            "data.corpus": self.corpus,
            "data.heldout": self.corpus / "heldout",
            "data.cache_dir": run_dir.with_name("cache"),
            "train.num_steps": NUM_STEPS,
            "log.every_steps": 1,
            "log.eval_every_steps": NUM_STEPS // 2,
            "checkpoint.every_steps": NUM_STEPS // 4,
            "engine.zero_stage": 1,
            "model.hidden_dropout": 0.1,
            "model.attention_dropout": 0.1,
        }
        command = ["deepspeed", "--num_gpus", "2", "--master_port", str(free_port()), "launcher/pretrain.py"]
        command += ["--config", "configs/demo_cpu.yaml"]
        return command + [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]


def records(run_dir: Path) -> list[dict[str, Any]]:
    """Return the fields COMPARED of every record of a run."""
    return [{name: record.get(name) for name in COMPARED} for record in read_metrics(run_dir)]


def contents(folder: Path, names: tuple[str, ...] = ()) -> dict[str, bytes]:
    """Return the bytes of some files of a folder, or of all files below it."""
    paths = [folder / name for name in names] or [path for path in folder.rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


def stop_after_half(tree: Tree, run_dir: Path) -> None:
    """Start a run and stop it by its stop file once half of its steps are recorded."""
    process = tree.start(*tree.pretrain(run_dir))
    while process.poll() is None and len(records(run_dir)) < NUM_STEPS // 2:
        time.sleep(0.1)
    (run_dir / STOP_FILE).touch()
    assert process.wait() == 75, "the earlier commit did not stop and save"


def main() -> int:
    """Make the runs of both commits, print the comparison and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--before", type=Path, required=True, help="checkout of the earlier commit, with its .venv")
    arguments = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="compatibility-"))
    corpus = folder / "corpus"
    before, now = Tree(arguments.before, corpus), Tree(REPOSITORY, corpus)
    text = str(folder / "text")
    before.run("electra-dist", "corpus", "python-docs", "--output", text)
    build = ["--input", text, "--output", str(corpus), "--config", "configs/demo_cpu.yaml"]
    before.run("electra-dist", "corpus", "build", *build)
    before.run(*before.pretrain(folder / "whole-before"))
    stop_after_half(before, folder / "half")
    before.run("electra-dist", "export", str(folder / "whole-before"), "--output", str(folder / "export-before"))

    now.run(*now.pretrain(folder / "whole-now"))
    now.run(*now.pretrain(folder / "half"))
    now.run("electra-dist", "export", str(folder / "whole-before"), "--output", str(folder / "export-now"))
    for name in ("whole-before", "half", "whole-now"):
        now.run("electra-dist", "verify", str(folder / name))
    expected = records(folder / "whole-before")
    files = (IDENTITY_FILE, TOKENIZER_FILE, RUN_VOCAB_FILE)
    same_files = contents(folder / "whole-before", files) == contents(folder / "whole-now", files)
    exports = contents(folder / "export-before"), contents(folder / "export-now")
    code = print_verdicts(
        f"compatibility with {arguments.before}",
        [
            DrillVerdict("the same run", records(folder / "whole-now") == expected, f"{len(expected)} records"),
            DrillVerdict("a stopped run resumed", records(folder / "half") == expected, f"{len(expected)} records"),
            DrillVerdict("export of the earlier checkpoint", exports[0] == exports[1], f"{len(exports[0])} files"),
            DrillVerdict("identity, tokenizer, vocabulary", same_files, ", ".join(files)),
        ],
    )
    if code == 0:
        shutil.rmtree(folder)
    return code


if __name__ == "__main__":
    sys.exit(main())
