"""Real `deepspeed` runs on several ranks: stages, precisions, world sizes, accumulation, kills and S3."""

from __future__ import annotations

import json
import math
import random
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from support.azurite import azurite, container
from support.real_runs import Kill, run_until_killed, write_corpus
from support.s3_server import S3Server, make_bucket, running_s3

from electra_dist.store.open_store import open_store

__all__ = ["azurite", "container"]

Pretrain = Callable[..., subprocess.CompletedProcess[str]]
Losses = Callable[[Path], list[tuple]]
MakeConfig = Callable[..., Path]

pytestmark = pytest.mark.multiproc


def worst_difference(a: list[tuple], b: list[tuple]) -> float:
    """Return the largest difference of MLM or RTD loss (fields 2 and 3) over all steps."""
    assert [record[0] for record in a] == [record[0] for record in b]
    return max(abs(x - y) for record_a, record_b in zip(a, b) for x, y in zip(record_a[2:4], record_b[2:4]))


@pytest.mark.parametrize(
    "num_steps", [pytest.param(40, marks=pytest.mark.sample), pytest.param(80, marks=pytest.mark.drill)]
)
def test_fp32_losses_agree_over_stages_and_ranks(
    tiny_config: MakeConfig, pretrain: Pretrain, losses: Losses, tmp_path: Path, num_steps: int
) -> None:
    runs = {}
    for ranks, stage in [(1, 1), (2, 0), (2, 1), (2, 2), (2, 3)]:
        name = f"ranks{ranks}-stage{stage}"
        settings = {"train.num_steps": num_steps, "engine.zero_stage": stage, "checkpoint.every_steps": 1000}
        pretrain(tiny_config(name, **settings), ranks)
        runs[ranks, stage] = losses(tmp_path / name)
        assert len(runs[ranks, stage]) == num_steps
    reference = runs[1, 1]
    for key, run in runs.items():
        difference = worst_difference(reference, run)
        print(f"{key}: largest loss difference from 1 rank {difference:.2e}")
        assert difference <= 2e-5, key
    assert runs[2, 1] == runs[2, 2]  # every number of every step, including the gradient norm


def test_bf16_zero1_is_bit_for_bit_the_same_on_one_and_two_ranks(
    tiny_config: MakeConfig, pretrain: Pretrain, losses: Losses, tmp_path: Path
) -> None:
    settings = {
        "train.num_steps": 40,
        "train.precision": "bf16",
        "model.hidden_dropout": 0.1,  # a function of step, row and position, so it is equal too
        "model.attention_dropout": 0.1,
        "log.eval_every_steps": 20,
    }
    for ranks in (1, 2):
        # The second config allows more tokens than the corpus has, which changes nothing.
        pretrain(tiny_config(f"bf16-{ranks}", **settings, **{"model.vocab_size": 300 * ranks}), ranks)
    assert "vocabulary: 300 entries, as in data.corpus" in (tmp_path / "bf16-2" / "log.txt").read_text()
    one, two = losses(tmp_path / "bf16-1"), losses(tmp_path / "bf16-2")
    # Field 4, the gradient norm, is a sum over partitions in an order that differs; all other fields must be equal.
    assert [r[:4] + r[5:] for r in one] == [r[:4] + r[5:] for r in two]
    check_context_auc(tmp_path / "bf16-1", tmp_path / "bf16-2")


def check_context_auc(one_rank: Path, two_ranks: Path) -> None:
    """Check that two runs have the same context AUC at both evaluations, and one warning each that it is low."""
    evaluations = []
    for run_dir in (one_rank, two_ranks):
        records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
        evaluations.append([record for record in records if record["kind"] == "eval"])
        log = (run_dir / "log.txt").read_text()
        assert log.count("is below 0.52") == 1
        assert log.count("replaced tokens instead of 5,000, because data.heldout") == 1
    names = ("step", "context_auc", "context_auc_se", "context_replaced", "sampled_correct")
    first, second = ([[record[name] for name in names] for record in records] for records in evaluations)
    assert first == second
    assert [record["step"] for record in evaluations[0]] == [20, 40]
    for record in evaluations[0]:
        # The corpus is random tokens, so there is no context to learn from.
        assert record["context_auc"] == pytest.approx(0.5, abs=4 * record["context_auc_se"])
        assert 0 < record["context_auc_se"] < 0.1
        assert 0 < record["generator_entropy"] <= math.log(1024)


