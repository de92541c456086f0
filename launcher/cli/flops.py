"""`electra-dist flops`: training FLOPs of the models of the paper, and of a config."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from electra_dist.config_file import load_config
from electra_dist.model.flops import run_flops, token_flops
from electra_dist.planning.paper_flops import TABLE


def flops(
    file: Annotated[Path | None, typer.Argument(help="also count the run of this config")] = None,
    overrides: Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="override")] = None,
) -> None:
    """Training FLOPs from ELMo to ELECTRA, counted as the paper does and as MFU does; with FILE, of that run, too."""
    out = Console(highlight=False, soft_wrap=True)
    table = Table("model", "in the paper", "its method", "for MFU", title="training FLOPs")
    for row in TABLE:
        mfu = row.mfu()
        table.add_row(row.name, row.printed or "-", f"{row.paper():.3g}", "-" if mfu is None else f"{mfu:.3g}")
    out.print(table)
    out.print("its method: backward = forward, look-ups as products, small operations, softmax at 15.6 % of positions")
    out.print("for MFU: matrix products only, backward = 2 x forward, softmax at masked positions")
    if file is not None:
        config = load_config(file, overrides or ())
        per_token = token_flops(config.model, config.data.seq_len, config.objective)
        tokens = config.train.num_steps * config.train.global_batch * config.data.seq_len
        out.print(
            f"{file}: objective {config.objective.name}, {tokens:.3g} tokens, {run_flops(config):.3g} FLOPs for MFU; "
            f"a token {per_token.total:.4g} (discriminator {per_token.discriminator:.4g}, generator "
            f"{per_token.generator:.4g})"
        )
