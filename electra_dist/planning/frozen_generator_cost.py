"""State what the training of a frozen generator has cost, which the FLOPs of the run that uses it do not include."""

from __future__ import annotations

from pathlib import Path

from electra_dist.config import Config
from electra_dist.model.flops import run_flops
from electra_dist.run.folder import is_run_folder, open_run


def generator_training(config: Config) -> tuple[str, str]:
    """Return two texts: the FLOPs that a frozen generator's own training took, and where this number comes from.

    All steps of the run that trained the generator are counted. For a Hugging Face folder the number is "not known".
    """
    folder = Path(config.train.init_generator_from or "")
    if not is_run_folder(folder):
        return "not known", f"not in the run's FLOP; {folder} is not a run folder"
    source = open_run(folder)
    return f"{run_flops(source):.2e} FLOP", f"not in the run's FLOP; {source.train.num_steps:,} steps of {folder}"
