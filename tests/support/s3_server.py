"""Runs a real S3 server process for tests: Ceph's radosgw where it is installed, otherwise moto's server.

    with running_s3() as (endpoint_url, env):
        make_bucket(endpoint_url, env, "bucket")

`env` holds the AWS_* variables that a client needs. The servers listen on 127.0.0.1 only, keep objects in memory and
end with the process that started them. `python tests/support/s3_server.py [moto|radosgw]` runs one until Ctrl-C.

To install radosgw: apt-get install --no-install-recommends radosgw ceph-mon ceph-osd ceph-common. No service needs to
run.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import functools
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # tests/

from support.forked_popen import start_server

ACCESS_KEY, SECRET_KEY = "AKIATESTTESTTEST", "SKSKSKSKSKSKSKSKSKSK"
CEPH_PROGRAMS = ("radosgw", "radosgw-admin", "ceph-mon", "ceph-osd", "ceph", "monmaptool", "ceph-authtool")
START_S = 60.0
# Moto's server, which is killed when the process that has started it ends (1: PR_SET_PDEATHSIG, 9: SIGKILL).
# S3 decides about conditional writes one after another. Moto looks first and writes then, so two writers of a moment
# would both be the first one without the lock.
MOTO = """
import ctypes, functools, threading, moto.server
from moto.s3.responses import S3Response
ctypes.CDLL(None).prctl(1, 9)
lock = threading.Lock()
def one_at_a_time(method):
    @functools.wraps(method)
    def locked(*arguments, **options):
        with lock:
            return method(*arguments, **options)
    return locked
for name in ("put_object", "_key_response_post"):
    setattr(S3Response, name, one_at_a_time(getattr(S3Response, name)))
moto.server.main()
"""


class S3Server(NamedTuple):
    """Address of a running S3 server and the environment variables that give a client its credentials."""

    endpoint_url: str
    env: dict[str, str]


def best_kind() -> str:
    """Return `radosgw` if all of Ceph's programs are installed, otherwise `moto`."""
    return "radosgw" if all(map(shutil.which, CEPH_PROGRAMS)) else "moto"


@contextlib.contextmanager
def running_s3(kind: str | None = None) -> Iterator[S3Server]:
    """Run an S3 server for the length of the block; `kind` is `moto` or `radosgw`, by default `best_kind()`."""
    start = {"moto": _moto, "radosgw": _radosgw}[kind or best_kind()]
    with tempfile.TemporaryDirectory(prefix="s3-") as folder, contextlib.ExitStack() as processes:
        yield _server_at(start(Path(folder), processes))


@functools.cache
def shared_moto() -> S3Server:
    """Return moto's server for all workers of this pytest call, and start it unless it runs.

    It is a fork of the server of forks, with which it ends.
    """
    address = start_server()
    port_file = address.with_suffix(".moto")
    with address.with_suffix(".moto-lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not port_file.exists():
            port_file.write_text(str(_moto(address.parent, contextlib.ExitStack())))
    return _server_at(int(port_file.read_text()))


def _server_at(port: int) -> S3Server:
    env = {
        "AWS_ACCESS_KEY_ID": ACCESS_KEY,
        "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_CONFIG_FILE": os.devnull,
        "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
    }
    return S3Server(f"http://127.0.0.1:{port}", env)


@functools.cache
def _client(endpoint_url: str, access_key: str, secret_key: str, region: str) -> Any:
    import boto3

    credentials = {"aws_access_key_id": access_key, "aws_secret_access_key": secret_key}
    return boto3.session.Session().client("s3", endpoint_url=endpoint_url, region_name=region, **credentials)


def client(endpoint_url: str, env: Mapping[str, str]) -> Any:
    """Return a boto3 client of the server that does not depend on os.environ or on the code under test."""
    return _client(endpoint_url, env["AWS_ACCESS_KEY_ID"], env["AWS_SECRET_ACCESS_KEY"], env["AWS_DEFAULT_REGION"])


def make_bucket(endpoint_url: str, env: Mapping[str, str], name: str) -> str:
    """Create a bucket and return its s3:// URL; `name` has at least 3 characters."""
    client(endpoint_url, env).create_bucket(Bucket=name)
    return f"s3://{name}"


def _moto(folder: Path, processes: contextlib.ExitStack) -> int:
    """Start moto's server and return its port."""
    port = _free_ports(1)
    command = [sys.executable, "-c", MOTO, "-H", "127.0.0.1", "-p", str(port)]
    settings = {
        "S3_UPLOAD_PART_MIN_SIZE": "1",  # small files can be uploaded in parts
        "MOTO_S3_DEFAULT_KEY_BUFFER_SIZE": str(16 << 20),  # objects stay in memory
        "S3_IGNORE_SUBDOMAIN_BUCKETNAME": "true",  # "storage.invalid" is a host, and its first part no bucket
    }
    _wait_for(port, _start(command, folder / "moto.log", processes, {**os.environ, **settings}))
    return port


def _radosgw(folder: Path, processes: contextlib.ExitStack) -> int:
    """Start a Ceph cluster of one monitor, one in-memory OSD and one gateway; return the gateway's port."""
    port = _free_ports(3)
    conf, keyring = folder / "ceph.conf", folder / "keyring"
    monitors = f"[v2:127.0.0.1:{port + 1},v1:127.0.0.1:{port + 2}]"
    cluster = str(uuid.uuid4())
    conf.write_text(_ceph_conf(folder, cluster, monitors))
    env = {**os.environ, "CEPH_CONF": str(conf)}
    (folder / "osd").mkdir()

    def call(*command: str) -> None:
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=START_S)
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"

    call("monmaptool", "--create", "--fsid", cluster, "--addv", "a", monitors, str(folder / "monmap"))
    capabilities = [part for service in ("mon", "osd", "mgr") for part in ("--cap", service, "allow *")]
    for number, name in enumerate(("mon.", "client.admin", "client.rgw", "osd.0")):
        create = ["-C"] if number == 0 else []
        call("ceph-authtool", *create, str(keyring), "-g", "-n", name, *capabilities)
    call("ceph-mon", "--mkfs", "-i", "a", "--monmap", str(folder / "monmap"), "--keyring", str(keyring))
    _start(["ceph-mon", "-i", "a", "-f"], folder / "mon.log", processes, env)
    osd = str(uuid.uuid4())
    call("ceph", "osd", "new", osd)
    call("ceph", "osd", "crush", "add", "osd.0", "1.0", "root=default", "host=h0")
    call("ceph-osd", "-i", "0", "--mkfs", "--osd-uuid", osd)
    _start(["ceph-osd", "-i", "0", "-f"], folder / "osd.log", processes, env)
    frontend = (
        f"--rgw-frontends=beast endpoint=127.0.0.1:{port} tcp_nodelay=1"  # without tcp_nodelay a request takes 40 ms
    )
    gateway = _start(["radosgw", "-n", "client.rgw", frontend, "-f"], folder / "rgw.log", processes, env)
    _wait_for(port, gateway)
    keys = ("--access-key", ACCESS_KEY, "--secret", SECRET_KEY)
    call("radosgw-admin", "user", "create", "--uid=test", "--display-name=test", *keys)
    return port


