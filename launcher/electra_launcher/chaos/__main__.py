"""Hit a run with faults on one machine, and compare every loss with that of an uninterrupted run.

    python -m electra_launcher.chaos configs/demo_cpu.yaml --count 60 --seed 1 --ranks 2 \\
        --set train.num_steps=1500 --set checkpoint.every_steps=10

How: two runs are made under `electra_launcher.supervise`, in the folders RUN-reference and RUN-chaos, where RUN is the
run_dir of the config. The first run is not interrupted. The second run is hit by faults; the seed determines which
fault comes at which step (faults.py lists the faults and how the run must react to each). If a fault ends the
supervisor, the drill starts it again. RUN-faults.png shows the losses of both runs with every fault marked.

The drill passes if the run reacted to each fault as it must, reached its last step, and has bit for bit the losses,
gradient norms and receipts (checksums of the rows trained on) of the reference run. Exit codes: 0 passed, 1 failed, 75
interrupted, 78 an error that you must fix.

Limits: one machine, with checkpoints on its disk. Faulty S3 services and cut networks are tested in the project's own
tests (tests/drills, tests/cluster).
"""

from __future__ import annotations

import argparse
import contextlib
import math
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from electra_dist.config import CHECKPOINTS_DIR, Config
from electra_dist.config.load import load_config
from electra_dist.errors import EXIT_CRASH, EXIT_DONE, UserError
from electra_dist.escapes import printable
from electra_dist.report.plot_style import print_style
from electra_dist.run.metrics import iter_steps
from electra_dist.run.records import encode
from electra_dist.run.this_node import mark_of, marked_pids
from electra_dist.store.atomic_files import read_regular
from electra_launcher.chaos.drill import Drill, Hit, Planned, Stuck, plan
from electra_launcher.chaos.faults import FAULTS, SmallDisk
from electra_launcher.entry import add_options, begin_program, exit_code_of

COMPARED = ("step", "loss", "mlm_loss", "rtd_loss", "grad_norm", "receipt")  # fields of a training record
_S_BETWEEN_FAULTS = 8 * 3600  # one fault in 8 hours, for the estimate of the goodput outside a drill
_DISK_FACTOR = 4  # room on the disk for the fault `disk`, in multiples of the reference run's checkpoints
_SPARE_BYTES = 8 << 20  # added to this room


def differences(found: Path, expected: Path) -> tuple[int, str]:
    """Compare two run folders; return the number of steps in `expected`, and the first difference or "".

    Losses, gradient norms and receipts (checksums of the rows trained on) must be equal bit for bit in each step, and
    the numbers of steps must be equal.
    """
    found_lines = compared_lines(found)
    expected_lines = compared_lines(expected)
    num_steps = len(expected_lines)
    for found_line, expected_line in zip(found_lines, expected_lines):
        if found_line != expected_line:
            return num_steps, f"{found_line.strip()} differs from the reference run's {expected_line.strip()}"
    if len(found_lines) != num_steps:
        return num_steps, f"{found} recorded {len(found_lines)} steps, the reference run {num_steps}"
    return num_steps, ""


def compared_lines(run_dir: Path) -> list[str]:
    """Return a line of JSON for each training step that a run recorded, with the values that a drill compares.

    A float is written with all its digits, so two lines are equal only if all values are equal bit for bit.
    """
    lines = []
    for record in iter_steps(run_dir):
        compared = {name: getattr(record, name) for name in COMPARED}
        lines.append(encode(compared).decode())
    return lines


def _supervise_command(config: Path, run_dir: Path, ranks: int, overrides: Sequence[str]) -> list[str]:
    """Return the command that starts a supervised run, which logs every step and saves checkpoints only locally."""
    drill_overrides = [f"run_dir={run_dir}", "checkpoint.targets=[]", "log.every_steps=1", "log.tensorboard=false"]
    command = [sys.executable, "-m", "electra_launcher.supervise"]
    command += ["--config", str(config), "--gpus-per-node", str(ranks)]
    for override in [*overrides, *drill_overrides]:
        command += ["--set", override]
    return command


