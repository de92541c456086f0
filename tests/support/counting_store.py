"""Count the requests and bytes that a store would send to an S3 service, with a store in memory.

All `CountingStore`s of one `Service` see the same objects, as the ranks of a run do. Each of them counts its own
requests, so a test gives every simulated rank a store of its own.
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
    """Objects of a simulated S3 service, which several `CountingStore`s share."""

    def __init__(self) -> None:
        """Create a service without objects."""
        self.objects: dict[str, bytes] = {}  # key -> content
        self.lock = threading.Lock()  # hold it to change `objects` or a store's counts


class CountingStore(Store):
    """Store in memory for one simulated process, which counts the requests of this process by kind.

    The methods behave like those of `Store`. The objects are in a `Service`, which the other processes' stores share.
    """

    def __init__(self, service: Service, pool_threads: int = 1) -> None:
        """Create the store of one process on the objects of `service`; all counts are 0.

        `pool_threads` is the number of threads of each pool that sends requests, for `num_serial`.
        """
        self.url = "s3://counted"
        self.requests: Counter[str] = Counter()  # kind ("GET", "PUT", "LIST" or "DELETE") -> number of requests
        self.bytes: Counter[str] = Counter()  # kind -> bytes of the objects that were sent or received
        self._service = service
        self._pool_threads = pool_threads
        self._requests_of_pool: Counter[str] = Counter()  # pool whose threads sent them -> requests; "": no pool

    @property
    def num_requests(self) -> int:
        """Number of all requests."""
        return self.requests.total()

    @property
    def num_serial(self) -> int:
        """Number of requests for which this process waits one after another.

        A pool of T threads sends T requests at once, so n requests of a pool count as ceil(n / T).
        """
        num_serial = 0
        for pool, num_requests in self._requests_of_pool.items():
            num_serial += _divide_up(num_requests, self._pool_threads) if pool else num_requests
        return num_serial

    def _count(self, kind: str, num_bytes: int = 0, num_requests: int = 1) -> None:
        """Count requests of a kind ("GET", "PUT", "LIST" or "DELETE"), and the bytes of objects that they carry."""
        # A thread of a pool has a name such as "ThreadPoolExecutor-0_3": the pool's name and the thread's number.
        pool, separator, _number = threading.current_thread().name.rpartition("_")
        is_of_pool = separator != "" and "ThreadPool" in pool
        with self._service.lock:
            self.requests[kind] += num_requests
            self.bytes[kind] += num_bytes
            self._requests_of_pool[pool if is_of_pool else ""] += num_requests

    def local_path(self, key: str) -> None:
        """Return None, because the objects are no files; nothing is counted."""
        check_key(key)

    def read(self, key: str) -> bytes:
        """Return the content of an object, and count a GET; raise StoreMissing if there is no such object."""
        data = self._service.objects.get(key)
        self._count("GET", len(data or b""))
        if data is None:
            raise StoreMissing(f"{self.url}/{key}: no such object")
        return data

    def read_range(self, key: str, start: int, length: int) -> memoryview:
        """Return `length` bytes of an object from byte `start` on, and count a GET; raise StoreMissing as `read`."""
        data = self._service.objects.get(key)
        if data is None:
            self._count("GET")
            raise StoreMissing(f"{self.url}/{key}: no such object")
        part = bytearray(data[start : start + length])
        self._count("GET", len(part))
        return memoryview(part)

    def exists(self, key: str) -> bool:
        """Return whether there is such an object, and count a GET, as which S3 bills the request (HEAD)."""
        self._count("GET")
        return key in self._service.objects

    def size(self, key: str) -> int:
        """Return the bytes of an object, which must exist, and count a GET."""
        self._count("GET")
        return len(self._service.objects[key])

    def fetch(self, key: str, destination: Path) -> None:
        """Write the content of an object into a file, and count a GET; raise StoreMissing as `read`."""
        destination.write_bytes(self.read(key))

    def write(self, key: str, data: bytes) -> None:
        """Create or replace an object, and count a PUT."""
        self._count("PUT", len(data))
        self._service.objects[check_key(key)] = data

    def write_new(self, key: str, data: bytes) -> bool:
        """Create an object if there is none, and count a PUT in any case; return whether it was created."""
        self._count("PUT", len(data))
        with self._service.lock:
            if check_key(key) in self._service.objects:
                return False
            self._service.objects[key] = data
            return True

    def upload(self, path: Path, key: str) -> None:
        """Create or replace an object with the content of a file, and count one PUT, whatever the size."""
        self.write(key, path.read_bytes())

    def sizes(self, prefix: str = "") -> dict[str, int]:
        """Return key -> bytes of the keys that start with `prefix`, and count a LIST for each page of 1,000 keys."""
        objects = sorted((key, len(data)) for key, data in [*self._service.objects.items()] if key.startswith(prefix))
        self._count("LIST", num_requests=max(1, _divide_up(len(objects), PAGE)))
        return dict(objects)

    def delete(self, key: str) -> None:
        """Delete an object if there is one, and count a DELETE."""
        self._count("DELETE")
        self._service.objects.pop(key, None)

    def delete_all(self, keys: Sequence[str]) -> None:
        """Delete all these objects that exist, and count a DELETE for each 1,000 keys."""
        if keys:
            self._count("DELETE", num_requests=_divide_up(len(keys), PAGE))
        for key in keys:
            self._service.objects.pop(key, None)

    def discard_unfinished(self, prefix: str, doomed: Callable[[str], bool]) -> int:
        """Return 0, because no write stays unfinished here, and count a LIST."""
        self._count("LIST")
        return 0


def _divide_up(count: int, size: int) -> int:
    """Return count / size, rounded up."""
    return -(-count // size)
