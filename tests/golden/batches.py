"""Golden batches: the rows of 20 steps of a run, over phases, windows and numbers of ranks, and the receipts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from support.real_runs import write_corpus, write_tiny_config

import electra_dist
from golden.comparison import Kind
from golden.doors import exact_records, sha256, train

NUM_STEPS = 20
GLOBAL_BATCH = 8
RUNS: dict[str, dict[str, Any]] = {
    "one corpus": {},
    "window of one shard": {"data.shuffle_window_shards": 1},
    "skipped steps": {"train.skip_steps": [3, 4, 11]},
    "three phases": {"data.phases": [{"corpus": "second", "from_step": 7}, {"corpus": "third", "from_step": 13}]},
}
RANKS = (1, 2, 4)


def names() -> list[str]:
    """Return the names of all entries."""
    rows = [f"rows: {run}" for run in RUNS]
    return [*rows, *(f"receipts: {run}, {ranks} ranks" for run in RUNS for ranks in RANKS)]


def make(name: str, folder: Path) -> Any:
    """Return the digests of the rows and their ids for each step, or the receipt after each step of a training."""
    what, _, rest = name.partition(": ")
    run, _, ranks = rest.partition(", ")
    write_corpus(str(folder / "corpus"), [7, 3, 12, 1, 9])
    write_corpus(str(folder / "second"), [5, 4], seed=4)
    write_corpus(str(folder / "third"), [31], seed=5)
    settings = {
        **RUNS[run],
        "train.num_steps": NUM_STEPS,
        "train.global_batch": GLOBAL_BATCH,
        "train.micro_batch": 2,
        "data.heldout": None,
        "model.discriminator.num_layers": 1,
        "model.generator.num_layers": 1,
    }
    if "data.phases" in settings:
        phases = settings["data.phases"]
        settings["data.phases"] = [{**phase, "corpus": str(folder / phase["corpus"])} for phase in phases]
    run_dir = folder / "run"
    config = write_tiny_config(folder / "run.yaml", run_dir, str(folder / "corpus"), **settings)
    if what == "receipts":
        codes, text = train(config, run_dir, int(ranks.split()[0]))
        assert set(codes) == {0}, text[-2000:]
        return [f"{record['step']}: {record['rows_seen']} {record['receipt']}" for record in exact_records(run_dir)]
    with electra_dist.open_corpus(electra_dist.load_config(config)) as corpus:
        return [
            f"{step}: ids {sha256(corpus.row_ids(step, GLOBAL_BATCH).numpy().tobytes())}, "
            f"rows {sha256(corpus.batch(step, GLOBAL_BATCH).numpy().tobytes())}"
            for step in range(NUM_STEPS)
        ]


KIND = Kind("batches", __doc__.splitlines()[0], names, make)
