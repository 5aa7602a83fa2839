"""Fields that only chats have: what the template gets, and tools; whole and in chunks."""

from __future__ import annotations

import json
from typing import Any

import pytest

from hex_llm.config import ServerConfig
from hex_llm.errors import ConfigError
from hex_llm.server.app import create_app
from hex_llm.server.openai.chat import RESERVED
from tests.server.asking import CHAT, COMPLETIONS, HELLO, ask, post, refusal, stream
from tests.server.fakes import BOS, FIRST_BYTE, FakeBackend, Speaker, byte_tokenizer
from tests.server.test_streaming import as_messages, joined

SHOWS_ALL = (
    "{{ messages | tojson }}|{{ tools | tojson }}|{{ documents | tojson }}|{{ add_generation_prompt }}|"
    "{{ reasoning_effort }}|{{ extra }}"
)
HERMES = "{{ tools | tojson }}{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<tool_call>"
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "of a place",
        "parameters": {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]},
    },
}
CLOCK = {"type": "function", "function": {"name": "clock"}}
TOOLS = [WEATHER, CLOCK]
ROME = '{"place": "Röm"}'
FORCED = f'[{{"name": "weather", "parameters": {ROME}}}]'
TWO_CALLS = (
    'Let me see. <tool_call>\n{"name": "weather", "arguments": {"place": "Röm"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>'
)


def asked_of(backend: FakeBackend) -> str:
    assert backend.tokenizer is not None
    return backend.tokenizer.decode(backend.asked[-1].prompt_ids)


def seen_by_template(change: dict[str, Any], **config: Any) -> list[Any]:
    backend = FakeBackend(byte_tokenizer(SHOWS_ALL))
    post(backend, CHAT, {**HELLO[CHAT], **change}, config=config)
    return asked_of(backend).split("|")


# ---- what the template gets


def test_messages_of_every_kind() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": [1, null]}'}}
    messages = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": "Q", "name": "Ann"},
        {"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": "Hm."},
        {"role": "tool", "content": [{"type": "text", "text": "42"}], "tool_call_id": "c1"},
        {"role": "assistant", "content": "A", "reasoning": "So.", "refusal": None, "annotations": []},
    ]
    seen = json.loads(seen_by_template({"messages": messages})[0])
    called = {**call, "function": {"name": "f", "arguments": {"a": [1, None]}}}
    assert seen == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Q", "name": "Ann"},
        {"role": "assistant", "content": "", "tool_calls": [called], "reasoning_content": "Hm."},
        {"role": "tool", "content": "42", "tool_call_id": "c1"},
        {"role": "assistant", "content": "A", "reasoning_content": "So.", "annotations": []},
    ]


def test_a_template_that_knows_developers() -> None:
    backend = FakeBackend(byte_tokenizer("{% if true %}{{ messages[0].role }}{% endif %}{# developer #}"))
    post(backend, CHAT, {"messages": [{"role": "developer", "content": "x"}]})
    assert asked_of(backend) == "developer"


def test_variables_of_the_template() -> None:
    documents = [{"title": "T", "text": "x"}]
    change = {
        "documents": documents,
        "add_generation_prompt": False,
        "reasoning_effort": "low",
        "chat_template_kwargs": {"extra": [1]},
    }
    _, tools, *others = seen_by_template(change)
    assert tools == "null"
    assert others == [json.dumps(documents), "False", "low", "[1]"]


def test_the_last_message_continued() -> None:
    backend = FakeBackend(byte_tokenizer())
    messages = [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "The"}]
    body = {"messages": messages, "continue_final_message": True, "add_generation_prompt": False}
    post(backend, CHAT, body)
    assert asked_of(backend) == "<user>Q<assistant>The"
    for more, begins in (({"echo": True}, "The"), ({}, "")):
        speaker = Speaker(" end")
        (choice,) = post(speaker, CHAT, {**body, **more})["choices"]
        assert choice["message"]["content"] == f"{begins} end"
        assert as_messages(joined(stream(speaker, CHAT, {**body, **more}))) == [choice]
    (choice,) = post(Speaker("end"), CHAT, {**HELLO[CHAT], "echo": True})["choices"]
    assert choice["message"]["content"] == "end"  # the last message is the user's


