"""An HTTP proxy that injects S3 faults: put it in front of a server and point a client's endpoint URL at it.

    python tests/support/fault_server.py --upstream http://127.0.0.1:9000 --port 9999 --seed 1 --rate 0.3

Faults (--faults, comma-separated; all by default; KIND:TEXT hits only paths that contain TEXT, as in flip:.tar):
  slowdown   503 SlowDown
  reset      the connection is reset in the middle of the body (or, for a PUT, before anything is stored)
  short      the body ends early although Content-Length promises more
  flip       one byte of the body is wrong
  stall      the body stops in the middle for --stall-s seconds, then the connection closes
  missing    404 NoSuchKey for an object that exists
  replaced   the body breaks in the middle and the object has another ETag afterwards
  expired    400 ExpiredToken
  lost       a PUT or POST is carried out, but its answer is lost
More faults, which must be asked for by name:
  away       every connection is reset before anything is answered
  dribble    the answer comes at one byte in --drip-s seconds (of a GET, only the body)
  slowsend   the body of a PUT is read at 4 KiB in --drip-s seconds
  and those of wrong_answers.py: redirected, moved, balancer, page, skewed, revoked, noetag, nolength, errordoc, cut,
  endless, stuck, notoken
Listings of a bucket are never flipped, missing or replaced: these faults only happen to objects.

The fault of a request is a function of (seed, method, key, number of earlier requests for them), so a schedule
repeats whatever the clients' timing and the bucket's name are. At most --in-a-row faults hit the same method and path
one after another, so a client that retries more often than that always succeeds. GET /-/faults returns the number of
faults by kind as JSON. PUT /-/plan replaces the plan and its counts; the body is a JSON object with the plan's fields.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import http.client
import http.server
import json
import signal
import socket
import struct
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # tests/, if this file is started as a program

from support.wrong_answers import (
    LISTING_FAULTS,
    OBJECT_ANSWERS,
    OWN_ANSWERS,
    WRONG_ANSWERS,
    changed_answer,
    own_answer,
)

ANSWERS = {
    "slowdown": (503, "SlowDown", "Please reduce your request rate."),
    "missing": (404, "NoSuchKey", "The specified key does not exist."),
    "expired": (400, "ExpiredToken", "The provided token has expired."),
}
BODY_FAULTS = ("reset", "short", "flip", "stall", "replaced")
OBJECT_FAULTS = ("flip", "missing", "replaced")
UPLOAD_FAULTS = ("slowdown", "reset", "expired", "lost")
DOWNLOAD_FAULTS = (*ANSWERS, *BODY_FAULTS)
ALL_FAULTS = (*DOWNLOAD_FAULTS, "lost")
MORE_FAULTS = ("away", "dribble", "slowsend", *WRONG_ANSWERS)  # only those that are asked for
HOP_BY_HOP = {"connection", "transfer-encoding", "keep-alive", "content-length"}


@dataclass
class FaultPlan:
    """Schedule of the faults to inject, with a record of those injected so far. Thread-safe."""

    seed: int = 0
    rate: float = 0.3  # share of requests that are hit
    faults: tuple[str, ...] = ALL_FAULTS
    only: str = ""  # hit only paths that contain this
    in_a_row: int = 3
    most: int | None = None  # largest number of faults in total; None: no limit
    stall_s: float = 3.0
    drip_s: float = 1.0
    counts: Counter[str] = field(default_factory=Counter)
    log: list[str] = field(default_factory=list)
    requests: int = 0
    _asked: Counter[tuple[str, str]] = field(default_factory=Counter)
    _row: Counter[tuple[str, str]] = field(default_factory=Counter)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def draw(self, method: str, path: str) -> tuple[str | None, float]:
        """Return the fault of the next request of `method` and `path` (None: no fault) and its place in the body.

        The place is a fraction of the body's length, in (0, 1).
        """
        kinds = self._possible(method, path)
        with self._lock:
            self.requests += 1
            asked = method, path
            key = path.lstrip("/").partition("/")[2]  # without the bucket, which has another name in each test
            text = f"{self.seed} {method} {key} {self._asked[asked]}"
            hit, kind, where = struct.unpack("<III", hashlib.sha256(text.encode()).digest()[:12])
            self._asked[asked] += 1
            allowed = bool(kinds) and self.only in path and self._row[asked] < self.in_a_row
            allowed = allowed and (self.most is None or self.counts.total() < self.most)
            if not allowed or hit >= self.rate * 2**32:
                self._row[asked] = 0
                return None, 0.0
            self._row[asked] += 1
            chosen = kinds[kind % len(kinds)]
            self.counts[chosen] += 1
            self.log.append(f"{chosen} {method} {path}")
            return chosen, (where + 0.5) / 2**32

    def _possible(self, method: str, path: str) -> list[str]:
        """Return the kinds of `faults` that can hit a request of `method` and `path`."""
        kinds = [kind for kind, _, text in (fault.partition(":") for fault in self.faults) if text in path]
        possible = {"away", "dribble", "noetag", *OWN_ANSWERS}
        possible |= set(DOWNLOAD_FAULTS if method == "GET" else UPLOAD_FAULTS)
        possible |= {"GET": {*OBJECT_ANSWERS, *LISTING_FAULTS}, "PUT": {"slowsend"}}.get(method, set())
        is_bucket = "/" not in path.strip("/")
        possible -= set(OBJECT_FAULTS) if is_bucket else set(LISTING_FAULTS)
        return [kind for kind in kinds if kind in possible]


class FaultProxy(http.server.ThreadingHTTPServer):
    """Proxy on 127.0.0.1 that injects the faults of `plan`, which may be replaced at any time."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, upstream: str, plan: FaultPlan, port: int = 0) -> None:
        self.upstream = urlsplit(upstream)
        self.plan = plan
        self.listings: dict[str, tuple[int, dict[str, str], bytes]] = {}  # path -> first page of its listing
        super().__init__(("127.0.0.1", port), _Handler)

    @property
    def endpoint_url(self) -> str:
        """The URL to give to S3 clients."""
        return f"http://127.0.0.1:{self.server_address[1]}"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore clients that hang up: the faults make them do so."""


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: FaultProxy

    def log_message(self, format: str, *args: Any) -> None:  # the plan keeps the log
        pass

    def _serve(self) -> None:
        num_bytes = int(self.headers.get("Content-Length", 0))
        if self.path == "/-/faults":
            self._answer(200, {}, json.dumps(self.server.plan.counts).encode())
            return
        if self.path == "/-/plan":
            fields = json.loads(self.rfile.read(num_bytes))
            self.server.plan = FaultPlan(**{**fields, "faults": tuple(fields["faults"])})
            self._answer(200, {}, b"")
            return
        fault, where = self.server.plan.draw(self.command, urlsplit(self.path).path)
        if fault == "slowsend":
            self._read_slowly(num_bytes)
            return
        body = self.rfile.read(num_bytes)
        if fault == "away":
            self._reset()
            return
        if fault in OWN_ANSWERS:
            self._answer(*own_answer(fault, f"http://{self.headers['Host']}{self.path}"))
            return
        if fault in ANSWERS:
            status, code, message = ANSWERS[fault]
            text = f'<?xml version="1.0"?><Error><Code>{code}</Code><Message>{message}</Message></Error>'
            self._answer(status, {"Content-Type": "application/xml"}, text.encode())
            return
        if fault == "reset" and self.command != "GET":
            self._reset()
            return
        status, headers, answer = self._forward_page(body) if fault in LISTING_FAULTS else self._forward(body)
        if fault == "dribble":
            self._dribble(status, headers, answer)
        elif fault in (*OBJECT_ANSWERS, *LISTING_FAULTS) and status < 300:
            wrong = changed_answer(fault, status, headers, answer)
            self._answer(*wrong, with_length=fault != "nolength")
        elif fault == "lost":
            self._reset()
        elif fault is None or status >= 300 or not answer:
            self._answer(status, headers, answer)
        else:
            self._break_body(fault, status, headers, answer, max(1, int(where * len(answer))))

    do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = _serve

    def _forward(self, body: bytes) -> tuple[int, dict[str, str], bytes]:
        """Send the request to the real server with the same Host header, so that the client's signature is valid."""
        upstream = self.server.upstream
        connection = http.client.HTTPConnection(upstream.hostname or "", upstream.port, timeout=60)
        with contextlib.closing(connection):
            connection.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
            for name, value in self.headers.items():
                if name.lower() not in ("connection", "expect"):
                    connection.putheader(name, value)
            connection.endheaders(body or None)
            answer = connection.getresponse()
            data = answer.read()
            headers = {name: value for name, value in answer.getheaders() if name.lower() not in HOP_BY_HOP}
            if self.command == "HEAD":
                headers["Content-Length"] = answer.getheader("Content-Length", "0")
            return answer.status, headers, data

    def _forward_page(self, body: bytes) -> tuple[int, dict[str, str], bytes]:
        """Send a request for a page of a listing to the real server, which is asked for the first one only."""
        listings = self.server.listings
        path = urlsplit(self.path).path
        if "endless-" not in self.path:
            listings[path] = self._forward(body)
        return listings[path]

    def _answer(self, status: int, headers: dict[str, str], body: bytes, with_length: bool = True) -> None:
        if with_length:
            headers = {"Content-Length": str(len(body)), **headers}
        else:
            headers = {"Connection": "close", **headers}
            self.close_connection = True
        self._send_head(status, headers)
        self.wfile.write(body)

    def _dribble(self, status: int, headers: dict[str, str], body: bytes) -> None:
        """Send an answer at one byte in `drip_s` seconds; the head of an object's answer comes at once."""
        headers = {"Content-Length": str(len(body)), **headers}
        is_object = self.command == "GET" and "/" in urlsplit(self.path).path.strip("/")
        if is_object:
            self._send_head(status, headers)
            slow = body
        else:
            lines = [f"HTTP/1.1 {status} OK", *(f"{name}: {value}" for name, value in headers.items()), "", ""]
            slow = "\r\n".join(lines).encode() + body
        for number in range(len(slow)):
            self.wfile.write(slow[number : number + 1])
            time.sleep(self.server.plan.drip_s)

    def _read_slowly(self, num_bytes: int) -> None:
        """Read the body of an upload at 4 KiB in `drip_s` seconds, until the client gives up."""
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        self.close_connection = True
        for _ in range(0, num_bytes, 4096):
            if not self.rfile.read(4096):
                return
            time.sleep(self.server.plan.drip_s)

    def _send_head(self, status: int, headers: dict[str, str]) -> None:
        self.send_response_only(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()

    def _break_body(self, fault: str, status: int, headers: dict[str, str], body: bytes, at: int) -> None:
        """Send an answer whose body is broken at byte `at` as `fault` describes."""
        headers = {**headers, "Content-Length": str(len(body))}
        if fault == "flip":
            at -= 1
            self._answer(status, headers, body[:at] + bytes([body[at] ^ 0x40]) + body[at + 1 :])
            return
        if fault == "replaced":  # a resumed request asks for this version, which no longer exists
            headers = {name: value for name, value in headers.items() if name.lower() != "etag"}
            headers["ETag"] = f'"{hashlib.md5(self.path.encode()).hexdigest()}"'
        self._send_head(status, headers)
        self.wfile.write(body[: min(at, len(body) - 1)])
        self.wfile.flush()
        if fault == "stall":
            time.sleep(self.server.plan.stall_s)
        if fault in ("reset", "replaced"):
            self._reset()
        self.close_connection = True

    def _reset(self) -> None:
        """Close the connection with RST instead of FIN, after the bytes sent so far have had time to arrive."""
        time.sleep(0.01)
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.close_connection = True
        self.rfile.close()
        self.connection.close()


@contextlib.contextmanager
def running_faults(upstream: str, plan: FaultPlan | None = None, port: int = 0) -> Iterator[FaultProxy]:
    """Run the proxy in a thread of this process for the length of the block; port 0: any free one."""
    with FaultProxy(upstream, plan or FaultPlan(), port) as proxy:
        thread = threading.Thread(target=proxy.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        thread.start()
        try:
            yield proxy
        finally:
            proxy.shutdown()
            thread.join()


def main() -> None:
    """Serve until Ctrl-C or SIGTERM, then print the number of requests and of faults by kind."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    defaults = FaultPlan()
    parser.add_argument("--upstream", required=True, help="endpoint URL of the real server")
    parser.add_argument("--port", type=int, default=0, help="port to listen on (default: any free one)")
    parser.add_argument("--seed", type=int, default=defaults.seed, help="seed of the schedule")
    parser.add_argument("--rate", type=float, default=defaults.rate, help="share of requests that are hit")
    parser.add_argument("--faults", default=",".join(ALL_FAULTS), help="kinds to inject")
    parser.add_argument("--only", default="", metavar="TEXT", help="hit only paths that contain TEXT")
    parser.add_argument(
        "--in-a-row", type=int, default=defaults.in_a_row, help="largest number of faults in succession"
    )
    parser.add_argument("--most", type=int, help="largest number of faults in total (default: no limit)")
    parser.add_argument("--stall-s", type=float, default=defaults.stall_s, help="length of a stall, in seconds")
    parser.add_argument("--drip-s", type=float, default=defaults.drip_s, help="time between two dribbled bytes")
    args = parser.parse_args()
    kinds = tuple(args.faults.split(","))
    if unknown := {kind.partition(":")[0] for kind in kinds} - {*ALL_FAULTS, *MORE_FAULTS}:
        parser.error(f"unknown fault {', '.join(sorted(unknown))}; there are {', '.join((*ALL_FAULTS, *MORE_FAULTS))}")
    plan = FaultPlan(args.seed, args.rate, kinds, args.only, args.in_a_row, args.most, args.stall_s, args.drip_s)
    with FaultProxy(args.upstream, plan, args.port) as proxy:
        print(f"{proxy.endpoint_url} -> {args.upstream}", flush=True)
        with contextlib.suppress(KeyboardInterrupt):
            proxy.serve_forever()
    print(json.dumps({"requests": plan.requests, "faults": plan.counts}))


if __name__ == "__main__":
    main()
