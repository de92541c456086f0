"""`electra-dist plan`: estimate parameters, memory, FLOPs and time of a run, on the config's GPUs or on N nodes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from electra_dist.config.load import load_config
from electra_dist.config.rules import check_new_run
from electra_dist.run.folder import is_run_folder
from launcher.cli.console import print_json
from launcher.cli.options import AsJson


def plan(
    file: Annotated[Path, typer.Argument(help="YAML file of a run, for example configs/large_25pct_mask.yaml")],
    overrides: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="override one config key; may be repeated")
    ] = None,
    nodes: Annotated[
        int | None, typer.Option(min=1, help="also estimate for 1, 2, 4, ... nodes, up to this number")
    ] = None,
    gpu: Annotated[str, typer.Option(help="GPU model of the nodes")] = "H200",
    gpus_per_node: Annotated[int, typer.Option(min=1, help="GPUs per node")] = 8,
    fabric: Annotated[
        str, typer.Option(help="network links of a node, per second: 400Gb, 8x400Gb (bits) or 50GB (bytes)")
    ] = "400Gb",
    step_tokens_per_s: Annotated[
        float | None,
        typer.Option(min=1, help="measured tokens per second of one GPU; default: its peak x plan.utilisation"),
    ] = None,
    gpu_hour_price: Annotated[
        float | None, typer.Option(min=0, help="price of one GPU-hour, in any currency; adds the cost of the run")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Estimate what a run would take: parameters, tokens, memory, FLOPs and days.

    With --nodes, also estimate the time on 1, 2, 4, ... nodes. Nothing is run or written.
    """
    from electra_dist.planning.multi_node_scaling import Cluster, parse_fabric
    from electra_dist.planning.plan import make_plan
    from electra_dist.planning.plan_page import print_plan

    config = load_config(file, overrides or ())
    if not is_run_folder(Path(config.run_dir)):
        check_new_run(config)
    cluster = None  # Without --nodes, only the GPUs that the config names are estimated.
    if nodes is not None:
        cluster = Cluster(
            nodes=nodes,
            gpu=gpu,
            gpus_per_node=gpus_per_node,
            fabric_bytes_per_s=parse_fabric(fabric),
            gpu_tokens_per_s=step_tokens_per_s,
            gpu_hour_price=gpu_hour_price,
        )
    planned = make_plan(config, cluster=cluster)
    if as_json:
        print_json(planned.as_json())
    else:
        print_plan(planned)
