"""Command `electra-dist corpus plan`: time, space, requests and cost of a corpus build, from rates of this machine."""

from __future__ import annotations

import contextlib
import hashlib
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from pydantic import TypeAdapter
from rich.table import Table

from electra_dist.config import Config, canonical_json
from electra_dist.config.load import load_config, load_section
from electra_dist.console import Console
from electra_dist.corpus.inputs.find_inputs import InputFile, search_inputs
from electra_dist.corpus.inputs.text_decoding import SkippedDocument, decode
from electra_dist.corpus.inputs.text_readers import DocumentStream
from electra_dist.corpus.prepare.prepare_config import PrepareConfig
from electra_dist.corpus.vocabulary import train_vocabulary
from electra_dist.errors import UserError
from electra_dist.run.environment_record import cpu
from electra_dist.run.number_formats import format_count, format_duration
from electra_dist.store.atomic_files import replacing
from electra_dist.store.json_file import DamagedJson, damaged_file, read_json_object, validate_json
from electra_dist.store.user_cache import user_cache_folder
from electra_dist.tokenizer import Vocabulary
from launcher.cli.console import open_console, print_json
from launcher.cli.options import AsJson, ConfigFile, Overrides

if TYPE_CHECKING:  # These modules import all that a build needs, which takes seconds.
    from electra_dist.corpus.builder.build_request import BuildRequest
    from electra_dist.planning.corpus.corpus_plan import CorpusPlan, Prices, Requests, Workload
    from electra_dist.planning.corpus.corpus_rates import CorpusRates, PrepareRate

DEFAULT_TOKENS = 33e9  # tokens of ELECTRA-Large's corpus
_MADE_TEXT = "made text, in which words are as unequally frequent as in English"
_VOCABULARY_DOCUMENTS = 100  # documents of the sample on which a vocabulary is trained if --vocab is not given


