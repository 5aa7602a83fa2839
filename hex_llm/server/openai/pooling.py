"""/v1/embeddings, OpenAI's; /v2/embed, Cohere's; /v1/score, vLLM's; and /v1/rerank, Jina's and Cohere's."""

from __future__ import annotations

import base64
import time
import uuid
from collections.abc import Callable, Sequence
from functools import partial
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request, Response
from pydantic import Field

from hex_llm.config import ServerConfig
from hex_llm.errors import InvalidRequest
from hex_llm.frontend import pooling
from hex_llm.frontend.beside import read
from hex_llm.server.common.backend import Backend, answer, served_name, together
from hex_llm.server.common.body import MAX_PROMPTS, Body, EngineRequest, OneOrMoreTexts, Whole
from hex_llm.server.common.body_route import BodyRoute
from hex_llm.server.common.replies import Listed
from hex_llm.server.common.replies import Whole as WholeReply
from hex_llm.server.common.streams import unless_gone
from hex_llm.server.openai.replies import Fields, check_model, usage
from hex_llm.server.openai.schemas import Prompts, PromptTexts, listed
from hex_llm.types import RequestOutput

# ---- bodies


Encoding = Literal["float", "base64"]


class PoolingRequest(EngineRequest):
    truncate_prompt_tokens: Whole | None = None
    truncation_side: Literal["left", "right"] = "left"


class EmbeddingRequest(PoolingRequest):
    input: Prompts
    encoding_format: Encoding = "float"
    dimensions: Whole | None = None


class CohereRequest(EngineRequest):
    """As to vLLM, `input_type` may be given only where a model has words for it, and none here has."""

    texts: PromptTexts
    embedding_types: Annotated[list[Encoding], Field(min_length=1, max_length=2)] = Field(["float"])
    output_dimension: Whole | None = None
    truncate: Literal["NONE", "START", "END"] = "END"
    max_tokens: Whole | None = None

    def plain(self) -> EmbeddingRequest:
        if self.truncate == "NONE" and self.max_tokens is not None:
            raise InvalidRequest.at("max_tokens", "only together with truncate")
        shared = {name: getattr(self, name) for name in EngineRequest.model_fields}
        return EmbeddingRequest(
            **shared,
            input=self.texts,
            dimensions=self.output_dimension,
            truncate_prompt_tokens=None if self.truncate == "NONE" else self.max_tokens or -1,
            truncation_side="left" if self.truncate == "START" else "right",
        )