def _print_table(hits: Sequence[Hit]) -> None:
    """Print two tables: one line for each fault, then one line for each kind of fault with means and maxima."""
    print(f"\n{'fault':10} {'step':>6} {'exit':>5} {'notice s':>9} {'next step s':>12} {'lost':>5}  what")
    for hit in hits:
        code = "-" if hit.code is None else str(hit.code)
        notice = _seconds_text(hit.notice_s)
        recovery = _seconds_text(hit.recovery_s)
        verdict = f"   BAD: {hit.problem}" if hit.problem else ""
        print(
            f"{hit.kind:10} {hit.step:6,} {code:>5} {notice:>9} {recovery:>12} {hit.steps_lost:5}  {hit.what}{verdict}"
        )
    print(f"\n{'kind':10} {'times':>6} {'notice s, mean (worst)':>23} {'next step s, mean (worst)':>26} {'lost':>5}")
    for kind in sorted({hit.kind for hit in hits}):
        hits_of_kind = [hit for hit in hits if hit.kind == kind]
        notice = _mean_and_worst([hit.notice_s for hit in hits_of_kind])
        recovery = _mean_and_worst([hit.recovery_s for hit in hits_of_kind])
        steps_lost = sum(hit.steps_lost for hit in hits_of_kind)
        print(f"{kind:10} {len(hits_of_kind):6} {notice:>23} {recovery:>26} {steps_lost:5}")


def _seconds_text(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds:.1f}"


def _mean_and_worst(values: Sequence[float | None]) -> str:
    """Return the mean and the largest of the values that are not None, as "1.2 (3.4)"; "-" if all are None."""
    known = [value for value in values if value is not None]
    if not known:
        return "-"
    mean = sum(known) / len(known)
    return f"{mean:.1f} ({max(known):.1f})"


def _print_goodput(hits: Sequence[Hit], reference: Path, seconds: float) -> None:
    """Print the run's goodput (share of its `seconds` spent on useful steps) and the mean cost of a fault."""
    step_times = [record.step_s for record in iter_steps(reference)]
    # Useful is the time that the steps took without faults. A fault costs the time until the next new step, and the
    # time of the steps that were repeated.
    useful_s = sum(step_times)
    num_hits = max(1, len(hits))
    steps_lost = sum(hit.steps_lost for hit in hits)
    repeated_s = steps_lost * useful_s / len(step_times)
    recovery_s = sum(hit.recovery_s for hit in hits if hit.recovery_s is not None)
    cost_s = (recovery_s + repeated_s) / num_hits
    estimated_goodput = 1 - cost_s / _S_BETWEEN_FAULTS
    print(
        f"\ngoodput {useful_s / seconds:.1%} of {seconds:.0f} s with a fault every {seconds / num_hits:.0f} s; "
        f"a fault costs {cost_s:.1f} s in this drill; with one fault in 8 hours the goodput would be "
        f"{estimated_goodput:.2%}"
    )


def drill(config: Config, args: argparse.Namespace) -> int:
    """Make the reference run and the run with faults, and print the result; return 0 if the drill passed, else 1.

    Both runs are made in folders beside the config's `run_dir`. Raises UserError if the drill cannot begin: it has a
    folder of an earlier drill, the config does not fit a drill, or the reference run failed.
    """
    base = Path(config.run_dir)
    reference = base.with_name(f"{base.name}-reference")
    run_dir = base.with_name(f"{base.name}-chaos")
    if run_dir.exists() or marked_pids(mark_of(run_dir, 0)):
        raise UserError(
            f"{run_dir} exists already or has running processes; delete it, or set another one with --set run_dir=..."
        )
    if config.checkpoint.every_steps == "auto":
        raise UserError(
            "checkpoint.every_steps is auto, but a drill needs a fixed number; add --set checkpoint.every_steps=10"
        )
    planned = plan(args.faults, args.count, config.train.num_steps, config.checkpoint.every_steps, args.seed)
    _make_reference(reference, args)
    begin = time.monotonic()
    hits, problems = _hit_run(run_dir, reference, planned, args)
    seconds = time.monotonic() - begin
    _print_table(hits)
    num_steps, difference = differences(run_dir, reference)
    _print_goodput(hits, reference, seconds)
    picture = base.with_name(f"{base.name}-faults.png")
    write_fault_plot(reference, run_dir, hits, picture)
    if difference:
        problems.append(difference)
    problems += [hit.problem for hit in hits if hit.problem]
    verdict = f"PASS: {num_steps} steps, each loss bit for bit the reference's"
    if problems:
        verdict = "FAIL: " + "; ".join(problems)
    print(
        f"\nseed {args.seed}, {len(hits)} faults, {args.ranks} ranks, {seconds:.0f} s, drawn in {picture}\n{verdict}"
    )
    return EXIT_CRASH if problems else EXIT_DONE


