"""The playground in a real Chromium against a real server: what people see and press."""

from __future__ import annotations

import ast
import json
import shlex
import time
from collections.abc import Callable
from typing import Any

import pytest

from hex_llm.config import EngineConfig
from hex_llm.weights.adapter_source import AdapterNames
from tests.browser.conftest import PHONE, Open, Serve
from tests.browser.scripted import ScriptedBackend
from tests.server.live import live

Keep = Callable[[Any, str], None]
PHONE_CONTEXT = {"viewport": PHONE, "has_touch": True, "is_mobile": True, "device_scale_factor": 2}


def send(page: Any, text: str = "Hello there") -> None:
    page.fill("#draft", text)
    page.press("#draft", "Enter")


def until_idle(page: Any) -> None:
    page.wait_for_selector("#send[aria-label=Send]")


def set_knob(page: Any, name: str, value: str) -> None:
    page.eval_on_selector(f"[name={name}]", "input => input.closest('details').open = true")
    page.fill(f"[name={name}]", value)


def body_of(page: Any) -> str:
    return page.inner_text(".answer .body")


def eventually(check: Callable[[], bool]) -> None:
    limit = time.monotonic() + 5
    while not check():
        assert time.monotonic() < limit
        time.sleep(0.02)


# ---- asking


def test_shows_an_answer_while_it_grows(open_page: Open, serve: Serve, keep: Keep):
    backend = ScriptedBackend("The beginning, and then the end.", pause_at=14)
    url = serve(backend)
    page = open_page(url)
    send(page)
    eventually(lambda: body_of(page) == "The beginning,")
    assert page.get_attribute("#send", "aria-label") == "Stop"
    assert page.get_attribute(".answer", "aria-busy") == "true"
    keep(page, "growing")
    backend.go.set()
    until_idle(page)
    assert body_of(page) == "The beginning, and then the end."
    told = page.inner_text(".answer .meta")
    assert "tokens/s" in told
    assert "first token after" in told
    assert "33 tokens" in told  # with the end token


def test_an_adapter_can_be_chosen(open_page: Open, backend: ScriptedBackend, url: str):
    backend.adapters = AdapterNames(EngineConfig(enable_lora=True, lora_modules="sql=gs://bucket/sql"))
    page = open_page(url)
    for name, adapter in (("sql", ("sql", "gs://bucket/sql")), ("", None)):
        set_knob(page, "dynamic_lora", name)
        send(page)
        until_idle(page)
        assert backend.asked[-1].adapter == adapter


def test_two_adapters_answer_side_by_side(open_page: Open, backend: ScriptedBackend, url: str, keep: Keep):
    backend.adapters = AdapterNames(EngineConfig(enable_lora=True, lora_modules="sql=gs://bucket/sql"))
    backend.text = "The same words of both."
    page = open_page(url)
    set_knob(page, "dynamic_lora", "sql")
    set_knob(page, "compare_lora", "none")
    send(page)
    until_idle(page)
    assert {one.adapter for one in backend.asked} == {("sql", "gs://bucket/sql"), None}
    assert page.locator(".pair .name").all_inner_texts() == ["sql", "no adapter"]
    assert page.locator(".pair .body").all_inner_texts() == [backend.text] * 2
    boxes = [one.bounding_box() for one in page.locator(".pair .answer").all()]
    assert boxes[0]["y"] == boxes[1]["y"]
    assert boxes[0]["x"] < boxes[1]["x"]
    keep(page, "side by side")
    page.reload()
    assert page.locator(".pair .body").count() == 2
    set_knob(page, "compare_lora", "")
    send(page)
    until_idle(page)
    assert len(backend.asked) == 3
    assert page.locator(".answer").count() == 3


@pytest.mark.parametrize("way", ["Escape", "button"])
def test_stops(way: str, open_page: Open, serve: Serve):
    backend = ScriptedBackend(pause_at=14, text="The beginning, and then the end.")
    url = serve(backend)
    page = open_page(url)
    send(page)
    eventually(lambda: body_of(page) == "The beginning,")
    if way == "Escape":
        page.keyboard.press("Escape")
    else:
        page.click("#send")
    until_idle(page)
    eventually(lambda: backend.num_cancelled == 1)
    assert body_of(page) == "The beginning,"
    assert "stopped" in page.inner_text(".answer .meta")
    assert not page.is_visible(".answer .error")


