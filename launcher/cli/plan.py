"""`electra-dist plan`: what a run would take, on the GPUs of its config or on N nodes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from electra_dist.config_file import load_config


def plan(
    file: Annotated[Path, typer.Argument(help="YAML file, for example configs/large_25pct_mask.yaml")],
    overrides: Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="override")] = None,
    nodes: Annotated[int | None, typer.Option(min=1, help="also plan for 1, 2, 4, ... up to so many nodes")] = None,
    gpu: Annotated[str, typer.Option(help="GPU of the nodes")] = "H200",
    gpus_per_node: Annotated[int, typer.Option(min=1, help="GPUs of a node")] = 8,
    fabric: Annotated[str, typer.Option(help="a node's links to the others: 400Gb, 8x400Gb, 50GB")] = "400Gb",
    step_tokens_per_s: Annotated[
        float | None, typer.Option(min=1, help="measured on one GPU; default: its peak x plan.utilisation")
    ] = None,
    gpu_hour_price: Annotated[float | None, typer.Option(min=0, help="price of a GPU-hour: adds the cost")] = None,
) -> None:
    """What a run would take: parameters, tokens, memory, FLOPs, days; with --nodes, how it scales."""
    from electra_dist.planning.scaling import Cluster, parse_fabric
    from electra_dist.planning.tables import print_plan

    cluster = None
    if nodes is not None:
        cluster = Cluster(
            nodes=nodes,
            gpu=gpu,
            gpus_per_node=gpus_per_node,
            fabric_bytes_per_s=parse_fabric(fabric),
            gpu_tokens_per_s=step_tokens_per_s,
            gpu_hour_price=gpu_hour_price,
        )
    print_plan(load_config(file, overrides or ()), cluster=cluster)
