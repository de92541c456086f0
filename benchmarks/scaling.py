"""Compare the scaling model of `electra-dist plan` with measured steps over links of limited bandwidth.

    python benchmarks/scaling.py            # root, Linux: 1, 2 and 4 ranks; 1 Gb/s, 250 Mb/s and no limit, in turn
    python benchmarks/scaling.py --overlap  # 2 and 4 ranks in bf16 with engine.overlap_communication: also compares
                                            # the step with the longer of its time over unlimited links and that
                                            # of its communication alone

How: each rank runs in network namespaces of its own, on a bridge (`tests/cluster/machines.py`); `tc` limits its link
with a token bucket. The prediction of `planning/multi_node_scaling.py` is the step time without a limit at the same
number of ranks, plus bytes_on_wire divided by the bandwidth. The ranks share this machine's cores, so the compute
time is measured at each number of ranks instead of divided. With --overlap the communication alone is timed as well,
by calling the collectives of a step without its computation. The table also compares the predicted bytes with those
that the interface sent, which include TCP and Ethernet headers.

Limits: all ranks share one Linux kernel; the links have no latency; the backend is gloo instead of NCCL.
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

from electra_dist.planning.multi_node_scaling import Precision, bytes_on_wire, parse_fabric, step_seconds

sys.path.append(str(REPOSITORY / "tests" / "cluster"))
from machines import Machines, missing

NETWORK = 78  # A network number that the cluster tests do not use.
GOAL = 0.15  # Largest error of the prediction, as a share of the measured time.
OVERLAP_GOAL = 1.15  # Largest step with overlap, as a multiple of the longer of the two times above.
STAGE = 1
UNLIMITED = ""  # Rate of a link without a limit.


class MachineRanks:
    """Running ranks, each on a machine of its own, that time steps or collectives at a requested bandwidth.

    Call `close` at the end; it stops the ranks.
    """

    def __init__(self, machines: Machines, folder: Path, rows: int, settings: Sequence[str]) -> None:
        """Start `scaling_rank.py` on every machine.

        Args:
            machines: Machines that are up; each gets one rank.
            folder: Folder for requests, answers and logs.
            rows: Rows per rank.
            settings: Changes of configs/small.yaml, as KEY=VALUE.
        """
        self._machines = machines
        self._folder = folder
        self._num_requests = 0
        script = [sys.executable, str(REPOSITORY / "benchmarks" / "scaling_rank.py"), str(folder), str(rows)]
        self._processes = []
        for rank, name in enumerate(machines.names):
            variables = {
                "RANK": str(rank),
                "LOCAL_RANK": "0",
                "WORLD_SIZE": str(len(machines.names)),
                "LOCAL_SIZE": "1",
                "MASTER_ADDR": machines.address("n1"),
                "MASTER_PORT": "29500",
                "GLOO_SOCKET_IFNAME": "eth0",
            }
            with (folder / f"{name}.log").open("wb") as log:
                command = machines.inside(name, *script, *settings)
                self._processes.append(
                    subprocess.Popen(command, env={**os.environ, **variables}, stdout=log, stderr=subprocess.STDOUT)
                )

    def measure(self, task: str, rate: str) -> Json:
        """Limit every link, let the ranks do a task twice, and return rank 0's answer.

        The program exits with the end of rank 0's log if a rank fails.

        Args:
            task: "steps"; "record", which takes steps and records the collectives of the last one; or
                "communication", which calls the recorded collectives without the computation around them.
            rate: Bandwidth in tc's notation, such as "250Mbit"; `UNLIMITED` removes the limit.

        Returns:
            `seconds` of each of the two steps or repetitions on rank 0, the mean of the `sent_bytes` of rank 0, and
            the number of `parameters` of the model.
        """
        for name in self._machines.names:
            self._limit_link(name, rate)
        answer = self._folder / f"done-{self._num_requests}"
        self._request(f"{task} 2")
        while not answer.exists():
            if any(process.poll() for process in self._processes):
                log_end = (self._folder / "n1.log").read_text(errors="replace")[-3000:]
                sys.exit(f"a rank failed; correct what the log of rank 0 reports:\n{log_end}")
            time.sleep(0.05)
        timing: Json = json.loads(answer.read_text())
        return timing

    def _limit_link(self, machine: str, rate: str) -> None:
        """Set the bandwidth of a machine's link with tc, or remove its limit if `rate` is `UNLIMITED`."""
        has_limit = rate != UNLIMITED
        if has_limit:
            words = ["replace", "dev", "eth0", "root", "tbf", "rate", rate, "burst", "128kb", "latency", "200ms"]
        else:
            words = ["del", "dev", "eth0", "root"]
        # Removing a limit that was never set fails, which is no error.
        subprocess.run(self._machines.inside(machine, "tc", "qdisc", *words), capture_output=True, check=has_limit)

    def _request(self, text: str) -> None:
        """Write a request for all ranks: a task and a number, such as "steps 2", or "end"."""
        put(self._folder / f"go-{self._num_requests}", text)
        self._num_requests += 1

    def close(self) -> None:
        """Stop the ranks and wait for their ends, at most 120 s for each."""
        self._request("end")
        for process in self._processes:
            process.wait(timeout=120)