def test_sends_the_conversation(open_page: Open, url: str, backend: ScriptedBackend):
    backend.text = "Yes."
    page = open_page(url)
    set_knob(page, "system", "Be brief.")
    send(page, "first")
    until_idle(page)
    send(page, "second")
    until_idle(page)
    assert backend.prompt() == "<system>Be brief.<user>first<assistant>Yes.<user>second<assistant>"


def test_retries_and_edits(open_page: Open, url: str, backend: ScriptedBackend):
    page = open_page(url)
    send(page, "first")
    until_idle(page)
    page.click("[aria-label=Retry]")
    until_idle(page)
    assert backend.prompt(0) == backend.prompt(1) == "<user>first<assistant>"
    page.hover(".user")
    page.click("[aria-label='Edit and send again']")
    page.fill(".editor textarea", "better")
    page.press(".editor textarea", "Enter")
    until_idle(page)
    assert backend.prompt() == "<user>better<assistant>"
    assert page.locator(".turn").count() == 2


def test_keys(open_page: Open, url: str, backend: ScriptedBackend):
    page = open_page(url)
    page.focus("#draft")
    page.keyboard.type("one")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("two")
    assert not backend.asked
    page.keyboard.press("Enter")
    until_idle(page)
    assert backend.prompt() == "<user>one\ntwo<assistant>"
    page.keyboard.press("Control+k")
    assert page.locator(".turn").count() == 0
    assert page.evaluate("document.activeElement.id") == "draft"
    page.keyboard.press("Enter")  # nothing to send
    assert len(backend.asked) == 1


def test_raw_prompts_go_as_they_are(open_page: Open, url: str, backend: ScriptedBackend, keep: Keep):
    page = open_page(url)
    page.click("text=Raw prompt")
    backend.text = " **upon** a time"
    send(page, "Once")
    until_idle(page)
    assert backend.prompt() == "Once"
    assert page.inner_text(".answer .body").strip() == "**upon** a time"
    send(page, "Twice")
    until_idle(page)
    assert backend.prompt() == "Twice"
    keep(page, "raw")
    page.click("text=Chat")
    assert page.locator(".turn").count() == 0


def test_survives_a_reload(open_page: Open, url: str):
    page = open_page(url)
    set_knob(page, "temperature", "0.3")
    send(page, "first")
    until_idle(page)
    before = body_of(page)
    page.fill("#draft", "not sent yet")
    page.reload()
    assert body_of(page) == before
    assert page.input_value("#draft") == "not sent yet"
    assert page.input_value("[name=temperature]") == "0.3"


# ---- what is shown


def test_token_probabilities(open_page: Open, url: str, backend: ScriptedBackend, keep: Keep):
    backend.text = "Größe 🙂 matters: one token for each byte, tinted by how likely it was."
    page = open_page(url)
    page.check("[name=logprobs]")
    send(page)
    until_idle(page)
    assert backend.asked[0].params.logprobs == 5
    shown = page.evaluate("document.querySelector('.answer .body').textContent")
    assert shown == backend.text + "</s>"  # the end is a token, too
    tints = page.eval_on_selector_all(
        ".token", "all => all.map(one => getComputedStyle(one).backgroundColor)"
    )
    assert len(set(tints[:10])) == 10
    page.hover(".token:nth-child(20)")
    assert page.locator("#tip div").count() == 5
    assert page.locator("#tip .chosen").count() == 1
    keep(page, "tokens")
    page.uncheck("[name=logprobs]")
    assert page.locator(".token").count() == 0
    assert body_of(page) == backend.text


def test_token_probabilities_of_raw_prompts(open_page: Open, url: str, backend: ScriptedBackend):
    backend.text = "upon a time"
    page = open_page(url)
    page.click("text=Raw prompt")
    page.check("[name=logprobs]")
    send(page, "Once")
    until_idle(page)
    assert page.locator(".token").count() >= len(backend.text)
    page.hover(".token:nth-child(3)")
    assert page.locator("#tip div").count() == 5


