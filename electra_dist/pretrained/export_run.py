"""Export a run's newest checkpoint to Hugging Face folders, without a process group or a GPU."""

from __future__ import annotations

import sys
from pathlib import Path

from electra_dist.checkpoint.checkpoint_manifest import RunState
from electra_dist.model.row_layout import SpecialIds
from electra_dist.pretrained.hf_conversion import export_towers
from electra_dist.pretrained.run_weights import load_run_weights


def export_run(run_dir: Path, output: Path) -> tuple[RunState, dict[str, Path]]:
    """Export the newest good checkpoint of a run to OUTPUT/discriminator and, if there is one, OUTPUT/generator.

    One line on stderr names each newer checkpoint that was skipped because it is damaged.

    Args:
        run_dir: the run folder.
        output: folder for the exports; created if missing. Files of the same names are replaced.

    Returns:
        The state of the checkpoint that was exported, and the folders by the names "discriminator" and "generator".

    Raises:
        UserError: `run_dir` is not a run, or has no good checkpoint.
    """
    run = load_run_weights(run_dir)
    for line in run.damaged:
        print(line, file=sys.stderr)
    tokenizer = run.tokenizer
    folders = export_towers(
        state=run.weights,
        model=run.config.model,
        special=SpecialIds.from_tokens(tokenizer.special),
        vocab_file=run.vocab_file,
        lowercase=tokenizer.lowercase,
        out_dir=output,
    )
    return run.state, folders
