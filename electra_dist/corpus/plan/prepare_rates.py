"""Measure what each stage of a preparation (`corpus prepare`) costs on this machine, for `electra-dist corpus plan`.

How: the steps of datatrove run in this process on a sample. First the filters run on the files of the sample. Then
the deduplication runs on all documents of the sample, also on those that the filters drop: the sample is small, and to
deduplicate the few kept documents would take little more than the fixed costs. A plan multiplies the measured cost per
byte by the size of the text that the filters keep.

Limits: the memory of the search for duplicates is not measured; datatrove keeps the hashes of one range at a time. The
search sorts, so its time grows a little faster than the text; the plan does not extrapolate this.
"""

from __future__ import annotations

import contextlib
import io
import resource
import tempfile
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from electra_dist.corpus.inputs.find_inputs import InputFile
from electra_dist.corpus.plan.corpus_rates import PrepareRate
from electra_dist.corpus.prepare.prepare_config import (
    DeduplicationSection,
    ExecutorSection,
    PrepareConfig,
    SourceSection,
)


def measure_preparation(config: PrepareConfig, files: Sequence[InputFile], text_field: str) -> list[PrepareRate]:
    """Run the stages of `corpus prepare` on local files and return the CPU time of each stage.

    `files` replace the sources of `config`, temporary folders its folders, and the default executor its executor.
    Raises UserError if a file that the filters need is missing.
    """
    with tempfile.TemporaryDirectory(prefix="prepare-rates-") as name:
        folder = Path(name)
        filters = config.model_copy(update={"deduplication": DeduplicationSection()})
        rates = _run_stages(filters, folder / "filters", files, text_field)
        has_deduplication = any(method is not None for method in config.deduplication.__dict__.values())
        if has_deduplication:
            without_filters = {"filters": type(config.filters)(), "formatting": type(config.formatting)()}
            duplicates = config.model_copy(update=without_filters)
            # The first stage reads and filters; its cost is known from the run above.
            rates += _run_stages(duplicates, folder / "duplicates", files, text_field)[1:]
        return rates


def _run_stages(config: PrepareConfig, folder: Path, files: Sequence[InputFile], text_field: str) -> list[PrepareRate]:
    """Run all stages of a preparation except the report at the end, in this process, and return their CPU times."""
    from datatrove.utils.logging import logger

    from electra_dist.corpus.prepare.preparation import check
    from electra_dist.corpus.prepare.source_plan import write_plan

    logger.remove()  # datatrove's messages would appear on the console
    sources = tuple(
        SourceSection(name=f"file-{number}", path=file.location, text_field=text_field)
        for number, file in enumerate(files)
    )
    changes = {
        "output": str(folder / "output"),
        "work": str(folder / "work"),
        "sources": sources,
        "executor": ExecutorSection(),
        "samples_per_filter": 0,
    }
    preparation = check(config.model_copy(update=changes))
    work = folder / "work"
    work.mkdir(parents=True)
    write_plan(preparation.plan, work)
    rates: list[PrepareRate] = []
    sizes: list[int] = []
    for stage in preparation.stages[:-1]:
        is_first = not rates
        begin = _cpu_seconds()
        with contextlib.redirect_stderr(io.StringIO()):  # hides the progress bars of datatrove
            for task in range(stage.num_tasks):
                documents = None
                for number, step in enumerate(stage.steps):
                    documents = step.run(documents, task, stage.num_tasks)
                    if is_first and number == 0:  # the reader of the sources
                        documents = _noting_sizes(documents, sizes)
                deque(documents or (), maxlen=0)  # The steps are generators, which run when they are read.
        cpu_s = _cpu_seconds() - begin
        rates.append(PrepareRate(stage=stage.name, cpu_s=cpu_s, text_bytes=max(1, sum(sizes))))
    return rates


def _noting_sizes(documents: Iterable[Any], sizes: list[int]) -> Iterator[Any]:
    for document in documents:
        sizes.append(len(document.text.encode()))
        yield document


def _cpu_seconds() -> float:
    """Return the CPU seconds of this process and of its ended child processes, such as those that extract HTML."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime
