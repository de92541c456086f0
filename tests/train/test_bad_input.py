"""Mistakes in the input of a run give one line on stderr and exit code 78, and nothing is written."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from support.real_runs import REPOSITORY, deepspeed_command, step_records, write_corpus, write_tiny_config
from support.s3_server import running_s3

from electra_dist.config.load import load_config
from electra_dist.data.manifest import MANIFEST_KEY
from electra_dist.data.order import CorpusOrder, RowOrder
from electra_dist.engine.optimizer import has_nvidia_apex
from electra_dist.run.folder import run_identity

MakeConfig = Callable[..., Path]


def one_rank(config: Path, *overrides: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run one rank without the `deepspeed` launcher, which would only pass its exit code on."""
    command = [sys.executable, str(REPOSITORY / "launcher" / "pretrain.py"), "--config", str(config)]
    for override in overrides:
        command += ["--set", override]
    inherited = {name: text for name, text in os.environ.items() if name != "MASTER_PORT"}  # other tests set it to 0
    return subprocess.run(command, capture_output=True, text=True, env={**inherited, **environment}, timeout=120)


def assert_refused(done: subprocess.CompletedProcess[str], run_dir: Path, *words: str) -> None:
    """Assert exit code 78, one error line with all `words`, no traceback and no run folder."""
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
    "other_tokenizer": (["model.vocab_size=200"], ["vocabulary of 300", "the model has 200"]),
    "apex_that_is_not_installed": (["optimizer.implementation=apex"], ["apex cannot be used", "not installed"]),
    "kernel_that_cannot_run": (["kernels.backend=cuda"], ["kernels.backend is cuda"]),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistake_in_config_or_corpus_is_refused_in_one_line(
    tiny_config: MakeConfig, tmp_path: Path, mistake: str
) -> None:
    if mistake.startswith("apex") and has_nvidia_apex():
        pytest.skip("NVIDIA's apex is installed")
    overrides, words = MISTAKES[mistake]
    assert_refused(one_rank(tiny_config(), *overrides), tmp_path / "run", *words)


def test_a_corpus_without_held_out_rows_is_no_reason_to_evaluate_on_its_training_text(tmp_path: Path) -> None:
    corpus = tmp_path / "corpus"
    write_corpus(str(corpus), [20])
    config = write_tiny_config(tmp_path / "run.yaml", tmp_path / "run", str(corpus))

    done = one_rank(config)

    words = [f"{corpus} has no held-out rows", "corpus.heldout_fraction", "--set data.heldout=null"]
    assert_refused(done, tmp_path / "run", *words)
    assert "corpus build --input" not in done.stderr


def test_a_vocabulary_that_the_corpus_does_not_name_is_refused(tmp_path: Path) -> None:
    write_corpus(str(tmp_path / "corpus"), [20])
    config = write_tiny_config(
        tmp_path / "run.yaml", tmp_path / "run", str(tmp_path / "corpus"), **{"data.heldout": None}
    )
    vocab = tmp_path / "corpus" / "vocab.txt"
    vocab.write_bytes(vocab.read_bytes().replace(b"\nw17\n", b"\nv17\n"))
    assert_refused(one_rank(config), tmp_path / "run", f"{vocab}: its sha256 is", "corpus.json names", "restore")


