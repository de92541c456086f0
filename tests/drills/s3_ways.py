"""Trains through each way in which S3 fails, one run for each: losses, exit codes and what `status` shows.

    python tests/drills/s3_ways.py [--ways redirect,404,...]

Corpus and checkpoints of a run of one rank lie on an S3 server behind `tests/support/fault_server.py`. In each run,
one way of failing hits every request, twice in a row (or for as long as its name says), before it succeeds.
Every loss must be that of a run on local files, bit for bit. Ways that never pass must end the run with the exit code
that the table expects, and with one line.

The runs have shorter limits than the defaults: a connection is measured over 2 s, and an operation has 8 tries. The
drill prints a table and exits with 1 if a verdict is bad.
"""

from __future__ import annotations

import contextlib
import functools
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from drill import Drill, chosen, command, first_difference, judge, options, start_programs_quickly
from support.certificates import serve_https
from support.fault_server import FaultPlan, FaultProxy, running_faults
from support.s3_server import best_kind

NUM_STEPS = 9
SETTINGS = {"train.num_steps": NUM_STEPS, "model.hidden_dropout": 0.1, "checkpoint.every_steps": 3}
ROWS_PER_SHARD = [20, 31, 24, 40, 29]
FOREVER = 10**9
SHARD = "shard-000002"
UNRESOLVED_HOST = "localhost"  # the processes of the drill resolve it late
PATIENCE_S = 6.0
RUN_LIMIT_S = 600.0


@dataclass(frozen=True, kw_only=True)
class Way:
    """One way of failing, and how the run must end."""

    name: str
    fault: str  # kind of fault of the proxy, or "refused": nobody listens at its port; "" for none
    only: str = ""  # part of the keys that it hits
    in_a_row: int = 2  # how many requests of a method and key it hits one after another
    begins_after: int = 0  # number of requests before the fault begins
    lasts_s: float | None = None  # length of the fault; None: until the end of the run
    exit_code: int = 0
    message: str = ""  # part of the run's output
    patience_s: float | None = None  # cluster.storage_patience_s; None: its default


WAYS = (
    Way(name="redirect loop (307)", fault="redirected"),
    Way(name="page of a proxy, status 200", fault="page"),
    Way(name="404 of a load balancer", fault="balancer"),
    Way(name="200 without ETag", fault="noetag"),
    Way(name="200 without length", fault="nolength"),
    Way(name="200 with an error document", fault="errordoc"),
    Way(name="half a body, right length", fault="cut"),
    Way(name="one byte in 0.2 s", fault="dribble", in_a_row=1),
    Way(name="listing: endless tokens", fault="endless"),
    Way(name="listing: same token", fault="stuck"),
    Way(name="credentials late by 15 s", fault="expired", in_a_row=FOREVER, begins_after=25, lasts_s=15.0),
    Way(name="clock wrong for 15 s", fault="skewed", in_a_row=FOREVER, begins_after=25, lasts_s=15.0),
    Way(name="SlowDown storm of 15 s", fault="slowdown", in_a_row=FOREVER, begins_after=25, lasts_s=15.0),
    Way(name="away for 20 s", fault="away", in_a_row=FOREVER, begins_after=25, lasts_s=20.0),
    Way(name="away for 2 min", fault="away", in_a_row=FOREVER, begins_after=25, lasts_s=120.0),
    Way(name="refused for 20 s", fault="refused", in_a_row=FOREVER, begins_after=25, lasts_s=20.0),
    Way(
        name="away for longer than patience",
        fault="away",
        in_a_row=FOREVER,
        begins_after=25,
        exit_code=75,
        message="storage was waited for",
        patience_s=PATIENCE_S,
    ),
    Way(name="DNS away for 15 s at the start", fault="", lasts_s=15.0, message="the name of the service cannot be"),
    Way(name="bad certificate", fault="", exit_code=78, message="certificate of the service is not accepted"),
    Way(name="redirect to another region", fault="moved", in_a_row=FOREVER, exit_code=78, message="another region"),
    Way(name="a shard is missing", fault="missing", only=SHARD, in_a_row=FOREVER, exit_code=78, message=SHARD),
    Way(
        name="a shard always has a wrong byte", fault="flip", only=SHARD, in_a_row=FOREVER, exit_code=78, message=SHARD
    ),
)


def train(config: str, unresolved_s: str) -> int:
    """Run one rank in this process, which cannot resolve `UNRESOLVED_HOST` at first, and return its exit code."""
    from electra_launcher import pretrain

    from electra_dist.store.patience import Pace

    defaults = Pace.__init__.__kwdefaults__ or {}
    defaults.update(longest_pause_s=2.0, rate_window_s=2.0, reread_pauses_s=(0.1, 0.5, 2.0))
    resolve = socket.getaddrinfo
    unresolved_until = time.monotonic() + float(unresolved_s)

    def resolve_late(host: Any, *arguments: Any, **options: Any) -> Any:
        if host != UNRESOLVED_HOST:
            return resolve(host, *arguments, **options)
        if time.monotonic() < unresolved_until:
            raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")
        return resolve("127.0.0.1", *arguments, **options)

    socket.getaddrinfo = resolve_late
    return pretrain.main(["--config", config])


