"""Damages that once ended a reader with a traceback or never: each is refused or passed over now."""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Any

import pytest
from fuzz.campaign import Campaign
from fuzz.damages import Damage
from fuzz.judge import run_here
from fuzz.readers import TARGETS

from electra_dist.run.heartbeat import RECORD_BYTES

pytestmark = pytest.mark.multiproc
DEEP = b"[" * 100_000 + b"]" * 100_000
LONG = b"1" * 5000
QUESTION = b'{"id": "1", "question": "w5", "answers": [{"text": "w5", "answer_start": 0}]}'
TIME = "2026-11-20T10:00:00+00:00"


def line(**fields: Any) -> bytes:
    """Return a record of a JSON-lines file."""
    return json.dumps(fields).encode() + b"\n"


def heartbeat(**fields: Any) -> bytes:
    """Return a heartbeat with a right checksum and the length of a record."""
    body = json.dumps(fields).encode().removesuffix(b"}")
    return (body + b', "crc": %d}' % zlib.crc32(body)).ljust(RECORD_BYTES - 1) + b"\n"


NO_ROOM_FOR_TEXT = json.dumps(
    {
        "objective": "rtd",
        "tower": "discriminator",
        "seq_len": 3,
        "steps": [6],
        "rows": 96,
        "corpus_fingerprint": "",
        "electra_dist": "",
    }
).encode()
EVALUATION_WITHOUT_ERROR = line(
    kind="eval",
    rows=4,
    step=3,
    **dict.fromkeys(("mlm_loss", "mlm_accuracy", "rtd_loss", "auc", "accuracy", "precision", "recall"), 0.5),
    context_auc=0.5,
)
FOUND = [
    # file, reader, content of the file
    ("run/metrics.jsonl", "status", b'{"kind": "train", "step": %s}\n' % DEEP),
    ("run/metrics.jsonl", "status", line(kind="train", step="x", step_s=1.0)),
    ("run/metrics.jsonl", "status", line(step=3)),
    ("run/metrics.jsonl", "report", EVALUATION_WITHOUT_ERROR),
    ("run/metrics.jsonl", "status", EVALUATION_WITHOUT_ERROR),
    ("run/environment.json", "report", b'{"\\ud800": 1}'),
    ("run/metrics.jsonl", "report", line(kind="train", step=3)),
    ("run/metrics.jsonl", "verify", line(kind="train", step=3, rows_seen=3, receipt="no number")),
    ("run/metrics.jsonl", "metrics at a resume", line(kind="train", step=None)),
    ("run/samples.jsonl", "report", line(step=3, texts=[{"original": 3}])),
    ("run/ledger.jsonl", "status", line(time="2026-13-45", event="start", step=0)),
    ("run/ledger.jsonl", "status", line(time="0001-01-01T00:00:00", event="start", step=0)),
    ("run/ledger.jsonl", "verify", line(time=TIME)),
    ("run/ledger.jsonl", "report", line(time=TIME, event="checkpoint", step=0, spent_s={"step": "x"})),
    ("run/slurm/jobs.jsonl", "end of a Slurm job", b""),
    ("run/slurm/jobs.jsonl", "status", line(time=TIME, event="begin", job="1", restart=0, ledger_events="x")),
    ("run/slurm/jobs.jsonl", "status", line(time=TIME, event="submit", jobs="1")),
    ("run/slurm/jobs.jsonl", "status", line(time=TIME, event="submit", jobs=[1])),
    ("run/slurm/job-1-0/exit-n0", "end of a Slurm job", b"\xff"),
    ("run/slurm/job-1-0/exit-n0", "end of a Slurm job", "²".encode()),
    ("run/strikes.jsonl", "excluded nodes", line(time="x", node="n", device="", reason="", by="")),
    ("run/strikes.jsonl", "excluded nodes", line(time=10**400, node="n", device="", reason="", by="")),
    ("run/heartbeats/rank-00000.json", "heartbeats", heartbeat(pid=1)),
    ("run/heartbeats/rank-00000.json", "status", heartbeat(**dict.fromkeys(("pid", "rank", "attempt", "step"), "x"))),
    ("run/meeting/session/node-0.json", "rendezvous", b""),
    ("run/meeting/session/node-0.json", "rendezvous", b'{"start": 2, "port": "x"}'),
    ("run/meeting/session/node-1.json", "rendezvous", b"{"),
    ("run/meeting/session/node-1.json", "rendezvous", b'{"start": 2, "code": 1, "final": false, "more": 1}'),
    ("run/meeting/sessions", "rendezvous", b"session\n\xff\n"),
    ("run/identity.json", "start of a run", b'{"numerics": "x"}'),
    ("run/identity.json", "open_corpus", b"{}"),
    (
        "run/identity.json",
        "verify --bytes",
        b'{"numerics": 1, "corpus_fingerprint": "x", "phase_fingerprints": ["x", "y"]}',
    ),
    ("run/environment.json", "report", b'{"versions": 3}'),
    ("run/skipped_steps.json", "skip list", b'{"steps": %s}' % DEEP),
    ("run/skipped_steps.json", "verify", b'{"steps": [1e999], "rollbacks": 0, "streak": []}'),
    ("run/micro_batch.json", "micro-batch", b'{"cpu, x, 1 ranks": [8]}'),
    ("run/token_counts-*.npy", "counts", b"\x93NUMPY"),
    ("run/vocab.txt", "export", b"[PAD]\n[UNK]\n"),
    ("run/config.yaml", "report", b"{"),
    ("run.yaml", "resolve", b"[" * 2000),
    ("run.yaml", "resolve", b"run_dir: x\nseed: !!int x\n"),
    ("run.yaml", "resolve", b"run_dir: 2026-13-41\n"),
    ("run.yaml", "resolve", b"run_dir: &a [*a]\n"),
    ("run.yaml", "resolve", b'run_dir: "\\ud800"\n'),
    ("run.yaml", "start of a run", b'run_dir: "x\\0y"\n'),
    ("run.yaml", "resolve", b'run_dir: x\nseed: "%s"\n' % (b"x" * 100_000)),
    ("corpus/corpus.json", "corpus info", DEEP),
    ("corpus/corpus.json", "corpus info", b'{"seq_len": %s}' % LONG),
    ("building/progress/build.json", "resume of a build", b"{"),
    ("building/progress/groups/*.json", "resume of a build", b"{"),
    ("building/progress/buckets/*.npy", "resume of a build", b"\x93NUMPY\x01\x00\x10\x00{'shape': (1,)}  "),
    ("export/discriminator/model.safetensors", "load_pretrained", b"\xff" * 8),
    ("export/discriminator/model.safetensors", "score --model", b""),
    ("export/discriminator/pretraining.json", "score --model", NO_ROOM_FOR_TEXT),
    ("export/discriminator/pretraining.json", "score --model", NO_ROOM_FOR_TEXT.replace(b"3", b"-1688")),
    ("export/discriminator/tokenizer.json", "load_pretrained", b'{"model": {"vocab": [1]}}'),
    ("export/discriminator/config.json", "load_pretrained", DEEP),
    ("squad.json", "read_squad", b'{"data": [{"paragraphs": [{"context": 3, "qas": [%s]}]}]}' % QUESTION),
    ("squad.json", "read_squad", DEEP),
    ("pairs.jsonl", "pairs", DEEP + b"\n"),
    ("texts.jsonl", "read_texts", DEEP + b"\n"),
    ("results.jsonl", "results", line(**dict.fromkeys(("task", "mode", "identity", "metric", "failure"), 3))),
    ("seed-0/finetune.json", "seed folder", DEEP),
    ("criterion.jsonl", "criterion", line(time=TIME)),
    ("building/progress/build.json", "merge of parts", b'{"tokenizer": "0", "seq_len": "x"}'),
    ("prepare/work/plan.json", "corpus prepare", b'{"output": "out", "identity": {}, "files": [3], "tasks": []}'),
    ("prepare/out/prepare.json", "corpus prepare", b'{"config": {}, "sources": {"a": 3}}'),
    ("rates.json", "corpus plan", b'{"rates": {"cpu_s": {}}}'),
]  # fmt: skip
TARGET_OF = {target.file: target for target in TARGETS}


