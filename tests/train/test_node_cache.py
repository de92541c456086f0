"""The caches of the nodes of a run: their folders, the lines in the log, and shards passed between nodes."""

from __future__ import annotations

import collections
import json
import os
from pathlib import Path

from support.rank_processes import finish_ranks, start_ranks
from support.real_runs import write_corpus

ROWS = [20, 7, 33, 12, 9, 15, 40, 11]


def test_two_nodes_fetch_each_shard_once_if_they_share(tmp_path: Path) -> None:
    """Of three ranks on two nodes, the two on one node share its folder; by default two nodes pass no shards on."""
    manifest = write_corpus(str(tmp_path / "corpus"), ROWS)
    script = Path(__file__).with_name("sharing_rank.py")
    output = finish_ranks(start_ranks(script, 3, str(tmp_path), json.dumps(ROWS)))
    of_ranks = [json.loads(text.splitlines()[-1]) for text in output]
    shared = ["the 2 nodes pass shards to one another, so that each shard is fetched from S3 by one of them"]
    for share_shards, times, last_lines in ((True, 1, shared), (None, 2, [])):
        ranks = [rank[0 if share_shards else 1] for rank in of_ranks]
        assert all(rank["right"] for rank in ranks)
        counts = collections.Counter(name for rank in ranks for name in rank["fetched"])
        assert counts == {entry.name: times for entry in manifest.shards}  # once for all, or once for each node
        name = f"electra-dist-cache-{os.getuid()}"
        folders = [str(tmp_path / f"node-{node}-{share_shards}" / name) for node in (0, 0, 1)]
        assert [rank["folder"] for rank in ranks] == folders
        assert ranks[0]["notes"] == ranks[2]["notes"]
        assert "which has the least room of the 2 nodes" in ranks[0]["notes"][0]
        assert ranks[0]["notes"][0].endswith("later epochs fetch nothing")
        assert ranks[0]["notes"][1:] == last_lines
    assert not (tmp_path / "run").exists()
