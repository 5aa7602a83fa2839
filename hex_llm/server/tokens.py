"""The small routes about text and tokens: vLLM's /tokenize, /detokenize, /tokenizer_info and /version, TGI's
/tokenize (a body with `inputs`) and /chat_tokenize.

Nothing is generated here. Texts may be longer than the model takes: all that takes time is done in
threads.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

from fastapi import APIRouter, Request, Response

from hex_llm import __version__
from hex_llm.config import ServerConfig
from hex_llm.errors import InvalidRequest
from hex_llm.frontend.beside import read, shaped
from hex_llm.sampling_params import MAX_INT
from hex_llm.server.common.backend import Backend
from hex_llm.server.common.body import Body, TokenIds, parse
from hex_llm.server.common.body_route import BodyRoute, checked
from hex_llm.server.common.replies import Encoded, Listed, Whole, encode, reply_of
from hex_llm.server.openai.chat import prepare
from hex_llm.server.openai.schemas import ChatRequest
from hex_llm.server.tgi.routes import TgiRoute, in_their_shape
from hex_llm.server.tgi.schemas import TokenizeRequest
from hex_llm.text.tokenizer import Fast, Tokenizer

Json = dict[str, Any]


class PromptToTokenize(Body):
    model: str = ""
    prompt: str
    add_special_tokens: bool = True
    return_token_strs: bool = False


class ChatToTokenize(ChatRequest):
    """A chat as it would be answered; what it says of sampling changes no token."""

    return_token_strs: bool = False


class ToDetokenize(Body):
    model: str = ""
    tokens: TokenIds


def _tokenizer(backend: Backend) -> Tokenizer:
    if backend.tokenizer is None:
        raise InvalidRequest("this server has no tokenizer (--skip_tokenizer_init)")
    return backend.tokenizer


# ---- vLLM's


async def tokenize(backend: Backend, config: ServerConfig, request: Request, body: Json) -> Whole:
    tokenizer = _tokenizer(backend)
    to_tokenize: ChatToTokenize | PromptToTokenize
    if "messages" in body:
        to_tokenize = await checked(request, partial(parse, ChatToTokenize, body))
        ids = (await prepare(backend, to_tokenize, config, only_prompt=True)).prompt_ids
    else:
        to_tokenize = parse(PromptToTokenize, body)
        encode_text = partial(tokenizer.encode, add_special_tokens=to_tokenize.add_special_tokens)
        ids = await read(len(to_tokenize.prompt), partial(encode_text, to_tokenize.prompt))
    names = Listed(map(tokenizer.codec.token, ids)) if to_tokenize.return_token_strs else None
    counts = {"count": len(ids), "max_model_len": backend.max_len}
    return Whole(len(ids), lambda: {**counts, "tokens": Listed(ids), "token_strs": names})


# ---- TGI's


def simple_tokens(tokenizer: Tokenizer, text: str, *, add_special_tokens: bool) -> Iterator[Json]:
    """Each token with its place in the text; 0 to 0 where the tokenizer does not tell it, as in TGI."""
    tokenizer.check(text)
    if isinstance(tokenizer.codec, Fast):
        for i, a, b in tokenizer.codec.encode_with_places(text, add_special_tokens):
            yield {"id": i, "text": text[a:b], "start": a, "stop": b}
    else:
        for i in tokenizer.encode(text, add_special_tokens=add_special_tokens):
            yield {"id": i, "text": tokenizer.shown(i), "start": 0, "stop": 0}


def tokens_reply(tokenizer: Tokenizer, text: str, *, add_special_tokens: bool) -> Response:
    return Encoded(encode(Listed(simple_tokens(tokenizer, text, add_special_tokens=add_special_tokens))))


def chat_tokens_reply(tokenizer: Tokenizer, prompt_ids: list[int]) -> Response:
    text = tokenizer.decode(prompt_ids, skip_special_tokens=False)
    tokens = Listed(simple_tokens(tokenizer, text, add_special_tokens=False))
    return Encoded(encode({"tokenize_response": tokens, "templated_text": text}))


# ---- routes


class TokensRoute(BodyRoute):
    needs_room = False


class TgiTokensRoute(TgiRoute):
    needs_room = False


def routes(backend: Backend, config: ServerConfig) -> APIRouter:
    router = APIRouter(route_class=TokensRoute)

    @router.post("/tokenize")
    async def tokenize_route(body: Json, request: Request) -> Response:
        if "inputs" in body:
            return await in_their_shape(as_tgi(body))
        return await reply_of(await tokenize(backend, config, request, body))

    async def as_tgi(body: Json) -> Response:
        to_tokenize = parse(TokenizeRequest, body)
        tokenizer, special = _tokenizer(backend), to_tokenize.add_special_tokens
        make = partial(tokens_reply, tokenizer, to_tokenize.inputs, add_special_tokens=special)
        return await read(len(to_tokenize.inputs), make)

    @router.post("/detokenize")
    async def detokenize(body: ToDetokenize) -> Response:
        ids = body.tokens
        if ids and not 0 <= min(ids) <= max(ids) <= MAX_INT:
            raise InvalidRequest.at("tokens", f"must be whole numbers from 0 to {MAX_INT}")
        tokenizer = _tokenizer(backend)
        decode = partial(tokenizer.decode, ids, skip_special_tokens=False)
        return Encoded(await shaped(len(ids), lambda: encode({"prompt": decode()})))

    @router.get("/version")
    async def version() -> Json:
        return {"version": __version__}

    @router.get("/tokenizer_info")
    async def tokenizer_info_route() -> Json:
        tokenizer = _tokenizer(backend)
        return {
            "tokenizer_class": type(tokenizer.codec).__name__,
            "vocab_size": tokenizer.vocab_size,
            "model_max_length": backend.max_len,
            "eos_token_ids": list(tokenizer.eos_ids),
            "chat_template": tokenizer.chat_template,
            **tokenizer.special_tokens,
        }

    async def chat_tokenize(body: ChatRequest) -> Response:
        talk = await prepare(backend, body, config, only_prompt=True)
        ids = talk.prompt_ids
        return await read(len(ids), partial(chat_tokens_reply, talk.tokenizer, ids))

    router.add_api_route(
        "/chat_tokenize", chat_tokenize, methods=["POST"], route_class_override=TgiTokensRoute
    )
    return router
