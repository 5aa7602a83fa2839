"""GET /: the playground, a page for people that asks this same server. Its files lie in page/.

Knows nothing of the model: the page learns all it shows from the API. Everybody may fetch it, with or without
the server's key and before the model is ready: what it asks for afterwards passes the gate like all requests.
"""

from __future__ import annotations

import gzip
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from fastapi import APIRouter, Request, Response

FOLDER = Path(__file__).parent / "page"
TYPES = {
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    # A browser asks each time whether its copy is still the same: a new server's page is seen at once.
    "Cache-Control": "no-cache",
    "Vary": "Accept-Encoding",
}


@dataclass(frozen=True)
class PageFile:
    body: bytes
    packed: bytes
    media_type: str
    etag: str

    def reply(self, request: Request) -> Response:
        headers = {**HEADERS, "ETag": self.etag}
        if self.etag in request.headers.get("if-none-match", ""):
            return Response(status_code=304, headers=headers)
        if "gzip" in request.headers.get("accept-encoding", ""):
            headers["Content-Encoding"] = "gzip"
            return Response(self.packed, headers=headers, media_type=self.media_type)
        return Response(self.body, headers=headers, media_type=self.media_type)


def read_files() -> dict[str, PageFile]:
    """Every file of the page under the path that it is served at; the page itself is at /."""
    files = {}
    for path in sorted(path for path in FOLDER.iterdir() if path.suffix in TYPES):
        body = path.read_bytes()
        etag = f'W/"{sha256(body).hexdigest()[:16]}"'  # weak: it stands for the packed body, too
        files["/" if path.name == "index.html" else f"/page/{path.name}"] = PageFile(
            body, gzip.compress(body, mtime=0), TYPES[path.suffix], etag
        )
    return files


FILES = read_files()


def routes() -> APIRouter:
    router = APIRouter()
    for path, file in FILES.items():
        router.add_api_route(path, file.reply, methods=["GET", "HEAD"], include_in_schema=False)
    return router
