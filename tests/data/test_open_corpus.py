"""A corpus on S3 gives the batches of the same corpus in a folder."""

from __future__ import annotations

from pathlib import Path

import torch
from support.real_runs import write_corpus
from support.s3_server import S3Server

import electra_dist as ed


def test_a_corpus_on_s3_gives_the_same_batches_as_in_a_folder(bucket: str, s3: S3Server, tmp_path: Path) -> None:
    rows_per_shard = [30, 20, 10]
    write_corpus(str(tmp_path / "corpus"), rows_per_shard)
    write_corpus(f"{bucket}/corpus", rows_per_shard, endpoint_url=s3.endpoint_url)

    local = ed.open_corpus(tmp_path / "corpus", seed=3, shuffle_window_shards=1)
    remote = ed.open_corpus(
        f"{bucket}/corpus",
        seed=3,
        shuffle_window_shards=1,
        endpoint_url=s3.endpoint_url,
        cache_dir=tmp_path / "cache",
    )
    with local, remote:
        for step in (40, 0, 7):  # in any order, and in later epochs
            assert torch.equal(remote.batch(step=step, global_batch=16), local.batch(step=step, global_batch=16))
        assert remote.token_counts().sum() == 60 * 32
        assert remote.vocabulary().tokens == local.vocabulary().tokens
    assert len(list((tmp_path / "cache").rglob("*.tar"))) == 3
