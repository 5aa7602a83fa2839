"""The playground's settings: each reaches the engine, or is told to be wrong."""

from __future__ import annotations

from typing import Any

from tests.browser.conftest import Open
from tests.browser.scripted import ScriptedBackend
from tests.browser.test_playground import body_of, send, set_knob, until_idle

SETTINGS: dict[str, tuple[str, Any]] = {
    "temperature": ("0.7", 0.7),
    "top_p": ("0.9", 0.9),
    "top_k": ("40", 40),
    "min_p": ("0.05", 0.05),
    "typical_p": ("0.95", 0.95),
    "seed": ("-7", -7),
    "max_tokens": ("9", 9),
    "min_tokens": ("2", 2),
    "stop": ("END\n###", ("END", "###")),
    "stop_token_ids": ("50, 51", (50, 51)),
    "presence_penalty": ("0.5", 0.5),
    "frequency_penalty": ("-0.5", -0.5),
    "repetition_penalty": ("1.1", 1.1),
    "logit_bias": ("10: -5\n11: 2.5", {10: -5.0, 11: 2.5}),
    "bad_words": ("ugh", ("ugh",)),
    "n": ("2", 2),
    "truncate_prompt_tokens": ("100", 100),
}
SWITCHES = {"include_stop_str_in_output": True, "ignore_eos": True, "skip_special_tokens": False}


def test_every_setting_reaches_the_engine(open_page: Open, url: str, backend: ScriptedBackend):
    page = open_page(url)
    for name, (text, _) in SETTINGS.items():
        set_knob(page, name, text)
    for name in SWITCHES:
        page.eval_on_selector(f"[name={name}]", "input => input.closest('details').open = true")
        page.check(f"[name={name}]")
    set_knob(page, "priority", "3")
    set_knob(page, "extra", '{"user": "me"}')
    send(page)
    until_idle(page)
    assert page.inner_text(".answer .error") == ""
    asked = backend.asked[0]
    for name, (_, value) in SETTINGS.items():
        assert getattr(asked.params, name) == value, name
    for name, value in SWITCHES.items():
        assert getattr(asked.params, name) is value, name
    assert asked.priority == 3
    page.click("#reset")
    send(page)
    until_idle(page)
    assert backend.asked[1].params.temperature == 1
    assert backend.asked[1].params.n == 1


def test_what_is_not_set_is_shown_as_the_server_has_it(open_page: Open, url: str, backend: ScriptedBackend):
    backend.sampling_defaults = {"temperature": 0.2, "max_tokens": 50}
    page = open_page(url)
    page.wait_for_selector("[name=temperature][placeholder='0.2']")
    assert page.input_value("#knob-temperature ~ input[type=range]") == "0.2"
    assert page.get_attribute("[name=max_tokens]", "placeholder") == "50"
    assert page.get_attribute("[name=top_p]", "placeholder") == "1"


def test_formats(open_page: Open, url: str, backend: ScriptedBackend):
    page = open_page(url)
    page.eval_on_selector("[name=format]", "input => input.closest('details').open = true")
    for kind, text, field in (
        ("json_schema", '{"type": "object"}', "json"),
        ("regex", "(yes|no)", "regex"),
        ("choice", "yes\nno", "choice"),
        ("grammar", 'start: "yes"', "grammar"),
    ):
        page.select_option("[name=format]", kind)
        page.fill("[name=format_text]", text)
        send(page)
        until_idle(page)
        wanted = backend.asked[-1].params.structured_outputs
        assert wanted is not None
        assert getattr(wanted, field) == (tuple(text.split("\n")) if field == "choice" else text)
    page.select_option("[name=format]", "json_object")
    send(page)
    until_idle(page)
    assert backend.asked[-1].params.structured_outputs.json_object  # type: ignore[union-attr]


def test_a_setting_that_cannot_be_read_is_told_and_nothing_is_sent(
    open_page: Open, url: str, backend: ScriptedBackend
):
    page = open_page(url)
    set_knob(page, "extra", "{no")
    send(page, "keep me")
    assert "Other fields" in page.inner_text("#notice")
    assert page.input_value("#draft") == "keep me"
    assert not backend.asked


def test_several_answers_are_tabs(open_page: Open, url: str):
    page = open_page(url)
    set_knob(page, "n", "3")
    send(page)
    until_idle(page)
    assert page.locator("[role=tab]").count() == 3
    page.click("text=Answer 3")
    assert page.get_attribute("[role=tab]:nth-child(3)", "aria-selected") == "true"
    assert "How a KV cache helps" in body_of(page)
