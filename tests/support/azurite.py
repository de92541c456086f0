"""Runs Azurite, Microsoft's emulator of Azure Blob Storage, for tests; it is a package of npm.

npm install --prefix FOLDER azurite; AZURITE=FOLDER/node_modules/.bin/azurite-blob pytest tests/store
"""

from __future__ import annotations

import base64
import contextlib
import datetime
import functools
import hashlib
import hmac
import http.client
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from urllib.parse import urlencode, urlsplit

import pytest
from support.s3_server import S3Server, _free_ports, _start, _wait_for

# The account and the key that every Azurite has; they are in its documentation.
ACCOUNT = "devstoreaccount1"
KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="


@functools.cache
def azurite_program() -> str | None:
    """Return the program of the emulator, from the variable AZURITE or the PATH; None if it is not installed."""
    return os.environ.get("AZURITE") or shutil.which("azurite-blob")


@contextlib.contextmanager
def running_azurite() -> Iterator[S3Server]:
    """Run the emulator for the length of the block; give its endpoint and the variables of a client's credentials."""
    program = azurite_program()
    assert program is not None
    port = _free_ports(1)
    command = [program, "--inMemoryPersistence", "--blobHost", "127.0.0.1", "--blobPort", str(port), "--silent"]
    command += ["--skipApiVersionCheck", "--disableTelemetry"]
    with tempfile.TemporaryDirectory(prefix="azurite-") as folder, contextlib.ExitStack() as processes:
        _wait_for(port, _start(command, Path(folder) / "log", processes))
        env = {"AZURE_STORAGE_ACCOUNT_NAME": ACCOUNT, "AZURE_STORAGE_ACCOUNT_KEY": KEY}
        yield S3Server(f"http://127.0.0.1:{port}/{ACCOUNT}", env)


def make_container(endpoint_url: str, name: str) -> str:
    """Create a container and return its az:// URL."""
    signed_request(endpoint_url, "PUT", name, {"restype": "container"})
    return f"az://{name}"


def signed_request(
    endpoint_url: str, method: str, path: str, query: Mapping[str, str] = {}, headers: Mapping[str, str] = {}
) -> bytes:
    """Send a request without a body, signed with the account's key, and return the body of its answer.

    `path` is the container or the container and the quoted name of an object. Headers begin with `x-ms-`.
    Source: https://learn.microsoft.com/rest/api/storageservices/authorize-with-shared-key
    """
    now = datetime.datetime.now(datetime.UTC)
    sent = {"x-ms-date": now.strftime("%a, %d %b %Y %H:%M:%S GMT"), "x-ms-version": "2021-08-06", **headers}
    lines = [f"{key}:{value}" for key, value in sorted(sent.items())]
    lines += [f"/{ACCOUNT}/{ACCOUNT}/{path}", *(f"{key}:{value}" for key, value in sorted(query.items()))]
    text = f"{method}{12 * chr(10)}{chr(10).join(lines)}"
    digest = hmac.new(base64.b64decode(KEY), text.encode(), hashlib.sha256).digest()
    sent["Authorization"] = f"SharedKey {ACCOUNT}:{base64.b64encode(digest).decode()}"
    connection = http.client.HTTPConnection(urlsplit(endpoint_url).netloc)
    connection.request(method, f"/{ACCOUNT}/{path}?{urlencode(query)}", headers={**sent, "Content-Length": "0"})
    answer = connection.getresponse()
    body = answer.read()
    connection.close()
    assert answer.status < 300, (method, path, body)
    return body


@pytest.fixture(scope="session")
def azurite() -> Iterator[S3Server]:
    """The emulator; tests that use it are skipped where it or obstore is not installed."""
    pytest.importorskip("obstore", reason="needs obstore")
    if azurite_program() is None:
        pytest.skip("needs Azurite: npm install azurite")
    with running_azurite() as server:
        yield server


@pytest.fixture
def container(azurite: S3Server, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> str:
    """The URL of a new container for this test; its credentials are in the environment."""
    for name, value in azurite.env.items():
        monkeypatch.setenv(name, value)
    name = hashlib.sha256(request.node.nodeid.encode()).hexdigest()[:16]
    return make_container(azurite.endpoint_url, f"test-{name}")
