"""Write one valid file of every kind that this project reads: corpora, a finished run, its export, and others."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pyarrow
import yaml
from electra_launcher.supervise.rendezvous import Rendezvous
from support.real_runs import VOCAB_SIZE, quick_command, write_corpus, write_tiny_config

from electra_dist.checkpoint.manifest import Manifest
from electra_dist.config.load import load_section
from electra_dist.corpus.builder.build_records import BuildNotes, BuildOrder, BuildRecords, FinishedBucket, ReadGroup
from electra_dist.corpus.builder.shuffle import write_spill
from electra_dist.corpus.counts import Counts
from electra_dist.corpus.inputs.text_decoding import DocumentNames, RawDocument
from electra_dist.corpus.origins import Origin, put_origins, table_of_examples, write_origins
from electra_dist.corpus.plan.corpus_rates import STEPS, CorpusRates, PrepareRate
from electra_dist.corpus.prepare.prepare_config import PrepareConfig
from electra_dist.corpus.prepare.prepare_report import REPORT_FILE, make_report
from electra_dist.corpus.prepare.source_plan import make_plan, write_plan
from electra_dist.data.manifest import read_manifest
from electra_dist.finetune.stored_scores import Measured
from electra_dist.pretrained.export import export_run
from electra_dist.run.failures import Failure, Strike, add_strike, record_failure
from electra_dist.run.folder import LEASE_DIR, token_counts_file
from electra_dist.run.lease import create
from electra_dist.run.ledger import append_job
from electra_dist.run.records import JsonlFile
from electra_dist.store.interface import Store
from electra_dist.store.open_store import open_store
from electra_dist.train.token_counts import write_counts

NUM_STEPS = 6
SECOND_CORPUS_FROM_STEP = 3
RESULT = Measured(
    task="rte",
    seed=0,
    mode="finetune",
    identity="0" * 64,
    metric="accuracy",
    score=0.5,
    metrics={"accuracy": 0.5},
    failures=(),
    train_loss=0.7,
    steps=4,
    examples=8,
    seconds=1.5,
)
SQUAD = {
    "version": "1.1",
    "data": [
        {
            "title": "t",
            "paragraphs": [
                {
                    "context": "w5 w6 w7 w8",
                    "qas": [{"id": "q0", "question": "w9", "answers": [{"text": "w6", "answer_start": 3}]}],
                }
            ],
        }
    ],
}


def make_specimen(root: Path) -> None:
    """Write the folders `corpus`, `second`, `run` and `export`, and smaller files, which includes a training run."""
    write_corpus(str(root / "corpus"), [70, 33, 48])
    write_corpus(str(root / "corpus" / "heldout"), [24], seed=9)
    _write_origin_files(open_store(str(root / "corpus")))
    write_corpus(str(root / "second"), [11, 19], seed=4)
    settings = {
        "train.num_steps": NUM_STEPS,
        "checkpoint.every_steps": 2,
        "log.eval_every_steps": 2,
        "data.phases": [{"corpus": str(root / "second"), "from_step": SECOND_CORPUS_FROM_STEP}],
    }
    config = write_tiny_config(root / "run.yaml", root / "run", str(root / "corpus"), **settings)
    done = subprocess.run(quick_command(config, 1), capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    export_run(root / "run", root / "export")
    shutil.copytree(root / "corpus", root / "indexed", ignore=shutil.ignore_patterns("heldout", "corpus.json"))
    _write_records(root / "run")
    _write_build_progress(root)
    _write_data_of_tasks(root)
    write_data_of_corpora(root)


def _write_origin_files(store: Store) -> None:
    """Write the origin files of a corpus each of whose rows is one document."""
    manifest = read_manifest(store)
    files = [put_origins(store, shard.name, _documents_of_rows(shard.rows)) for shard in manifest.shards]
    write_origins(store, manifest, files)


def _documents_of_rows(num_rows: int) -> pyarrow.Table:
    """Return the origin table of rows each of which is one document."""
    places = np.array([(row, 0, row) for row in range(num_rows)])
    return table_of_examples(places, [Origin("a.txt", row, "texts", DocumentNames()) for row in range(num_rows)])


def _write_records(run: Path) -> None:
    """Write the files of a run folder that only some runs have."""
    for number in range(2):
        add_strike(run, Strike(time=1.7e9, node=f"n{number}", device="GPU 3", reason="it hung", by="preflight"))
    failure = {"time": "2026-11-20T10:00:00+00:00", "start": "start-000001", "node": "n0", "rank": 3, "error": "ecc"}
    for step in (5, 6):
        record_failure(run, 0, Failure(**failure, code=1, line="it broke", step=step, positions=[40, 47]), {3: "x\n"})
    (run / "skipped_steps.json").write_text(json.dumps({"steps": [], "rollbacks": 0, "streak": []}) + "\n")
    (run / "micro_batch.json").write_text(json.dumps({"cpu, x, 1 ranks": 8}) + "\n")
    write_counts(token_counts_file(run, "0" * 16), np.arange(VOCAB_SIZE))
    append_job(run, "submit", jobs=["1"], script="submission-0001.sh", nodes=1)
    now = "2026-11-20T10:00:00.000+00:00"
    append_job(
        run,
        "begin",
        job="1",
        restart=0,
        nodes="n0",
        submitted=now,
        started=now,
        ledger_events=0,
        checkpoint_step=0,
    )
    append_job(run, "end", job="1", restart=0, codes={"n0": 75}, ledger_events=1, verdict="again", why="it crashed")
    job_state = run / "slurm" / "job-1-0"
    job_state.mkdir()
    (job_state / "exit-n0").write_text("75\n")
    nodes = [Rendezvous(run, 0, 29500, "session"), Rendezvous(run, 1, 29500, "session")]
    for node in nodes:
        assert node.start(lambda: False, 1.0)
    nodes[1].end(1, final=False, ends_others=True)


def progress_parameters(root: Path) -> dict[str, object]:
    """Return the parameters of the build in the folder `building`, which uses the vocabulary of `corpus`."""
    tokenizer = read_manifest(open_store(str(root / "corpus"))).tokenizer
    return {
        "seq_len": 32,
        "tokenizer": tokenizer.sha256,
        "shard_size_mb": 16.0,
        "lowercase": True,
        "undecodable": "skip",
    }


def _write_build_progress(root: Path) -> None:
    """Write the folder `building`: a corpus build whose parts are finished but not merged."""
    store = open_store(str(root / "building"))
    manifest = read_manifest(open_store(str(root / "corpus")))
    records = BuildRecords(store)
    vocabulary_text = (root / "corpus" / "vocab.txt").read_text()
    records.begin(progress_parameters(root), vocabulary_text, BuildNotes(with_origins=True))
    spill = "progress/spills/000000-000000"
    write_spill(store, spill, [RawDocument(b"some text", False, number=key, key=key << 54) for key in range(9)])
    group = ReadGroup(
        number=0,
        files_digest="0" * 64,
        modified="0" * 64,
        documents_digest="0" * 32,
        spills=[spill],
        counts=Counts.model_validate(
            {"files": {".txt": {"files": 1, "bytes": 81}}, "sources": {"a.txt": {"read": 9, "read_bytes": 81}}}
        ),
    )
    records.record_group(group)
    order = BuildOrder(
        num_inputs=1,
        inputs_sha256="0" * 64,
        num_groups=1,
        num_buckets=1,
        shards_per_bucket=1,
        epochs={"a.txt": 1.0},
        search=Counts(),
    )
    records.record_order(order)
    entry = manifest.shards[0]
    shutil.copyfile(root / "corpus" / entry.name, root / "building" / entry.name)
    counts = {"text_bytes": 100, "text_tokens": 50, "examples": 4, "rows": 4, "tokens": 50}
    bucket = FinishedBucket(
        number=0,
        entries=[entry],
        counts=Counts.model_validate(
            {
                "rows": {"train": counts, "heldout": counts},
                "sources": {"a.txt": {"documents": 4, "used": 3, "heldout": 1}},
            }
        ),
    )
    records.record_bucket(bucket, np.zeros((4, 32), np.uint16), _documents_of_rows(4))
    records.record_part("1/2")
    records.record_bucket(bucket, np.zeros((4, 32), np.uint16))
    records.record_part("1/1")


def write_data_of_corpora(root: Path) -> None:
    """Write the records that corpus commands read back (prepare.json, rates), and a lease."""
    prepare = root / "prepare"
    (prepare / "texts").mkdir(parents=True)
    (prepare / "texts" / "a.txt").write_text("w5 w6\n")
    tree = {"output": "out", "work": "work", "sources": [{"name": "a", "path": "texts"}]}
    (prepare / "pipeline.yaml").write_text(yaml.safe_dump(tree))
    (prepare / "work").mkdir()
    with contextlib.chdir(prepare):
        config = load_section(Path("pipeline.yaml"), PrepareConfig)
        plan = make_plan(config)
        write_plan(plan, Path(config.work))
        counts = {"a": 1}
        file = {"name": "documents/00000.jsonl.gz", "sha256": "0" * 64, "size_bytes": 9, "documents": 1}
        record = {
            "documents_in": counts,
            "documents_out": counts,
            "characters_in": counts,
            "characters_out": counts,
            "dropped": [],
            "samples": {},
            "file": file,
        }
        report = make_report(config, plan, [[record]])
        open_store(config.output).write(REPORT_FILE, json.dumps(report).encode())
    rates = CorpusRates(
        sample="a text",
        date="2026-11-20T10:00:00+00:00",
        hardware="a machine",
        settings={"seq_len": 32},
        input_bytes=1000,
        text_bytes=1000,
        documents=9,
        spill_bytes=500,
        tokens=200,
        shard_bytes=400,
        cpu_s=dict.fromkeys(STEPS, 0.1),
        record_cpu_s=0.001,
        prepare=[PrepareRate(stage="01-filter", cpu_s=0.1, text_bytes=1000)],
    )
    (root / "rates.json").write_text(rates.model_dump_json())
    (root / "leased" / LEASE_DIR).mkdir(parents=True)
    created = create(root / "leased" / LEASE_DIR, 1, "rank 0")
    assert created is not None
    os.close(created[1])


def _write_data_of_tasks(root: Path) -> None:
    """Write data and results of fine-tuning and of a comparison."""
    (root / "squad.json").write_text(json.dumps(SQUAD))
    pair = {"sentence_good": "w5 w6", "sentence_bad": "w6 w5", "UID": "order"}
    (root / "pairs.jsonl").write_text((json.dumps(pair) + "\n") * 3)
    (root / "texts.jsonl").write_text((json.dumps({"text": "w5 w6", "label": "yes"}) + "\n") * 3)
    (root / "texts.txt").write_text("w5 w6\nw7 w8\n")
    results = JsonlFile(root / "results.jsonl")
    results.append(dataclasses.asdict(RESULT))
    results.close()
    (root / "seed-0").mkdir()
    (root / "seed-0" / "finetune.json").write_text(json.dumps({"result": dataclasses.asdict(RESULT)}))
    (root / "words").mkdir()
    for stem in ("train", "dev"):
        (root / "words" / f"{stem}.tsv").write_text("text\tanswer\n" + "w5 w6\tyes\nw7 w8\tno\n" * 4)
    task = {"data": str(root / "words"), "text_a": "text", "label": "answer"}
    tree = {"base": "run.yaml", "output": str(root / "compared"), "objectives": ["rtd", "mlm"], "seeds": [1]}
    settings = {"steps": 4, "evaluate_at": [0.5, 1.0], "minimal_pairs": False, "tasks": {"words": task}}
    (root / "compare.yaml").write_text(yaml.safe_dump({**tree, **settings}))
    stated = {"time": "2026-11-20T10:00:00+00:00", "scores": 0, "criterion": {"arm": "rtd"}}
    (root / "criterion.jsonl").write_text(json.dumps(stated) + "\n")


def newest_checkpoint(run: Path) -> Path:
    """Return the folder of the run's newest checkpoint."""
    return run / "checkpoints" / f"step-{NUM_STEPS:08d}-a0001"


def check_manifest(folder: Path) -> None:
    """Parse the manifest of a checkpoint's folder."""
    Manifest.parse((folder / "manifest.json").read_bytes())
