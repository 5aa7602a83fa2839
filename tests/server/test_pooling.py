"""/v1/embeddings, asked by the `openai` package over real HTTP; /v1/score and /v1/rerank."""

from __future__ import annotations

import base64
import math
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import httpx
import numpy as np
import openai
import pytest

from hex_llm.types import Pooling, Request, Update
from tests.server import fakes
from tests.server.asking import ask, post, refusal
from tests.server.fakes import POOLING, FakeBackend, byte_tokenizer, fake_vector
from tests.server.live import live

EMBEDDINGS, SCORE, RERANK = "/v1/embeddings", "/v1/score", "/v1/rerank"


@pytest.fixture(scope="module")
def client() -> Iterator[openai.OpenAI]:
    with live(FakeBackend(byte_tokenizer())) as address:
        yield openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0)


def unit(text: str | list[int], size: int | None = None) -> np.ndarray[Any, Any]:
    """What the fake engine's vector becomes."""
    ids = byte_tokenizer().encode(text) if isinstance(text, str) else text
    vector = fake_vector(ids)[:size]
    return vector / np.linalg.norm(vector)


# ---- embeddings


def test_embeddings_by_type() -> None:
    backend = FakeBackend(byte_tokenizer())
    reply = post(
        backend,
        "/v2/embed",
        {"model": "fake", "texts": ["hello", "you"], "embedding_types": ["float", "base64"]},
    )
    floats, coded = reply["embeddings"]["float"], reply["embeddings"]["base64"]
    for vector, code, text in zip(floats, coded, ("hello", "you"), strict=True):
        np.testing.assert_allclose(vector, unit(text), rtol=1e-6)
        np.testing.assert_allclose(np.frombuffer(base64.b64decode(code), "<f4"), unit(text), rtol=1e-6)
    num_tokens = sum(len(request.prompt_ids) for request in backend.asked)
    assert reply["meta"]["billed_units"] == {"input_tokens": num_tokens}
    assert reply["texts"] == ["hello", "you"]


@pytest.mark.parametrize(
    ("truncate", "kept"), [({"truncate": "START"}, "lo"), ({"truncate": "END"}, None), ({}, None)]
)
def test_embeddings_by_type_cut_their_texts(truncate: dict[str, str], kept: str | None) -> None:
    backend = FakeBackend(byte_tokenizer())
    body = {"texts": ["hello"], "output_dimension": 2, "max_tokens": 2, **truncate}
    assert len(post(backend, "/v2/embed", body)["embeddings"]["float"][0]) == 2
    whole = byte_tokenizer().encode("hello")
    assert backend.asked[-1].prompt_ids == (whole[-2:] if kept else whole[:2])
    refused = refusal(ask(backend, "POST", "/v2/embed", json={**body, "truncate": "NONE"}))
    assert refused["param"] == "max_tokens"


@pytest.mark.parametrize(
    ("given", "texts"),
    [
        ("hello", ["hello"]),
        (["hello", "you there", "hello"], ["hello", "you there", "hello"]),
        ([5, 6, 7, 7], [[5, 6, 7, 7]]),
        ([[5, 6], [7]], [[5, 6], [7]]),
    ],
)
@pytest.mark.parametrize("encoding", ["float", "base64", None])  # None: the client asks for base64 itself
def test_embeddings(client: openai.OpenAI, given: Any, texts: list[Any], encoding: Any) -> None:
    format_ = {} if encoding is None else {"encoding_format": encoding}
    reply = client.embeddings.create(model="fake", input=given, **format_)
    assert [one.index for one in reply.data] == list(range(len(texts)))
    for one, text in zip(reply.data, texts, strict=True):
        vector: Any = one.embedding
        if encoding == "base64":
            vector = np.frombuffer(base64.b64decode(vector), "<f4")
        np.testing.assert_allclose(vector, unit(text), rtol=1e-6)
    num_tokens = sum(len(byte_tokenizer().encode(x) if isinstance(x, str) else x) for x in texts)
    assert reply.usage.prompt_tokens == reply.usage.total_tokens == num_tokens
    assert (reply.object, reply.model, reply.data[0].object) == ("list", "fake", "embedding")


def test_dimensions(client: openai.OpenAI) -> None:
    reply = client.embeddings.create(model="fake", input="hello", dimensions=3)
    np.testing.assert_allclose(reply.data[0].embedding, unit("hello", 3), rtol=1e-6)


def test_not_normalised(backend: FakeBackend) -> None:
    backend.pooling = Pooling("mean", normalize=False, size=8)
    reply = post(backend, EMBEDDINGS, {"input": [5, 6, 6]})
    assert reply["data"][0]["embedding"] == fake_vector([5, 6, 6]).tolist()
    assert backend.asked[0].params.pooling == "mean"


def test_truncated(backend: FakeBackend) -> None:
    post(backend, EMBEDDINGS, {"input": [5, 6, 7], "truncate_prompt_tokens": 2})
    assert backend.asked[0].prompt_ids == [6, 7]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({}, "input"),
        ({"input": []}, "the prompt is empty"),
        ({"input": [[5], []]}, "text 1: the prompt is empty"),
        ({"input": 5}, "input: must be a text"),
        ({"input": [5, "a"]}, "input: must be a text"),
        ({"input": ["a"] * 1025}, "input: must be a text"),
        ({"input": [[5], [300]]}, "token id 300"),
        ({"input": ["a", "a" * 5000]}, "text 1: the prompt has"),
        ({"input": "a", "dimensions": 0}, "dimensions: must be a whole number from 1 to 8"),
        ({"input": "a", "dimensions": 9}, "dimensions"),
        ({"input": "a", "dimensions": 1.5}, "dimensions"),
        ({"input": "a", "encoding_format": "hex"}, "encoding_format"),
        ({"input": "a", "temperature": 1}, "temperature"),
        ({"input": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
    ],
)
def test_what_is_refused(backend: FakeBackend, body: dict[str, Any], message: str) -> None:
    assert message in refusal(ask(backend, "POST", EMBEDDINGS, json=body))["message"]


