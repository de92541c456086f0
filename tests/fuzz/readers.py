"""The table of the fuzz: every file that this project reads, with the commands and the functions that read it."""

from __future__ import annotations

import contextlib
import io
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np
from electra_launcher.cli.corpus.prepare import _print_report
from electra_launcher.slurm import job
from electra_launcher.supervise.rendezvous import Rendezvous
from fuzz.specimens import check_manifest, newest_checkpoint, progress_parameters
from rich.console import Console
from support.checkpoints import verify
from support.real_runs import VOCAB_SIZE

from electra_dist.api import open_corpus
from electra_dist.compare.significance import record_criterion
from electra_dist.config.load import load_config, load_section
from electra_dist.corpus.builder.build_records import BuildNotes, BuildRecords
from electra_dist.corpus.builder.join_parts import join_parts
from electra_dist.corpus.builder.shuffle import NUM_CELLS, open_spills
from electra_dist.corpus.prepare.preparation import check, finished_report
from electra_dist.corpus.prepare.prepare_config import PrepareConfig
from electra_dist.corpus.prepare.source_plan import write_plan
from electra_dist.data.shard import Shard
from electra_dist.engine.micro_batch import read_known_sizes
from electra_dist.errors import TornCheckpoint
from electra_dist.finetune.labelled_texts import read_texts
from electra_dist.finetune.passage_windows import read_squad
from electra_dist.finetune.seed_folder import read_identity
from electra_dist.finetune.stored_scores import ScoreStore
from electra_dist.pretrained.encoder import load_pretrained
from electra_dist.run.failures import excluded_nodes, read_failures, read_strikes
from electra_dist.run.folder import LEASE_DIR, token_counts_file
from electra_dist.run.heartbeat import read_heartbeats
from electra_dist.run.lease import find_newest, read_owner
from electra_dist.run.metrics import MetricsWriter
from electra_dist.scoring.pair_files import read_pair_files
from electra_dist.store.open_store import open_store
from electra_dist.train.check_inputs import check_inputs
from electra_dist.train.guard import SkipList
from electra_dist.train.token_counts import read_counts


@dataclass(frozen=True)
class Reader:
    """A command line, or a function of the root folder, that reads a file."""

    name: str
    command: tuple[str, ...] = ()  # {root} stands for the root folder; empty for a function
    function: Callable[[Path], object] | None = None
    weight: int = 4  # share of the cases; 1 for one that takes long


@dataclass(frozen=True)
class Target:
    """A file that is damaged, and its readers."""

    file: str  # path or pattern below the root folder; the first match in the order of the names is taken
    kind: str  # of `damages.damages`
    readers: tuple[Reader, ...]
    newest: bool = False  # take the last match instead

    def path(self, root: Path) -> Path:
        """Return the file."""
        matches = sorted(root.glob(self.file))
        assert matches, f"no {self.file}"
        return matches[-1 if self.newest else 0]


def _command(line: str, weight: int = 4) -> Reader:
    return Reader(line.split("{")[0].strip(), tuple(line.split()), weight=weight)


def _rendezvous(root: Path) -> None:
    node = Rendezvous(root / "run", 1, 29500, "session")
    node.start(lambda: False, 0.05)
    node.news()
    node.left_by()
    node.taken_over()
    Rendezvous(root / "run", 0, 29500, "session").left_by()


def _truncate(root: Path) -> None:
    """Do what a resume does with the records of a run, in a copy of them."""
    folder = root / "truncated"
    folder.mkdir(exist_ok=True)
    for name in ("metrics.jsonl", "samples.jsonl"):
        source = root / "run" / name
        if source.exists():
            (folder / name).write_bytes(source.read_bytes())
    with contextlib.closing(MetricsWriter(folder)) as writer:
        writer.truncate_after(3)


def _progress(root: Path) -> None:
    store = open_store(str(root / "building"))
    records = BuildRecords(store)
    records.begin(progress_parameters(root), "", BuildNotes())
    for group in records.groups().values():
        for spill in open_spills(store, group.spills):
            list(spill.documents(range(NUM_CELLS)))
    records.order()
    for bucket in records.buckets().values():
        if bucket.heldout_rows:
            records.heldout_rows(bucket)
            records.heldout_origins(bucket)
    records.parts()


def _merge(root: Path) -> None:
    """Merge a copy of the build's parts, because a merge deletes their records."""
    with tempfile.TemporaryDirectory() as copy:
        shutil.copytree(root / "building", copy, dirs_exist_ok=True)
        join_parts(copy, None)