def _ceph_conf(folder: Path, cluster: str, monitors: str) -> str:
    settings = {
        "fsid": cluster,
        "mon_host": monitors,
        "public_addr": "127.0.0.1",
        "cluster_addr": "127.0.0.1",
        "keyring": folder / "keyring",
        "osd_pool_default_size": 1,
        "osd_pool_default_min_size": 1,
        "mon_allow_pool_size_one": "true",
        "osd_pool_default_pg_num": 8,
        "osd_pool_default_pg_autoscale_mode": "off",
        "osd_crush_chooseleaf_type": 0,
        "mon_max_pg_per_osd": 1000,
        "mon_data_avail_warn": 1,
        "mon_data_avail_crit": 1,
        "osd_objectstore": "memstore",
        "memstore_device_bytes": 4 << 30,
        "paxos_propose_interval": 0.05,
        "mon_data": folder / "mon",
        "osd_data": folder / "osd",
        "log_file": folder / "$name.log",
        "admin_socket": folder / "$name.asok",
        "run_dir": folder,
        "crash_dir": folder,
        "rgw_data": folder,
        "rgw_thread_pool_size": 64,
        "rgw_multipart_min_part_size": 1,  # so that small files can be uploaded in parts
        "rgw_gc_obj_min_wait": 5,  # the default of two hours would fill the small in-memory store
        "rgw_gc_processor_period": 5,
        "rgw_gc_processor_max_time": 5,
    }
    return "[global]\n" + "".join(f"{name} = {value}\n" for name, value in settings.items())


def _start(
    command: Sequence[str], log: Path, processes: contextlib.ExitStack, env: Mapping[str, str] | None = None
) -> subprocess.Popen[bytes]:
    """Start a server process that is killed with `processes`, and with this process if that dies first."""
    libc = ctypes.CDLL(None)

    def die_with_parent() -> None:
        libc.prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG

    is_moto = MOTO in command  # it does this itself, so that it can be a fork
    with log.open("wb") as out:
        process = subprocess.Popen(
            command, stdout=out, stderr=out, env=env, preexec_fn=None if is_moto else die_with_parent
        )
    process.log = log  # type: ignore[attr-defined]
    processes.callback(process.wait)
    processes.callback(process.kill)
    return process


def _wait_for(port: int, process: subprocess.Popen[bytes]) -> None:
    """Wait until the process accepts connections on `port`; raise RuntimeError with its log if it does not."""
    deadline = time.monotonic() + START_S
    while process.poll() is None and time.monotonic() < deadline:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
            return
        time.sleep(0.05)
    raise RuntimeError(f"{process.args}: not listening: {process.log.read_text()[-2000:]}")  # type: ignore[attr-defined]


def _free_ports(count: int) -> int:
    """Return the first of `count` consecutive ports that were free a moment ago."""
    while True:
        with contextlib.ExitStack() as stack, contextlib.suppress(OSError):
            first = stack.enter_context(socket.socket())
            first.bind(("127.0.0.1", 0))
            port = int(first.getsockname()[1])
            for offset in range(1, count):
                stack.enter_context(socket.socket()).bind(("127.0.0.1", port + offset))
            return port


if __name__ == "__main__":
    with running_s3(sys.argv[1] if len(sys.argv) > 1 else None) as (url, variables):
        print(" ".join(f"{key}={value}" for key, value in variables.items()), f"\n{url}", flush=True)
        with contextlib.suppress(KeyboardInterrupt):
            signal.pause()