def _make_reference(reference: Path, args: argparse.Namespace) -> None:
    """Make or continue the uninterrupted run in the folder `reference`; append its output to `reference`.log."""
    output = reference.with_name(f"{reference.name}.log")
    command = _supervise_command(args.config, reference, args.ranks, args.set)
    with output.open("ab") as out:
        done = subprocess.run(command, stdout=out, stderr=out, check=False)
    if done.returncode != EXIT_DONE:
        last_line = read_regular(output).decode(errors="replace").rstrip().rpartition("\n")[2]
        raise UserError(
            f"the uninterrupted run {reference} ended with exit code {done.returncode} ({printable(last_line)}); fix "
            f"what {output} names, then run the drill again"
        )


def _hit_run(
    run_dir: Path, reference: Path, planned: Sequence[Planned], args: argparse.Namespace
) -> tuple[list[Hit], list[str]]:
    """Train in `run_dir` under the `planned` faults; return the result of each, and why the drill failed ([]: passed).

    The checkpoints in `reference` tell how large the disk must be that the fault `disk` fills.
    """
    hits: list[Hit] = []
    problems: list[str] = []
    with contextlib.ExitStack() as at_the_end:  # a disk is unmounted last, also if the run cannot start
        if "disk" in args.faults:
            disk = SmallDisk(run_dir / CHECKPOINTS_DIR, _small_disk_bytes(reference / CHECKPOINTS_DIR))
            at_the_end.callback(disk.close)
        run = Drill(run_dir, _supervise_command(args.config, run_dir, args.ranks, args.set), args.seed)
        at_the_end.callback(run.close)
        try:
            for number, planned_fault in enumerate(planned, start=1):
                hit = run.hit(planned_fault)
                hits.append(hit)
                print(f"{number:3} {hit.kind} at step {hit.step}: {hit.problem or 'good'}", flush=True)
            code = run.finish()
            if code != EXIT_DONE:
                problems.append(f"after the last fault the run ended with exit code {code} instead of {EXIT_DONE}")
        except Stuck as stuck:
            problems.append(f"after {len(hits)} faults: {stuck}")
    return hits, problems


def _small_disk_bytes(checkpoints: Path) -> int:
    size = sum(file.stat().st_size for file in checkpoints.rglob("*") if file.is_file())
    return _DISK_FACTOR * size + _SPARE_BYTES


def main(argv: Sequence[str] | None = None) -> int:
    """Run the drill and return its exit code: 0 passed, 1 failed, 75 interrupted, 78 a user error."""
    args = _parse(argv)

    def program() -> int:
        _check_kinds(args.faults)
        return drill(load_config(args.config, args.set), args)

    return exit_code_of(program)