def test_special_tokens_before_the_template(backend: FakeBackend) -> None:
    post(backend, CHAT, {**HELLO[CHAT], "add_special_tokens": True})
    post(backend, CHAT, HELLO[CHAT])
    more, usual = (request.prompt_ids for request in backend.asked)
    assert more == [1, *usual]


def test_a_template_in_the_request() -> None:
    backend = FakeBackend(byte_tokenizer())
    body = {**HELLO[CHAT], "chat_template": "[{{ messages[0].content }}]"}
    assert refusal(ask(backend, "POST", CHAT, json=body))["param"] == "chat_template"
    trust = {"trust_request_chat_template": True}
    post(backend, CHAT, body, config=trust)
    assert asked_of(backend) == "[hello]"
    for template in ("{{ unclosed", "{{ ''.__class__ }}"):
        reply = ask(backend, "POST", CHAT, json={**body, "chat_template": template}, config=trust)
        assert refusal(reply)["param"] == "chat_template"


def test_fields_that_come_back(backend: FakeBackend) -> None:
    body = {**HELLO[CHAT], "metadata": {"a": "b"}, "request_id": "mine", "return_token_ids": True}
    reply = post(backend, CHAT, {**body, "user": "u", "service_tier": "auto", "store": False})
    assert (reply["id"], reply["metadata"]) == ("chatcmpl-mine", {"a": "b"})
    assert reply["prompt_token_ids"] == backend.asked[-1].prompt_ids
    assert len(reply["choices"][0]["token_ids"]) == reply["usage"]["completion_tokens"]
    first, *_ = stream(backend, CHAT, body)
    assert (first["id"], first["metadata"]) == ("chatcmpl-mine", {"a": "b"})


def message(**fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "assistant", **fields}]}


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"messages": [{"role": "user", "content": "a", "reasoning_content": "b"}]}, "messages"),
        ({"messages": [{"role": "tool", "tool_call_id": "x"}]}, "messages"),
        (message(tool_calls=[{"id": "x", "function": {"name": "f", "arguments": 1}}]), "messages"),
        (message(tool_calls=[{"id": "x", "type": "custom", "function": {"name": "f"}}]), "messages"),
        ({"continue_final_message": True}, "continue_final_message"),
        ({"reasoning_effort": "huge"}, "reasoning_effort"),
        ({"documents": ["a"]}, "documents"),
        *(({"chat_template_kwargs": {name: []}}, "chat_template_kwargs") for name in RESERVED),
        ({"chat_template_kwargs": []}, "chat_template_kwargs"),
        ({"metadata": {"a": 1}}, "metadata"),
        ({"store": True}, "store"),
        ({"service_tier": "flex"}, "service_tier"),
        ({"suffix": "x"}, "suffix"),
        ({"mm_processor_kwargs": {"a": 1}}, "mm_processor_kwargs"),
        ({"truncation_side": "middle"}, "truncation_side"),
        ({"thinking_token_budget": 5}, "thinking_token_budget"),
        ({"kv_transfer_params": {"a": 1}}, "kv_transfer_params"),
        ({"modalities": ["audio"]}, "modalities"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"structured_outputs": {"regex": "a", "whitespace_pattern": "b"}}, "structured_outputs"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": "sometimes"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "allowed_tools"}}, "tool_choice"),
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"tools": [CLOCK, CLOCK]}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": "auto"}}]}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": "a", "parameters": "x"}}]}, "tools"),
    ],
)
def test_chats_that_are_refused(change: dict[str, Any], param: str) -> None:
    backend = FakeBackend(byte_tokenizer(HERMES))
    error = refusal(ask(backend, "POST", CHAT, json={**HELLO[CHAT], **change}))
    assert error["param"] == param
    assert param in error["message"]
    assert not backend.asked