def status_of(run_dir: Path) -> str:
    """Return the line of `electra-dist status` that says how the run is; "-" before there is a run folder."""
    done = subprocess.run(command("electra-dist", "status", run_dir), capture_output=True, text=True, timeout=300)
    lines = [line.strip() for line in (done.stdout + done.stderr).splitlines() if line.strip()]
    chosen_line = next((line for line in lines if "waiting for storage" in line), lines[0] if lines else "-")
    return chosen_line[:150]


@contextlib.contextmanager
def faults_in_time(upstream: str, way: Way, run_dir: Path, shown: list[str]) -> Iterator[FaultProxy]:
    """Run a proxy that fails as `way` says; append what `status` shows meanwhile to `shown`."""
    is_refused = way.fault == "refused"
    kind = "away" if is_refused else way.fault  # of the requests on connections that are open when nobody listens
    begins_at_once = bool(kind) and way.begins_after == 0
    plan = FaultPlan(rate=float(begins_at_once), faults=(kind,) if kind else (), only=way.only, in_a_row=way.in_a_row)
    plan.drip_s = 0.2
    has_ended = threading.Event()

    def control() -> None:
        """Begin the fault after its number of requests, and end it after its time."""
        while plan.requests < way.begins_after:
            if has_ended.wait(0.05):
                return
        plan.rate = 1.0
        if is_refused:
            port = proxy.server_address[1]
            listening.close()
        if way.lasts_s is None:
            return
        has_ended.wait(way.lasts_s / 2)
        shown.append(status_of(run_dir))
        has_ended.wait(way.lasts_s / 2)
        plan.rate = 0.0
        if is_refused:
            listening.enter_context(running_faults(upstream, plan, port))

    with contextlib.ExitStack() as listening:
        proxy = listening.enter_context(running_faults(upstream, plan))
        thread = threading.Thread(target=control)
        if way.begins_after:
            thread.start()
        try:
            yield proxy
        finally:
            has_ended.set()
            if way.begins_after:
                thread.join()


def endpoint_of(way: Way, proxy: FaultProxy, folder: Path) -> str:
    """Return the endpoint URL of a run: the proxy, under the name or with the certificate that the way needs."""
    if way.name.startswith("DNS"):
        return proxy.endpoint_url.replace("127.0.0.1", UNRESOLVED_HOST)
    return serve_https(proxy, folder) if way.name == "bad certificate" else proxy.endpoint_url


def survives(drill: Drill, way: Way, bucket: str, upstream: str) -> tuple[bool, str]:
    """Make the run of one way and compare it with the run on local files."""
    twin = drill.twin(ranks=1)
    shown: list[str] = []
    begin = time.monotonic()
    run_dir = drill.new_run(way.name, 1).folder
    with faults_in_time(upstream, way, run_dir, shown) as proxy:
        settings = drill.s3_settings(bucket, endpoint_of(way, proxy, drill.folder), way.name)
        if way.patience_s is not None:
            settings["cluster.storage_patience_s"] = way.patience_s
        run = drill.new_run(way.name, 1, **settings)
        rank = [sys.executable, str(Path(__file__).resolve()), "rank", str(run.config), str(way.lasts_s or 0.0)]
        done = subprocess.run(rank, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=RUN_LIMIT_S)
        num_faults = proxy.plan.counts.total()
    elapsed_s = time.monotonic() - begin
    shown.append(status_of(run.folder))
    output = done.stdout.decode(errors="replace")
    good = done.returncode == way.exit_code and way.message in output and "Traceback" not in output
    equal = ""
    if way.exit_code == 0 and good:
        found, expected = run.steps(), twin.steps()
        good = not first_difference(found, expected) and "set aside" not in output
        equal = f"{sum(one == two for one, two in zip(found, expected))} of {NUM_STEPS} losses equal, "
    if not good:
        print(f"--- {way.name}: exit {done.returncode}\n{output[-3000:]}", flush=True)
    outcome = f"exit {done.returncode}, {equal}{num_faults} faults, {elapsed_s:.0f} s"
    return good, f"{outcome}; status: {' -> '.join(shown)}"


def main() -> int:
    """Run the drill and return its exit code: 0 if every verdict is good."""
    parser = options(__doc__)
    parser.add_argument("--ways", default="", help="parts of the names of the ways to try (default: all)")
    parser.add_argument("--server", choices=("moto", "radosgw"), help="S3 server (default: radosgw if installed)")
    args = parser.parse_args()
    ways = {way.name: way for way in WAYS}
    names = chosen(parser, "--ways", args.ways.split(","), ways)
    with tempfile.TemporaryDirectory(prefix="s3-ways-") as folder, contextlib.ExitStack() as stack:
        start_programs_quickly(stack)
        drill = Drill(Path(folder), ROWS_PER_SHARD, **SETTINGS)
        upstream, bucket = stack.enter_context(drill.on_s3(args.server))
        cases = {name: functools.partial(survives, drill, ways[name], bucket, upstream) for name in names}
        return judge(args.server or best_kind(), cases)


if __name__ == "__main__":
    sys.exit(train(*sys.argv[2:]) if sys.argv[1:2] == ["rank"] else main())
