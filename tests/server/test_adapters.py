"""Adapters by name in every dialect, by the clients of each; and the routes that give names."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import openai
import pytest
import text_generation
from huggingface_hub import InferenceClient

from hex_llm.config import EngineConfig
from hex_llm.errors import InvalidRequest, UnknownModel
from hex_llm.types import AdapterRef
from hex_llm.weights.adapter_source import AdapterNames
from tests.server.asking import CHAT, COMPLETIONS, HELLO, ask, post, refusal
from tests.server.fakes import FakeBackend, byte_tokenizer
from tests.server.live import live

SQL = AdapterRef("sql", "gs://bucket/sql")
ADMIN = {"allow_runtime_lora_updating": True}


class Adapting(FakeBackend):
    def __init__(self) -> None:
        super().__init__(byte_tokenizer())
        self.adapters = AdapterNames(EngineConfig(enable_lora=True, lora_modules="sql=gs://bucket/sql"))

    @property
    def named(self) -> list[AdapterRef | None]:
        return [request.adapter for request in self.asked]


@pytest.fixture
def backend() -> Adapting:
    return Adapting()


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[Adapting, str]]:
    backend = Adapting()
    with live(backend) as url:
        yield backend, url


def test_openai_names_them_by_the_model(served: tuple[Adapting, str]) -> None:
    backend, url = served
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    card = client.models.list().data[1]
    assert (card.id, card.parent, card.root) == ("sql", "fake", "gs://bucket/sql")  # type: ignore[attr-defined]
    for name, ref in (("fake", None), ("sql", SQL), ("org/name", AdapterRef("org/name", "org/name"))):
        for stream in (False, True):
            reply = client.chat.completions.create(model=name, stream=stream, **HELLO[CHAT])
            told = {chunk.model for chunk in reply} if stream else {reply.model}
            assert told == {name}
        assert client.completions.create(model=name, prompt="hello").model == name
        assert client.responses.create(model=name, input="hello").model == name
        assert backend.named[-4:] == [ref] * 4
    with pytest.raises(openai.NotFoundError, match="The model `gpt-4o` does not exist"):
        client.chat.completions.create(model="gpt-4o", **HELLO[CHAT])
    with pytest.raises(openai.BadRequestError, match="--allowed_lora_sources"):
        client.completions.create(model="/etc", prompt="hello", stream=True)


def test_anthropic_does_too(served: tuple[Adapting, str]) -> None:
    backend, url = served
    client = anthropic.Anthropic(base_url=url, api_key="none", max_retries=0)
    reply = client.messages.create(model="sql", max_tokens=3, **HELLO[CHAT])
    assert (reply.model, backend.named[-1]) == ("sql", SQL)
    with pytest.raises(anthropic.NotFoundError):
        client.messages.create(model="claude", max_tokens=3, **HELLO[CHAT])


def test_tgi_names_them_by_adapter_id(served: tuple[Adapting, str]) -> None:
    backend, url = served
    client = InferenceClient(model=url, provider="hf-inference")
    client.text_generation("hello", max_new_tokens=3, adapter_id="sql")
    *_, last = client.text_generation("hello", max_new_tokens=3, adapter_id="sql", stream=True, details=True)
    assert last.generated_text.endswith("oll")
    assert backend.named[-2:] == [SQL, SQL]
    text_generation.Client(url).generate("hello", max_new_tokens=3)
    assert backend.named[-1] is None
    unknown = {"inputs": "hello", "parameters": {"adapter_id": "unknown"}}
    reply = httpx.post(f"{url}/generate_stream", json=unknown)
    assert (reply.status_code, reply.json()["error_type"]) == (422, "validation")
    assert "`unknown` does not exist" in reply.json()["error"]


@pytest.mark.parametrize("field", ["dynamic-lora", "dynamic_lora", "lora_id"])
def test_vertex_names_one_for_each_instance(backend: Adapting, field: str) -> None:
    chat = {**HELLO[CHAT], "@requestFormat": "chatCompletions", field: "sql"}
    for instances in (
        [{"prompt": "a", field: "sql"}, {"prompt": "b"}, {"prompt": "c", "parameters": {field: "gs://b/c"}}],
        [{"inputs": "a", field: "sql"}, {"inputs": "b"}, {"inputs": "c", "parameters": {field: "gs://b/c"}}],
    ):
        post(backend, "/generate", {"instances": instances})
        assert backend.named[-3:] == [SQL, None, AdapterRef("gs://b/c", "gs://b/c")]
    post(backend, "/generate", {"instances": [chat]})
    assert backend.named[-1] == SQL
    refusal(ask(backend, "POST", "/generate", json={"prompt": "a", field: "unknown"}), 404)
    assert refusal(
        ask(FakeBackend(byte_tokenizer()), "POST", "/generate", json={"prompt": "a", field: "sql"})
    )


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("error", "status"), [(UnknownModel("it is gone", "model"), 404), (InvalidRequest("rank", "model"), 400)]
)
def test_what_the_engine_finds_is_the_requests_fault(error: Exception, status: int, stream: bool) -> None:
    from hex_llm.engine.book import End
    from hex_llm.types import FinishReason, Request, Update

    class Failing(Adapting):
        def updates(self, request: Request) -> Any:
            end = End.by(error)
            yield Update(
                request.request_id,
                error=end.error,
                param=end.param,
                kind=end.kind,
                finish_reason=FinishReason.ERROR,
            )

    body = {**HELLO[COMPLETIONS], "model": "sql", "stream": stream}
    told = refusal(ask(Failing(), "POST", COMPLETIONS, json=body), status)
    assert (told["message"], told["param"]) == (str(error), "model")


# ---- names that come and go


def test_names_are_given_and_taken_away(backend: Adapting) -> None:
    def load(status: int, **body: Any) -> httpx.Response:
        reply = ask(backend, "POST", "/v1/load_lora_adapter", json=body, config=ADMIN)
        assert reply.status_code == status, reply.text
        return reply

    place = {"lora_name": "new", "lora_path": "gs://bucket/new"}
    assert "added successfully" in load(200, **place).text
    assert backend.named == [AdapterRef("gs://bucket/new", "gs://bucket/new")], "it was tried"
    post(backend, COMPLETIONS, {**HELLO[COMPLETIONS], "model": "new"})
    assert backend.named[-1] == AdapterRef("new", "gs://bucket/new")
    assert "already" in load(400, **place).text
    load(200, **place, load_inplace=True)
    load(400, lora_name="fake", lora_path="gs://bucket/new")
    load(400, lora_name="a", lora_path="/etc")
    load(400, lora_name="a\n", lora_path="gs://b")
    backend.error = InvalidRequest("the adapter is broken", "model")
    assert "broken" in load(400, lora_name="broken", lora_path="gs://bucket/broken").text
    assert set(backend.adapters.registered) == {"sql", "new"}
    for status in (200, 404):
        body = {"lora_name": "new"}
        reply = ask(backend, "POST", "/v1/unload_lora_adapter", json=body, config=ADMIN)
        assert reply.status_code == status
    assert [one["id"] for one in ask(backend, "GET", "/v1/models").json()["data"]] == ["fake", "sql"]


def test_nobody_may_unless_told(backend: Adapting) -> None:
    for path in ("/v1/load_lora_adapter", "/v1/unload_lora_adapter"):
        assert ask(backend, "POST", path, json={"lora_name": "a", "lora_path": "b"}).status_code == 404


def test_without_adapters_names_mean_what_they_did() -> None:
    backend = FakeBackend(byte_tokenizer())
    assert post(backend, COMPLETIONS, {**HELLO[COMPLETIONS], "model": "org/name"})["model"] == "fake"
    assert backend.asked[0].adapter is None
    assert len(ask(backend, "GET", "/v1/models").json()["data"]) == 1
