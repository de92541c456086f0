"""Every mistake a user can make with a run: one line on stderr, exit code 78, nothing written."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from support.real_runs import REPOSITORY, deepspeed_command, step_records, write_corpus
from support.s3_server import running_s3

from electra_dist.data.manifest import MANIFEST_KEY
from electra_dist.data.order import RowOrder

MakeConfig = Callable[..., Path]


def one_rank(config: Path, *overrides: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """One rank without the launcher's second of start-up; the launcher passes its exit code through."""
    command = [sys.executable, str(REPOSITORY / "launcher" / "pretrain.py"), "--config", str(config)]
    for override in overrides:
        command += ["--set", override]
    return subprocess.run(command, capture_output=True, text=True, env={**os.environ, **environment}, timeout=120)


def assert_refused(done: subprocess.CompletedProcess[str], run_dir: Path, *words: str) -> None:
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert done.returncode == 78, done.stderr
    assert len(errors) == 1, done.stderr
    assert "Traceback" not in done.stderr
    for word in words:
        assert word in errors[0], errors[0]
    assert not run_dir.exists()


MISTAKES = {
    "unknown_key": (["train.micro_bacth=4"], ["train.micro_bacth", "did you mean `train.micro_batch`"]),
    "wrong_type": (["train.num_steps=soon"], ["train.num_steps", "soon"]),
    "mask_prob_of_25": (["objective.mask_prob=25"], ["objective.mask_prob", "0.25 means 25 %"]),
    "missing_corpus": (["data.corpus=/nowhere/corpus"], ["/nowhere/corpus"]),
    "other_length": (["data.seq_len=16"], ["rows of 32 tokens", "data.seq_len is 16"]),
    "other_tokenizer": (["model.vocab_size=500"], ["vocabulary of 300", "model.vocab_size is 500"]),
    "kernel_that_cannot_run": (["kernels.backend=cuda"], ["kernels.backend is cuda"]),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_config_and_corpus_mistakes(tiny_config: MakeConfig, tmp_path: Path, mistake: str) -> None:
    overrides, words = MISTAKES[mistake]
    assert_refused(one_rank(tiny_config(), *overrides), tmp_path / "run", *words)


def test_global_batch_that_the_ranks_do_not_divide(tiny_config: MakeConfig, tmp_path: Path) -> None:
    done = one_rank(tiny_config(), WORLD_SIZE="3", RANK="0", LOCAL_RANK="0")
    assert_refused(done, tmp_path / "run", "3 ranks", "use 1, 2 ranks")


def test_only_the_first_rank_speaks(tiny_config: MakeConfig) -> None:
    done = one_rank(tiny_config(), WORLD_SIZE="3", RANK="1", LOCAL_RANK="1")
    assert (done.returncode, done.stderr) == (78, "")


def test_empty_shard_list(tiny_config: MakeConfig, tmp_path: Path) -> None:
    corpus = tmp_path / "empty"
    write_corpus(str(corpus), [8])
    tree = json.loads((corpus / MANIFEST_KEY).read_text())
    tree["shards"] = []
    (corpus / MANIFEST_KEY).write_text(json.dumps(tree))
    assert_refused(one_rank(tiny_config(), f"data.corpus={corpus}"), tmp_path / "run", "empty", "no shards")


def test_unwritable_run_folder(tiny_config: MakeConfig, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    done = one_rank(tiny_config(), f"run_dir={tmp_path}/file/run")
    assert_refused(done, tmp_path / "run", "run_dir", "not a writable folder")


def test_run_folder_of_another_config(tiny_config: MakeConfig, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    config = tiny_config()
    from electra_dist.config_file import load_config

    (run_dir / "identity.json").write_text(json.dumps(load_config(config, ["seed=8"]).identity()))
    done = one_rank(config)
    assert done.returncode == 78
    assert "seed was 8, is 7" in done.stderr
    assert [p.name for p in run_dir.iterdir()] == ["identity.json"]


def test_corpus_that_was_rebuilt_under_a_run(tiny_config: MakeConfig, tmp_path: Path) -> None:
    corpus = tmp_path / "corpus"
    write_corpus(str(corpus), [40, 24])
    config = tiny_config(**{"data.corpus": str(corpus), "train.num_steps": 2, "data.heldout": None})
    assert one_rank(config).returncode == 0
    write_corpus(str(corpus), [24, 40])
    before = sorted(p.name for p in (tmp_path / "run").rglob("*"))
    done = one_rank(config)
    assert done.returncode == 78
    assert "another config or corpus (corpus_fingerprint was" in done.stderr
    assert sorted(p.name for p in (tmp_path / "run").rglob("*")) == before


def test_no_credentials_for_s3(tiny_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    done = one_rank(tiny_config(), "data.corpus=s3://bucket/prefix", "data.endpoint_url=http://127.0.0.1:9")
    assert_refused(done, tmp_path / "run", "s3://bucket/prefix", "credentials")


def test_bucket_that_does_not_exist(tiny_config: MakeConfig, tmp_path: Path) -> None:
    with running_s3() as server:
        url = f"data.endpoint_url={server.endpoint_url}"
        done = one_rank(tiny_config(), "data.corpus=s3://nobodys-bucket/prefix", url, **server.env)
    assert_refused(done, tmp_path / "run", "s3://nobodys-bucket", "bucket")
    assert server.env["AWS_SECRET_ACCESS_KEY"] not in done.stderr


@pytest.mark.multiproc
def test_a_shard_that_only_one_rank_meets_is_named_once(tiny_config: MakeConfig, tmp_path: Path) -> None:
    """Not rank 0, which alone would otherwise speak; both end with 78 and not with the connection that broke."""
    corpus, rows_per_shard = tmp_path / "corpus", [1, 2, 1, 3] * 16
    manifest = write_corpus(str(corpus), rows_per_shard)
    _, shards, _ = RowOrder(rows_per_shard, 7, 2).locate(np.arange(5 * 16))
    in_step = shards.reshape(5, 2, 8)  # step, rank, row
    victim = next(s for s in in_step[4, 1] if s not in in_step[:4] and s not in in_step[4, 0])
    shard = corpus / manifest.shards[victim].name
    shard.write_bytes(b"x" * shard.stat().st_size)
    config = tiny_config(**{"data.corpus": str(corpus), "data.heldout": None})
    done = subprocess.run(deepspeed_command(config, 2), capture_output=True, text=True, timeout=120)
    errors = [line for line in (done.stdout + done.stderr).splitlines() if line.startswith("error: ")]
    assert done.returncode == 78, done.stderr
    assert len(errors) == 1, done.stderr
    assert str(shard) in errors[0]
    assert "Traceback" not in done.stderr
    assert len(step_records(tmp_path / "run")) == 4
