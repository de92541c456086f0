"""The scripts for a GPU machine: real training with a kill and a resume, and how they find Python and wheels."""

import json
import os
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from gpu_parts.carried_packages import TO_TRAIN
from gpu_train_parts import make_carry
from gpu_train_parts.real_run import plan_of
from gpu_train_parts.training_process import Training, compare

from electra_dist.config_file import load_config

REPOSITORY = Path(__file__).resolve().parents[2]


def _logged(losses: list[float], receipts: str = "abcdef") -> dict[int, dict]:
    return {
        step: {"loss": loss, "mlm_loss": loss, "rtd_loss": 1.0, "grad_norm": 2.0, "receipt": receipts[step - 1]}
        for step, loss in enumerate(losses, 1)
    }


def test_equal_runs_are_equal_bit_for_bit() -> None:
    found = compare(_logged([3.0, 2.0]), _logged([3.0, 2.0]))
    assert (found["steps"], found["same_rows"], found["bit_for_bit"]) == (2, True, True)


def test_one_bit_is_found_and_its_size_reported() -> None:
    found = compare(_logged([3.0, 2.0]), _logged([3.0, 2.0000000000000004]))
    assert found["same_rows"]
    assert not found["bit_for_bit"]
    assert found["largest_difference"]["loss"] == pytest.approx(2.2e-16, rel=0.01)
    assert found["largest_difference"]["rtd_loss"] == 0


@pytest.mark.parametrize("other", [_logged([3.0, 2.0], "abx"[::2] + "y"), _logged([3.0]), {}])
def test_other_rows_or_steps_are_not_the_same_run(other: dict) -> None:
    found = compare(_logged([3.0, 2.0]), other)
    assert not found["same_rows"]


def test_a_loss_that_is_not_a_number_is_a_difference() -> None:
    assert not compare(_logged([3.0]), _logged([float("nan")]))["bit_for_bit"]


def test_the_kill_waits_for_a_step_and_a_complete_checkpoint(tmp_path: Path) -> None:
    training = object.__new__(Training)
    training.run_dir = tmp_path
    assert not training._has_saved_and_reached(3)
    steps = "".join(json.dumps({"kind": "train", "step": step}) + "\n" for step in (1, 2, 3))
    (tmp_path / "metrics.jsonl").write_text(steps)
    assert not training._has_saved_and_reached(3)
    (tmp_path / "ledger.jsonl").write_text(
        '{"event": "start", "step": 0}\n{"event": "checkp'
    )  # not written to its end
    assert not training._has_saved_and_reached(3)
    (tmp_path / "ledger.jsonl").write_text('{"event": "start", "step": 0}\n{"event": "checkpoint", "step": 2}\n')
    assert training._has_saved_and_reached(3)
    assert not training._has_saved_and_reached(4)


def test_the_plan_is_a_valid_configuration_and_kills_between_checkpoints() -> None:
    for smoke in (True, False):
        plan = plan_of(smoke, Path("corpus"), 64)
        config = load_config(plan.config, plan.overrides)
        assert isinstance(config.checkpoint.every_steps, int)
        assert config.checkpoint.every_steps < plan.kill_after < config.train.num_steps
        assert plan.kill_after % config.checkpoint.every_steps  # some steps are repeated
        assert config.log.every_steps == 1
        if plan.small:
            small = load_config(plan.small, plan.small_overrides)
            assert small.data.seq_len == config.data.seq_len == 512


def test_carried_wheels_are_seen_by_the_run_only(tmp_path: Path) -> None:
    """The script's own lines, with a Python that records what it is asked."""
    folder = tmp_path / "copy"
    (folder / "benchmarks" / "gpu_parts").mkdir(parents=True)
    for name in ("gpu_run.sh", "gpu_parts/find_python.sh"):
        (folder / "benchmarks" / name).write_text((REPOSITORY / "benchmarks" / name).read_text())
    (folder / "wheels").mkdir()
    (folder / "wheels" / "some-1.0-py3-none-any.whl").touch()
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\n[ "$1" = -c ] && { echo 20; exit; }\necho "$PYTHONPATH | $*" >> "$0.calls"\n')
    python.chmod(0o755)
    environment = os.environ | {"PYTHON": str(python), "OUT": "results", "PYTHONPATH": "/other"}
    script = folder / "benchmarks" / "gpu_run.sh"
    subprocess.run(["bash", str(script), "--minutes", "3", "--parts", "heads"], env=environment, check=True)
    install, run = (tmp_path / "python.calls").read_text().splitlines()
    target = install.partition("--target ")[2].split()[0]
    assert "--no-index --no-deps" in install
    assert install.endswith("wheels/some-1.0-py3-none-any.whl")
    path, _, arguments = run.partition(" | ")
    assert path.split(":") == [str(folder), f"{folder}/kernels", target, "/other"]
    assert arguments == "-u benchmarks/gpu.py --minutes 3 --parts heads --output results"


def test_a_corpus_that_is_too_large_is_not_carried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, target = tmp_path / "corpus", tmp_path / "carried" / "corpus"
    (source / "heldout").mkdir(parents=True)
    (source / "corpus.json").write_text("{}")
    (source / "heldout" / "shard.tar").write_bytes(bytes(1000))
    make_carry.carry_corpus(target, source)
    assert (target / "heldout" / "shard.tar").read_bytes() == bytes(1000)
    monkeypatch.setattr(make_carry, "MOST_BYTES", 999)
    with pytest.raises(SystemExit, match="less than"):
        make_carry.carry_corpus(target, source)
    with pytest.raises(SystemExit, match=r"no corpus\.json"):
        make_carry.carry_corpus(target, source / "heldout")


@pytest.mark.drill
@pytest.mark.multiproc  # three starts of DeepSpeed
def test_a_killed_run_resumes_with_what_is_carried(
    tmp_path: Path, bare_python: Callable[[Sequence[str]], Path], demo_corpus: Path
) -> None:
    environment = os.environ | {"PYTHON": str(bare_python(TO_TRAIN)), "OUT": str(tmp_path / "out")}
    command = ["bash", str(REPOSITORY / "benchmarks" / "gpu_train.sh"), "--smoke", "--corpus", str(demo_corpus)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=480)
    assert done.returncode == 0, done.stdout + done.stderr
    (file,) = (tmp_path / "out").glob("gpu_train-*.json")
    found = json.loads(file.read_text())["exactness"]
    assert found["right"]
    assert found["bit_for_bit"]
    assert (found["steps"], found["resumed_at"]) == (50, [10])
