"""A store in memory that counts requests and bytes as an S3 service would bill them.

All `CountingStore` objects of one `Service` see the same objects, as the ranks of a run do. Each of them counts its
own requests, so a test gives every simulated rank a store of its own.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

from electra_dist.errors import StoreMissing
from electra_dist.store.interface import Store, check_key

PAGE = 1000  # keys in one answer to a listing, and in one request that deletes several


class Service:
    """The objects of a simulated S3 service."""

    def __init__(self) -> None:
        """Begin without any object."""
        self.objects: dict[str, bytes] = {}
        self.lock = threading.Lock()


class CountingStore(Store):
    """One process's view of a `Service`, with the number of its requests by kind.

    A request that is sent by a thread of a pool counts as serial only in proportion: of n requests that a pool of T
    threads sends, ceil(n / T) are waited for one after another.
    """

    def __init__(self, service: Service, pool_threads: int = 1) -> None:
        """Count from 0.

        Args:
            service: holds the objects.
            pool_threads: number of threads of each pool that sends requests.
        """
        self.url = "s3://counted"
        self.requests: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()
        self._service = service
        self._pool_threads = pool_threads
        self._by_pool: Counter[str] = Counter()  # requests by the pool whose thread sent them; "": by no pool

    @property
    def num_requests(self) -> int:
        """Number of all requests."""
        return self.requests.total()

    @property
    def num_serial(self) -> int:
        """Number of requests that this process waits for one after another."""
        pooled = sum(-(-count // self._pool_threads) for pool, count in self._by_pool.items() if pool)
        return self._by_pool[""] + pooled

    def _count(self, kind: str, num_bytes: int = 0, num_requests: int = 1) -> None:
        """Count requests of one kind, and the bytes that they send or receive."""
        pool, is_pooled, _ = threading.current_thread().name.rpartition("_")
        with self._service.lock:
            self.requests[kind] += num_requests
            self.bytes[kind] += num_bytes
            self._by_pool[pool if is_pooled and "ThreadPool" in pool else ""] += num_requests

    def local_path(self, key: str) -> None:
        check_key(key)

    def read(self, key: str, *, must_exist: bool = False) -> bytes:
        data = self._service.objects.get(key)
        self._count("GET", len(data or b""))
        if data is None:
            raise StoreMissing(f"{self.url}/{key}: no such object")
        return data

    def read_range(self, key: str, start: int, length: int, *, must_exist: bool = False) -> memoryview:
        data = self._service.objects.get(key)
        if data is None:
            self._count("GET")
            raise StoreMissing(f"{self.url}/{key}: no such object")
        part = bytearray(data[start : start + length])
        self._count("GET", len(part))
        return memoryview(part)

    def exists(self, key: str) -> bool:
        self._count("GET")
        return key in self._service.objects

    def size(self, key: str) -> int:
        self._count("GET")
        return len(self._service.objects[key])

    def fetch(self, key: str, destination: Path, *, must_exist: bool = False) -> None:
        destination.write_bytes(self.read(key, must_exist=must_exist))

    def write(self, key: str, data: bytes) -> None:
        self._count("PUT", len(data))
        self._service.objects[check_key(key)] = data

    def write_new(self, key: str, data: bytes) -> bool:
        self._count("PUT", len(data))
        with self._service.lock:
            if check_key(key) in self._service.objects:
                return False
            self._service.objects[key] = data
            return True

    def upload(self, path: Path, key: str) -> None:
        self.write(key, path.read_bytes())

    def list(self, prefix: str = "") -> list[str]:
        keys = sorted(key for key in list(self._service.objects) if key.startswith(prefix))
        self._count("LIST", num_requests=max(1, -(-len(keys) // PAGE)))
        return keys

    def delete(self, key: str) -> None:
        self._count("DELETE")
        self._service.objects.pop(key, None)

    def delete_all(self, keys: Sequence[str]) -> None:
        if keys:
            self._count("DELETE", num_requests=-(-len(keys) // PAGE))
        for key in keys:
            self._service.objects.pop(key, None)

    def discard_unfinished(self, prefix: str, doomed: Callable[[str], bool]) -> int:
        self._count("LIST")
        return 0