# ---- tools


def speaker(text: str, template: str = HERMES) -> Speaker:
    return Speaker(text, byte_tokenizer(template))


def both_ways(backend: FakeBackend, body: dict[str, Any], **config: Any) -> dict[str, Any]:
    """The one choice of a reply, which must be the same when it is put together from chunks."""
    body = {**HELLO[CHAT], "max_tokens": 1000, **body}
    (whole,) = post(backend, CHAT, body, config=config)["choices"]
    (grown,) = as_messages(joined(stream(backend, CHAT, body, config=config)))
    calls: dict[int, dict[str, Any]] = {}
    for part in grown["message"].pop("tool_calls", ()):
        call = calls.setdefault(
            part["index"], {"id": "", "type": "", "function": {"name": "", "arguments": ""}}
        )
        for name in ("id", "type"):
            call[name] += part.get(name, "")
        for name, text in part["function"].items():
            call["function"][name] += text
    spoken = {**grown["message"], "content": grown["message"]["content"] or (None if calls else "")}
    grown["message"] = {**spoken, **({"tool_calls": list(calls.values())} if calls else {})}
    told = whole["message"].get("tool_calls", [])
    assert len({call["id"] for call in told}) == len(told)
    for call in (*told, *calls.values()):
        assert call["type"] == "function"
        assert call.pop("id")  # each answer has its own
    assert grown == whole
    return whole


def calls_in(choice: dict[str, Any]) -> list[tuple[str, Any]]:
    functions = [call["function"] for call in choice["message"].get("tool_calls", ())]
    return [(one["name"], json.loads(one["arguments"])) for one in functions]


def test_a_model_that_calls_tools() -> None:
    backend = speaker(TWO_CALLS)
    choice = both_ways(backend, {"tools": TOOLS})
    assert calls_in(choice) == [("weather", {"place": "Röm"}), ("clock", {})]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"].strip() == "Let me see."
    assert asked_of(backend).startswith(json.dumps(TOOLS, ensure_ascii=False))
    params = backend.asked[-1].params
    assert (params.structured_outputs, params.skip_special_tokens) == (None, False)


def test_calls_come_one_by_one() -> None:
    chunks = stream(speaker(TWO_CALLS), CHAT, {**HELLO[CHAT], "tools": TOOLS, "max_tokens": 1000})
    parts = [call for chunk in chunks for call in chunk["choices"][0]["delta"].get("tool_calls", ())]
    assert [(part["index"], part["function"]["name"], part["function"]["arguments"]) for part in parts] == [
        (0, "weather", ROME),
        (1, "clock", "{}"),
    ]
    assert [
        chunk["choices"][0]["finish_reason"] for chunk in chunks if chunk["choices"][0]["finish_reason"]
    ] == ["tool_calls"]


def test_a_model_that_does_not_call() -> None:
    choice = both_ways(speaker("No <tool> needed."), {"tools": TOOLS, "tool_choice": "auto"})
    assert choice["message"] == {"role": "assistant", "content": "No <tool> needed."}
    assert choice["finish_reason"] == "stop"


def test_one_call_at_most() -> None:
    choice = both_ways(speaker(TWO_CALLS), {"tools": TOOLS, "parallel_tool_calls": False})
    assert calls_in(choice) == [("weather", {"place": "Röm"})]


def test_no_calls_wanted() -> None:
    backend = speaker(TWO_CALLS)
    choice = both_ways(backend, {"tools": TOOLS, "tool_choice": "none"})
    assert choice["message"]["content"] == TWO_CALLS
    assert choice["finish_reason"] == "stop"
    assert asked_of(backend).startswith("null")
    assert backend.asked[-1].params.skip_special_tokens


