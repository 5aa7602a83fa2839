"""What vLLM's clients ask for beyond OpenAI's: beams, batches, flags of the server, a model's defaults."""

from __future__ import annotations

import asyncio
import json
import threading
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import uvicorn

from hex_llm.config import EngineConfig, ServerConfig
from hex_llm.errors import ConfigError, ModelError
from hex_llm.frontend.client import sampling_defaults
from hex_llm.launch import local
from hex_llm.launch.connection import connection
from hex_llm.server.app import create_app
from tests.server.asking import CHAT, COMPLETIONS, HELLO, ask, post, refusal, stream
from tests.server.fakes import FIRST_BYTE, FakeBackend, byte_tokenizer
from tests.server.live import live

BATCH = "/v1/chat/completions/batch"
BEAMS = {"use_beam_search": True, "n": 2, "max_tokens": 3}


def told(name: str, **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": name}], **more}


# ---- batches


def test_each_conversation_has_a_choice(backend: FakeBackend) -> None:
    texts = ["ab", "cde"]
    body = {"messages": [told(text)["messages"] for text in texts], "return_token_ids": True}
    reply = post(backend, BATCH, body)
    assert [choice["index"] for choice in reply["choices"]] == [0, 1]
    alone = [post(backend, CHAT, told(text, return_token_ids=True)) for text in texts]
    assert [one["message"] for one in reply["choices"]] == [one["choices"][0]["message"] for one in alone]
    assert reply["usage"]["total_tokens"] == sum(one["usage"]["total_tokens"] for one in alone)


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [[]]}, "messages"),
        ({"messages": told("a")["messages"]}, "messages"),
        ({"n": 2}, "n"),
        ({"stream": True}, "stream"),
        ({"use_beam_search": True}, "use_beam_search"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
        ({"messages": [told("a")["messages"]] * 1025}, "messages"),
    ],
)
def test_batches_that_are_refused(backend: FakeBackend, change: dict[str, Any], param: str) -> None:
    body = {"messages": [told("a")["messages"]], **change}
    assert refusal(ask(backend, "POST", BATCH, json=body))["param"] == param
    assert not backend.asked


# ---- words that its clients look for


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"prompt": None, "prompt_embeds": []}, "Either prompt or prompt_embeds must be provided and non-em"),
        (
            {"prompt_embeds": None, "prompt": ...},
            "Either prompt or prompt_embeds must be provided and non-em",
        ),
        ({"seed": 2**63}, "less_than_equal"),
        ({"seed": -(2**63) - 1}, "greater_than_equal"),
    ],
)
def test_faults_have_their_names(backend: FakeBackend, change: dict[str, Any], words: str) -> None:
    body = {name: value for name, value in {"prompt": "a", **change}.items() if value is not ...}
    told = refusal(ask(backend, "POST", COMPLETIONS, json=body))
    assert words in told["message"]
    assert told["param"] == next(iter({"prompt", "seed"} & change.keys()))


# ---- log-probabilities


def test_log_probabilities_of_given_tokens(backend: FakeBackend) -> None:
    """The fake engine tells of other tokens, but as many."""
    for path, changes in ((CHAT, {"logprobs": True}), (COMPLETIONS, {"logprobs": 0})):
        body = {**HELLO[path], "max_tokens": 1, "logprob_token_ids": [5, 7]}
        post(backend, path, {**body, **changes})
        assert backend.asked[-1].params.logprob_token_ids == (5, 7)
        for change in ({"logprobs": None}, {"logprob_token_ids": [999]}, {"logprob_token_ids": [5] * 129}):
            reply = ask(backend, "POST", path, json={**body, **changes, **change})
            assert refusal(reply)["param"] == "logprob_token_ids"
    beams = {**HELLO[CHAT], **BEAMS, "logprobs": True, "logprob_token_ids": [5]}
    assert refusal(ask(backend, "POST", CHAT, json=beams))["param"] == "logprob_token_ids"


# ---- beams


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_beams_that_cannot_be(backend: FakeBackend, path: str) -> None:
    for change, param in (
        ({"stream": True}, "use_beam_search"),
        ({"n": 11}, "use_beam_search"),
        ({"guided_regex": "a"}, "structured_outputs"),
        ({"stop": "a"}, "stop"),
        ({"max_tokens": 513}, "max_tokens"),
    ):
        reply = ask(backend, "POST", path, json={**HELLO[path], **BEAMS, **change})
        assert refusal(reply)["param"] == param


def test_beams_go_on_with_the_likeliest(backend: FakeBackend) -> None:
    """The fake engine's likeliest tokens are always the lowest ids, of which EOS is one."""
    reply = post(
        backend, COMPLETIONS, {"prompt": [FIRST_BYTE, FIRST_BYTE], **BEAMS, "return_token_ids": True}
    )
    best, second = (choice["token_ids"] for choice in reply["choices"])
    assert best != second
    assert len(best) <= 3
    assert reply["choices"][0]["finish_reason"] in ("stop", "length")
    penalized = post(
        backend, COMPLETIONS, {"prompt": [FIRST_BYTE], **BEAMS, "length_penalty": 0.0, "logprobs": 1}
    )
    sums = [sum(choice["logprobs"]["token_logprobs"]) for choice in penalized["choices"]]
    assert sums == sorted(sums, reverse=True)


# ---- flags