@pytest.fixture(scope="module")
def campaign(specimen: Path) -> Campaign:
    """The folder whose files are damaged one after another."""
    return Campaign(specimen, run_here)


@pytest.mark.parametrize(("file", "name", "content"), FOUND, ids=[f"{file}-{name}" for file, name, _ in FOUND])
def test_a_damage_that_once_ended_a_reader_is_refused_or_passed_over(
    file: str, name: str, content: bytes, campaign: Campaign
) -> None:
    target = TARGET_OF[file]
    reader = next(reader for reader in target.readers if reader.name == name)
    ending = campaign.case(target, reader, Damage("content", 0.0, content))
    assert not ending.is_fault, ending.text


@pytest.mark.parametrize("name", ["load_pretrained", "score --model"])
@pytest.mark.parametrize(
    "key", ["vocab_size", "num_hidden_layers", "hidden_size", "intermediate_size", "embedding_size"]
)
def test_an_impossible_size_in_the_config_of_a_model_allocates_nothing(
    key: str, name: str, campaign: Campaign, specimen: Path
) -> None:
    target = TARGET_OF["export/discriminator/config.json"]
    reader = next(reader for reader in target.readers if reader.name == name)
    config = json.loads(target.path(specimen).read_bytes())
    content = json.dumps({**config, key: (1 << 53) * config["num_attention_heads"]}).encode()
    ending = campaign.case(target, reader, Damage("content", 0.0, content))
    assert not ending.is_fault, ending.text


