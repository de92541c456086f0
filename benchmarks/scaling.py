"""The scaling model of `electra-dist plan` against measured steps over links of limited bandwidth.

    python benchmarks/scaling.py            # root, Linux: 1, 2 and 4 ranks; 1 Gb/s, 250 Mb/s and no limit, in turn

Each rank is a machine of its own (`tests/cluster/machines.py`: network namespaces on a bridge), whose link `tc` limits
with a token bucket. The prediction is that of `planning/scaling.py`: the step without a limit at the same number of
ranks (they share this machine's cores, so compute is measured and not divided), plus bytes_on_wire over the bandwidth.
The bytes that the interface sent stand beside those predicted; TCP and Ethernet headers come on top.

Where it stops: one kernel, no latency on the links; gloo, not NCCL.
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from measure import REPOSITORY, TOY, Json, ResultLine, finish, parser, print_table, summary
from scaling_rank import put

from electra_dist.planning.scaling import bytes_on_wire, parse_fabric, step_seconds

sys.path.append(str(REPOSITORY / "tests" / "cluster"))
from machines import Machines, missing

NETWORK = 78  # beside the cluster tests' own
GOAL = 0.15  # of the measured time
STAGE, PRECISION = 1, "fp32"
UNLIMITED = ""


class MachineRanks:
    """Ranks on machines of their own, which time steps at the bandwidth that is asked for."""

    def __init__(self, machines: Machines, folder: Path, rows: int, settings: Sequence[str]) -> None:
        self._machines, self._folder, self._orders = machines, folder, 0
        script = [sys.executable, str(REPOSITORY / "benchmarks" / "scaling_rank.py"), str(folder), str(rows)]
        self._processes = []
        for rank, name in enumerate(machines.names):
            place = {"RANK": str(rank), "LOCAL_RANK": "0", "WORLD_SIZE": str(len(machines.names)), "LOCAL_SIZE": "1"}
            place |= {"MASTER_ADDR": machines.address("n1"), "MASTER_PORT": "29500", "GLOO_SOCKET_IFNAME": "eth0"}
            with (folder / f"{name}.log").open("wb") as log:
                command = machines.inside(name, *script, *settings)
                self._processes.append(
                    subprocess.Popen(command, env={**os.environ, **place}, stdout=log, stderr=subprocess.STDOUT)
                )

    def time_steps(self, steps: int, rate: str) -> Json:
        """Seconds and bytes of steps with every link at `rate` (as tc says it)."""
        for name in self._machines.names:
            limit = ["replace", "dev", "eth0", "root", "tbf", "rate", rate, "burst", "128kb", "latency", "200ms"]
            tc = limit if rate else ["del", "dev", "eth0", "root"]
            subprocess.run(self._machines.inside(name, "tc", "qdisc", *tc), capture_output=True, check=bool(rate))
        done = self._folder / f"done-{self._orders}"
        self._order(steps)
        while not done.exists():
            if any(process.poll() for process in self._processes):
                sys.exit("a rank failed:\n" + (self._folder / "n1.log").read_text(errors="replace")[-3000:])
            time.sleep(0.05)
        found: Json = json.loads(done.read_text())
        return found

    def _order(self, steps: int) -> None:
        put(self._folder / f"go-{self._orders}", str(steps))
        self._orders += 1

    def close(self) -> None:
        """End the ranks."""
        self._order(0)
        for process in self._processes:
            process.wait(timeout=120)


@contextlib.contextmanager
def started(count: int, rows: int, settings: Sequence[str]) -> Iterator[MachineRanks]:
    """`count` machines with a rank each."""
    with tempfile.TemporaryDirectory(prefix="scaling-") as name:
        folder = Path(name)
        folder.chmod(0o755)
        batch = [f"train.micro_batch={rows}", f"train.global_batch={rows * count}", f"train.precision={PRECISION}"]
        with Machines(folder / "machines", count, network=NETWORK) as machines:
            ranks = MachineRanks(machines, folder, rows, [*settings, *batch, f"engine.zero_stage={STAGE}"])
            yield ranks
            ranks.close()


def measure(count: int, rates: Sequence[str], rows: int, settings: Sequence[str], rounds: int) -> list[Json]:
    """Measured and predicted steps of `count` ranks at each bandwidth, the bandwidths in turn."""
    with started(count, rows, settings) as ranks:
        ranks.time_steps(2, UNLIMITED)
        seconds: dict[str, list[float]] = {rate: [] for rate in (UNLIMITED, *rates)}
        sent = {}
        for _ in range(rounds):
            for rate, kept in seconds.items():
                told = ranks.time_steps(2, rate)
                kept += told["seconds"]
                sent[rate] = told["sent_bytes"]
    wire_bytes = bytes_on_wire(told["parameters"], STAGE, PRECISION, count)
    compute_s = statistics.median(seconds[UNLIMITED])
    found = []
    for rate in rates:
        predicted_s = step_seconds(compute_s, wire_bytes, parse_fabric(rate))
        measured = summary(seconds[rate])
        found.append(
            {
                "ranks": count,
                "rate": rate,
                "unlimited_s": seconds[UNLIMITED],
                "seconds": seconds[rate],
                "measured_s": measured["median"],
                "predicted_s": predicted_s,
                "error": predicted_s / measured["median"] - 1,
                "predicted_bytes": wire_bytes,
                "sent_bytes": sent[rate],
            }
        )
    return found


def report(found: list[Json], facts: str) -> ResultLine:
    print(facts)
    rows = [
        [
            f"{row['ranks']} ranks, {row['rate']}",
            f"{row['predicted_bytes'] / 1e6:.1f}",
            f"{row['sent_bytes'] / 1e6:.1f}",
            f"{statistics.median(row['unlimited_s']):.3f}",
            f"{row['predicted_s']:.3f}",
            f"{row['measured_s']:.3f} ({min(row['seconds']):.3f} to {max(row['seconds']):.3f})",
            f"{row['error']:+.1%}",
        ]
        for row in found
    ]
    header = ["", "MB predicted", "MB sent", "no limit s", "predicted s", "measured s", "error"]
    print_table(header, rows)
    worst = max(abs(row["error"]) for row in found)
    print(f"largest error {worst:.1%} (goal: {GOAL:.0%})")
    cases = f"{min(row['ranks'] for row in found)} to {max(row['ranks'] for row in found)} ranks, two bandwidths"
    return ResultLine(f"predicted step over limited links, {cases}", f"at most {worst:.0%} from the measured one", "")


def main(argv: Sequence[str] | None = None) -> Json:
    parse = parser(__doc__, rounds=3)
    parse.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parse.add_argument("--rates", nargs="+", default=["1Gbit", "250Mbit"], help="bandwidths of each link")
    parse.add_argument("--rows", type=int, default=2, help="rows of a rank")
    arguments = parse.parse_args(argv)
    if missing():
        sys.exit(f"cannot limit links here: {missing()}")
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    settings = [*TOY, "model.vocab_size=300", "data.seq_len=32"] if arguments.smoke else []
    found = []
    for count in arguments.ranks:
        found += measure(count, arguments.rates, arguments.rows, settings, arguments.rounds)
    line = report(found, f"ZeRO-{STAGE}, {PRECISION}, {arguments.rows} rows a rank, one thread a rank")
    return finish("scaling", arguments, argv, [line], runs=found)


if __name__ == "__main__":
    main()
