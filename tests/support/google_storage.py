"""A server with the part of Google Cloud Storage's XML API that obstore uses: moto behind a translation of headers.

The XML API is S3's with other names: `x-goog-if-generation-match: 0` is `If-None-Match: *`, and `x-goog-meta-` begins
the names of metadata. Source: https://cloud.google.com/storage/docs/xml-api/reference-headers
"""

from __future__ import annotations

import hashlib
import http.server
import json
import threading
from collections.abc import Iterator
from urllib.parse import urlsplit

import pytest
from support.forwarding import ForwardingHandler, without_connection
from support.s3_server import ACCESS_KEY, S3Server, make_bucket
from typing_extensions import override

_TO_S3 = ("x-goog-meta-", "x-amz-meta-")
_CREDENTIAL = f"{ACCESS_KEY}/20260101/us-east-1/s3/aws4_request"
_AUTHORIZATION = f"AWS4-HMAC-SHA256 Credential={_CREDENTIAL}, SignedHeaders=host, Signature=0"  # moto checks none


class _Handler(ForwardingHandler):
    @override
    def headers_of_request(self) -> dict[str, str]:
        headers = {
            name.lower().replace(*_TO_S3): value
            for name, value in without_connection(self.headers.items())
            if name.lower() != "authorization"
        }
        if headers.pop("x-goog-if-generation-match", None) == "0":
            headers["If-None-Match"] = "*"
        return headers | {"Authorization": _AUTHORIZATION}

    @override
    def headers_of_answer(self, headers: list[tuple[str, str]]) -> list[tuple[str, str]]:
        translated = [(name.lower().replace(*reversed(_TO_S3)), value) for name, value in headers]
        return [*translated, ("x-goog-generation", "1")]


@pytest.fixture(scope="session")
def google(moto: S3Server) -> Iterator[S3Server]:
    """The server, and the variable with credentials that need no token; skipped where obstore is not installed."""
    pytest.importorskip("obstore", reason="needs obstore")
    handler = type("Handler", (_Handler,), {"upstream": urlsplit(moto.endpoint_url).netloc})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        names = ("client_email", "private_key", "private_key_id")
        key = {"gcs_base_url": url, "disable_oauth": True, **dict.fromkeys(names, "")}
        yield S3Server(url, {"GOOGLE_SERVICE_ACCOUNT_KEY": json.dumps(key)})
        server.shutdown()


@pytest.fixture
def google_bucket(
    google: S3Server, moto: S3Server, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> str:
    """The gs:// URL of a new bucket for this test; its credentials are in the environment."""
    for name, value in google.env.items():
        monkeypatch.setenv(name, value)
    # Without a hyphen, which obstore quotes, and moto does not unquote in the names of buckets.
    name = f"test{hashlib.sha256(f'google {request.node.nodeid}'.encode()).hexdigest()[:16]}"
    return make_bucket(*moto, name).replace("s3://", "gs://")