@pytest.mark.parametrize("size", [-512, -8, -1024, (1 << 63) - 1, 1 << 63])
@pytest.mark.parametrize("name", ["corpus index", "shard"])
def test_a_member_of_an_impossible_size_ends_the_reading_of_a_shard(name: str, size: int, campaign: Campaign) -> None:
    target = TARGET_OF["indexed/shard-000000.tar"]
    reader = next(reader for reader in target.readers if reader.name == name)
    ending = campaign.case(target, reader, Damage("member_size", 0.0, size))
    assert not ending.is_fault, ending.text
    assert ending.outcome == "refused"


@pytest.mark.parametrize("file", ["corpus/corpus.json", "second/corpus.json"])
def test_more_rows_than_a_shard_has_room_for_are_refused(file: str, campaign: Campaign, specimen: Path) -> None:
    """`verify` once hashed the number of every row that the manifest claimed, until memory ended."""
    target = TARGET_OF[file]
    manifest = json.loads(target.path(specimen).read_bytes())
    manifest["shards"][0]["rows"] = 1_025_247_687_426
    for reader in target.readers:
        ending = campaign.case(target, reader, Damage("content", 0.0, json.dumps(manifest).encode()))
        assert not ending.is_fault, ending.text
        assert ending.outcome == "refused"


@pytest.mark.parametrize("name", ["load_pretrained", "score --model"])
def test_architectures_that_are_no_list_are_passed_over(name: str, campaign: Campaign, specimen: Path) -> None:
    target = TARGET_OF["export/discriminator/config.json"]
    reader = next(reader for reader in target.readers if reader.name == name)
    config = json.loads(target.path(specimen).read_bytes())
    content = json.dumps({**config, "architectures": 18361}).encode()
    ending = campaign.case(target, reader, Damage("content", 0.0, content))
    assert not ending.is_fault, ending.text


def test_a_model_that_lacks_a_bias_is_refused(campaign: Campaign, specimen: Path) -> None:
    """The key of a bias of the attention output is renamed."""
    target = TARGET_OF["export/discriminator/model.safetensors"]
    reader = next(reader for reader in target.readers if reader.name == "score --model")
    ending = campaign.case(target, reader, Damage("rename", 0.31172406930938545, "x"))
    assert not ending.is_fault, ending.text
    assert ending.outcome == "refused"
