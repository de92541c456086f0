"""Kills real runs with SIGKILL at random steps and during saves, and compares them with uninterrupted runs.

    python tests/drills/real_kills.py --seed 1 --stages 1,2,3 --kills 10

For each ZeRO stage, a run of 2 ranks in bf16 with dropout is killed repeatedly, every second time while a checkpoint
is being written, and started again with the same command. A kill hits one rank or all processes at once. Every loss
and gradient norm of every step must equal the uninterrupted run's, bit for bit. Then, in fp32 without dropout, the
number of ranks changes 1 -> 2 -> 4 -> 1 and the stage 1 -> 3 -> 2, with a kill at each change; the losses must be
those of one rank up to the rounding of sums. The drill prints a table and exits with 1 if a verdict is bad. Two cores
need about a minute for 4 kills.
"""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the repository
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # tests/
os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.setdefault("OMP_NUM_THREADS", "1")

from support.real_runs import (
    DrillVerdict,
    Kill,
    deepspeed_command,
    print_verdicts,
    read_losses,
    run_until_killed,
    step_records,
    write_corpus,
    write_tiny_config,
)

NUM_STEPS, EVERY_STEPS = 140, 7
ELASTIC_STEPS, PHASE_STEPS = 80, 20
LARGEST_DIFFERENCE = 2e-5  # nats per token of either loss
BF16 = {"train.precision": "bf16", "model.hidden_dropout": 0.1, "model.attention_dropout": 0.1}
REASON = """\
The losses differ because fp32 sums are added in different orders. With W ranks the gradient is the sum of W partial
sums in the all-reduce; on one rank the micro-batches are added one after another; ZeRO-3 adds other partitions than
ZeRO-1. Each order rounds by about 6e-8 of the sum, and training propagates the difference. Rows, masks and noise are
equal bit for bit. If the scores of a sampled token's two best candidates are closer than that rounding, the sample can
change, which shows as a jump of 1e-3 or more."""


def draw_kills(moments: random.Random, count: int) -> list[Kill]:
    """Return kills at moments spread over the whole run; every second one is in a save."""
    steps = sorted(moments.sample(range(2, NUM_STEPS - 2 * EVERY_STEPS), count))
    return [
        Kill(step, moments.choice([0, 1, None]), number % 2 == 1, moments.uniform(0.0, 0.008))
        for number, step in enumerate(steps)
    ]


def kill_and_check(config: Path, run_dir: Path, ranks: int, kill: Kill) -> bool:
    """Start the run and kill it; return whether the kill was meant for a save and interrupted one."""
    killed = run_until_killed(config, run_dir, ranks, kill)
    assert killed.code not in (0, 75, 78), f"exit code {killed.code} after kill -9: {run_dir.with_suffix('.log')}"
    return kill.during_save and killed.cut_a_save


