"""A server with the part of the Hugging Face Hub's API that downloads and reads in ranges need: `HF_ENDPOINT`.

Repositories are folders; a commit keeps their content, and a branch is the name of a commit. A gated repository needs
the token. The answers are those that https://huggingface.co/docs/hub/api describes and huggingface_hub reads.
"""

from __future__ import annotations

import hashlib
import http.server
import json
import re
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit

import pytest
from typing_extensions import override

TOKEN = "hf_test"
_PATH = re.compile(
    r"/api/(?P<kind>models|datasets)/(?P<repo>[^/]+/[^/]+)(?:/(?P<call>revision|tree|paths-info)/(?P<rest>.+))?"
)
_FILE = re.compile(r"/(?P<kind>datasets/)?(?P<repo>[^/]+/[^/]+)/resolve/(?P<revision>[^/]+)/(?P<path>.+)")


def git_oid(data: bytes) -> str:
    """Return the hash by which git names a file, which is the Hub's ETag."""
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


@dataclass
class Hub:
    """Repositories of the server: name -> branch -> commit, and (name, commit) -> path -> content."""

    url: str = ""
    branches: dict[str, dict[str, str]] = field(default_factory=dict)
    commits: dict[tuple[str, str], dict[str, bytes]] = field(default_factory=dict)
    gated: set[str] = field(default_factory=set)
    requests: list[str] = field(default_factory=list)  # METHOD PATH, and the range if there is one

    def commit(self, name: str, files: dict[str, bytes] | Path, branch: str = "main") -> str:
        """Make the content of a folder the newest commit of a branch; return the commit."""
        if isinstance(files, Path):
            folder = files
            paths = sorted(path for path in folder.rglob("*") if path.is_file())
            files = {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}
        named = "".join(f"{path} {git_oid(data)}\n" for path, data in files.items())
        commit = hashlib.sha1(named.encode()).hexdigest()
        self.branches.setdefault(name, {})[branch] = commit
        self.commits[name, commit] = files
        return commit


class _Handler(http.server.BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._answer()

    def do_HEAD(self) -> None:
        self._answer()

    def do_POST(self) -> None:
        self._answer(self.rfile.read(int(self.headers.get("Content-Length", 0))))

    @override
    def log_message(self, format: str, *args: object) -> None:
        pass

    def _answer(self, body: bytes = b"") -> None:
        path = unquote(urlsplit(self.path).path)
        self.hub.requests.append(f"{self.command} {path} {self.headers.get('Range', '')}".strip())
        call = _PATH.fullmatch(path)
        if call is not None:
            self._answer_call(call, body)
            return
        file = _FILE.fullmatch(path)
        if file is not None:
            self._answer_file(file)
        else:
            self._refuse(404, "RepoNotFound")

    def _files(self, repo: str, revision: str) -> tuple[str, dict[str, bytes]] | None:
        """Return a commit and its files; None after a refusal was sent."""
        branches = self.hub.branches.get(repo)
        if branches is None:
            self._refuse(401, "RepoNotFound")
            return None
        if repo in self.hub.gated and self.headers.get("Authorization") != f"Bearer {TOKEN}":
            self._refuse(401, "GatedRepo")
            return None
        commit = branches.get(revision, revision)
        if (repo, commit) not in self.hub.commits:
            self._refuse(404, "RevisionNotFound")
            return None
        return commit, self.hub.commits[repo, commit]

    def _answer_call(self, call: re.Match[str], body: bytes) -> None:
        revision, _, folder = (call["rest"] or "main").partition("/")
        if call["call"] == "revision":
            revision = call["rest"]
        found = self._files(call["repo"], revision)
        if found is None:
            return
        commit, files = found
        if call["call"] in (None, "revision"):
            siblings = [{"rfilename": path} for path in files]
            self._json({"id": call["repo"], "sha": commit, "siblings": siblings, "private": False, "tags": []})
            return
        if call["call"] == "paths-info":
            form = parse_qs(body.decode())
            wanted = form["paths"] if form else json.loads(body)["paths"]
            self._json([_entry(path, files[path]) for path in wanted if path in files])
            return
        below = f"{folder}/" if folder else ""
        is_recursive = parse_qs(urlsplit(self.path).query).get("recursive", ["false"])[0].lower() in ("true", "1")
        inside = [path for path in files if path.startswith(below)]
        folders = {below + path[len(below) :].partition("/")[0] for path in inside if "/" in path[len(below) :]}
        if not is_recursive:
            inside = [path for path in inside if "/" not in path[len(below) :]]
        elif inside:
            folders = {part.as_posix() for path in inside for part in Path(path).parents if part.as_posix() != "."}
        if folder and not inside and not folders:
            self._refuse(404, "EntryNotFound")
            return
        entries = [{"type": "directory", "path": path, "oid": git_oid(path.encode()), "size": 0} for path in folders]
        self._json([*entries, *(_entry(path, files[path]) for path in inside)])

    def _answer_file(self, file: re.Match[str]) -> None:
        found = self._files(file["repo"], file["revision"])
        if found is None:
            return
        commit, files = found
        data = files.get(file["path"])
        if data is None:
            self._refuse(404, "EntryNotFound", commit)
            return
        headers = {"X-Repo-Commit": commit, "ETag": f'"{git_oid(data)}"', "Accept-Ranges": "bytes"}
        wanted = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        status = 200
        if wanted is not None:
            status = 206
            start, end = int(wanted[1]), min(int(wanted[2] or len(data)) + 1, len(data))
            headers["Content-Range"] = f"bytes {start}-{end - 1}/{len(data)}"
            data = data[start:end]
        self._send(status, data, headers)

    def _refuse(self, status: int, code: str, commit: str = "") -> None:
        self._send(status, b"", {"X-Error-Code": code, "X-Error-Message": code, "X-Repo-Commit": commit})

    def _json(self, content: object) -> None:
        self._send(200, json.dumps(content).encode(), {"Content-Type": "application/json"})

    def _send(self, status: int, data: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            if value:
                self.send_header(name, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)


def _entry(path: str, data: bytes) -> dict[str, object]:
    return {"type": "file", "path": path, "oid": git_oid(data), "size": len(data)}


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    """A running Hub without repositories, which huggingface_hub asks in this process, with a cache of its own."""
    from huggingface_hub import constants

    from electra_dist import hub as hub_module

    hub = Hub()
    handler = type("Handler", (_Handler,), {"hub": hub})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        hub.url = f"http://127.0.0.1:{server.server_port}"
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        # huggingface_hub reads the environment when it is imported; the rest is for processes that a test starts.
        monkeypatch.setattr(constants, "ENDPOINT", hub.url)
        monkeypatch.setattr(
            constants, "HUGGINGFACE_CO_URL_TEMPLATE", hub.url + "/{repo_id}/resolve/{revision}/{filename}"
        )
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub-cache"))
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        monkeypatch.setenv("HF_HOME", str(tmp_path / "hf-home"))
        monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub-cache"))
        hub_module._download.cache_clear()
        yield hub
        hub_module._download.cache_clear()
        server.shutdown()
