"""From a run's newest checkpoint to two Hugging Face folders. Needs no process group and no GPU."""

from __future__ import annotations

import sys
from pathlib import Path

from electra_dist.checkpoint.load import assemble
from electra_dist.checkpoint.manifest import RunState
from electra_dist.checkpoint.targets import open_targets
from electra_dist.config_file import load_config
from electra_dist.data.manifest import TokenizerEntry
from electra_dist.errors import UserError
from electra_dist.model.rows import SpecialIds
from electra_dist.pretrained.hf import export_towers
from electra_dist.run.folder import CONFIG_FILE, TOKENIZER_FILE, VOCAB_FILE


def export_run(run_dir: Path, output: Path) -> tuple[RunState, dict[str, Path]]:
    """Write OUTPUT/discriminator and, if the objective has one, OUTPUT/generator; returns the state and the folders.

    Raises:
        UserError: `run_dir` is not a run, or has no good checkpoint.
    """
    if not (run_dir / CONFIG_FILE).exists():
        raise UserError(f"{run_dir}: not a run folder (no {CONFIG_FILE}); name the run_dir of a started run")
    config = load_config(run_dir / CONFIG_FILE)
    tokenizer = TokenizerEntry.model_validate_json((run_dir / TOKENIZER_FILE).read_text())
    state, weights, damaged = assemble(open_targets(config.model_copy(update={"run_dir": str(run_dir)})))
    for line in damaged:
        print(line, file=sys.stderr)
    special = SpecialIds.from_tokens(tokenizer.special)
    return state, export_towers(weights, config.model, special, run_dir / VOCAB_FILE, tokenizer.lowercase, output)
