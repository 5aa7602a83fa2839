"""A real Chromium, driven by playwright. Without one the tests are skipped with a warning; in CI they fail.

Screenshots are kept under build/playground, to be looked at.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.browser.scripted import ScriptedBackend
from tests.server.fakes import FakeBackend
from tests.server.live import live

SCREENSHOTS = Path(__file__).parents[2] / "build" / "playground"
DESKTOP = {"width": 1280, "height": 800}
PHONE = {"width": 375, "height": 740}
REFUSED = "Failed to load resource"  # the browser's own words about a status that is no success

Open = Callable[..., Any]
Serve = Callable[..., str]


@pytest.fixture(scope="package")  # not longer: while playwright runs, no other test can have an event loop
def chromium() -> Iterator[Any]:
    path = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if path is None or importlib.util.find_spec("playwright") is None:
        missing = "Chromium" if path is None else "the package playwright"
        cannot_run(f"the playground was NOT tested in a browser: {missing} is not installed")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path)
        yield browser
        browser.close()


def cannot_run(why: str) -> None:
    if os.environ.get("CI") == "true":
        pytest.fail(why)
    warnings.warn(why, stacklevel=2)
    pytest.skip(why)


@pytest.fixture
def servers() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def serve(servers: ExitStack) -> Serve:
    """Starts a server, whose address it gives."""

    def started(backend: FakeBackend, **config: Any) -> str:
        return servers.enter_context(live(backend, **config))

    return started


@pytest.fixture
def backend() -> ScriptedBackend:
    return ScriptedBackend()


@pytest.fixture
def url(backend: ScriptedBackend, serve: Serve) -> str:
    return serve(backend)


@pytest.fixture
def open_page(chromium: Any, servers: ExitStack) -> Iterator[Open]:  # pages end before their servers
    """Opens a page in a browser of its own. It may log no error, except of refusals where `may_refuse`."""
    contexts = []
    problems: list[str] = []

    def opened(url: str, *, may_refuse: bool = False, **context: Any) -> Any:
        contexts.append(chromium.new_context(**{"viewport": DESKTOP, "color_scheme": "light", **context}))
        page = contexts[-1].new_page()
        page.set_default_timeout(10_000)

        def logged(message: Any) -> None:
            if message.type == "error" and not (may_refuse and REFUSED in message.text):
                problems.append(message.text)

        page.on("console", logged)
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.goto(url)
        return page

    yield opened
    for context in contexts:
        context.close()
    assert not problems


@pytest.fixture
def keep() -> Callable[..., None]:
    """Keeps a screenshot of a page under a name."""

    def kept(page: Any, name: str) -> None:
        SCREENSHOTS.mkdir(parents=True, exist_ok=True)
        page.screenshot(path=SCREENSHOTS / f"{name}.png")

    return kept