def run_to_the_end(config: Path, run_dir: Path, ranks: int) -> None:
    """Start a run and fail unless it ends with exit code 0."""
    done = subprocess.run(deepspeed_command(config, ranks), capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, f"{run_dir}: exit {done.returncode}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"


def first_difference(found: list[tuple], expected: list[tuple]) -> str:
    """Describe the first difference of two lists of step records; empty if they are equal."""
    for found_record, expected_record in zip(found, expected):
        if found_record != expected_record:
            step = expected_record[0]
            return f"step {step}: {found_record} is not {expected_record}"
    if len(found) != len(expected):
        return f"{len(found)} records, not {len(expected)}"
    return ""


def killed_equals_uninterrupted(folder: Path, corpus: str, stage: int, kills: list[Kill]) -> DrillVerdict:
    """Compare a run that is killed repeatedly with an uninterrupted one, at one ZeRO stage.

    The verdict also requires that more than half of the kills meant for a save interrupted one.
    """
    settings = {
        **BF16,
        "train.num_steps": NUM_STEPS,
        "engine.zero_stage": stage,
        "checkpoint.every_steps": EVERY_STEPS,
        "data.heldout": None,
    }
    uncut, cut = folder / f"uncut-{stage}", folder / f"cut-{stage}"
    run_to_the_end(write_tiny_config(folder / f"uncut-{stage}.yaml", uncut, corpus, **settings), uncut, 2)
    config = write_tiny_config(folder / f"cut-{stage}.yaml", cut, corpus, **settings)
    cut_saves = 0
    for number, kill in enumerate(kills, start=1):
        hit = kill_and_check(config, cut, 2, kill)
        cut_saves += hit
        victim = "everything" if kill.victim is None else f"rank {kill.victim}"
        when = f"in a save after step {kill.step}" if kill.during_save else f"at step {kill.step}"
        print(f"  ZeRO-{stage} kill {number:2}: {victim:10} {when}{', save cut' if hit else ''}", flush=True)
    run_to_the_end(config, cut, 2)
    found, expected = read_losses(cut), read_losses(uncut)
    difference = first_difference(found, expected)
    receipts = [[record["receipt"] for record in step_records(run)] for run in (cut, uncut)]
    good = not difference and receipts[0] == receipts[1] and len(expected) == NUM_STEPS
    wanted = sum(kill.during_save for kill in kills)
    good = good and cut_saves > 0.5 * wanted
    text = f"{len(kills)} kills, {cut_saves} of {wanted} save kills cut a save; " + (
        difference or f"{len(found)} steps and their receipts equal bit for bit, last loss {found[-1][1]!r}"
    )
    return DrillVerdict(f"ZeRO-{stage}, 2 ranks, bf16, dropout", good, text)


def changed_equals_steady(
    folder: Path, corpus: str, name: str, phases: list[tuple[int, int]], steady: list[tuple]
) -> DrillVerdict:
    """Compare a run whose ranks or stage change with the records `steady` of an uninterrupted one.

    Args:
        folder: where the run folder and its config are made.
        corpus: URL of the corpus.
        name: name of the run folder.
        phases: (ranks, ZeRO stage) of each phase; all have equal length, and each but the last ends with a kill -9.
        steady: step records of the uninterrupted run.
    """
    run_dir, length = folder / name, ELASTIC_STEPS // len(phases)
    for number, (ranks, stage) in enumerate(phases):
        config = elastic_config(folder, run_dir, corpus, stage)
        if number < len(phases) - 1:
            kill_and_check(config, run_dir, ranks, Kill((number + 1) * length + 1, victim=0))
        else:
            run_to_the_end(config, run_dir, ranks)
    found = read_losses(run_dir)
    assert [record[0] for record in found] == [record[0] for record in steady]
    # Fields 2 and 3 are the MLM and the RTD loss; field 1, `loss`, is the former plus 50 times the latter.
    worst = [max(abs(x - y) for x, y in zip(one[2:4], two[2:4])) for one, two in zip(found, steady)]
    totals = [abs(one[1] - two[1]) for one, two in zip(found, steady)]
    for number, (ranks, stage) in enumerate(phases):
        part = slice(number * length, (number + 1) * length if number < len(phases) - 1 else None)
        label = f"steps {part.start + 1}-{part.stop or ELASTIC_STEPS}: {ranks} rank{'s' * (ranks > 1)}, ZeRO-{stage}"
        print(f"  {label:34} largest difference {max(worst[part]):.1e} per token, {max(totals[part]):.1e} of the loss")
        print("   ", " ".join(f"{value:.0e}" for value in totals[part]), flush=True)
    flips = [record[0] for record, value in zip(found, worst) if value > LARGEST_DIFFERENCE]
    text = f"largest difference {max(worst):.1e} (bound {LARGEST_DIFFERENCE:.0e}), of the loss {max(totals):.1e}; "
    text += f"jump at step {flips[0]}" if flips else "no flipped sample"
    return DrillVerdict(f"fp32, {name}", not flips, text)


def elastic_config(folder: Path, run_dir: Path, corpus: str, stage: int) -> Path:
    """Write the config of an fp32 run without dropout and return its file."""
    settings = {
        "train.num_steps": ELASTIC_STEPS,
        "train.micro_batch": 4,
        "engine.zero_stage": stage,
        "data.heldout": None,
    }
    return write_tiny_config(folder / f"{run_dir.name}.yaml", run_dir, corpus, **settings)


def main() -> int:
    """Run the drill and return its exit code: 0 if every verdict is good."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1, help="seed of moments and victims")
    parser.add_argument("--stages", default="1,2,3", help="ZeRO stages to kill; empty: none")
    parser.add_argument("--kills", type=int, default=10, help="kills of each run")
    parser.add_argument("--no-elastic", action="store_true", help="leave out the changes of ranks and stages")
    args = parser.parse_args()
    stages = [int(stage) for stage in args.stages.split(",") if stage]
    if not stages and args.no_elastic:
        parser.error("--stages without a stage and --no-elastic leave nothing to test")
    if stages and args.kills < 1:
        parser.error(f"--kills must be at least 1, not {args.kills}; to kill nothing, give --stages ''")
    begin, verdicts = time.monotonic(), []
    with tempfile.TemporaryDirectory(prefix="real-kills-") as name:
        folder = Path(name)
        corpus = str(folder / "corpus")
        write_corpus(corpus, [70, 33, 48, 90, 15])
        for stage in stages:
            kills = draw_kills(random.Random(f"{args.seed} {stage}"), args.kills)
            verdicts.append(killed_equals_uninterrupted(folder, corpus, stage, kills))
            print(f"  {verdicts[-1].detail}", flush=True)
        if not args.no_elastic:
            steady_dir = folder / "steady"
            run_to_the_end(elastic_config(folder, steady_dir, corpus, 1), steady_dir, 1)
            steady = read_losses(steady_dir)
            for change, phases in (
                ("ranks 1-2-4-1", [(1, 1), (2, 1), (4, 1), (1, 1)]),
                ("ZeRO 1-3-2", [(2, 1), (2, 3), (2, 2)]),
            ):
                print(
                    f"fp32, {change}, against one uninterrupted rank; below each phase every step's loss difference:"
                )
                verdicts.append(changed_equals_steady(folder, corpus, change.replace(" ", "-"), phases, steady))
            print(REASON)
    return print_verdicts(f"seed {args.seed}, {time.monotonic() - begin:.0f} s", verdicts)


if __name__ == "__main__":
    sys.exit(main())
