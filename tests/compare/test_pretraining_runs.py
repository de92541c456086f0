"""A comparison's run is started only if it is neither finished nor training, and a failed run is explained.

No process is started: the checkpoints, the processes and the supervisor that `pretrain` sees are replaced.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from support.small_models import frozen_weights

from electra_dist.compare import comparison_runs
from electra_dist.compare.comparison import Comparison
from electra_dist.compare.comparison_config import CompareConfig
from electra_dist.compare.comparison_runs import PlannedRun, make_plan, pretrain
from electra_dist.config.load import load_config, load_section
from electra_dist.pretrained.export import export_tower
from electra_dist.run.folder import begin_run_folder
from electra_dist.tokenizer import Vocabulary
from electra_dist.train.check_inputs import check_inputs


@pytest.fixture
def run(make_comparison: Callable[..., Path]) -> PlannedRun:
    """A run of 8 steps whose checkpoints after 4 and 8 steps are scored."""
    file = make_comparison()
    return make_plan(load_section(file, CompareConfig), file).runs[0]


def fake_supervisor(
    monkeypatch: pytest.MonkeyPatch, saved_steps: list[set[int]], running_pids: list[list[int]], output: str = ""
) -> list[str]:
    """Replace what `pretrain` sees of a run, and let every started run end with exit code 1.

    Args:
        monkeypatch: pytest's fixture.
        saved_steps: steps of the complete checkpoints, at the first, second, ... time that `pretrain` reads them.
        running_pids: ids of the run's processes, at the first, second, ... time that `pretrain` looks for them.
        output: what every started run appends to its log.

    Returns:
        A list, empty at first, to which every start of a run appends the name of the run.
    """
    started: list[str] = []
    next_saved_steps = iter(saved_steps)
    next_running_pids = iter(running_pids)

    def supervise(run: PlannedRun, ranks: int, pause: Callable[[], None]) -> int:
        started.append(run.name)
        log = Path(f"{run.config.run_dir}.log")
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("a") as file:
            file.write(output)
        return 1

    monkeypatch.setattr(comparison_runs, "saved_steps", lambda run: next(next_saved_steps))
    monkeypatch.setattr(comparison_runs, "marked_pids", lambda mark: next(next_running_pids))
    monkeypatch.setattr(comparison_runs, "_supervise", supervise)
    return started


def test_a_run_with_a_checkpoint_of_its_last_step_is_not_started_again(
    run: PlannedRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = fake_supervisor(monkeypatch, saved_steps=[{4, 8}], running_pids=[])

    failure = pretrain(run, 1, lambda: None)

    assert failure == ""
    assert started == []


def test_a_run_that_still_trains_is_waited_for_and_not_started_twice(
    run: PlannedRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses: list[int] = []
    started = fake_supervisor(monkeypatch, saved_steps=[set(), {4}, {4, 8}], running_pids=[[123], [123]])

    failure = pretrain(run, 1, lambda: pauses.append(1))

    assert failure == ""
    assert started == []
    assert len(pauses) == 2


def test_a_run_that_ends_early_is_started_once_and_its_last_error_is_reported(
    run: PlannedRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = "a line\nerror: the disk is full\nsupervise: end, exit code 1\n"
    started = fake_supervisor(monkeypatch, saved_steps=[set(), {4}], running_pids=[[], []], output=output)

    failure = pretrain(run, 1, lambda: None)

    assert failure == (
        "the run ended with exit code 1: error: the disk is full; "
        f"read {run.config.run_dir}.log, correct the cause and repeat the command"
    )
    assert started == [run.name]


@pytest.mark.parametrize(
    ("output", "reported"),
    [("killed, step 5 of 8\n", "killed, step 5 of 8"), ("", "it has written nothing to the log")],
)
def test_an_error_that_an_earlier_start_has_written_to_the_log_is_not_reported_again(
    run: PlannedRun, monkeypatch: pytest.MonkeyPatch, output: str, reported: str
) -> None:
    log = Path(f"{run.config.run_dir}.log")
    log.parent.mkdir(parents=True)
    log.write_text("error: the disk is full\n")
    fake_supervisor(monkeypatch, saved_steps=[set(), {4}], running_pids=[[], []], output=output)

    failure = pretrain(run, 1, lambda: None)

    assert failure.startswith(f"the run ended with exit code 1: {reported}; read ")


def test_a_comparison_whose_generator_is_frozen_recognises_its_runs(
    make_comparison: Callable[..., Path], tiny_corpus: Path, tmp_path: Path
) -> None:
    """The identity of such a run holds the digest of the generator's weights, which no config file names."""
    file = make_comparison(objectives=["rtd", "rtd_masked_only"])
    base = yaml.safe_load((tmp_path / "base.yaml").read_text())
    base["objective"] = {**base.get("objective", {}), "generator": "frozen"}
    base["train"]["init_generator_from"] = str(tmp_path / "generator")
    (tmp_path / "base.yaml").write_text(yaml.safe_dump(base))
    config = load_config(tmp_path / "base.yaml", [])
    vocabulary = Vocabulary.read(tiny_corpus / "vocab.txt")
    export_tower(frozen_weights(config.model), config.model, "generator", vocabulary, True, tmp_path / "generator")
    run = make_plan(load_section(file, CompareConfig), file).runs[0]
    inputs = check_inputs(run.config, 1)
    tokenizer = inputs.corpora.tokenizer.model_dump_json()
    begin_run_folder(inputs.config, inputs.identity, tokenizer, vocabulary.text.encode(), {})

    Comparison(load_section(file, CompareConfig), file, None)
