"""A request handler that passes requests on to another HTTP server, for tests that change or watch what is sent."""

from __future__ import annotations

import http.client
import http.server
from collections.abc import Iterable

from typing_extensions import override

_OF_ONE_CONNECTION = {"host", "connection", "keep-alive", "transfer-encoding", "content-length"}


class ForwardingHandler(http.server.BaseHTTPRequestHandler):
    """Sends each request to `upstream`, and its answer back; subclasses override the steps between."""

    upstream: str  # host:port
    protocol_version = "HTTP/1.1"

    def _forward(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        answer, data = self.ask_upstream(body)
        self.send_response_only(answer.status)
        for name, value in self.headers_of_answer(without_connection(answer.getheaders())):
            self.send_header(name, value)
        length = answer.getheader("Content-Length", "0") if self.command == "HEAD" else str(len(data))
        self.send_header("Content-Length", length)
        self.end_headers()
        self.wfile.write(data)

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _forward

    def ask_upstream(self, body: bytes) -> tuple[http.client.HTTPResponse, bytes]:
        """Send the request with its `body` to the other server; return the answer and its content."""
        connection = http.client.HTTPConnection(self.upstream)
        connection.request(self.command, self.path, body, self.headers_of_request())
        answer = connection.getresponse()
        data = answer.read()
        connection.close()
        return answer, data

    def headers_of_request(self) -> dict[str, str]:
        """Return the headers that the other server gets."""
        return dict(self.headers.items())

    def headers_of_answer(self, headers: list[tuple[str, str]]) -> list[tuple[str, str]]:
        """Return the headers that the client gets, beside the length; `headers` are those of the other server."""
        return headers

    @override
    def log_message(self, format: str, *args: object) -> None:
        pass


def without_connection(headers: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    """Leave out the headers that belong to one connection."""
    return [(name, value) for name, value in headers if name.lower() not in _OF_ONE_CONNECTION]
