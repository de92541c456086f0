"""Makes the folders of long runs: as many records as asked for, in the time of writing a file."""

from __future__ import annotations

import random
from pathlib import Path

from support.run_records import EVAL, STEP

from electra_dist.config.load import dump_yaml, load_config
from electra_dist.run.ledger import Ledger
from electra_dist.run.records import encode

CONFIG = Path(__file__).parents[2] / "configs" / "demo_cpu_bert.yaml"
_CHANGING_FIELDS = ("mlm_loss", "rtd_loss", "tokens_per_s", "data_wait", "step_s")  # each in [0.5, 1.5)
_RECORDS_PER_EVALUATION = 500
_EVENTS_PER_LEDGER = 2000


def write_long_run(folder: Path, num_records: int, *, with_evaluations: bool = True) -> Path:
    """Write the folder of a run that logged every step, and return it.

    The records have all fields of a real one. One in a hundred has an undefined gradient norm, one in a thousand has a
    loss that is ten times too high, and every 500th is followed by an evaluation, unless `with_evaluations` is false.
    The ledger has a start and 2,000 checkpoints.
    """
    folder.mkdir(parents=True)
    config = load_config(CONFIG, [f"train.num_steps={num_records}", "train.global_batch=64"])
    (folder / "config.yaml").write_text(dump_yaml(config))
    draw = random.Random(num_records)
    train = STEP.fields()
    line = encode({**train, "step": -1, **dict.fromkeys(_CHANGING_FIELDS, -2.0), "grad_norm": -3}).replace(b"%", b"%%")
    line = line.replace(b'"step": -1', b'"step": %d').replace(b"-2.0", b"%.17g").replace(b'"grad_norm": -3', b"%b")
    with open(folder / "metrics.jsonl", "wb") as file:
        for step in range(1, num_records + 1):
            values = [0.5 + draw.random() for _ in _CHANGING_FIELDS]
            if step % 1000 == 0:
                values[0] *= 10
            norm = b'"grad_norm": "NaN"' if step % 100 == 0 else b'"grad_norm": %.17g' % draw.random()
            file.write(_filled(line, step, values, norm))
            if with_evaluations and step % _RECORDS_PER_EVALUATION == 0:
                record = {**EVAL.fields(), "step": step, "auc": draw.random(), "context_auc": 0.6}
                file.write(encode({**record, "context_auc_se": 0.004}))
    _write_ledger(folder, num_records)
    return folder


def _filled(line: bytes, step: int, values: list[float], norm: bytes) -> bytes:
    """Return the line of a training record with its changing values, in the order in which the line has them."""
    mlm_loss, rtd_loss, tokens_per_s, data_wait, step_s = values
    return line % (step, mlm_loss, rtd_loss, norm, tokens_per_s, data_wait, step_s)


def _write_ledger(folder: Path, num_steps: int) -> None:
    """Write a ledger with a start and 2,000 checkpoints, the last of which is at step `num_steps`."""
    ledger = Ledger(folder)
    ledger.append("start", 0, attempt=1, ranks=8, setup_s={"import": 5.0, "build": 2.0, "restore": 0.0})
    ledger.close()
    start = (folder / "ledger.jsonl").read_bytes()
    time = start.split(b'"')[3]
    save = b'{"time": "%b", "event": "checkpoint", "step": %d, "attempt": 1, "stall_s": 0.25, "wait_s": 0.0, ' % (
        time,
        -1,
    )
    save += b'"write_s": 2.0, "spent_s": {"first": 3.0, "step": -1.0, "data": 0.5, "stall": 0.25, "eval": 1.0}}\n'
    with open(folder / "ledger.jsonl", "ab") as file:
        for number in range(1, _EVENTS_PER_LEDGER + 1):
            step = num_steps * number // _EVENTS_PER_LEDGER
            file.write(save.replace(b'"step": -1,', b'"step": %d,' % step).replace(b"-1.0", b"%d.0" % step))