def _check_kinds(kinds: Sequence[str]) -> None:
    unknown = [kind for kind in kinds if kind not in FAULTS]
    if unknown == [""]:  # an empty text, split at commas
        raise UserError(f"--faults names no kind of fault; choose from {','.join(FAULTS)}")
    if unknown:
        raise UserError(f"--faults {','.join(unknown)}: no such kind of fault; choose from {','.join(FAULTS)}")


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line `argv` of the drill; None stands for that of this process."""
    parser = argparse.ArgumentParser(
        prog="python -m electra_launcher.chaos",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("config", help="YAML file of the run")
    add_options(parser, "--set")
    kinds_without_root = [kind for kind in FAULTS if kind != "disk"]
    parser.add_argument(
        "--faults",
        type=lambda text: text.split(","),
        default=kinds_without_root,
        help=f"kinds of faults, separated by commas; default: {','.join(kinds_without_root)}; "
        f"also disk, which needs root",
    )
    parser.add_argument("--count", type=int, default=60, help="number of faults (default: 60)")
    parser.add_argument(
        "--seed", type=int, default=1, help="determines order, steps and victims of the faults (default: 1)"
    )
    parser.add_argument("--ranks", type=int, default=2, help="number of ranks (default: 2)")
    return parser.parse_args(argv)


_REFERENCE_COLOR = "#cbd5e1"
_INTERRUPTED_COLOR = "#2563eb"
_FAULT_COLOR = "#dc2626"
_GROUPS = {
    "process killed or frozen": ("kill", "hang", "pause", "supervisor", "power"),
    "run stopped": ("term", "hup", "int", "term-rank", "usr2", "stop-file", "lease"),
    "file damaged": ("torn", "flip", "missing", "metrics", "ledger"),
}  # name in the diagram -> kinds of faults; all other kinds are failures of the storage


def write_fault_plot(reference: Path, interrupted: Path, hits: Sequence[Hit], out: Path) -> None:
    """Draw the losses of both runs and the faults (`fault_figure`) into the PNG `out`."""
    fault_figure(reference, interrupted, hits).savefig(out, dpi=160, facecolor="white")


def fault_figure(reference: Path, interrupted: Path, hits: Sequence[Hit]) -> Figure:
    """Return a diagram of each network's loss with both runs in it, and below them one with a row per group of faults.

    The loss that training minimises would be the natural one to show, but it may rise while both networks learn,
    because the discriminator's part grows as the generator's replacements become plausible.
    """
    expected = {record.step: record for record in iter_steps(reference)}
    found = {record.step: record for record in iter_steps(interrupted)}
    networks = {"Generator": "mlm_loss"}
    if any(record.rtd_loss for record in expected.values()):
        networks["Discriminator"] = "rtd_loss"
    with matplotlib.rc_context(print_style()):
        figure = Figure(figsize=(7.6, 1.0 + 1.5 * len(networks)), layout="constrained")
        FigureCanvasAgg(figure)
        *losses, faults = figure.subplots(len(networks) + 1, 1, sharex=True, height_ratios=[3] * len(networks) + [1.2])
        for axes, (network, field) in zip(losses, networks.items(), strict=True):
            _draw_losses(
                axes,
                network,
                {step: getattr(record, field) for step, record in expected.items()},
                {step: getattr(record, field) for step, record in found.items()},
            )
        losses[0].legend(loc="upper right", frameon=False)
        _draw_faults(faults, hits)
        return figure


def _draw_losses(axes: Axes, network: str, expected: dict[int, float], found: dict[int, float]) -> None:
    """Draw the interrupted run's losses by step thinly over the reference run's; the title has their difference."""
    axes.plot(
        list(expected), list(expected.values()), color=_REFERENCE_COLOR, linewidth=5.0, label="uninterrupted run"
    )
    axes.plot(list(found), list(found.values()), color=_INTERRUPTED_COLOR, linewidth=1.0, label="run with faults")
    differences = [abs(found[step] - loss) for step, loss in expected.items() if step in found]
    if found == expected:
        difference = "exactly 0 at every step"
    else:
        difference = f"up to {max(differences, default=math.nan):g} in {len(differences)} of {len(expected)} steps"
    axes.set_title(f"{network}'s loss, difference of the two runs: {difference}")
    axes.set_ylabel("nats per token")


def _draw_faults(axes: Axes, hits: Sequence[Hit]) -> None:
    """Draw a row for each group of faults that occurred, with their number and a mark at the step of each."""
    group_of = {kind: group for group, kinds in _GROUPS.items() for kind in kinds}
    steps: dict[str, list[int]] = {}
    for hit in hits:
        steps.setdefault(group_of.get(hit.kind, "storage failed"), []).append(hit.step)
    for row, marks in enumerate(steps.values()):
        axes.plot(marks, [row] * len(marks), "|", color=_FAULT_COLOR, markersize=9, markeredgewidth=2)
    axes.set_yticks(range(len(steps)), [f"{group}: {len(marks)}" for group, marks in steps.items()])
    axes.set_ylim(len(steps) - 0.5, -0.5)
    axes.set_title(f"The {len(hits)} faults")
    axes.set_xlabel("training step")


if __name__ == "__main__":
    begin_program()
    sys.exit(main())