def test_a_call_that_is_named() -> None:
    backend = speaker(ROME, SHOWS_ALL)  # no parser is needed
    named = {"type": "function", "function": {"name": "weather"}}
    choice = both_ways(backend, {"tools": TOOLS, "tool_choice": named})
    assert calls_in(choice) == [("weather", {"place": "Röm"})]
    assert (choice["message"]["content"], choice["finish_reason"]) == (None, "tool_calls")
    wanted = backend.asked[-1].params.structured_outputs
    assert wanted is not None
    assert json.loads(wanted.json or "") == WEATHER["function"]["parameters"]  # type: ignore[index]


@pytest.mark.parametrize("parallel", [True, False])
def test_calls_that_are_required(parallel: bool) -> None:
    backend = speaker(
        f'[{{"name": "weather", "parameters": {ROME}}}, {{"name": "clock", "parameters": {{}}}}]'
    )
    choice = both_ways(backend, {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": parallel})
    assert calls_in(choice) == [("weather", {"place": "Röm"}), ("clock", {})][: 1 + parallel]
    assert choice["finish_reason"] == "tool_calls"
    wanted = backend.asked[-1].params.structured_outputs
    assert wanted is not None
    assert json.loads(wanted.json or "").get("maxItems") == (None if parallel else 1)


@pytest.mark.parametrize("text", [TWO_CALLS, FORCED, ROME])
def test_a_call_that_is_cut_off(text: str) -> None:
    """Is none, whole as in chunks; one that is forced is no text either."""
    named = {"type": "function", "function": {"name": "weather"}}
    choices = {TWO_CALLS: "auto", FORCED: "required", ROME: named}
    body = {"tools": TOOLS, "tool_choice": choices[text], "max_tokens": text.index("Röm") + 2}
    choice = both_ways(speaker(text), body)
    assert choice["finish_reason"] == "length"
    assert calls_in(choice) == []
    said = text[: text.index("Röm")] if text == TWO_CALLS else ""
    assert choice["message"]["content"].removesuffix("R\N{REPLACEMENT CHARACTER}") == said


@pytest.mark.parametrize("structure", [{"response_format": {"type": "json_object"}}, {"guided_regex": "a"}])
def test_tools_and_a_structure(structure: dict[str, Any]) -> None:
    """One that is forced comes before it; a model that decides itself keeps to the structure."""
    choice = both_ways(speaker(FORCED), {"tools": TOOLS, "tool_choice": "required", **structure})
    assert calls_in(choice) == [("weather", {"place": "Röm"})]
    backend = speaker(TWO_CALLS)
    choice = both_ways(backend, {"tools": TOOLS, **structure})
    assert choice["message"]["content"] == TWO_CALLS
    assert backend.asked[-1].params.structured_outputs is not None


def test_what_clients_replay_goes_to_the_template() -> None:
    own = {"role": "wizard", "content": "a", "mood": "grim", "parts": {"b": [1]}}
    replayed = {"role": "assistant", "content": None, "refusal": None, "audio": None, "tool_calls": None}
    part = {"type": "text", "text": "c", "cache_control": {"type": "ephemeral"}}
    messages = [own, replayed, {"role": "user", "content": [part]}]
    assert json.loads(seen_by_template({"messages": messages})[0]) == [
        own, {"role": "assistant", "content": ""}, {"role": "user", "content": "c"}
    ]  # fmt: skip
    for broken in ("{", "[1]", "1", "[" * 100_000):  # which a conversation cannot get rid of any more
        call = {"id": "x", "type": "function", "function": {"name": "f", "arguments": broken}}
        (seen,) = json.loads(seen_by_template(message(tool_calls=[call]))[0])
        assert seen["tool_calls"][0]["function"]["arguments"] == {}
    asks = FakeBackend(byte_tokenizer("{% if messages[0].content is none %}none{% endif %}"))
    post(asks, CHAT, {"messages": [replayed]})
    assert asked_of(asks) == "none"
    # As Qwen3's: it asks for another field alone.
    template = "{% if messages[0].reasoning_content is not none %}{{ 'x' in messages[0].content }}{% endif %}"
    asks_not = FakeBackend(byte_tokenizer(template))
    post(asks_not, CHAT, {"messages": [replayed]})
    assert asked_of(asks_not) == "False"


def test_fields_are_null_rather_than_missing(backend: FakeBackend) -> None:
    reply = ask(backend, "POST", CHAT, json=HELLO[CHAT]).json()
    assert {name for name, value in reply.items() if value is None} == {
        "service_tier", "kv_transfer_params", "prompt_logprobs", "prompt_token_ids"
    }  # fmt: skip
    (choice,) = reply["choices"]
    assert {name for name, value in choice.items() if value is None} == {
        "logprobs", "stop_reason", "token_ids"
    }  # fmt: skip
    assert (choice["message"]["reasoning"], choice["message"]["refusal"]) == (None, None)
    (choice,) = ask(backend, "POST", COMPLETIONS, json=HELLO[COMPLETIONS]).json()["choices"]
    assert {"logprobs", "token_ids", "prompt_logprobs", "prompt_token_ids"} <= choice.keys()


def test_logprobs_written_as_a_text(backend: FakeBackend) -> None:
    for text, wanted in (("true", True), ("false", False)):
        (choice,) = post(backend, CHAT, {**HELLO[CHAT], "logprobs": text})["choices"]
        assert (choice["logprobs"] is not None) == wanted
    assert refusal(ask(backend, "POST", CHAT, json={**HELLO[CHAT], "logprobs": "1"}))["param"] == "logprobs"


def test_choices_call_by_themselves() -> None:
    body = {**HELLO[CHAT], "tools": TOOLS, "n": 2, "max_tokens": 1000}
    choices = post(speaker(TWO_CALLS), CHAT, body)["choices"]
    assert [calls_in(choice) for choice in choices] == [[("weather", {"place": "Röm"}), ("clock", {})]] * 2


def test_the_format_of_calls() -> None:
    body = {**HELLO[CHAT], "tools": TOOLS, "max_tokens": 1000}
    unknown = speaker(TWO_CALLS, SHOWS_ALL)
    assert "tool_call_parser" in refusal(ask(unknown, "POST", CHAT, json=body))["message"]
    choice = post(unknown, CHAT, body, config={"tool_call_parser": "hermes"})["choices"][0]
    assert len(calls_in(choice)) == 2
    for config in ({"tool_call_parser": "none"}, {"enable_auto_tool_choice": False}):
        refusal(ask(speaker(TWO_CALLS), "POST", CHAT, json=body, config=config))
    for config in ({"tool_call_parser": "nonsense"}, {"reasoning_parser": "nonsense"}):
        with pytest.raises(ConfigError, match="nonsense"):
            create_app(unknown, ServerConfig(**config))


TAGGED = "{{ messages[0].content }}{# <function= #}"


def test_arguments_between_tags_have_the_types_of_the_schema() -> None:
    said = "<function=weather><parameter=place>12</parameter><parameter=days>3</parameter></function>"
    choice = both_ways(speaker(f"<tool_call>{said}</tool_call>", TAGGED), {"tools": TOOLS})
    assert calls_in(choice) == [("weather", {"place": "12", "days": 3})]


def test_the_prompt_that_another_server_has_read(backend: FakeBackend) -> None:
    ids = [BOS, FIRST_BYTE + 65, FIRST_BYTE + 66]
    body = {**HELLO[CHAT], "kv_transfer_params": {"prompt_token_ids": ids}, "return_token_ids": True}
    assert post(backend, CHAT, body)["prompt_token_ids"] == ids
    first, *_ = stream(backend, CHAT, body)
    assert first["prompt_token_ids"] == ids
    body["kv_transfer_params"] = {"do_remote_prefill": True}
    assert refusal(ask(backend, "POST", CHAT, json=body))["param"] == "kv_transfer_params"