class ScoreRequest(PoolingRequest):
    """One query and any number of documents, or as many of both."""

    text_1: OneOrMoreTexts = Field([])
    text_2: OneOrMoreTexts = Field([])
    queries: OneOrMoreTexts = Field([])  # vLLM's newer names of the same
    documents: OneOrMoreTexts = Field([])

    def pairs(self) -> list[tuple[str, str]]:
        given = (self.text_1 or self.queries, self.text_2 or self.documents)
        queries, documents = ([one] if isinstance(one, str) else one for one in given)
        if not 1 <= len(documents) <= MAX_PROMPTS or len(queries) not in (1, len(documents)):
            raise InvalidRequest.at(
                "text_1", f"must be one text, or as many as text_2 has, which are 1 to {MAX_PROMPTS}"
            )
        return list(zip(queries * (len(documents) // len(queries)), documents, strict=True))


class Document(Body):
    text: str


class RerankRequest(PoolingRequest):
    query: str
    documents: Annotated[list[str | Document], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True)]
    top_n: Annotated[Whole, Field(ge=0)] = 0  # 0: all
    return_documents: bool = True


# ---- replies


async def pooled(
    backend: Backend, body: PoolingRequest, prompts: Sequence[str | list[int]], *, embeds: bool = False
) -> list[RequestOutput]:
    backend.check_room(len(prompts))
    params = pooling.pooling_params(
        backend.pooling, body.truncate_prompt_tokens, body.truncation_side, embeds=embeds
    )

    async def one(number: int, prompt: str | list[int]) -> RequestOutput:
        try:
            return await answer(backend, prompt, body, params)
        except InvalidRequest as error:
            if error.param != "prompt":
                raise
            raise InvalidRequest(f"text {number}: {error}", "input") from None

    return await together(one(*numbered) for numbered in enumerate(prompts))


def head(backend: Backend, body: PoolingRequest, prefix: str, outputs: Sequence[RequestOutput]) -> Fields:
    return {
        "id": f"{prefix}-{uuid.uuid4().hex}",
        "object": "list",
        "created": int(time.time()),
        "model": served_name(backend, body),
        "usage": usage(
            (one.prompt_token_ids for one in outputs), 0, sum(o.num_cached_tokens for o in outputs)
        ),
    }


async def embedded(
    backend: Backend, body: EmbeddingRequest
) -> tuple[list[RequestOutput], int, Callable[[RequestOutput, Encoding], Any]]:
    """The outputs, their size, and how to write the vector of one."""
    how = backend.pooling
    pooling.check_dimensions(body.dimensions, how)
    outputs = await pooled(backend, body, listed(body.input), embeds=True)

    def told(output: RequestOutput, encoding: Encoding) -> Any:
        vector = pooling.embedding(output, how, body.dimensions)
        if encoding == "float":
            return Listed(vector.tolist())
        return base64.b64encode(vector.astype("<f4").tobytes()).decode()

    return outputs, len(outputs) * (body.dimensions or how.size), told


async def embed(backend: Backend, body: EmbeddingRequest) -> WholeReply:
    outputs, size, told = await embedded(backend, body)

    def make() -> Fields:
        vectors = [told(one, body.encoding_format) for one in outputs]
        data = [{"object": "embedding", "index": i, "embedding": one} for i, one in enumerate(vectors)]
        return {**head(backend, body, "embd", outputs), "data": data}

    return WholeReply(size, make)


async def embed_by_type(backend: Backend, body: CohereRequest) -> WholeReply:
    outputs, size, told = await embedded(backend, body.plain())
    num_tokens = sum(len(one.prompt_token_ids) for one in outputs)

    def make() -> Fields:
        return {
            "id": f"embd-{uuid.uuid4().hex}",
            "embeddings": {kind: [told(one, kind) for one in outputs] for kind in body.embedding_types},
            "texts": body.texts,
            "meta": {"api_version": {"version": "2"}, "billed_units": {"input_tokens": num_tokens}},
            "response_type": "embeddings_by_type",
        }

    return WholeReply(size * len(body.embedding_types), make)


async def scores(
    backend: Backend, body: PoolingRequest, pairs: Sequence[tuple[str, str]]
) -> tuple[list[float], list[RequestOutput]]:
    scoring = partial(pooling.scoring, backend.pooling, backend.tokenizer, pairs)
    prompts, combine = await read(sum(len(a) + len(b) for a, b in pairs), scoring)
    outputs = await pooled(backend, body, prompts)
    return combine(outputs), outputs


async def score(backend: Backend, body: ScoreRequest) -> WholeReply:
    told, outputs = await scores(backend, body, body.pairs())
    data = [{"index": i, "object": "score", "score": one} for i, one in enumerate(told)]
    return WholeReply(len(data), lambda: {**head(backend, body, "score", outputs), "data": data})


async def rerank(backend: Backend, body: RerankRequest) -> WholeReply:
    texts = [one if isinstance(one, str) else one.text for one in body.documents]
    told, outputs = await scores(backend, body, [(body.query, text) for text in texts])
    order = sorted(range(len(texts)), key=lambda i: -told[i])[: body.top_n or None]
    results = [
        {"index": i, "relevance_score": told[i]}
        | ({"document": {"text": texts[i]}} if body.return_documents else {})
        for i in order
    ]
    return WholeReply(
        len(results), lambda: {**head(backend, body, "rerank", outputs), "results": Listed(results)}
    )


def routes(backend: Backend, config: ServerConfig) -> APIRouter:
    router = APIRouter(route_class=BodyRoute)

    @router.post("/v1/embeddings")
    async def embeddings(body: EmbeddingRequest, request: Request) -> Response:
        check_model(backend, config, body.model)
        return await unless_gone(request, embed(backend, body))

    @router.post("/v2/embed")
    async def cohere_embed(body: CohereRequest, request: Request) -> Response:
        check_model(backend, config, body.model)
        return await unless_gone(request, embed_by_type(backend, body))

    @router.post("/v1/score")
    @router.post("/score")
    async def score_route(body: ScoreRequest, request: Request) -> Response:
        check_model(backend, config, body.model)
        return await unless_gone(request, score(backend, body))

    @router.post("/v1/rerank")
    @router.post("/v2/rerank")
    @router.post("/rerank")
    async def rerank_route(body: RerankRequest, request: Request) -> Response:
        check_model(backend, config, body.model)
        return await unless_gone(request, rerank(backend, body))

    return router