def _preparation(root: Path) -> None:
    """Do what `corpus prepare` does before it runs a task: compare the plan, and look for the report."""
    with contextlib.chdir(root / "prepare"):
        config = load_section(Path("pipeline.yaml"), PrepareConfig)
        checked = check(config)
        write_plan(checked.plan, Path(config.work))
        report = finished_report(checked)
        assert report is not None
        _print_report(report, Console(file=io.StringIO()))


def _lease(root: Path) -> None:
    """Read a lease as the start of a run does when it finds one in the run folder."""
    newest = find_newest(root / "leased" / LEASE_DIR)
    assert newest.is_free(0.0) in (True, False)
    assert newest.description
    read_owner(root / "leased")


def _shard(root: Path) -> None:
    shard = Shard(root / "indexed" / "shard-000000.tar", 32, np.dtype(np.uint16))
    try:
        shard.rows(np.arange(min(shard.num_rows, 1000)))
    finally:
        shard.close()


def _job_end(root: Path) -> None:
    run = root / "run"
    arguments = ["end", str(run), "--session", "job-1-0", "--config"]
    with mock.patch.object(job, "append_job"):  # the records stay as they are
        code = job.main([*arguments, str(run / "config.yaml")])
    assert code in (0, 78), code


def _manifest(root: Path) -> None:
    with contextlib.suppress(TornCheckpoint):  # which every caller catches, to take another checkpoint
        check_manifest(newest_checkpoint(root / "run"))


def _checkpoint(root: Path) -> None:
    folder = newest_checkpoint(root / "run")
    verify(open_store(str(folder.parent)), folder.name)


def _criterion(root: Path) -> None:
    record_criterion(root, SimpleNamespace(model_dump=lambda mode: {"arm": "rtd"}), 0)


PREPARATION = Reader("corpus prepare", function=_preparation)
RATES = _command("corpus plan {root}/run.yaml --rates {root}/rates.json", 1)
STATUS = _command("status {root}/run")
STATUS_JSON = _command("status {root}/run --json")
VERIFY = _command("verify {root}/run")
VERIFY_BYTES = _command("verify --bytes {root}/run", 1)
REPORT = _command("report {root}/run", 1)
EXPORT = _command("export {root}/run --output {root}/exported", 1)
LIST = _command("checkpoint list {root}/run")
VERIFY_CHECKPOINTS = _command("checkpoint verify {root}/run")
REPAIR = _command("checkpoint repair {root}/run --dry-run")
RESOLVE = _command("resolve {root}/run.yaml")
PLAN = _command("plan {root}/run.yaml", 2)
SUBMIT = _command("submit --config {root}/run.yaml --nodes 2 --dry-run")
INFO = _command("corpus info {root}/corpus")
FIND = _command("corpus find {root}/corpus --document a.txt#3")
INDEX = _command("corpus index {root}/indexed --vocab {root}/corpus/vocab.txt")
SCORE = _command("score --model {root}/export/discriminator {root}/texts.txt", 1)
SCORE_RUN = _command("score --model {root}/run {root}/texts.txt", 1)
COMPARE = _command("compare {root}/compare.yaml --dry-run")
START = Reader("start of a run", function=lambda root: check_inputs(load_config(root / "run.yaml"), 1))
JOB_END = Reader("end of a Slurm job", function=_job_end)
FAILURES = Reader("failures", function=lambda root: read_failures(root / "run"))
STRIKES = Reader("excluded nodes", function=lambda root: excluded_nodes(read_strikes(root / "run"), 1.7e9))
LIBRARY = Reader("open_corpus", function=lambda root: open_corpus(root / "run"))
ENCODER = Reader("load_pretrained", function=lambda root: load_pretrained(str(root / "export" / "discriminator")))
RENDEZVOUS = Reader("rendezvous", function=_rendezvous)
RESUME = Reader("metrics at a resume", function=_truncate)

MERGE = Reader("merge of parts", function=_merge)