@contextlib.contextmanager
def started(count: int, rows: int, settings: Sequence[str]) -> Iterator[MachineRanks]:
    """Start machines with a rank each for the length of the `with` block.

    If the block raises, the ranks end with their machines.

    Args:
        count: Number of machines.
        rows: Rows per rank.
        settings: Changes of configs/small.yaml, as KEY=VALUE.
    """
    with tempfile.TemporaryDirectory(prefix="scaling-") as name:
        folder = Path(name)
        folder.chmod(0o755)
        batch = [f"train.micro_batch={rows}", f"train.global_batch={rows * count}"]
        with Machines(folder / "machines", count, network=NETWORK) as machines:
            ranks = MachineRanks(machines, folder, rows, [*settings, *batch, f"engine.zero_stage={STAGE}"])
            yield ranks
            ranks.close()


def measure(
    count: int, rates: Sequence[str], rows: int, settings: Sequence[str], rounds: int, *, overlaps: bool
) -> list[Json]:
    """Measure steps at each bandwidth, in alternation, and predict them.

    Args:
        count: Number of ranks.
        rates: Bandwidths of every link, in tc's notation. Steps without a limit are measured in any case.
        rows: Rows per rank.
        settings: Changes of configs/small.yaml, as KEY=VALUE.
        rounds: Rounds of two timed steps at each bandwidth.
        overlaps: Whether to train in bf16 with `engine.overlap_communication`: the ranks then exchange fp32 gradients
            during the backward pass. False: fp32, without overlap.

    Returns:
        One JSON object per bandwidth, with measured and predicted seconds and bytes of a step. With `overlaps`,
        `collectives_s` lists the seconds of each repetition of the step's collectives without its computation, and
        `of_the_longer` is the median time of the step, divided by the longer of the median time without a limit and
        the median of `collectives_s`.
    """
    precision: Precision = "bf16" if overlaps else "fp32"
    switches = [f"train.precision={precision}", f"engine.overlap_communication={str(overlaps).lower()}"]
    with started(count, rows, [*settings, *switches]) as ranks:
        ranks.measure("record", UNLIMITED)  # These two steps also serve as warm-up.
        seconds: dict[str, list[float]] = {rate: [] for rate in (UNLIMITED, *rates)}
        collectives_s: dict[str, list[float]] = {rate: [] for rate in rates}
        sent_bytes = {}
        collectives_bytes = {}
        for _ in range(rounds):
            for rate, seconds_at_rate in seconds.items():
                timing = ranks.measure("steps", rate)
                seconds_at_rate += timing["seconds"]
                sent_bytes[rate] = timing["sent_bytes"]
                if overlaps and rate in rates:
                    alone = ranks.measure("communication", rate)
                    collectives_s[rate] += alone["seconds"]
                    collectives_bytes[rate] = alone["sent_bytes"]
    wire_bytes = bytes_on_wire(timing["parameters"], STAGE, precision, count, exchanges_fp32=overlaps)
    compute_s = statistics.median(seconds[UNLIMITED])
    results = []
    for rate in rates:
        predicted_s = step_seconds(compute_s, wire_bytes, parse_fabric(rate))
        measured = summary(seconds[rate])
        result: Json = {
            "ranks": count,
            "rate": rate,
            "unlimited_s": seconds[UNLIMITED],
            "seconds": seconds[rate],
            "measured_s": measured["median"],
            "predicted_s": predicted_s,
            "error": predicted_s / measured["median"] - 1,
            "overlaps": overlaps,
            "predicted_bytes": wire_bytes,
            "sent_bytes": sent_bytes[rate],
        }
        if overlaps:
            longer_s = max(compute_s, statistics.median(collectives_s[rate]))
            result["collectives_s"] = collectives_s[rate]
            result["collectives_bytes"] = collectives_bytes[rate]
            result["of_the_longer"] = measured["median"] / longer_s
        results.append(result)
    return results