def test_accumulating_four_micro_batches_equals_one_large_batch(
    tiny_config: MakeConfig, pretrain: Pretrain, losses: Losses, tmp_path: Path
) -> None:
    for micro in (4, 16, "auto"):
        pretrain(tiny_config(f"micro{micro}", **{"train.micro_batch": micro}), 1)
    assert worst_difference(losses(tmp_path / "micro4"), losses(tmp_path / "micro16")) <= 2e-6
    assert "micro-batch: 16 rows, the most that fit" in (tmp_path / "microauto" / "log.txt").read_text()
    assert losses(tmp_path / "microauto") == losses(tmp_path / "micro16")


@pytest.mark.parametrize("stage", [1, pytest.param(3, marks=pytest.mark.drill)])
def test_run_killed_at_a_step_and_during_a_save_gives_the_losses_of_an_uninterrupted_run(
    tiny_config: MakeConfig, pretrain: Pretrain, losses: Losses, tmp_path: Path, stage: int
) -> None:
    settings = {
        "train.num_steps": 40,
        "train.precision": "bf16",
        "engine.zero_stage": stage,
        "model.hidden_dropout": 0.1,
        "checkpoint.every_steps": 7,
    }
    pretrain(tiny_config("uncut", **settings), 2)
    config, run_dir = tiny_config("cut", **settings), tmp_path / "cut"
    moments = random.Random(stage)
    kills = [Kill(9 + moments.randrange(6), victim=1)]
    kills += [Kill(18, victim=0, during_save=True)] * 3  # the first kill usually interrupts a save
    for kill in kills:
        killed = run_until_killed(config, run_dir, 2, kill)
        assert killed.code not in (0, 75, 78)
        if kill.during_save and killed.cut_a_save:
            break
    assert killed.cut_a_save
    output = pretrain(config, 2).stdout
    # The age is not known if the kill came after the commit of the checkpoint and before its line in the ledger.
    restored = r"restored step \d+(, age .*)?, \d+ later steps are repeated, goodput [\d.]+ %; saved by attempt \d+"
    assert re.search(restored, output)
    assert losses(run_dir) == losses(tmp_path / "uncut")
    events = [json.loads(line)["event"] for line in (run_dir / "ledger.jsonl").read_text().splitlines()]
    assert events.count("start") + events.count("resume") >= 3
    assert events[-1] == "done"


def test_starting_a_finished_run_again_does_nothing(
    tiny_config: MakeConfig, pretrain: Pretrain, losses: Losses, tmp_path: Path
) -> None:
    config = tiny_config("done")
    pretrain(config, 1)
    before = losses(tmp_path / "done")
    again = pretrain(config, 1)
    assert "nothing to do" in again.stdout and "changed since the last start" not in again.stdout
    assert "attention: " not in again.stdout and "finished: " not in again.stdout  # the command says it once
    values = {"checkpoint.every_steps": 11, "cluster.notify": "curl https://secret.example"}
    changed = pretrain(tiny_config("done", **values), 1).stdout
    assert re.search(
        r"changed since the last start: checkpoint.every_steps \d+ -> 11, cluster.notify \S+ -> ", changed
    )
    assert "secret.example" not in changed
    assert losses(tmp_path / "done") == before