def test_a_shard_that_changes_during_a_run_ends_it_with_its_name(tmp_path: Path) -> None:
    """No step uses a changed row: the losses until then are those of a run on the undamaged corpus."""
    corpus = tmp_path / "corpus"
    write_corpus(str(corpus), [64, 64])
    endless = {"train.num_steps": 100_000, "data.heldout": None, "checkpoint.every_steps": 1_000}
    config = write_tiny_config(tmp_path / "run.yaml", tmp_path / "run", str(corpus), **endless)
    command = [sys.executable, str(REPOSITORY / "launcher" / "pretrain.py"), "--config", str(config)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        try:
            deadline = time.monotonic() + 200
            while len(step_records(tmp_path / "run")) < 3 and time.monotonic() < deadline:
                assert process.poll() is None, process.stderr.read() if process.stderr else ""
                time.sleep(0.05)
            for path in corpus.glob("shard-*.tar"):
                data = path.read_bytes()
                with path.open("r+b") as stream:
                    stream.seek(len(data) // 2)
                    stream.write(bytes([data[len(data) // 2] ^ 1]))
            _, errors = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == 78, errors[-2000:]
    assert "Traceback" not in errors
    [line] = [line for line in errors.splitlines() if line.startswith("error: ")]
    assert line.startswith(f"error: {corpus}/shard-")
    assert "in block" in line
    again = one_rank(config)
    assert again.returncode == 78
    assert "not the shard that corpus.json lists" in again.stderr


def test_global_batch_that_the_ranks_do_not_divide_is_refused(tiny_config: MakeConfig, tmp_path: Path) -> None:
    done = one_rank(tiny_config(), WORLD_SIZE="3", RANK="0", LOCAL_RANK="0")
    assert_refused(done, tmp_path / "run", "3 ranks", "use 1, 2, 4, 8, 16 ranks")


def test_ranks_other_than_0_exit_with_78_and_print_nothing(tiny_config: MakeConfig) -> None:
    done = one_rank(tiny_config(), WORLD_SIZE="3", RANK="1", LOCAL_RANK="1")
    assert (done.returncode, done.stderr) == (78, "")


def test_corpus_without_shards_is_refused(tiny_config: MakeConfig, tmp_path: Path) -> None:
    corpus = tmp_path / "empty"
    write_corpus(str(corpus), [8])
    tree = json.loads((corpus / MANIFEST_KEY).read_text())
    tree["shards"] = []
    (corpus / MANIFEST_KEY).write_text(json.dumps(tree))
    assert_refused(one_rank(tiny_config(), f"data.corpus={corpus}"), tmp_path / "run", "empty", "no shards")


def test_unwritable_run_folder_is_refused(tiny_config: MakeConfig, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    done = one_rank(tiny_config(), f"run_dir={tmp_path}/file/run")
    assert_refused(done, tmp_path / "run", "run_dir", "not a writable folder")


def test_run_folder_of_another_config_is_refused_and_left_unchanged(tiny_config: MakeConfig, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    config = tiny_config()
    identity = run_identity(load_config(config, ["seed=8"]), "0" * 64)
    (run_dir / "identity.json").write_text(json.dumps(identity))
    done = one_rank(config)
    assert done.returncode == 78
    assert "seed was 8, is 7" in done.stderr
    assert [p.name for p in run_dir.iterdir()] == ["identity.json"]


def test_resume_on_a_rebuilt_corpus_is_refused_and_the_run_folder_left_unchanged(
    tiny_config: MakeConfig, tmp_path: Path
) -> None:
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


def test_a_heldout_corpus_that_has_changed_since_the_run_began_is_refused(tmp_path: Path) -> None:
    """Its scores could not be compared with the earlier ones; a held-out corpus at another place is accepted."""
    heldout = tmp_path / "corpus" / "heldout"
    write_corpus(str(tmp_path / "corpus"), [40])
    write_corpus(str(heldout), [24], seed=9)
    settings = {"train.num_steps": 2}
    config = write_tiny_config(tmp_path / "run.yaml", tmp_path / "run", str(tmp_path / "corpus"), **settings)
    assert one_rank(config).returncode == 0
    records = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    heldout.rename(tmp_path / "earlier")
    write_corpus(str(heldout), [24], seed=10)
    refused = one_rank(config)
    (error,) = [line for line in refused.stderr.splitlines() if line.startswith("error: ")]
    assert refused.returncode == 78 and f"data.heldout {heldout} has changed since the run began" in error
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == records
    assert one_rank(config, f"data.heldout={tmp_path / 'earlier'}").returncode == 0


def test_missing_s3_credentials_are_refused_naming_the_url(
    tiny_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    aws_variables = [name for name in os.environ if name.startswith("AWS_")]
    for name in aws_variables:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    done = one_rank(tiny_config(), "data.corpus=s3://bucket/prefix", "data.endpoint_url=http://127.0.0.1:9")
    assert_refused(done, tmp_path / "run", "s3://bucket/prefix", "credentials")


def test_missing_bucket_is_refused_without_printing_the_secret_key(tiny_config: MakeConfig, tmp_path: Path) -> None:
    with running_s3() as server:
        url = f"data.endpoint_url={server.endpoint_url}"
        done = one_rank(tiny_config(), "data.corpus=s3://nobodys-bucket/prefix", url, **server.env)
    assert_refused(done, tmp_path / "run", "s3://nobodys-bucket", "bucket")
    assert server.env["AWS_SECRET_ACCESS_KEY"] not in done.stderr


@pytest.mark.multiproc
def test_damaged_shard_that_only_rank_1_reads_is_named_in_one_line(tiny_config: MakeConfig, tmp_path: Path) -> None:
    """Both ranks end with 78 because of the shard, and not with the error of a broken connection."""
    corpus = tmp_path / "corpus"
    rows_per_shard = [1, 2, 1, 3] * 16
    manifest = write_corpus(str(corpus), rows_per_shard)
    _, shards, _ = RowOrder([CorpusOrder(rows_per_shard, 7, 2)]).locate(np.arange(5 * 16))
    shards = shards.reshape(5, 2, 8)  # step, rank, row
    rows_before = shards[:4]
    rank_0_rows, rank_1_rows = shards[4]
    victim = next(shard for shard in rank_1_rows if shard not in rows_before and shard not in rank_0_rows)
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


def test_a_process_that_would_abort_at_its_end_still_returns_the_exit_code(tmp_path: Path) -> None:
    """Threads of torch that are destroyed while they run abort a process during Python's clean-up."""
    script = REPOSITORY / "launcher" / "pretrain.py"
    program = (
        "import atexit, os, runpy, sys\n"
        "atexit.register(os.abort)\n"
        f"sys.argv = ['pretrain.py', '--config', {str(tmp_path / 'absent.yaml')!r}]\n"
        f"runpy.run_path({str(script)!r}, run_name='__main__')\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert_refused(done, tmp_path / "run", "absent.yaml")
