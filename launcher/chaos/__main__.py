"""A drill on your own machine: hit a run again and again, and compare every loss with a run that nobody touched.

    python -m launcher.chaos configs/demo_cpu.yaml --count 60 --seed 1 --ranks 2 \\
        --set train.num_steps=1500 --set checkpoint.every_steps=10

Two runs under `launcher.supervise` are made beside the config's run_dir, which itself is left alone: RUN-reference,
uninterrupted, and RUN-chaos, which is hit at seeded steps by seeded faults (faults.py says what each one does and what
must come of it). The drill starts again what ended with 75, was killed, or waits for a person (a full disk).

It passes if each fault had the end it must have, the run reached its last step, and every loss, gradient norm and
receipt is bit for bit the reference's. Exit code 0 if so, 1 if not, 78 for a mistake in the command.

Where it stops: one machine, checkpoints on its disk. Faulty S3 and cut networks need servers and namespaces that a
user's machine does not have; they are tested where this program is developed (tests/drills, tests/cluster).
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from electra_dist.config import CHECKPOINTS_DIR, Config
from electra_dist.config_file import load_config
from electra_dist.errors import EXIT_CRASH, EXIT_DONE, EXIT_USER_ERROR, UserError
from electra_dist.run.jsonl import encode
from electra_dist.run.metrics import read_metrics
from electra_dist.run.processes import mark_of, marked_pids
from launcher.chaos.drill import Drill, Hit, Stuck, plan
from launcher.chaos.faults import FAULTS, SmallDisk

COMPARED = ("step", "loss", "mlm_loss", "rtd_loss", "grad_norm", "receipt")


def differences(found: Path, expected: Path) -> tuple[int, str]:
    """Steps of the reference run, and where the two part: empty if nowhere. Compared as written: bit for bit."""
    records = [[r for r in read_metrics(run) if "grad_norm" in r] for run in (found, expected)]
    texts = [[encode({name: r[name] for name in COMPARED}).decode() for r in run] for run in records]
    for one, two in zip(*texts):
        if one != two:
            return len(texts[1]), f"{one.strip()} is not {two.strip()}"
    same = len(texts[0]) == len(texts[1])
    return len(texts[1]), "" if same else f"{len(texts[0])} steps, not {len(texts[1])}"


def _supervise(config: Path, run_dir: Path, ranks: int, overrides: Sequence[str]) -> list[str]:
    ours = [f"run_dir={run_dir}", "checkpoint.targets=[]", "log.every_steps=1", "log.tensorboard=false"]
    command = [sys.executable, "-m", "launcher.supervise", "--config", str(config), "--gpus-per-node", str(ranks)]
    return command + [part for setting in [*overrides, *ours] for part in ("--set", setting)]


def _print_table(hits: Sequence[Hit]) -> None:
    print(f"\n{'fault':10} {'step':>6} {'exit':>5} {'notice s':>9} {'next step s':>12} {'lost':>5}  what")
    for hit in hits:
        numbers = (f"{n:.1f}" if n is not None else "-" for n in (hit.notice_s, hit.recovery_s))
        code = "-" if hit.code is None else str(hit.code)
        line = "{:10} {:6,} {:>5} {:>9} {:>12} {:5}".format(hit.kind, hit.step, code, *numbers, hit.steps_lost)
        print(f"{line}  {hit.what}{f'   BAD: {hit.fault}' if hit.fault else ''}")
    print(f"\n{'kind':10} {'times':>6} {'notice s, mean (worst)':>23} {'next step s, mean (worst)':>26} {'lost':>5}")
    for kind in dict.fromkeys(sorted(hit.kind for hit in hits)):
        some = [hit for hit in hits if hit.kind == kind]
        notice, recovery = (_mean([getattr(h, name) for h in some]) for name in ("notice_s", "recovery_s"))
        print(f"{kind:10} {len(some):6} {notice:>23} {recovery:>26} {sum(h.steps_lost for h in some):5}")


def _mean(values: Sequence[float | None]) -> str:
    known = [value for value in values if value is not None]
    return f"{sum(known) / len(known):.1f} ({max(known):.1f})" if known else "-"


def _print_goodput(hits: Sequence[Hit], reference: Path, seconds: float) -> None:
    """Useful: what the reference run's steps took. An interruption costs what passed without a new step, and its
    lost steps again."""
    step_s = [record["step_s"] for record in read_metrics(reference) if "grad_norm" in record]
    useful, lost = sum(step_s), sum(hit.steps_lost for hit in hits)
    cost = (sum(h.recovery_s or 0.0 for h in hits) + lost * useful / len(step_s)) / max(1, len(hits))
    print(
        f"\ngoodput {useful / seconds:.1%} of {seconds:.0f} s with a fault every {seconds / max(1, len(hits)):.0f} s; "
        f"a fault costs {cost:.1f} s here, which at one in 8 hours would be {1 - cost / 28800:.2%}"
    )


def drill(config: Config, args: argparse.Namespace) -> int:
    """Both runs, the table, the verdict."""
    base = Path(config.run_dir)
    reference, run_dir = base.with_name(f"{base.name}-reference"), base.with_name(f"{base.name}-chaos")
    if run_dir.exists() or marked_pids(mark_of(run_dir, 0)):
        raise UserError(f"{run_dir} is there already; delete it, or give another run_dir by --set run_dir=...")
    if config.checkpoint.every_steps == "auto":
        raise UserError("a drill plans its faults by the checkpoints; add --set checkpoint.every_steps=10")
    planned = plan(args.faults, args.count, config.train.num_steps, config.checkpoint.every_steps, args.seed)
    output = reference.with_name(f"{reference.name}.log")
    with output.open("ab") as out:
        done = subprocess.run(
            _supervise(args.config, reference, args.ranks, args.set), stdout=out, stderr=out, check=False
        )
    if done.returncode != EXIT_DONE:
        raise UserError(f"the uninterrupted run {reference} ended with {done.returncode}; see {output}")
    disk = None
    if "disk" in args.faults:
        size = sum(file.stat().st_size for file in (reference / CHECKPOINTS_DIR).rglob("*") if file.is_file())
        disk = SmallDisk(run_dir / CHECKPOINTS_DIR, 4 * size + (8 << 20))
    begin, hits, problem = time.monotonic(), list[Hit](), ""
    run = Drill(run_dir, _supervise(args.config, run_dir, args.ranks, args.set), args.seed, disk)
    try:
        for number, one in enumerate(planned, start=1):
            hits.append(run.hit(one))
            print(f"{number:3} {one.kind} at step {hits[-1].step}: {hits[-1].fault or 'good'}", flush=True)
        code = run.finish()
        problem = "" if code == EXIT_DONE else f"the run ended with {code}"
    except Stuck as stuck:
        problem = f"after {len(hits)} faults: {stuck}"
    finally:
        run.close()
        if disk:
            disk.close()
    seconds = time.monotonic() - begin
    _print_table(hits)
    num_steps, different = differences(run_dir, reference)
    _print_goodput(hits, reference, seconds)
    bad = [problem] * bool(problem) + [different] * bool(different) + [h.fault for h in hits if h.fault]
    verdict = "FAIL: " + "; ".join(bad) if bad else f"PASS: {num_steps} steps, each loss bit for bit the reference's"
    print(f"\nseed {args.seed}, {len(hits)} faults, {args.ranks} ranks, {seconds:.0f} s\n{verdict}")
    return EXIT_CRASH if bad else EXIT_DONE


def main(argv: Sequence[str] | None = None) -> int:
    """Run the drill. Returns its exit code."""
    args = _parse(argv)
    try:
        unknown = [kind for kind in args.faults if kind not in FAULTS]
        if unknown or not args.faults:
            raise UserError(f"--faults {','.join(unknown) or '(none)'}: choose of {','.join(FAULTS)}")
        return drill(load_config(args.config, args.set), args)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return EXIT_USER_ERROR


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="chaos.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("config", help="YAML file of the run")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override, may repeat")
    kinds = [kind for kind in FAULTS if kind != "disk"]
    parser.add_argument(
        "--faults",
        type=lambda text: text.split(","),
        default=kinds,
        help=f"default: {','.join(kinds)}; also disk",
    )
    parser.add_argument("--count", type=int, default=60, help="how many faults")
    parser.add_argument("--seed", type=int, default=1, help="kinds, moments and victims")
    parser.add_argument("--ranks", type=int, default=2, help="ranks")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
