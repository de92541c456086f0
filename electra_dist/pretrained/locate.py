"""Find the model that a user names, and the checkpoint of a run, before torch is imported.

A model is the folder of a run, of an export with its two towers, of one of these towers, any Hugging Face folder, or
a name on the Hub, which is downloaded.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from electra_dist.config.load import load_config
from electra_dist.errors import UserError
from electra_dist.hub import model_folder
from electra_dist.run.folder import is_run_folder, run_within

RANDOM = "random:"  # begins the name of a model with the random weights that a run with a config starts from
Step = int | Literal["best"] | None  # checkpoint of a run: the one after these steps, the best, or the newest


def locate_model(spec: str, tower: str = "discriminator") -> str:
    """Return the path of the model that a user names by `spec`; in the folder of an export, the model of `tower`.

    A model on the Hub is downloaded. A name "random:CONFIG" is returned as it is, after a check of the config. Raises
    UserError for another text.
    """
    if spec.startswith(RANDOM):
        load_config(Path(spec.removeprefix(RANDOM)))
        return spec
    folder = model_folder(spec)
    if is_run_folder(folder) or (folder / "config.json").exists():
        return str(folder)
    if (folder / tower / "config.json").exists():
        return str(folder / tower)
    raise UserError(
        f"{spec}: not a model: neither a run (config.yaml) nor a Hugging Face folder (config.json); name the folder "
        f"of a run, of its export or of a Hugging Face model, ORG/NAME of one on the Hub, or random:CONFIG.yaml"
        f"{run_within(folder)}"
    )


def choose_step(spec: str, checkpoint: str | None) -> Step:
    """Convert the option --checkpoint: "newest" or None, "best", a number of steps, or a checkpoint's folder.

    Raises UserError for any other text, or if a checkpoint is chosen although `spec` is not a run.
    """
    if checkpoint in (None, "newest"):
        return None
    if not is_run_folder(Path(spec)):
        raise UserError(f"{spec}: only a run has checkpoints to choose from; leave out --checkpoint {checkpoint}")
    if checkpoint == "best":
        return "best"
    digits = checkpoint.replace(",", "")
    if digits.isascii() and digits.isdigit():
        return int(digits)
    from electra_dist.checkpoint.stored_copies import parse_folder

    step_and_attempt = parse_folder(Path(checkpoint).name)
    if step_and_attempt is None:
        raise UserError(
            f"--checkpoint {checkpoint}: not a checkpoint; give best, the number of a step, or the folder of one"
        )
    if not Path(checkpoint).resolve().is_relative_to(Path(spec).resolve()):
        raise UserError(f"--checkpoint {checkpoint}: not in the run {spec}; name the run that it belongs to")
    return step_and_attempt[0]