def plan(
    file: ConfigFile,
    overrides: Overrides = None,
    tokens: Annotated[
        float | None,
        typer.Option(min=1, help="tokens of the corpus, such as 33e9; default: those of --input, or 33e9"),
    ] = None,
    inputs: Annotated[
        list[str] | None,
        typer.Option("--input", help="text to plan for and to measure on, given as for `corpus build`"),
    ] = None,
    vocab: Annotated[
        Path | None, typer.Option(help="vocab.txt to measure with; default: a vocabulary is trained on the sample")
    ] = None,
    text_field: Annotated[str, typer.Option(help="JSON field or table column that holds the text")] = "text",
    prepare: Annotated[
        Path | None, typer.Option(help="YAML file of `corpus prepare`; its stages are planned, too")
    ] = None,
    kept: Annotated[float, typer.Option(min=0.001, max=1, help="share of the text that --prepare keeps")] = 1.0,
    rates_file: Annotated[
        Path | None,
        typer.Option(
            "--rates",
            help="JSON file with rates, also a record of benchmarks/run.py corpus_builder; nothing is measured",
        ),
    ] = None,
    measure: Annotated[bool, typer.Option("--measure", help="measure again, even if rates were kept")] = False,
    input_file_mb: Annotated[
        float, typer.Option(min=0.001, help="size of an input file in MB, if --input is not given")
    ] = 250.0,
    machines: Annotated[int, typer.Option(min=1, help="number of machines; each builds one part")] = 1,
    cores: Annotated[int, typer.Option(min=1, help="cores of a machine; one worker uses one core")] = 16,
    hours: Annotated[
        float | None, typer.Option(min=0.001, help="wanted duration; prints how many machines are needed")
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
    from electra_dist.planning.corpus.corpus_plan import Prices, machines_needed, plan_corpus

    config = load_config(file, overrides or ())
    preparation = load_section(prepare, PrepareConfig) if prepare else None
    files = search_inputs(inputs, config.data.endpoint_url).files if inputs else []
    console = Console(stderr=True, soft_wrap=True)
    measurement = _Measurement(config, files, vocab, text_field, preparation)
    rates = read_rates(rates_file) if rates_file else measurement.kept_or_new(console, again=measure)
    work = _workload(rates, files, tokens, kept, input_file_mb, machines, cores)
    planned = plan_corpus(rates, measurement.request([], _placeholder(config)), work)
    prices = Prices(core_hour=core_hour_price, thousand_requests=request_price, gigabyte=gb_price)
    num_machines_needed = machines_needed(planned, hours) if hours else None
    if as_json:
        print_json(_as_json(planned, rates, prices, hours, num_machines_needed))
        return
    out = open_console(soft_wrap=False)
    out.print(_table(planned, prices))
    for line in _remarks(planned, rates, work, hours, num_machines_needed):
        out.print(line, soft_wrap=True)


def read_rates(path: Path) -> CorpusRates:
    """Read rates (CPU times of a build's steps) from a file of this command or of benchmarks/run.py corpus_builder."""
    from electra_dist.planning.corpus.corpus_rates import CorpusRates

    next_step = "give another --rates, or leave it out to measure"
    tree = read_json_object(path, next_step)
    try:
        return validate_json(TypeAdapter(CorpusRates), tree.get("rates", tree))
    except DamagedJson as error:
        raise damaged_file(path, error, next_step) from None


class _Measurement:
    """Measurement of the CPU time of each step of a build ("rates"). Results are kept in the user's cache folder."""

    def __init__(
        self,
        config: Config,
        files: list[InputFile],
        vocab: Path | None,
        text_field: str,
        preparation: PrepareConfig | None,
    ) -> None:
        self._config = config
        self._files = files
        self._vocab = vocab
        self._text_field = text_field
        self._preparation = preparation

    def kept_or_new(self, console: Console, *, again: bool) -> CorpusRates:
        """Return the rates that an earlier call kept for the same input, settings and machine, or measure new rates.

        With `again`, rates are always measured. New rates are kept for later calls.
        """
        path = user_cache_folder() / f"corpus-rates-{self._digest()}.json"
        if path.exists() and not again:
            try:
                return read_rates(path)
            except UserError as error:
                console.print(f"{error}; measured again")
        console.print(f"measuring the steps of a build for some seconds; the rates are kept in {path}")
        rates = self._measure()
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as out:
            out.write((rates.model_dump_json(indent=1) + "\n").encode())
        return rates

    def request(self, files: list[InputFile], vocabulary: Vocabulary) -> BuildRequest:
        """Return a request to build a corpus from `files` with the config's settings, for measuring and planning."""
        from electra_dist.corpus.builder.build_request import BuildRequest

        return BuildRequest(
            inputs=files,
            vocabulary=vocabulary,
            output="unused",
            seq_len=self._config.data.seq_len,
            seed=self._config.seed,
            corpus=self._config.corpus,
            text_field=self._text_field,
        )

    def _digest(self) -> str:
        """Return a digest of everything that rates depend on: paths and sizes of the input, settings, machine."""
        config = self._config
        values = {
            "machine": cpu(),
            "files": [[file.location, file.size] for file in self._files],
            "vocab": str(self._vocab),
            "text_field": self._text_field,
            "vocab_size": config.model.vocab_size,
            "seq_len": config.data.seq_len,
            "corpus": config.corpus.model_dump(mode="json"),
            "prepare": self._preparation.model_dump(mode="json") if self._preparation else None,
        }
        return hashlib.sha256(canonical_json(values).encode()).hexdigest()[:16]

    def _measure(self) -> CorpusRates:
        """Measure the rates on the smallest input files or, if there are no input files, on an artificial text."""
        from electra_dist.planning.corpus.corpus_rates import SAMPLE_BYTES, measure_rates, smallest_files
        from electra_dist.planning.corpus.sample_text import write_sample_text

        with tempfile.TemporaryDirectory(prefix="corpus-plan-") as folder:
            files = smallest_files(self._files, SAMPLE_BYTES)
            sample = f"{len(files)} files of the input, the smallest"
            if not files:
                path = Path(folder) / "sample.jsonl"
                write_sample_text(path, SAMPLE_BYTES)
                files = search_inputs([path]).files
                sample = _MADE_TEXT
            request = self.request(files, self._vocabulary(files))
            stages = self._measure_preparation(files)
            return measure_rates(request, sample, f"{cpu()['model']}", stages)

    def _measure_preparation(self, files: list[InputFile]) -> list[PrepareRate]:
        """Measure the stages of `corpus prepare` on the sample `files`; return [] if no preparation is planned."""
        if self._preparation is None:
            return []
        try:
            from electra_dist.planning.corpus.prepare_rates import measure_preparation
        except ModuleNotFoundError as error:
            raise UserError(f"--prepare needs {error.name}; pip install 'electra-dist[corpus]'") from None
        return measure_preparation(self._preparation, files, self._text_field)

    def _vocabulary(self, files: list[InputFile]) -> Vocabulary:
        """Read the vocabulary of --vocab, or train a vocabulary on `files` and fill it up with unused entries."""
        if self._vocab is not None:
            return Vocabulary.read(self._vocab)
        corpus = self._config.corpus
        if corpus.tokenizer == "bpe":
            raise UserError("corpus.tokenizer: bpe needs --vocab; pass the tokenizer.json of the corpus")
        texts = []
        for raw in DocumentStream(files, self._text_field, self._config.data.endpoint_url):
            with contextlib.suppress(SkippedDocument):
                texts.append(decode(raw, self._text_field))
            if len(texts) == _VOCABULARY_DOCUMENTS:
                break
        if not texts:
            raise UserError("no document of the sample has text; give another --input or --text-field")
        size = self._config.model.vocab_size
        trained = train_vocabulary(lambda: iter(texts), size, corpus.lowercase)
        return _filled(trained, size)


def _placeholder(config: Config) -> Vocabulary:
    """Return a vocabulary of model.vocab_size meaningless entries, because a plan needs only their number."""
    from electra_dist.tokenizer import SPECIAL_TOKENS

    return _filled(Vocabulary("\n".join(SPECIAL_TOKENS) + "\n", "placeholder"), config.model.vocab_size)


def _filled(vocabulary: Vocabulary, size: int) -> Vocabulary:
    """Return a vocabulary filled up to `size` entries with [unusedN]; `size` sets how many bytes a token id takes."""
    unused = "".join(f"[unused{number}]\n" for number in range(size - vocabulary.size))
    return Vocabulary(vocabulary.text + unused, "trained on the sample")


def _workload(
    rates: CorpusRates,
    files: list[InputFile],
    tokens: float | None,
    kept: float,
    input_file_mb: float,
    machines: int,
    cores: int,
) -> Workload:
    """Return how much text to plan for: for `tokens` if given, else that of the input files, else for the default."""
    from electra_dist.planning.corpus.corpus_plan import Workload, workload_of_tokens

    if not files or tokens is not None:
        return workload_of_tokens(
            rates,
            tokens or DEFAULT_TOKENS,
            file_bytes=input_file_mb * 1e6,
            kept=kept,
            num_machines=machines,
            cores_per_machine=cores,
        )
    input_bytes = sum(file.size for file in files)
    raw_text_bytes = input_bytes * rates.text_bytes / rates.input_bytes
    return Workload(
        text_bytes=raw_text_bytes * kept,
        input_bytes=input_bytes * kept,
        num_files=len(files),
        num_documents=rates.documents * raw_text_bytes * kept / rates.text_bytes,
        raw_text_bytes=raw_text_bytes,
        num_machines=machines,
        cores_per_machine=cores,
    )


def _table(plan: CorpusPlan, prices: Prices) -> Table:
    """Return a table with a row for each step of the planned build and a row of sums; costs only if prices are set."""
    from electra_dist.planning.corpus.corpus_plan import total_requests

    columns = ["step", "core-hours", "GB read", "GB written", "GET", "PUT", "LIST", "DELETE"]
    table = Table(*columns, *(["cost"] if prices.any else []))
    for column in table.columns[1:]:
        column.justify = "right"

    def add(name: str, hours: float, size: tuple[float, float], requests: Requests, cost: float) -> None:
        gigabytes = [f"{num_bytes / 1e9:,.1f}" for num_bytes in size]
        numbers = [requests.get, requests.put, requests.list, requests.delete]
        cells = [name, f"{hours:,.2f}", *gigabytes, *(f"{number:,}" for number in numbers)]
        if prices.any:
            cells.append(f"{cost:,.2f}")
        table.add_row(*cells)

    for step in plan.steps:
        add(step.name, step.core_hours, (step.bytes_in, step.bytes_out), step.requests, step.cost(prices))
    total_bytes = (sum(step.bytes_in for step in plan.steps), sum(step.bytes_out for step in plan.steps))
    total_hours = sum(step.core_hours for step in plan.steps)
    add("all", total_hours, total_bytes, total_requests(plan.steps), sum(step.cost(prices) for step in plan.steps))
    return table


def _remarks(
    plan: CorpusPlan, rates: CorpusRates, work: Workload, hours: float | None, num_machines_needed: int | None
) -> list[str]:
    """Return the lines below the table of the plan: sizes of the corpus, duration, and the measured rates."""
    most_busy_cores = min(plan.num_groups, plan.num_buckets)
    lines = [
        f"{format_count(plan.tokens)} tokens from {work.text_bytes / 1e9:,.1f} GB of text in {work.num_files:,} "
        f"files: {plan.num_shards:,} shards; {plan.num_groups:,} groups of inputs and {plan.num_buckets:,} buckets, "
        f"so at most {most_busy_cores:,} cores have work",
        f"spill files: {plan.spill_bytes / 1e9:,.1f} GB in the output until the corpus is merged",
        f"time on {plan.num_machines} x {plan.cores_per_machine} cores: {format_duration(plan.hours * 3600)}, if "
        "storage keeps up",
    ]
    if hours is not None and num_machines_needed is None:
        lines.append(f"no number of machines finishes in {hours:g} h, because the merge, one process, takes longer")
    elif hours is not None:
        lines.append(
            f"for {hours:g} h: {num_machines_needed} machines of {plan.cores_per_machine} cores "
            f"(--machines {num_machines_needed})"
        )
    lines.append(
        f"rates: {rates.tokens_per_core_s_of_build / 1e6:.2f} M tokens/s a core in all steps, measured on "
        f"{rates.text_bytes / 1e6:.1f} MB, {rates.sample}; {rates.hardware}, {rates.date[:10]}"
    )
    if rates.prepare:
        lines.append(
            f"preparation: {work.raw_text_bytes / 1e9:,.1f} GB of text before it; without the extraction of HTML, and "
            "without its reading and writing of files"
        )
    return lines


def _as_json(
    plan: CorpusPlan, rates: CorpusRates, prices: Prices, hours: float | None, num_machines_needed: int | None
) -> dict[str, Any]:
    steps = [asdict(step) | {"cost": step.cost(prices)} for step in plan.steps]
    tree = asdict(plan) | {"steps": steps, "hours": plan.hours, "rates": rates.model_dump()}
    for key in ("prepare", "parallel", "merge"):  # `steps` has them all
        del tree[key]
    if hours is not None:
        tree["machines_for_wanted_hours"] = num_machines_needed
    return tree
