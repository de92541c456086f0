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

import functools
import random
import sys
import tempfile
from pathlib import Path

from drill import Drill, Run, at_least_one, first_difference, judge, options
from support.real_runs import Kill, run_until_killed

NUM_STEPS, EVERY_STEPS = 140, 7
BF16 = {
    "train.num_steps": NUM_STEPS,
    "train.precision": "bf16",
    "checkpoint.every_steps": EVERY_STEPS,
    "model.hidden_dropout": 0.1,
    "model.attention_dropout": 0.1,
}
ELASTIC_STEPS = 80
FP32 = {"train.num_steps": ELASTIC_STEPS, "train.micro_batch": 4}
CHANGES = {  # (ranks, ZeRO stage) of phases of equal length
    "ranks 1-2-4-1": [(1, 1), (2, 1), (4, 1), (1, 1)],
    "ZeRO 1-3-2": [(2, 1), (2, 3), (2, 2)],
}
LARGEST_DIFFERENCE = 2e-5  # nats per token of either loss
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


def kill_and_check(run: Run, kill: Kill) -> bool:
    """Start the run and kill it; return whether the kill was meant for a save and interrupted one."""
    killed = run_until_killed(run.config, run.folder, run.ranks, kill)
    assert killed.code not in (0, 75, 78), f"exit code {killed.code} after kill -9: {run.output}"
    return kill.during_save and killed.cut_a_save


def killed_equals_uninterrupted(drill: Drill, stage: int, kills: list[Kill]) -> tuple[bool, str]:
    """Compare a run that is killed repeatedly with an uninterrupted one, at one ZeRO stage.

    The verdict also requires that more than half of the kills meant for a save interrupted one.
    """
    settings = {**BF16, "engine.zero_stage": stage}
    expected = drill.twin(**settings).steps()
    run = drill.new_run(f"cut {stage}", **settings)
    cut_saves = 0
    for number, kill in enumerate(kills, start=1):
        hit = kill_and_check(run, kill)
        cut_saves += hit
        victim = "everything" if kill.victim is None else f"rank {kill.victim}"
        when = f"in a save after step {kill.step}" if kill.during_save else f"at step {kill.step}"
        print(f"  ZeRO-{stage} kill {number:2}: {victim:10} {when}{', save cut' if hit else ''}", flush=True)
    run.train()
    found = run.steps()
    difference = first_difference(found, expected)
    wanted = sum(kill.during_save for kill in kills)
    good = not difference and len(expected) == NUM_STEPS and cut_saves > 0.5 * wanted
    return good, f"{len(kills)} kills, {cut_saves} of {wanted} save kills cut a save; " + (
        difference or f"{len(found)} steps and their receipts equal bit for bit, last loss {found[-1][1]!r}"
    )


def changed_equals_steady(drill: Drill, name: str) -> tuple[bool, str]:
    """Compare a run whose ranks or stage change, each time by a kill -9, with an uninterrupted one of one rank."""
    print(f"fp32, {name}, against one uninterrupted rank; below each phase every step's loss difference:")
    phases = CHANGES[name]
    length = ELASTIC_STEPS // len(phases)
    steady = drill.twin(ranks=1, **FP32, **{"engine.zero_stage": 1}).steps()
    for number, (ranks, stage) in enumerate(phases, start=1):
        run = drill.new_run(name, ranks, **FP32, **{"engine.zero_stage": stage})
        if number < len(phases):
            kill_and_check(run, Kill(number * length + 1, victim=0))
        else:
            run.train()
    found = run.steps()
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
    return not flips, text + (f"jump at step {flips[0]}" if flips else "no flipped sample")


def main() -> int:
    """Run the drill and return its exit code: 0 if every verdict is good."""
    parser = options(__doc__)
    parser.add_argument("--seed", type=int, default=1, help="seed of moments and victims")
    parser.add_argument("--stages", default="1,2,3", help="ZeRO stages to kill; empty: none")
    parser.add_argument("--kills", type=at_least_one, default=10, help="kills of each run")
    parser.add_argument("--no-elastic", action="store_true", help="leave out the changes of ranks and stages")
    args = parser.parse_args()
    stages = [int(stage) for stage in args.stages.split(",") if stage]
    if not stages and args.no_elastic:
        parser.error("--stages without a stage and --no-elastic leave nothing to test")
    with tempfile.TemporaryDirectory(prefix="real-kills-") as folder:
        drill = Drill(Path(folder), [70, 33, 48, 90, 15])
        cases = {}
        for stage in stages:
            kills = draw_kills(random.Random(f"{args.seed} {stage}"), args.kills)
            name = f"ZeRO-{stage}, 2 ranks, bf16, dropout"
            cases[name] = functools.partial(killed_equals_uninterrupted, drill, stage, kills)
        if not args.no_elastic:
            for name in CHANGES:
                cases[f"fp32, {name}"] = functools.partial(changed_equals_steady, drill, name)
        code = judge(f"seed {args.seed}", cases)
    if not args.no_elastic:
        print(REASON)
    return code


if __name__ == "__main__":
    sys.exit(main())
