"""Fills disks and takes storage away under real runs: every loss must be that of an undisturbed run.

    python tests/drills/full_disks.py [--only WORD ...]

A small tmpfs lies under each folder that a run writes to, in turn. While a step is computed it is filled to the last
byte or made read-only, and later freed. S3 is taken away by a proxy that is killed and started again. The drill needs
root, to mount, and the extra test (moto) for the cases with S3. It prints a table and exits with 1 if a
verdict is bad. --only runs the cases with these names or, if none has, with these words in their names.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the repository
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # tests/
os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import deepspeed  # noqa: F401  (the runs are forks of this process, which imports everything once)
from support.real_runs import (
    REPOSITORY,
    DrillVerdict,
    free_port,
    print_verdicts,
    read_losses,
    step_records,
    write_corpus,
    write_tiny_config,
)
from support.s3_server import make_bucket, running_s3
from support.small_disks import (
    Watched,
    can_mount,
    fill_command,
    free,
    remount_command,
    small_disk,
    storage_event,
    watch,
)

import electra_dist.train.run  # noqa: F401

AWAY_S = 3.0
PATIENCE = "cluster.storage_patience_s=4"  # in the cases in which it runs out
PAUSE_S = 60.0  # of the next start, counted from the end of the one that lost its storage
STEP = 7  # while it is computed, storage goes away; it lies between two saves


@dataclass
class Drill:
    """Folders of the drill, and the losses of undisturbed runs, with which those of all other runs must agree."""

    folder: Path
    references: dict[int, list[tuple]] = field(default_factory=dict)  # number of ranks -> losses

    def new_run(self, name: str, **settings: object) -> tuple[Path, Path]:
        """Return the config file and the run folder of a new run."""
        run_dir = self.folder / name.replace(" ", "-")
        config = write_tiny_config(run_dir.with_suffix(".yaml"), run_dir, f"{self.folder}/corpus", **settings)
        return config, run_dir

    def reference(self, ranks: int) -> list[tuple]:
        """Return the losses of an undisturbed run of so many ranks, which is made at the first call.

        Another number of ranks adds up the same losses in another order, so their last bits differ.
        """
        if ranks not in self.references:
            config, run_dir = self.new_run(f"undisturbed, ranks {ranks}")
            end = watch(config, run_dir, {}, ranks=ranks)
            assert end.code == 0, end.output[-3000:]
            self.references[ranks] = read_losses(run_dir)
        return self.references[ranks]

    def judge(
        self, name: str, run_dir: Path, end: Watched, code: int = 0, detail: str = "", ranks: int = 1
    ) -> DrillVerdict:
        """Return the verdict on a run that must end with `code`, with equal losses and without a traceback.

        Args:
            name: of the case.
            run_dir: folder of the run.
            end: how the run ended.
            code: exit code that it must have.
            detail: what the case has checked itself; a text that begins with "BAD" makes the verdict bad.
            ranks: number of ranks of the run.
        """
        losses = read_losses(run_dir)
        reference = self.reference(ranks)
        is_equal = losses == (reference if code == 0 else reference[: len(losses)])
        has_traceback = "Traceback" in end.output
        is_good = end.code == code and is_equal and not has_traceback and not detail.startswith("BAD")
        if not is_good:
            print(f"--- {name}\n{end.output[-6000:]}", file=sys.stderr)
        said = f"; status: {end.status[0][:100]}" if end.status else ""
        equality = "losses equal" if is_equal else "losses differ"
        return DrillVerdict(name, is_good, f"exit {end.code}, {equality}{detail and '; ' + detail}{said}")


def begin_drill(folder: Path) -> Drill:
    """Write a corpus, run once without faults, and return the drill."""
    write_corpus(f"{folder}/corpus", [16] * 20)
    write_corpus(f"{folder}/corpus/heldout", [16] * 2, seed=3)
    drill = Drill(folder)
    drill.reference(ranks=1)
    return drill


def full_and_freed(name: str, place: str, **settings: object) -> Callable[[Drill], DrillVerdict]:
    """Return a case: the disk of a folder of the run is full for a few seconds.

    Args:
        name: of the case.
        place: folder that the disk is mounted on, relative to the run folder; "" for the run folder itself.
        **settings: of the config.
    """

    def case(drill: Drill) -> DrillVerdict:
        config, run_dir = drill.new_run(name, **settings)
        with small_disk(run_dir / place, 6) as disk:
            faults = {"shell_at": [[fill_command(disk), STEP]]}
            end = watch(config, run_dir, faults, away_s=AWAY_S, cure=lambda: free(disk))
            return drill.judge(name, run_dir, end)

    return case


def read_only_for_a_while(name: str, place: str) -> Callable[[Drill], DrillVerdict]:
    """Return a case: the disk of a folder of the run is read-only for a few seconds; see `full_and_freed`."""

    def case(drill: Drill) -> DrillVerdict:
        config, run_dir = drill.new_run(name)
        with small_disk(run_dir / place, 6) as disk:
            faults = {"shell_at": [[remount_command(disk, "ro"), STEP]]}
            end = watch(config, run_dir, faults, away_s=AWAY_S, cure=lambda: shell(remount_command(disk, "rw")))
            return drill.judge(name, run_dir, end)

    return case


def shell(command: str) -> None:
    """Run a shell command."""
    os.system(command)


def tensorboard_full(drill: Drill) -> DrillVerdict:
    """The disk of TensorBoard stays full: its writer is dropped with one line, and the run does not wait."""
    name = "tensorboard, full for good"
    config, run_dir = drill.new_run(name, **{"log.tensorboard": True})
    with small_disk(run_dir / "tensorboard", 1) as disk:
        end = watch(config, run_dir, {"shell_at": [[fill_command(disk), STEP]]})
        num_lines = end.output.count("TensorBoard gets no more records")
        return drill.judge(name, run_dir, end, detail="one line" if num_lines == 1 else f"BAD: {num_lines} lines")


def temporary_folder_full(drill: Drill) -> DrillVerdict:
    """The folder of temporary files is full from the start."""
    name = "tmp, full for good"
    config, run_dir = drill.new_run(name)
    with small_disk(drill.folder / "tmp", 1) as disk:
        shell(fill_command(disk))
        end = watch(config, run_dir, {}, env={"TMPDIR": str(disk)})
        return drill.judge(name, run_dir, end)


def read_only_at_the_start(drill: Drill) -> DrillVerdict:
    """The run folder is read-only when the run starts, for a few seconds."""
    name = "run folder, read-only at start"
    config, run_dir = drill.new_run(name)
    with small_disk(run_dir, 6) as disk:
        shell(remount_command(disk, "ro"))
        end = watch(config, run_dir, {}, away_s=AWAY_S, cure=lambda: shell(remount_command(disk, "rw")))
        return drill.judge(name, run_dir, end)


def away_for_too_long(name: str, place: str, ranks: int = 1) -> Callable[[Drill], DrillVerdict]:
    """Return a case: a disk is full for longer than the patience: 75, then the next start waits and goes on."""

    def case(drill: Drill) -> DrillVerdict:
        config, run_dir = drill.new_run(name)
        with small_disk(run_dir / place, 6) as disk:
            faults: dict[str, object] = {"shell_at": [[fill_command(disk), STEP]]}
            end = watch(config, run_dir, faults, overrides=[PATIENCE], ranks=ranks)
            errors = [line for line in end.errors if "disk full" in line]
            event = storage_event(run_dir)
            first = drill.judge(name, run_dir, end, code=75, ranks=ranks)
            free(disk)
            again = watch(config, run_dir, {"pause_s": PAUSE_S}, ranks=ranks)
            second = drill.judge(name, run_dir, again, ranks=ranks)
            waited = "this one begins in" in again.output
            has_event = event is not None or place == ""  # a full run folder takes no event
            is_good = first.good and second.good and len(errors) == 1 and has_event
            detail = f"{first.detail}; {len(errors)} error line; event {'storage' if event else 'none'}; next start "
            detail += f"{'after a pause ' if waited else ''}{second.detail}"
            return DrillVerdict(name, is_good, detail)

    return case


def one_of_two_targets(drill: Drill) -> DrillVerdict:
    """The first of two checkpoint targets stays full: the second has the newest checkpoint when the run ends."""
    name = "first of two targets, too long"
    targets = [str(drill.folder / "small"), str(drill.folder / "large")]
    config, run_dir = drill.new_run(name, **{"checkpoint.targets": targets})
    with small_disk(Path(targets[0]), 6) as disk:
        end = watch(config, run_dir, {"shell_at": [[fill_command(disk), STEP]]}, overrides=[PATIENCE])
        newest = sorted(path.parent.name for path in Path(targets[1]).glob("step-*/manifest.json"))[-1]
        has_newest = newest.startswith("step-00000010")
        first = drill.judge(name, run_dir, end, code=75, detail=f"{'' if has_newest else 'BAD '}other has {newest}")
        free(disk)
        second = drill.judge(name, run_dir, watch(config, run_dir, {"pause_s": 1.0}))
        return DrillVerdict(name, first.good and second.good, f"{first.detail}; next start {second.detail}")


class Outage:
    """Proxy in front of an S3 server, a process that can be taken away and brought back on the same port."""

    def __init__(self, upstream: str) -> None:
        self._upstream = upstream
        self.port = free_port()
        self.begin()

    def begin(self) -> None:
        """Bring the proxy back, and wait until it answers."""
        script = str(REPOSITORY / "tests" / "support" / "fault_server.py")
        command = [sys.executable, script, "--upstream", self._upstream, "--port", str(self.port), "--rate", "0"]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        deadline = time.monotonic() + 120.0
        while True:
            try:
                socket.create_connection(("127.0.0.1", self.port), 1.0).close()
                return
            except OSError:
                assert time.monotonic() < deadline
                time.sleep(0.1)

    def end(self) -> None:
        """Kill the proxy: open connections break, and new ones are refused."""
        self._process.kill()
        self._process.wait()


@contextlib.contextmanager
def s3_run(drill: Drill, name: str, **settings: object) -> Iterator[tuple[Path, Path, Outage]]:
    """Yield config and run folder of a run with corpus and checkpoints on S3, and the outage to cause."""
    with running_s3("moto") as server:
        bucket = make_bucket(server.endpoint_url, server.env, "drill")
        os.environ.update(server.env)
        write_corpus(f"{bucket}/corpus", [16] * 20, endpoint_url=server.endpoint_url)
        write_corpus(f"{bucket}/corpus/heldout", [16] * 2, seed=3, endpoint_url=server.endpoint_url)
        outage = Outage(server.endpoint_url)
        url = f"http://127.0.0.1:{outage.port}"
        config, run_dir = drill.new_run(
            name,
            **{
                "data.corpus": f"{bucket}/corpus",
                "data.heldout": f"{bucket}/corpus/heldout",
                "data.endpoint_url": url,
                "checkpoint.endpoint_url": url,
                "checkpoint.targets": [f"{bucket}/checkpoints"],
                **settings,
            },
        )
        try:
            yield config, run_dir, outage
        finally:
            outage.end()


def local_disk_of_s3_run(name: str, place: str) -> Callable[[Drill], DrillVerdict]:
    """Return a case: the disk of the cache of a run on S3 is full for a few seconds."""

    def case(drill: Drill) -> DrillVerdict:
        with s3_run(drill, name) as (config, run_dir, _), small_disk(run_dir / place, 6) as disk:
            faults = {"shell_at": [[fill_command(disk), STEP]]}
            end = watch(config, run_dir, faults, away_s=AWAY_S, cure=lambda: free(disk))
            return drill.judge(name, run_dir, end)

    return case


def s3_away(name: str, away_s: float, patience_s: float = 900.0) -> Callable[[Drill], DrillVerdict]:
    """Return a case: S3 refuses connections for so many seconds in the middle of a run."""

    def case(drill: Drill) -> DrillVerdict:
        with s3_run(drill, name) as (config, run_dir, outage):
            marker = drill.folder / f"{run_dir.name}.away"
            faults = {"shell_at": [[f"touch {marker}", STEP]]}
            watcher = threading.Thread(target=take_away, args=(outage, marker, away_s), daemon=True)
            watcher.start()
            overrides = [f"cluster.storage_patience_s={patience_s:g}"]
            end = watch(config, run_dir, faults, overrides=overrides, timeout_s=900)
            watcher.join()
            code = 0 if away_s < patience_s else 75
            num_retries = step_records(run_dir)[-1]["store_retries"]
            has_noticed = num_retries > 0 or code == 75
            detail = f"{'' if has_noticed else 'BAD: '}{num_retries} requests repeated"
            return drill.judge(name, run_dir, end, code=code, detail=detail)

    return case


def take_away(outage: Outage, marker: Path, away_s: float) -> None:
    """Take S3 away once the marker exists, and bring it back after so many seconds."""
    while not marker.exists():
        time.sleep(0.05)
    outage.end()
    time.sleep(away_s)
    outage.begin()


CASES: dict[str, Callable[[Drill], DrillVerdict]] = {
    "run folder, full": full_and_freed("run folder, full", "", **{"log.tensorboard": True}),
    "run folder, read-only at start": read_only_at_the_start,
    "run folder, full too long": away_for_too_long("run folder, full too long", ""),
    "checkpoints, full": full_and_freed("checkpoints, full", "checkpoints"),
    "checkpoints, read-only": read_only_for_a_while("checkpoints, read-only", "checkpoints"),
    "checkpoints, full too long": away_for_too_long("checkpoints, full too long", "checkpoints"),
    "2 ranks, checkpoints, full too long": away_for_too_long("2 ranks, checkpoints, full too long", "checkpoints", 2),
    "first of two targets, too long": one_of_two_targets,
    "tensorboard, full for good": tensorboard_full,
    "tmp, full for good": temporary_folder_full,
    "cache, full": local_disk_of_s3_run("cache, full", "cache"),
    "S3 away 20 s": s3_away("S3 away 20 s", 20.0),
    "S3 away 120 s": s3_away("S3 away 120 s", 120.0),
    "S3 away too long": s3_away("S3 away too long", 400.0, patience_s=20.0),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="*", default=[], help="names of cases, or words in them")
    args = parser.parse_args()
    for word in args.only:
        if not any(word in name for name in CASES):
            parser.error(f"--only: {word!r} is in the name of no case; the cases are {'; '.join(CASES)}")
    if not can_mount():
        print("this drill needs root and the right to mount a tmpfs", file=sys.stderr)
        return 1
    names = [name for name in CASES if name in args.only]
    if not names:
        names = [name for name in CASES if not args.only or any(word in name for word in args.only)]
    verdicts = []
    with tempfile.TemporaryDirectory() as folder:
        drill = begin_drill(Path(folder))
        for name in names:
            begin = time.monotonic()
            verdicts.append(CASES[name](drill))
            print(f"{name}: {'good' if verdicts[-1].good else 'BAD'} ({time.monotonic() - begin:.0f} s)", flush=True)
    return print_verdicts("disks that fill, and storage that goes away", verdicts)


if __name__ == "__main__":
    sys.exit(main())