def report(found: list[Json], facts: str) -> ResultLine:
    """Print the table of predicted and measured steps and return its row for docs/results.md.

    Args:
        found: Results of `measure` at all numbers of ranks.
        facts: ZeRO stage, precision and rows, as text.
    """
    print(facts)
    overlaps = found[0]["overlaps"]
    rows = [
        [
            f"{row['ranks']} ranks, {row['rate']}",
            f"{row['predicted_bytes'] / 1e6:.1f}",
            f"{row['sent_bytes'] / 1e6:.1f}",
            f"{statistics.median(row['unlimited_s']):.3f}",
            f"{row['predicted_s']:.3f}",
            f"{row['measured_s']:.3f} ({min(row['seconds']):.3f} to {max(row['seconds']):.3f})",
            f"{row['error']:+.1%}",
            *([f"{statistics.median(row['collectives_s']):.3f}", f"{row['of_the_longer']:.2f}"] if overlaps else []),
        ]
        for row in found
    ]
    header = ["", "MB predicted", "MB sent", "no limit s", "predicted s", "measured s", "error"]
    print_table([*header, "communication s", "of the longer"] if overlaps else header, rows)
    rank_counts = [row["ranks"] for row in found]
    cases = f"{min(rank_counts)} to {max(rank_counts)} ranks, two bandwidths"
    if overlaps:
        longest = max(row["of_the_longer"] for row in found)
        print(f"largest step {longest:.2f} of the longer of no limit and communication alone (goal: {OVERLAP_GOAL})")
        subject = f"step with engine.overlap_communication over limited links, {cases}"
        figure = f"at most {longest:.2f} of the longer of the step without a limit and its communication alone"
        return ResultLine(subject, figure, "")
    worst = max(abs(row["error"]) for row in found)
    print(f"largest error {worst:.1%} (goal: {GOAL:.0%})")
    return ResultLine(f"predicted step over limited links, {cases}", f"at most {worst:.0%} from the measured one", "")


def main(argv: Sequence[str] | None = None) -> Json:
    """Measure all numbers of ranks, print the comparison and return the record."""
    parse = parser(__doc__, rounds=3)
    parse.add_argument(
        "--ranks", type=int, nargs="+", help="numbers of ranks to measure (default: 1 2 4; with --overlap 2 4)"
    )
    parse.add_argument(
        "--overlap",
        action="store_true",
        help="train in bf16 with engine.overlap_communication, and compare the step with the longer of its time over "
        "unlimited links and that of its communication alone",
    )
    parse.add_argument(
        "--rates",
        nargs="+",
        default=["1Gbit", "250Mbit"],
        help="bandwidths of every link, in tc's notation (default: 1Gbit 250Mbit)",
    )
    parse.add_argument("--rows", type=int, default=2, help="rows per rank (default: %(default)s)")
    arguments = parse.parse_args(argv)
    if missing():
        sys.exit(
            f"links cannot be limited on this machine: {missing()}; "
            "run as root on Linux with iproute2, nftables and util-linux"
        )
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    settings = [*TOY, "model.vocab_size=300", "data.seq_len=32"] if arguments.smoke else []
    found = []
    overlaps = arguments.overlap
    for count in arguments.ranks or ([2, 4] if overlaps else [1, 2, 4]):
        found += measure(count, arguments.rates, arguments.rows, settings, arguments.rounds, overlaps=overlaps)
    training = "bf16 with overlap" if overlaps else "fp32"
    line = report(found, f"ZeRO-{STAGE}, {training}, {arguments.rows} rows a rank, one thread a rank")
    return finish("scaling-overlap" if overlaps else "scaling", arguments, argv, [line], runs=found)


if __name__ == "__main__":
    main()