def test_markdown(open_page: Open, url: str, keep: Keep):
    page = open_page(url)
    send(page, "Explain how a KV cache makes decoding fast.")
    until_idle(page)
    answer = page.locator(".answer .body")
    assert answer.locator("h4").inner_text() == "How a KV cache helps"
    assert answer.locator("ol > li").count() == 2
    assert answer.locator("ol > li > ul > li").count() == 2
    assert answer.locator("tbody tr").count() == 2
    assert answer.locator("td.right").first.inner_text() == "512"
    assert answer.locator("p code").first.inner_text() == "O(n)"
    assert answer.locator("pre code").inner_text().startswith("def decode(cache, token):\n    cache")
    assert answer.locator("blockquote").inner_text() == "A cache trades memory for time."
    link = answer.locator("a")
    assert link.get_attribute("rel") == "noopener noreferrer"
    assert link.get_attribute("href") == "https://example.org/paper"
    keep(page, "chat")


def test_what_a_model_says_is_never_markup(open_page: Open, url: str, backend: ScriptedBackend):
    backend.text = (
        '<img src=x onerror="alert(1)"> <script>alert(2)</script> **<b>bold</b>** [a](javascript:alert(3)) '
        "![p](https://example.org/p.png) [d](data:text/html,x)\n\n```<i>\n<u>code</u>\n```\n\n"
        "| <s> |\n|---|\n| <s>x</s> |\n"
    )
    page = open_page(url)
    page.on("dialog", lambda _: pytest.fail("a script ran"))
    send(page, "<b>me too</b>")
    until_idle(page)
    assert page.locator("#thread :is(img, script, b, i, u, s, iframe)").count() == 0
    links = page.eval_on_selector_all("#thread a", "all => all.map(one => one.href)")
    assert links == ["https://example.org/p.png"]
    assert page.inner_text(".bubble") == "<b>me too</b>"


def test_broken_markdown_loses_no_text(open_page: Open, url: str, backend: ScriptedBackend):
    backend.text = "**open *and `code\n- \n1.\n|a\n> \n>> deep\n```\nnever closed"
    page = open_page(url)
    send(page)
    until_idle(page)
    shown = body_of(page)
    for word in ("**open", "`code", "|a", "deep", "never closed"):
        assert word in shown


def test_live_numbers(open_page: Open, url: str):
    page = open_page(url)
    page.wait_for_selector("#status.ready")
    assert page.inner_text("#model") == "fake"
    assert page.locator(".tile").count() == 4
    assert "4,096 tokens" in page.inner_text("#stats")
    page.wait_for_selector(".tile .line[d]", state="attached")


def test_snippets(open_page: Open, url: str, backend: ScriptedBackend, keep: Keep):
    text = 'it\'s "quoted" \\ and\n🙂 long'
    page = open_page(url)
    page.wait_for_selector("#status.ready")
    set_knob(page, "temperature", "0.7")
    set_knob(page, "top_k", "40")
    set_knob(page, "key", "very-secret")
    page.fill("#draft", text)
    page.click("#snippets-open")
    command = shlex.split(page.inner_text("#snippet"), posix=True)
    assert command[:3] == ["curl", "-N", f"{url}/v1/chat/completions"]
    body = json.loads(command[-1])
    assert body["messages"] == [{"role": "user", "content": text}]
    assert (body["model"], body["temperature"], body["top_k"], body["stream"]) == ("fake", 0.7, 40, True)
    page.click("dialog >> text=openai")
    given = keywords(page.inner_text("#snippet"), "create")
    assert given["messages"] == body["messages"]
    assert given["extra_body"] == {"top_k": 40}
    keep(page, "snippets")
    page.click("dialog >> text=Vertex")
    (instance,) = keywords(page.inner_text("#snippet"), "predict")["instances"]
    assert instance["messages"] == body["messages"]
    assert instance["@requestFormat"] == "chatCompletions"
    assert "very-secret" not in page.inner_text("dialog")
    page.keyboard.press("Escape")
    assert not page.is_visible("dialog")


