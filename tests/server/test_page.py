"""The playground without a browser: what is served, to whom, and what its files may not contain."""

from __future__ import annotations

import gzip
import re

import pytest

from hex_llm.server import page
from tests.server.asking import ask
from tests.server.fakes import FakeBackend

PATHS = sorted(page.FILES)
SCRIPTS = [path for path in PATHS if path.endswith(".js")]
MAX_SENT = 40_000  # bytes of the whole page, as browsers fetch it
MAX_LINES = 400


def text_of(path: str) -> str:
    return page.FILES[path].body.decode()


def test_has_a_page_a_style_and_scripts():
    assert {"/", "/page/style.css", "/page/app.js", "/page/icon.svg"} <= set(PATHS)


@pytest.mark.parametrize("path", PATHS)
def test_is_served_with_its_type_and_a_strict_policy(path: str, backend: FakeBackend):
    reply = ask(backend, "GET", path)
    assert reply.status_code == 200
    kind = {"css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}.get(
        path.split(".")[-1], "text/html"
    )
    assert reply.headers["content-type"].split(";")[0] == kind
    policy = dict(part.split(" ", 1) for part in reply.headers["content-security-policy"].split("; "))
    assert policy["default-src"] == "'none'"
    assert set(policy.values()) == {"'none'", "'self'"}
    assert reply.headers["x-content-type-options"] == "nosniff"


def test_is_packed_for_who_can_unpack_it(backend: FakeBackend):
    plain = ask(backend, "GET", "/", headers={"accept-encoding": "identity"})
    packed = ask(backend, "GET", "/", headers={"accept-encoding": "gzip, br"})
    assert "content-encoding" not in plain.headers
    assert packed.headers["content-encoding"] == "gzip"
    assert packed.content == plain.content == page.FILES["/"].body
    assert int(packed.headers["content-length"]) < int(plain.headers["content-length"])


def test_is_sent_again_only_when_it_has_changed(backend: FakeBackend):
    first = ask(backend, "GET", "/page/app.js")
    assert first.headers["cache-control"] == "no-cache"
    known = ask(backend, "GET", "/page/app.js", headers={"if-none-match": first.headers["etag"]})
    assert (known.status_code, known.content) == (304, b"")
    assert known.headers["etag"] == first.headers["etag"]
    other = ask(backend, "GET", "/page/app.js", headers={"if-none-match": 'W/"older"'})
    assert other.status_code == 200


def test_head_has_the_headers_only(backend: FakeBackend):
    reply = ask(backend, "HEAD", "/")
    assert (reply.status_code, reply.content) == (200, b"")


@pytest.mark.parametrize("path", PATHS)
def test_needs_neither_a_key_nor_a_model(path: str):
    assert ask(FakeBackend(ready=False), "GET", path, config={"api_key": "secret"}).status_code == 200


def test_opens_no_other_door():
    config = {"api_key": "secret"}
    assert ask(FakeBackend(), "POST", "/", config=config, json={"inputs": "hello"}).status_code == 401
    assert ask(FakeBackend(), "GET", "/v1/models", config=config).status_code == 401
    assert ask(FakeBackend(), "GET", "/page/../v1/models", config=config).status_code == 401


@pytest.mark.parametrize("path", ["/page/", "/page/index.html", "/page/nothing.js", "/page/../page.py"])
def test_serves_nothing_else(path: str, backend: FakeBackend):
    assert ask(backend, "GET", path).status_code == 404


@pytest.mark.parametrize("path", PATHS)
def test_names_no_other_host(path: str):
    hosts = set(re.findall(r"(?:https?:)?//(\w[\w.-]+\.\w+)", text_of(path)))
    assert hosts <= {"www.w3.org"}  # the name of SVG, which nobody fetches


@pytest.mark.parametrize("path", PATHS)
def test_has_nothing_that_its_policy_forbids(path: str):
    """Inline scripts and styles would not run; texts must never become markup."""
    text = text_of(path)
    assert not re.search(
        r"(inner|outer)HTML|insertAdjacentHTML|document\.write|\beval\(|new Function|srcdoc", text
    )
    if path == "/":
        assert not re.search(r"<style|\sstyle=|\son\w+=|<script(?![^>]*src=)", text)


@pytest.mark.parametrize("path", SCRIPTS)
def test_imports_are_served_and_fetched_ahead(path: str):
    """The browser must not learn of a module only when another one has come."""
    for name in re.findall(r'from "\./(\w+\.js)"', text_of(path)):
        assert f"/page/{name}" in page.FILES
        assert f'modulepreload" href="page/{name}"' in text_of("/")


def test_is_small():
    sent = sum(len(file.packed) for file in page.FILES.values())
    assert sent < MAX_SENT
    assert all(gzip.decompress(file.packed) == file.body for file in page.FILES.values())
    assert max(text_of(path).count("\n") for path in PATHS) < MAX_LINES