def test_streams_that_must_tell_their_usage(backend: FakeBackend) -> None:
    for path in (COMPLETIONS, CHAT):
        chunks = stream(backend, path, HELLO[path], config={"enable_force_include_usage": True})
        assert all(chunk["usage"]["prompt_tokens"] > 0 for chunk in chunks)
        assert chunks[-1]["choices"] == []


def test_tokens_named_by_their_ids(backend: FakeBackend) -> None:
    config = {"return_tokens_as_token_ids": True}
    (choice,) = post(backend, CHAT, {**HELLO[CHAT], "logprobs": True}, config=config)["choices"]
    assert all(one["token"].startswith("token_id:") for one in choice["logprobs"]["content"])


def test_a_prefix_of_paths_and_a_key(backend: FakeBackend) -> None:
    with live(backend, root_path="/llm", api_key="k") as url:
        for prefix in ("", "/llm"):
            client = openai.OpenAI(base_url=f"{url}{prefix}/v1", api_key="k", max_retries=0)
            assert client.completions.create(model="", prompt="ab").choices[0].text == "ba"
            with pytest.raises(openai.AuthenticationError):
                client.with_options(api_key="x").models.list()
        with pytest.raises(openai.NotFoundError):
            openai.OpenAI(base_url=f"{url}/other/v1", api_key="k").models.list()


def test_a_unix_socket(backend: FakeBackend, tmp_path: Path) -> None:
    path = str(tmp_path / "server.sock")
    local.bind_unix(path).close()  # a server that has ended leaves its socket behind
    listener = local.bind_unix(path)
    assert local.address_of(listener) == f"unix:{path}"
    app = create_app(backend, ServerConfig())
    server = uvicorn.Server(
        uvicorn.Config(app, http=connection(60, 60), log_config=None, lifespan="off", ws="none")
    )

    def serve() -> None:
        with asyncio.Runner(loop_factory=local.new_event_loop) as runner:
            runner.run(server.serve(sockets=[listener]))

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        with httpx.Client(transport=httpx.HTTPTransport(uds=path, retries=9), timeout=30) as client:
            reply = client.post("http://server/v1/completions", json={"prompt": "ab"})
        assert reply.json()["choices"][0]["text"] == "ba"
    finally:
        server.should_exit = True
        thread.join()
    with pytest.raises(ConfigError, match="--uds="):
        local.bind_unix(str(tmp_path / "no" / "folder"))


@pytest.mark.parametrize("form", ["TEXT", "json"])
def test_balancers_are_told_the_load(backend: FakeBackend, form: str) -> None:
    headers = {"endpoint-load-metrics-format": form}
    load = ask(backend, "POST", COMPLETIONS, json=HELLO[COMPLETIONS], headers=headers).headers
    kind, _, told_load = load["endpoint-load-metrics"].partition(" ")
    assert kind == form.upper()
    if kind == "JSON":
        assert json.loads(told_load)["named_metrics"]["kv_cache_usage_perc"] == 0
    else:
        assert "named_metrics.kv_cache_usage_perc=0" in told_load
    others = ask(backend, "POST", COMPLETIONS, json=HELLO[COMPLETIONS], headers={**headers, "x": "y"} | {
        "endpoint-load-metrics-format": "xml"}).headers  # fmt: skip
    assert "endpoint-load-metrics" not in others


def test_a_chat_template_of_the_command_line(tmp_path: Path) -> None:
    (tmp_path / "t.jinja").write_text("{{ messages }}")
    assert (
        local.template_of(str(tmp_path / "t.jinja"))
        == local.template_of("{{ messages }}")
        == "{{ messages }}"
    )
    assert local.template_of(None) is None
    with pytest.raises(ConfigError, match="--chat_template="):
        local.template_of(str(tmp_path / "other"))


# ---- defaults of the model


def test_defaults_of_sampling(tmp_path: Path) -> None:
    config = EngineConfig(generation_config=str(tmp_path))
    assert sampling_defaults(config) == {}
    file = tmp_path / "generation_config.json"
    file.write_text(json.dumps({"temperature": 0.3, "top_k": 5, "max_new_tokens": 7, "eos_token_id": 2}))
    assert sampling_defaults(config) == {"temperature": 0.3, "top_k": 5, "max_tokens": 7}
    for source in ("vllm", "none"):
        assert sampling_defaults(EngineConfig(generation_config=source)) == {}
    assert sampling_defaults(EngineConfig()) == {"temperature": 0.2, "top_p": 0.9}  # of the embedded model
    file.write_text('{"temperature": -1}')
    with pytest.raises(ModelError, match=r"generation_config.json: temperature.*--generation_config=none"):
        sampling_defaults(config)
    with pytest.raises(ConfigError, match="--generation_config="):
        sampling_defaults(EngineConfig(generation_config=str(tmp_path / "other")))


def test_what_a_request_says_wins_over_the_models_defaults() -> None:
    backend = FakeBackend(byte_tokenizer())
    backend.sampling_defaults = {"temperature": 0.3, "top_k": 5, "max_tokens": 7}
    post(backend, CHAT, {**HELLO[CHAT], "top_k": 2})
    params = backend.asked[-1].params
    assert (params.temperature, params.top_k, params.max_tokens) == (0.3, 2, 7)
    post(backend, CHAT, {**HELLO[CHAT], "max_completion_tokens": 3})
    assert backend.asked[-1].params.max_tokens == 3
    post(backend, COMPLETIONS, HELLO[COMPLETIONS])
    assert (backend.asked[-1].params.temperature, backend.asked[-1].params.max_tokens) == (0.3, 16)
