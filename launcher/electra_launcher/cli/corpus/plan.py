"""Command `electra-dist corpus plan`: time, space, requests and cost of a corpus build, from rates of this machine."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated

import typer

from electra_dist.console import Console
from electra_launcher.cli.command_output import open_console, print_json
from electra_launcher.cli.options import AsJson, ConfigFile, Overrides

DEFAULT_TOKENS = 33e9  # tokens of ELECTRA-Large's corpus


def plan(
    file: ConfigFile,
    overrides: Overrides = None,
    tokens: Annotated[
        float | None,
        typer.Option(min=1, help="tokens of the corpus, such as 33e9; default: those of --input, or 33e9"),
    ] = None,
    inputs: Annotated[
        list[str] | None,
        typer.Option(
            "--input", help="text to plan for and to measure on, given as for `corpus build`; default: a made text"
        ),
    ] = None,
    vocab: Annotated[
        Path | None, typer.Option(help="vocab.txt to measure with; default: a vocabulary is trained on the sample")
    ] = None,
    text_field: Annotated[str, typer.Option(help="JSON field or table column that holds the text")] = "text",
    prepare: Annotated[
        Path | None, typer.Option(help="YAML file of `corpus prepare`, whose stages are planned, too; default: none")
    ] = None,
    kept: Annotated[float, typer.Option(min=0.001, max=1, help="share of the text that --prepare keeps")] = 1.0,
    rates_file: Annotated[
        Path | None,
        typer.Option(
            "--rates",
            help="JSON file with rates, also an output of --json; default: they are measured on this machine",
        ),
    ] = None,
    measure: Annotated[bool, typer.Option("--measure", help="measure again, even if rates were kept")] = False,
    input_file_mb: Annotated[
        float, typer.Option(min=0.001, help="size of an input file in MB, if --input is not given")
    ] = 250.0,
    machines: Annotated[int, typer.Option(min=1, help="number of machines; each builds one part")] = 1,
    cores: Annotated[int, typer.Option(min=1, help="cores of a machine; one worker uses one core")] = 16,
    hours: Annotated[
        float | None,
        typer.Option(min=0.001, help="wanted duration, for which the machines needed are printed; default: none"),
    ] = None,
    core_hour_price: Annotated[float, typer.Option(min=0, help="price of one core-hour, in any currency")] = 0.0,
    request_price: Annotated[float, typer.Option(min=0, help="price of 1,000 requests to S3")] = 0.0,
    gb_price: Annotated[float, typer.Option(min=0, help="price of 1 GB read from or written to S3")] = 0.0,
    as_json: AsJson = False,
) -> None:
    """Estimate what building a corpus takes: core-hours, bytes, spill space, shards, S3 requests, machines and cost.

    The rates are measured on this machine in some seconds and kept in ~/.cache/electra-dist; nothing else is written.
    Prices are 0 unless they are given; without any price, the cost is left out.
    """
    # These modules import all that a build needs, which takes seconds.
    from electra_dist.config.load import load_config, load_section
    from electra_dist.corpus.inputs.find_inputs import search_inputs
    from electra_dist.corpus.plan.corpus_plan import (
        Prices,
        machines_needed,
        plan_corpus,
        workload_of_files,
        workload_of_tokens,
    )
    from electra_dist.corpus.plan.corpus_rates import read_rates
    from electra_dist.corpus.plan.measurement import Measurement
    from electra_dist.corpus.plan.plan_table import plan_as_json, plan_table, remarks
    from electra_dist.corpus.prepare.prepare_config import PrepareConfig

    config = load_config(file, overrides or ())
    preparation = load_section(prepare, PrepareConfig) if prepare else None
    files = search_inputs(inputs, config.data.endpoint_url).files if inputs else []
    console = Console(stderr=True, soft_wrap=True)
    measurement = Measurement(config=config, files=files, vocab=vocab, text_field=text_field, preparation=preparation)
    rates = read_rates(rates_file) if rates_file else measurement.stored_or_measured(console, again=measure)
    if files and tokens is None:
        work = workload_of_files(rates, files, kept=kept)
    else:
        work = workload_of_tokens(rates, tokens or DEFAULT_TOKENS, file_bytes=input_file_mb * 1e6, kept=kept)
    work = dataclasses.replace(work, num_machines=machines, cores_per_machine=cores)
    planned = plan_corpus(rates, measurement.planned_request(), work)
    prices = Prices(core_hour=core_hour_price, thousand_requests=request_price, gigabyte=gb_price)
    num_machines_needed = machines_needed(planned, hours) if hours else None
    if as_json:
        print_json(plan_as_json(planned, rates, prices, hours, num_machines_needed))
        return
    out = open_console(soft_wrap=False)
    out.print(plan_table(planned, prices))
    for line in remarks(planned, rates, work, hours, num_machines_needed):
        out.print(line, soft_wrap=True)