def test_a_server_that_cannot(backend: FakeBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    cannot = replace(fakes.LIMITS, pooling=Pooling(problem="no, --runner"))
    monkeypatch.setattr(fakes, "LIMITS", cannot)
    assert refusal(ask(backend, "POST", EMBEDDINGS, json={"input": "a"}))["message"] == "no, --runner"
    monkeypatch.setattr(fakes, "LIMITS", replace(cannot, pooling=POOLING, generates=False))
    assert ask(backend, "POST", EMBEDDINGS, json={"input": "a"}).status_code == 200
    error = refusal(ask(backend, "POST", "/v1/completions", json={"prompt": "a"}))
    assert "--runner" in error["message"]
    backend.pooling = Pooling("tokens", token_ids=(5, 6))
    assert "scores pairs" in refusal(ask(backend, "POST", EMBEDDINGS, json={"input": "a"}))["message"]


# ---- scores


def test_scores_are_cosines(backend: FakeBackend) -> None:
    for names in (("text_1", "text_2"), ("queries", "documents")):
        reply = post(backend, SCORE, dict(zip(names, ("hello", ["you", "hello"]), strict=True)))
        scores = [one["score"] for one in reply["data"]]
        assert scores == pytest.approx([float(unit("hello") @ unit("you")), 1.0])
        assert [(one["index"], one["object"]) for one in reply["data"]] == [(0, "score"), (1, "score")]
    pairs = post(backend, "/score", {"text_1": ["a", "b"], "text_2": ["b", "b"]})
    assert pairs["data"][1]["score"] == pytest.approx(1.0)
    assert reply["usage"]["prompt_tokens"] == len("hello") + len("you") + 2  # each text once


@pytest.mark.parametrize("path", [RERANK, "/rerank", "/v2/rerank"])
def test_rerank(backend: FakeBackend, path: str) -> None:
    documents = ["zzzz", {"text": "hello!"}, "hallo"]
    reply = post(backend, path, {"query": "hello", "documents": documents, "top_n": 2})
    assert [one["index"] for one in reply["results"]] == [1, 2]
    assert reply["results"][0]["document"] == {"text": "hello!"}
    expected = float(unit("hello") @ unit("hello!"))
    assert reply["results"][0]["relevance_score"] == pytest.approx(expected)
    bare = post(backend, path, {"query": "hello", "documents": documents, "return_documents": False})
    assert len(bare["results"]) == 3
    assert list(bare["results"][0]) == ["index", "relevance_score"]


class Reranker(FakeBackend):
    """Says yes to documents of three letters."""

    pooling = Pooling("tokens", token_ids=(7, 9))

    def updates(self, request: Request) -> Iterable[Update]:
        assert self.tokenizer is not None
        fits = self.tokenizer.decode(request.prompt_ids).endswith("<Document>: yes")
        vector = np.log(np.float32([0.1, 0.3] if fits else [0.4, 0.1]))
        for update in super().updates(request):
            update.pooled = vector.tobytes()
            yield update


def test_a_reranker_is_asked_for_yes_or_no() -> None:
    template = "{{ messages | length }}{{ messages[1].content }}{{ '' if enable_thinking is false else '!' }}"
    backend = Reranker(byte_tokenizer(template))
    reply = post(backend, RERANK, {"query": "which", "documents": ["no", "yes"]})
    assert [one["index"] for one in reply["results"]] == [1, 0]
    assert [one["relevance_score"] for one in reply["results"]] == pytest.approx([0.75, 0.2])
    params = backend.asked[0].params
    assert (params.pooling, params.allowed_token_ids, params.max_tokens) == ("tokens", (7, 9), 1)
    assert backend.tokenizer is not None
    assert "<Query>: which\n<Document>: no" in backend.tokenizer.decode(backend.asked[0].prompt_ids)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (SCORE, {"text_1": "a"}),
        (SCORE, {"text_1": "a", "text_2": []}),
        (SCORE, {"text_1": ["a", "b"], "text_2": ["a", "b", "c"]}),
        (SCORE, {"text_1": 5, "text_2": "a"}),
        (SCORE, {"text_1": "a", "text_2": ["b"] * 1025}),
        (RERANK, {"query": "a", "documents": []}),
        (RERANK, {"query": "a"}),
        (RERANK, {"query": ["a"], "documents": ["a"]}),
        (RERANK, {"query": "a", "documents": ["a"], "top_n": -1}),
        (RERANK, {"query": "a", "documents": [{"title": "a"}]}),
    ],
)
def test_scores_that_are_refused(backend: FakeBackend, path: str, body: dict[str, Any]) -> None:
    refusal(ask(backend, "POST", path, json=body))
    assert not backend.asked


def test_every_number_is_finite(client: openai.OpenAI) -> None:
    reply = httpx.post(f"{client.base_url}embeddings", json={"input": [[1]] * 40, "encoding_format": "float"})
    assert all(math.isfinite(x) for one in reply.json()["data"] for x in one["embedding"])
