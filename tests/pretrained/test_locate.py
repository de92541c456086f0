"""The model that a user names: a run, an export, one of its towers, a Hugging Face folder; and a run's checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest

from electra_dist.errors import UserError
from electra_dist.pretrained.locate import Step, choose_step, locate_model


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run with an export, of which only the files are there that tell what it is."""
    for file in ("config.yaml", "export/discriminator/config.json", "export/generator/config.json"):
        (tmp_path / "run" / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "run" / file).write_text("")
    return tmp_path / "run"


def test_an_export_stands_for_the_tower_in_it_and_all_other_models_for_themselves(run: Path) -> None:
    export = run / "export"
    assert locate_model(str(export)) == str(export / "discriminator")
    assert locate_model(str(export), "generator") == str(export / "generator")
    config = Path(__file__).parents[2] / "configs" / "small.yaml"
    for spec in (str(run), str(export / "generator"), f"random:{config}"):
        assert locate_model(spec) == spec
    with pytest.raises(UserError, match=f"^{run}/x.yaml: no such config file"):
        locate_model(f"random:{run}/x.yaml")
    with pytest.raises(UserError, match=f"not a model: neither a run.*; did you mean {run}\\?$"):
        locate_model(str(run.parent))
    with pytest.raises(UserError, match=r"or random:CONFIG\.yaml$"):
        locate_model(str(export.parent.parent / "elsewhere"))


@pytest.mark.parametrize(
    ("checkpoint", "step"),
    [(None, None), ("newest", None), ("best", "best"), ("1,000", 1000), ("RUN/checkpoints/step-00000100-a0001", 100)],
)
def test_a_checkpoint_is_named_by_its_step_its_folder_or_as_the_best(
    run: Path, checkpoint: str | None, step: Step
) -> None:
    assert choose_step(str(run), checkpoint and checkpoint.replace("RUN", str(run))) == step


@pytest.mark.parametrize(
    ("spec", "checkpoint", "message"),
    [
        ("RUN", "last", "--checkpoint last: not a checkpoint; give best, the number of a step, or"),
        ("RUN", "other/checkpoints/step-00000100-a0001", "not in the run"),
        ("RUN/export", "best", "only a run has checkpoints to choose from; leave out --checkpoint best"),
    ],
)
def test_a_checkpoint_that_there_cannot_be_is_refused_in_one_line(
    run: Path, spec: str, checkpoint: str, message: str
) -> None:
    with pytest.raises(UserError, match=message) as error:
        choose_step(spec.replace("RUN", str(run)), checkpoint)
    assert "\n" not in str(error.value)
