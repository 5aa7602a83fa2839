"""Servers for the tests of `weights.source`, on the loopback only, that fail where they are told to.

`Hub` speaks as much of the hub's HTTP as huggingface_hub asks for; `Proxy` stands before the bucket emulator.
"""

from __future__ import annotations

import hashlib
import http.client
import json
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TypeVar
from urllib.parse import unquote, urlsplit

Answer = tuple[int, dict[str, str], bytes]
S = TypeVar("S", bound="FaultyServer")


@dataclass
class Fault:
    """What goes wrong with the requests ("METHOD path?query") that match `where`."""

    where: str
    status: int | None = None
    headers: dict[str, str] = field(default_factory=dict)
    cut: int | None = None  # so many bytes of the body, then the connection is closed
    stall: int | None = None  # so many bytes of the body, then silence; -1: not even a header
    pause: float = 0  # seconds between the pieces of a body sent in ten
    times: int = 1_000_000


class FaultyServer(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.faults: list[Fault] = []
        self.log: list[str] = []
        self.over = threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def answer(self, method: str, path: str, headers: dict[str, str]) -> Answer:
        raise NotImplementedError

    def fault(self, request: str) -> Fault:
        for fault in self.faults:
            if fault.times and re.search(fault.where, request):
                fault.times -= 1
                return fault
        return Fault("")

    def asked(self, pattern: str) -> list[str]:
        return [line for line in self.log if re.search(pattern, line)]


class Handler(BaseHTTPRequestHandler):
    server: FaultyServer
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        request = f"{self.command} {self.path}"
        headers = {name.lower(): value for name, value in self.headers.items()}
        self.server.log.append(
            f"{request} {headers.get('range', '')} {headers.get('authorization', '')}".strip()
        )
        fault = self.server.fault(request)
        if fault.stall == -1:
            self.server.over.wait(30)
            self.close_connection = True
        elif fault.status:
            self.send(fault.status, fault.headers, b'{"error": "told to fail"}', Fault(""))
        else:
            self.send(*self.server.answer(self.command, self.path, headers), fault)

    do_HEAD = do_GET

    def send(self, status: int, headers: dict[str, str], body: bytes, fault: Fault) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.send_body(body, fault)

    def send_body(self, body: bytes, fault: Fault) -> None:
        sent = fault.cut if fault.cut is not None else fault.stall
        step = len(body) // 10 + 1 if fault.pause else len(body) + 1
        for start in range(0, len(body) if sent is None else min(sent, len(body)), step):
            self.wfile.write(body[start : start + step][:sent])
            time.sleep(fault.pause)
        if fault.stall is not None:
            self.server.over.wait(30)
        if sent is not None:
            self.close_connection = True

    def log_message(self, *args: object) -> None: ...


class Hub(FaultyServer):
    def __init__(self) -> None:
        super().__init__()
        self.files: dict[str, dict[str, bytes]] = {}  # by commit
        self.commits: dict[tuple[str, str], str] = {}  # by repository and revision

    def put(self, repo: str, files: dict[str, bytes], revision: str = "main") -> str:
        names = json.dumps(sorted((name, hashlib.sha1(data).hexdigest()) for name, data in files.items()))
        commit = hashlib.sha1(names.encode()).hexdigest()
        self.files[commit] = files
        self.commits[repo, revision] = self.commits[repo, commit] = commit
        return commit

    def answer(self, method: str, path: str, headers: dict[str, str]) -> Answer:
        path = unquote(urlsplit(path).path)
        if match := re.fullmatch(r"/api/models/(.+?)(?:/(revision|tree)/(.+))?", path):
            return self.api(match[1], match[2], match[3] or "main")
        if match := re.fullmatch(r"/(.+?)/resolve/([^/]+)/(.+)", path):
            return self.file(match[1], match[2], match[3], headers.get("range"))
        return self.missing("RepoNotFound")

    def api(self, repo: str, what: str | None, revision: str) -> Answer:
        commit = self.commits.get((repo, revision))
        if commit is None:
            known = any(name == repo for name, _ in self.commits)
            return self.missing("RevisionNotFound" if known else "RepoNotFound")
        files = self.files[commit]
        if what == "tree":
            entries = [{"type": "file", "path": n, "size": len(d), "oid": "0" * 40} for n, d in files.items()]
            return 200, {"Content-Type": "application/json"}, json.dumps(entries).encode()
        info = {"id": repo, "sha": commit, "siblings": [{"rfilename": name} for name in files]}
        return 200, {"Content-Type": "application/json"}, json.dumps(info).encode()

    def file(self, repo: str, revision: str, name: str, asked: str | None) -> Answer:
        commit = self.commits.get((repo, revision), "")
        data = self.files.get(commit, {}).get(name)
        if data is None:
            return self.missing("EntryNotFound")
        headers = {
            "ETag": f'"{hashlib.sha1(data).hexdigest()}"',
            "X-Repo-Commit": commit,
            "Accept-Ranges": "bytes",
        }
        if asked is None:
            return 200, headers, data
        first, _, last = asked.removeprefix("bytes=").partition("-")
        start, end = int(first), min(int(last or len(data)), len(data) - 1)
        headers["Content-Range"] = f"bytes {start}-{end}/{len(data)}"
        return 206, headers, data[start : end + 1]

    def missing(self, code: str) -> Answer:
        return 404, {"X-Error-Code": code}, b"{}"


class Proxy(FaultyServer):
    def __init__(self, port: int) -> None:
        super().__init__()
        self.port = port

    def answer(self, method: str, path: str, headers: dict[str, str]) -> Answer:
        behind = http.client.HTTPConnection("127.0.0.1", self.port)
        try:
            behind.request(method, path, headers=headers)
            response = behind.getresponse()
            kept = {
                k: v
                for k, v in response.getheaders()
                if k in ("Content-Type", "Content-Range", "Content-type")
            }
            return response.status, kept, response.read()
        finally:
            behind.close()


@contextmanager
def running(server: S) -> Iterator[S]:
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.over.set()
        server.shutdown()
        server.server_close()
        thread.join()
