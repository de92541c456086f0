"""`electra-dist flops`: training FLOPs of the models in the ELECTRA paper, and of the run of a config."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from electra_dist.config.load import load_config
from electra_dist.model.flops import run_flops, token_flops
from electra_dist.planning.paper_flops import TABLE
from launcher.cli.console import open_console


def flops(
    file: Annotated[Path | None, typer.Argument(help="YAML file of a run, to count its FLOPs, too")] = None,
    overrides: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="override one config key; may be repeated")
    ] = None,
) -> None:
    """Print the training FLOPs of the models in the ELECTRA paper, from ELMo to ELECTRA.

    Each model is counted twice: by the paper's method, and by the one that is used for MFU (model FLOPs utilisation).
    The output explains the difference. With FILE, the FLOPs of that run are printed, too.
    """
    out = open_console()
    table = Table("model", "in the paper", "its method", "for MFU", title="training FLOPs")
    for model in TABLE:
        mfu_flops = model.mfu()
        mfu_cell = "-" if mfu_flops is None else f"{mfu_flops:.3g}"
        table.add_row(model.name, model.printed or "-", f"{model.paper():.3g}", mfu_cell)
    out.print(table)
    out.print(
        "its method: the backward pass counts as much as the forward pass, look-ups count as matrix products, "
        "small operations count, the softmax is at 15.6 % of the positions"
    )
    out.print(
        "for MFU: only matrix products count, the backward pass counts twice the forward pass, "
        "the softmax is at the masked positions"
    )
    if file is not None:
        config = load_config(file, overrides or ())
        per_token = token_flops(config.model, config.data.seq_len, config.objective)
        num_tokens = config.train.num_steps * config.train.global_batch * config.data.seq_len
        out.print(
            f"{file}: objective {config.objective.name}, {num_tokens:.3g} tokens, {run_flops(config):.3g} FLOPs for "
            f"MFU; per token {per_token.total:.4g} (discriminator {per_token.discriminator:.4g}, generator "
            f"{per_token.generator:.4g})"
        )
