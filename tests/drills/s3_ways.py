"""Trains through each way in which S3 fails, one run for each: losses, exit codes and what `status` shows.

    python tests/drills/s3_ways.py [--ways redirect,404,...]

Corpus and checkpoints of a run of one rank lie on an S3 server behind `tests/support/fault_server.py`. In each run,
one way of failing hits every request, twice in a row (or for as long as its name says), before it succeeds.
Every loss must be that of a run on local files, bit for bit. Ways that never pass must end the run with the exit code
that the table expects, and with one line.

The processes are forked from one that has imported everything, and have shorter limits than the defaults: a connection
is measured over 2 s, and an operation has 8 tries. The drill prints a table and exits with 1 if a verdict is bad.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
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

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the repository
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # tests/
os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.setdefault("OMP_NUM_THREADS", "1")

from support.certificates import serve_https
from support.fault_server import FaultPlan, FaultProxy, running_faults
from support.real_runs import DrillVerdict, print_verdicts, read_losses, write_corpus, write_tiny_config
from support.s3_server import best_kind, make_bucket, running_s3

NUM_STEPS = 9
ROWS_PER_SHARD = [20, 31, 24, 40, 29]
FOREVER = 10**9
UNRESOLVED_HOST = "localhost"  # the processes of the drill resolve it late
PATIENCE_S = 6.0
RUN_LIMIT_S = 600.0


@dataclass(frozen=True, kw_only=True)
class Way:
    """One way of failing, and how the run must end."""

    name: str
    fault: str  # kind of fault of the proxy; "" for none
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
)


def train(config: str, log: str, environment: dict[str, str], unresolved_until: float) -> None:
    """Run one rank in this process, which was forked for it, and exit with its code.

    Args:
        config: file of the configuration.
        log: file for its output.
        environment: variables to set, such as the credentials.
        unresolved_until: time of the monotonic clock until which `UNRESOLVED_HOST` cannot be resolved.
    """
    from electra_launcher import pretrain

    from electra_dist.store.patience import Pace

    with open(log, "ab", buffering=0) as out:
        os.dup2(out.fileno(), 1)
        os.dup2(out.fileno(), 2)
    os.environ.update(environment)
    defaults = Pace.__init__.__kwdefaults__ or {}
    defaults.update(longest_pause_s=2.0, rate_window_s=2.0, reread_pauses_s=(0.1, 0.5, 2.0))
    resolve = socket.getaddrinfo

    def resolve_late(host: Any, *arguments: Any, **options: Any) -> Any:
        """Resolve `UNRESOLVED_HOST` to this machine, once its time has come."""
        if host != UNRESOLVED_HOST:
            return resolve(host, *arguments, **options)
        if time.monotonic() < unresolved_until:
            raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")
        return resolve("127.0.0.1", *arguments, **options)

    socket.getaddrinfo = resolve_late
    sys.exit(pretrain.main(["--config", config]))


def status_of(run_dir: Path) -> str:
    """Return the line of `electra-dist status` that says how the run is; "-" before there is a run folder."""
    command = [str(Path(sys.executable).parent / "electra-dist"), "status", str(run_dir)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    lines = [line.strip() for line in (done.stdout + done.stderr).splitlines() if line.strip()]
    chosen = next((line for line in lines if "waiting for storage" in line), lines[0] if lines else "-")
    return chosen[:150]


@contextlib.contextmanager
def faults_in_time(proxy: FaultProxy, way: Way, run_dir: Path, shown: list[str]) -> Iterator[FaultPlan]:
    """Let the proxy fail as `way` says while the block runs; append what `status` shows meanwhile to `shown`."""
    begins_at_once = bool(way.fault) and way.begins_after == 0
    kinds = (way.fault,) if way.fault else ()
    plan = FaultPlan(rate=float(begins_at_once), faults=kinds, in_a_row=way.in_a_row, drip_s=0.2)
    proxy.plan = plan
    has_ended = threading.Event()

    def control() -> None:
        """Begin the fault after its number of requests, and end it after its time."""
        while plan.requests < way.begins_after:
            if has_ended.wait(0.05):
                return
        plan.rate = 1.0
        if way.lasts_s is None:
            return
        has_ended.wait(way.lasts_s / 2)
        shown.append(status_of(run_dir))
        has_ended.wait(way.lasts_s / 2)
        plan.rate = 0.0

    thread = threading.Thread(target=control)
    if way.begins_after:
        thread.start()
    try:
        yield plan
    finally:
        has_ended.set()
        if way.begins_after:
            thread.join()


def endpoint_of(way: Way, proxy: FaultProxy, https_url: str) -> str:
    """Return the endpoint URL of a run: the proxy, under the name or with the certificate that the way needs."""
    if way.name.startswith("DNS"):
        return proxy.endpoint_url.replace("127.0.0.1", UNRESOLVED_HOST)
    return https_url if way.name == "bad certificate" else proxy.endpoint_url


def settings() -> dict[str, object]:
    """Return the settings that all runs of this drill share."""
    return {
        "train.num_steps": NUM_STEPS,
        "model.hidden_dropout": 0.1,
        "data.heldout": None,
        "checkpoint.every_steps": 3,
    }


def check(
    way: Way, folder: Path, bucket: str, proxy: FaultProxy, https_url: str, env: dict[str, str], processes: Any
) -> DrillVerdict:
    """Make the run of one way and compare it with the run on local files."""
    name = way.name.replace(" ", "-").replace(":", "").replace(",", "").replace("(", "").replace(")", "")
    run_dir, log = folder / name, folder / f"{name}.log"
    endpoint = endpoint_of(way, proxy, https_url)
    remote: dict[str, object] = {
        "data.endpoint_url": endpoint,
        "checkpoint.endpoint_url": endpoint,
        "checkpoint.targets": [f"{bucket}/{name}"],
    }
    if way.patience_s is not None:
        remote["cluster.storage_patience_s"] = way.patience_s
    config = write_tiny_config(folder / f"{name}.yaml", run_dir, f"{bucket}/corpus", **settings(), **remote)
    shown: list[str] = []
    begin = time.monotonic()
    with faults_in_time(proxy, way, run_dir, shown) as plan:
        unresolved_until = begin + (way.lasts_s or 0.0)
        process = processes.Process(target=train, args=(str(config), str(log), env, unresolved_until))
        process.start()
        process.join(RUN_LIMIT_S)
        if process.is_alive():
            process.kill()
            process.join()
    elapsed_s = time.monotonic() - begin
    shown.append(status_of(run_dir))
    output = log.read_text(errors="replace")
    good = process.exitcode == way.exit_code and way.message in output and "Traceback" not in output
    equal = ""
    if way.exit_code == 0 and good:
        expected = read_losses(folder / "local")
        found = read_losses(run_dir)
        good = found == expected and "set aside" not in output
        equal = f"{sum(one == two for one, two in zip(found, expected))} of {NUM_STEPS} losses equal, "
    if not good:
        print(f"--- {way.name}: exit {process.exitcode}\n{output[-3000:]}", flush=True)
    outcome = f"exit {process.exitcode}, {equal}{plan.counts.total()} faults, {elapsed_s:.0f} s"
    detail = f"{outcome}; status: {' -> '.join(shown)}"
    print(f"{'good' if good else 'BAD'}  {way.name:32}  {detail}", flush=True)
    return DrillVerdict(way.name, good, detail)


def main() -> int:
    """Run the drill and return its exit code: 0 if every verdict is good."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ways", default="", help="parts of the names of the ways to try (default: all)")
    parser.add_argument("--server", choices=("moto", "radosgw"), help="S3 server (default: radosgw if installed)")
    args = parser.parse_args()
    parts = args.ways.split(",")
    for part in parts:
        if not any(part in way.name for way in WAYS):
            parser.error(f"--ways: {part!r} is in the name of no way; the ways are {', '.join(w.name for w in WAYS)}")
    ways = [way for way in WAYS if any(part in way.name for part in parts)]
    begin = time.monotonic()
    processes = multiprocessing.get_context("forkserver")
    processes.set_forkserver_preload(["electra_dist.train.run", "electra_launcher.pretrain", "boto3"])
    with tempfile.TemporaryDirectory(prefix="s3-ways-") as folder_name, running_s3(args.server) as server:
        folder = Path(folder_name)
        os.environ.update(server.env)
        bucket = make_bucket(server.endpoint_url, server.env, "ways")
        write_corpus(str(folder / "corpus"), ROWS_PER_SHARD)
        write_corpus(f"{bucket}/corpus", ROWS_PER_SHARD, endpoint_url=server.endpoint_url)
        local = write_tiny_config(folder / "local.yaml", folder / "local", f"{folder}/corpus", **settings())
        process = processes.Process(target=train, args=(str(local), str(folder / "local.log"), server.env, 0.0))
        process.start()
        process.join()
        assert process.exitcode == 0, (folder / "local.log").read_text()[-4000:]
        with running_faults(server.endpoint_url) as proxy, running_faults(server.endpoint_url) as https:
            https.plan = FaultPlan(rate=0.0)
            https_url = serve_https(https, folder)
            verdicts = [check(way, folder, bucket, proxy, https_url, server.env, processes) for way in ways]
    kind = args.server or best_kind()
    return print_verdicts(f"{kind}, {time.monotonic() - begin:.0f} s", verdicts)


if __name__ == "__main__":
    sys.exit(main())