def test_corpus_on_s3_gives_the_same_losses_as_local_files(
    tiny_config: MakeConfig, pretrain: Pretrain, losses: Losses, tmp_path: Path
) -> None:
    with running_s3() as server, pytest.MonkeyPatch.context() as patch:
        for name, value in server.env.items():
            patch.setenv(name, value)
        make_bucket(server.endpoint_url, server.env, "corpora")
        rows = [70, 33, 48, 90, 15]  # as in the local corpus
        write_corpus("s3://corpora/tiny", rows, endpoint_url=server.endpoint_url)
        write_corpus("s3://corpora/tiny/heldout", [24], seed=9, endpoint_url=server.endpoint_url)
        pretrain(tiny_config("local"), 2)
        remote = {"data.corpus": "s3://corpora/tiny", "data.heldout": "s3://corpora/tiny/heldout"}
        pretrain(tiny_config("remote", **remote, **{"data.endpoint_url": server.endpoint_url}), 2)
    assert losses(tmp_path / "remote") == losses(tmp_path / "local")
    cached = list((tmp_path / "remote" / "cache").rglob("*.tar"))
    assert len(cached) == len(rows) + 1  # each shard once for both ranks
    secrets = server.env["AWS_SECRET_ACCESS_KEY"]
    for file in (tmp_path / "remote").rglob("*"):
        assert file.is_dir() or secrets.encode() not in file.read_bytes()


def test_a_run_on_azure_that_is_killed_goes_on_with_the_losses_of_a_run_on_a_disk(
    tiny_config: MakeConfig, pretrain: Pretrain, losses: Losses, tmp_path: Path, azurite: S3Server, container: str
) -> None:
    """Its shards come from the emulator, and its checkpoints are nowhere else."""
    rows = [70, 33, 48, 90, 15]  # as in the local corpus
    write_corpus(f"{container}/tiny", rows, endpoint_url=azurite.endpoint_url)
    write_corpus(f"{container}/tiny/heldout", [24], seed=9, endpoint_url=azurite.endpoint_url)
    steps = {"train.num_steps": 12, "checkpoint.every_steps": 3}
    pretrain(tiny_config("local", **steps), 2)
    remote = {
        "data.corpus": f"{container}/tiny",
        "data.heldout": f"{container}/tiny/heldout",
        "checkpoint.targets": [f"{container}/run"],
        **{f"{section}.endpoint_url": azurite.endpoint_url for section in ("data", "checkpoint")},
    }
    config = tiny_config("remote", **steps, **remote)
    run_until_killed(config, tmp_path / "remote", 2, Kill(8, victim=None))
    pretrain(config, 2)

    assert losses(tmp_path / "remote") == losses(tmp_path / "local")
    events = [json.loads(line) for line in (tmp_path / "remote" / "ledger.jsonl").read_text().splitlines()]
    starts = [event["step"] for event in events if event["event"] in ("start", "resume")]
    assert starts[0] == 0 and starts[1] >= 3, starts
    keys = open_store(f"{container}/run", azurite.endpoint_url).list()
    assert any(key.endswith("manifest.json") for key in keys)
    assert not list((tmp_path / "remote").rglob("*.safetensors"))
    for file in (tmp_path / "remote").rglob("*"):
        assert file.is_dir() or azurite.env["AZURE_STORAGE_ACCOUNT_KEY"].encode() not in file.read_bytes()


@pytest.mark.drill
def test_resume_with_other_ranks_and_stages_gives_the_losses_of_one_uninterrupted_rank(
    tiny_config: MakeConfig, pretrain: Pretrain, losses: Losses, tmp_path: Path
) -> None:
    uncut = tiny_config("steady", **{"train.num_steps": 30})
    pretrain(uncut, 1)
    run_dir = tmp_path / "elastic"
    for ranks, stage, stop in [(1, 1, 10), (2, 3, 20), (4, 2, 30)]:
        settings = {"train.num_steps": 30, "engine.zero_stage": stage, "train.micro_batch": 4}
        config = tiny_config("elastic", **settings)
        if stop < 30:
            run_until_killed(config, run_dir, ranks, Kill(stop + 1, victim=0))
        else:
            pretrain(config, ranks)
    assert worst_difference(losses(tmp_path / "steady"), losses(run_dir)) <= 2e-5