def keywords(code: str, function: str) -> dict[str, Any]:
    """The arguments that Python code gives to a method."""
    calls = [node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Call)]
    (call,) = (c for c in calls if isinstance(c.func, ast.Attribute) and c.func.attr == function)
    return {str(each.arg): ast.literal_eval(each.value) for each in call.keywords}


# ---- trouble


def test_waits_for_the_model(open_page: Open, serve: Serve, keep: Keep):
    backend = ScriptedBackend("Now.", ready=False)
    url = serve(backend)
    page = open_page(url, may_refuse=True)
    page.wait_for_selector("#status.loading")
    assert "being loaded" in page.inner_text("#status")
    send(page)
    page.wait_for_selector(".meta:has-text('Waiting: ')")
    keep(page, "loading")
    backend.ready = True
    until_idle(page)
    assert body_of(page) == "Now."
    page.wait_for_selector("#status.ready")


def test_asks_for_the_key(open_page: Open, serve: Serve, keep: Keep):
    url = serve(ScriptedBackend("Welcome."), api_key="secret")
    page = open_page(url, may_refuse=True)
    page.wait_for_selector("#status.locked")
    send(page)
    page.wait_for_selector(".error:has-text('API key')")
    assert page.evaluate("document.activeElement.name") == "key"
    keep(page, "locked")
    page.fill("[name=key]", "secret")
    page.click("[aria-label=Retry]")
    until_idle(page)
    assert body_of(page) == "Welcome."
    page.wait_for_selector("#status.ready")
    assert page.evaluate("localStorage.length") == 0


def test_tells_what_was_refused(open_page: Open, url: str):
    page = open_page(url, may_refuse=True)
    set_knob(page, "temperature", "-3")
    send(page)
    page.wait_for_selector(".error:has-text('temperature')")
    page.fill("[name=temperature]", "1")
    page.click("[aria-label=Retry]")
    until_idle(page)
    assert not page.is_visible(".answer .error")


def test_tells_that_the_server_is_gone(open_page: Open):
    with live(ScriptedBackend()) as url:
        page = open_page(url, may_refuse=True)
        page.wait_for_selector("#status.ready")
    send(page)
    page.wait_for_selector(".error:has-text('cannot be reached')")
    page.wait_for_selector("#status.away")


# ---- looks


def ground(page: Any) -> str:
    return page.evaluate("getComputedStyle(document.body).backgroundColor")


def test_dark_and_light(open_page: Open, url: str, keep: Keep):
    light, dark = open_page(url), open_page(url, color_scheme="dark")
    assert ground(light) != ground(dark)
    send(dark, "Explain how a KV cache makes decoding fast.")
    until_idle(dark)
    keep(dark, "dark")
    keep(light, "empty")
    light.click("#theme")
    assert ground(light) == ground(dark)
    light.reload()
    assert ground(light) == ground(dark)


def test_phone(open_page: Open, url: str, keep: Keep):
    page = open_page(url, **PHONE_CONTEXT)
    page.wait_for_selector("#status.ready")
    keep(page, "phone_empty")
    send(page, "Explain how a KV cache makes decoding fast.")
    until_idle(page)
    keep(page, "phone")
    widths = "[document.documentElement, document.querySelector('#scroll')].map(one => one.scrollWidth)"
    assert page.evaluate(widths) == [PHONE["width"]] * 2
    assert not page.is_visible("#panel")
    page.click("#panel-toggle")
    right = "document.querySelector('#panel').getBoundingClientRect().right"
    eventually(lambda: page.evaluate(right) <= PHONE["width"])
    assert page.evaluate(widths) == [PHONE["width"]] * 2
    keep(page, "phone_drawer")
    page.click("#panel-close")
    page.wait_for_selector("#panel", state="hidden")


def test_everything_pressable_has_a_name(open_page: Open, url: str):
    page = open_page(url)
    send(page)
    until_idle(page)
    nameless = """all => all.filter((one) =>
        !(one.getAttribute('aria-label') || one.textContent.trim() || one.labels?.length)
    ).map((one) => one.outerHTML)"""
    assert page.eval_on_selector_all("button, input, select, textarea", nameless) == []