TARGETS = (
    Target("run.yaml", "yaml", (RESOLVE, PLAN, SUBMIT, START)),
    Target("run/config.yaml", "yaml", (STATUS, REPORT, JOB_END, LIST)),
    Target("compare.yaml", "yaml", (COMPARE,)),
    Target("corpus/corpus.json", "json", (INFO, START, VERIFY, LIBRARY)),
    Target("second/corpus.json", "json", (START, VERIFY, LIBRARY)),
    Target("corpus/vocab.txt", "text", (START, INDEX)),
    Target("corpus/origins.json", "json", (FIND,)),
    Target("corpus/origins/shard-000000.parquet", "text", (FIND,)),
    Target("indexed/shard-000000.tar", "tar", (INDEX, Reader("shard", function=_shard))),
    *(
        Target(f"building/progress/{name}", kind, (Reader("resume of a build", function=_progress), MERGE))
        for name, kind in (
            ("build.json", "record"),
            ("order.json", "record"),
            ("groups/*.json", "record"),
            ("buckets/*.json", "record"),
            ("buckets/*.npy", "npy"),
            ("buckets/*.parquet", "text"),
            ("notes.json", "record"),
            ("spills/*", "text"),
        )
    ),
    Target("run/identity.json", "json", (START, STATUS, REPORT, EXPORT, LIBRARY, VERIFY_BYTES)),
    Target("run/inputs.json", "json", (START,)),
    Target("run/environment.json", "json", (REPORT, EXPORT)),
    Target("prepare/work/plan.json", "json", (PREPARATION,)),
    Target("prepare/out/prepare.json", "json", (PREPARATION,)),
    Target("rates.json", "json", (RATES,)),
    Target("leased/lease/*.json", "json", (Reader("lease", function=_lease),)),
    Target("run/SHA256SUMS", "text", (EXPORT, SCORE_RUN)),
    Target("run/metrics.jsonl", "jsonl", (STATUS, STATUS_JSON, VERIFY, REPORT, RESUME)),
    Target("run/samples.jsonl", "jsonl", (REPORT, RESUME)),
    Target("run/ledger.jsonl", "jsonl", (STATUS, STATUS_JSON, VERIFY, REPORT, JOB_END)),
    Target("run/slurm/jobs.jsonl", "jsonl", (STATUS, REPORT, JOB_END)),
    Target("run/slurm/job-1-0/exit-n0", "text", (JOB_END,)),
    Target("run/strikes.jsonl", "jsonl", (STATUS, STATUS_JSON, STRIKES)),
    Target("run/failures/node-0.jsonl", "jsonl", (STATUS, _command("why {root}/run"), FAILURES)),
    Target(
        "run/heartbeats/rank-00000.json",
        "heartbeat",
        (STATUS, STATUS_JSON, Reader("heartbeats", function=lambda root: read_heartbeats(root / "run"))),
    ),
    Target("run/meeting/session/node-0.json", "json", (RENDEZVOUS,)),
    Target("run/meeting/session/node-1.json", "json", (RENDEZVOUS,)),
    Target("run/meeting/sessions", "text", (RENDEZVOUS,)),
    Target(
        "run/skipped_steps.json", "json", (VERIFY, Reader("skip list", function=lambda r: SkipList(r / "run", [])))
    ),
    Target(
        "run/micro_batch.json",
        "json",
        (Reader("micro-batch", function=lambda root: read_known_sizes(root / "run")),),
    ),
    Target(
        "run/token_counts-*.npy",
        "npy",
        (Reader("counts", function=lambda r: read_counts(token_counts_file(r / "run", "0" * 16), VOCAB_SIZE)),),
    ),
    Target("run/tokenizer.json", "json", (EXPORT, SCORE_RUN)),
    Target("run/vocab.txt", "text", (EXPORT, SCORE_RUN)),
    Target(
        "run/checkpoints/step-*/manifest.json",
        "manifest",
        (Reader("manifest", function=_manifest), VERIFY_CHECKPOINTS, LIST, EXPORT, REPAIR, VERIFY),
        newest=True,
    ),
    Target(
        "run/checkpoints/step-*/rank-00000.*.safetensors",
        "safetensors",
        (Reader("checkpoint", function=_checkpoint), VERIFY_CHECKPOINTS, EXPORT, REPAIR),
        newest=True,
    ),
    Target("run/checkpoints/attempts/*.json", "json", (LIST, VERIFY_CHECKPOINTS, START)),
    Target("export/discriminator/config.json", "json", (ENCODER, SCORE)),
    Target("export/discriminator/tokenizer.json", "json", (ENCODER, SCORE)),
    Target("export/discriminator/pretraining.json", "json", (ENCODER, SCORE)),
    Target("export/discriminator/model.safetensors", "safetensors", (ENCODER, SCORE)),
    Target("squad.json", "json", (Reader("read_squad", function=lambda root: read_squad(root / "squad.json", 1)),)),
    Target("pairs.jsonl", "jsonl", (Reader("pairs", function=lambda root: read_pair_files([root / "pairs.jsonl"])),)),
    Target(
        "texts.jsonl",
        "jsonl",
        (Reader("read_texts", function=lambda root: read_texts(root / "texts.jsonl", "text", None, "label")),),
    ),
    Target("texts.txt", "text", (SCORE,)),
    Target("results.jsonl", "jsonl", (Reader("results", function=lambda r: ScoreStore(r / "results.jsonl")),)),
    Target("seed-0/finetune.json", "json", (Reader("seed folder", function=lambda r: read_identity(r / "seed-0")),)),
    Target("criterion.jsonl", "jsonl", (Reader("criterion", function=_criterion),)),
)
