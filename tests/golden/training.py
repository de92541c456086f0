"""Golden trainings: seven objectives, every ZeRO stage and precision, one and two ranks.

Each run has 12 steps with dropout. The guard stops step 2, and steps 6 and 7, after which the run goes back to its
checkpoint of step 4. At step 10 it is stopped and started again.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from support.real_runs import write_corpus, write_tiny_config

from golden.comparison import Kind
from golden.doors import events, exact_records, named_places, newest_tensors, sha256, train

OBJECTIVES = ("rtd", "mlm", "rtd_masked_only", "replace_mlm", "all_tokens_mlm", "electric", "adversarial")
PRECISIONS = ("fp32", "bf16", "fp16")
SETTINGS: dict[str, Any] = {
    "train.num_steps": 12,
    "train.global_batch": 4,
    "train.micro_batch": 2,
    "model.hidden_dropout": 0.1,
    "model.attention_dropout": 0.1,
    "guard.window": 3,
    "guard.spike_sigma": 1000.0,
    "guard.max_in_a_row": 2,
    "guard.skip_before": 1,
    "checkpoint.every_steps": 4,
    "log.eval_every_steps": 8,
    "log.eval_rows": 4,
}
SPIKES = (2, 6, 7)
STOP_AT = 10
# In fp16 the loss scale doubles every third step. It begins so that the first steps update and a later one overflows.
FIRST_LOSS_SCALES = {
    "all_tokens_mlm": 2.0**16,
    "electric": 2.0**12,
    "rtd": 2.0**13,
    "rtd_masked_only": 2.0**12,
    "adversarial": 2.0**13,
    "mlm": 2.0**19,
    "replace_mlm": 2.0**19,
}


def names() -> list[str]:
    """Return the names of all runs."""
    return [
        f"{objective} zero {stage} {precision} ranks {ranks}"
        for objective in OBJECTIVES
        for stage in range(4)
        for precision in PRECISIONS
        for ranks in (1, 2)
    ]


def make(name: str, folder: Path) -> dict[str, Any]:
    """Train one run; an error of the config is the entry, if the combination is refused."""
    objective, _, stage, precision, _, ranks = name.split()
    corpus = folder / "corpus"
    write_corpus(str(corpus), [40, 40])
    write_corpus(str(corpus / "heldout"), [8], seed=9)
    run_dir = folder / "run"
    settings = {
        **SETTINGS,
        "objective.name": objective,
        "engine.zero_stage": int(stage),
        "train.precision": precision,
    }
    config = write_tiny_config(folder / "run.yaml", run_dir, str(corpus), **settings)
    codes, text = train(config, run_dir, int(ranks), STOP_AT, SPIKES, FIRST_LOSS_SCALES[objective])
    if set(codes) != {0}:
        errors = [line for line in text.splitlines() if line.startswith("error: ")]
        return {"exit_codes": codes, "errors": [named_places(error, folder) for error in errors]}
    records = exact_records(run_dir)
    return {
        "steps": [
            f"{record['step']}: loss {record['loss']!r}, norm {record['grad_norm']!r}, receipt {record['receipt']}"
            for record in records
            if record["kind"] == "train"
        ],
        "records": sha256(repr([sorted(record.items()) for record in records]).encode()),
        "events": events(run_dir),
        "state": newest_tensors(run_dir),
    }


KIND = Kind("training", __doc__.splitlines()[0], names, make, is_of_a_cpu=True)
