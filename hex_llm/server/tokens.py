"""The small routes about text and tokens: vLLM's /tokenize, /detokenize, /tokenizer_info and /version, TGI's
/tokenize (a body with `inputs`) and /chat_tokenize.

Nothing is generated here. Tokenizing happens in threads: a long text must not hold up the event loop.
"""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import APIRouter, Response
from fastapi.responses import JSONResponse

from hex_llm import __version__
from hex_llm.config import ServerConfig
from hex_llm.errors import InvalidRequest
from hex_llm.sampling_params import MAX_INT
from hex_llm.server.backend import Backend
from hex_llm.server.body import Body, TokenIds, parse
from hex_llm.server.chat import prepare
from hex_llm.server.schemas import ChatRequest
from hex_llm.server.stream import encode
from hex_llm.server.tgi import TgiRoute, in_their_shape
from hex_llm.server.tgi_schemas import TokenizeRequest
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


async def tokenize(backend: Backend, config: ServerConfig, body: Json) -> Json:
    tokenizer = _tokenizer(backend)
    wanted: ChatToTokenize | PromptToTokenize
    if "messages" in body:
        wanted = parse(ChatToTokenize, body)
        ids = (await prepare(backend, wanted, config)).prompt_ids
    else:
        wanted = parse(PromptToTokenize, body)
        special = wanted.add_special_tokens
        ids = await asyncio.to_thread(tokenizer.encode, wanted.prompt, add_special_tokens=special)
    names = await asyncio.to_thread(_names, tokenizer, ids) if wanted.return_token_strs else None
    return {"count": len(ids), "max_model_len": backend.max_len, "tokens": ids, "token_strs": names}


def _names(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    return [tokenizer.shown(i) for i in ids]


def tokenizer_info(backend: Backend) -> Json:
    tokenizer = _tokenizer(backend)
    return {
        "tokenizer_class": type(tokenizer.codec).__name__,
        "vocab_size": tokenizer.vocab_size,
        "model_max_length": backend.max_len,
        "eos_token_ids": list(tokenizer.eos_ids),
        "chat_template": tokenizer.chat_template,
        **tokenizer.special_tokens,
    }


# ---- TGI's


def simple_tokens(tokenizer: Tokenizer, text: str, *, add_special_tokens: bool) -> list[Json]:
    """Each token with its place in the text; 0 to 0 where the tokenizer does not tell it, as in TGI."""
    ids = tokenizer.encode(text, add_special_tokens=add_special_tokens)  # refuses what is no text
    if isinstance(tokenizer.codec, Fast):
        places = tokenizer.codec.tokenizer.encode(text, add_special_tokens=add_special_tokens).offsets
        pairs = zip(ids, places, strict=True)
        return [{"id": i, "text": text[a:b], "start": a, "stop": b} for i, (a, b) in pairs]
    return [{"id": i, "text": tokenizer.shown(i), "start": 0, "stop": 0} for i in ids]


def as_list(tokens: list[Json]) -> bytes:
    """As JSON, token by token: nothing else runs while one value is encoded, and all are a large one."""
    return b"[%b]" % b",".join(encode(token) for token in tokens)


def tokens_reply(tokenizer: Tokenizer, text: str, *, add_special_tokens: bool) -> Response:
    tokens = as_list(simple_tokens(tokenizer, text, add_special_tokens=add_special_tokens))
    return Response(tokens, media_type="application/json")


def chat_tokens_reply(tokenizer: Tokenizer, prompt_ids: list[int]) -> Response:
    text = tokenizer.decode(prompt_ids, skip_special_tokens=False)
    tokens = as_list(simple_tokens(tokenizer, text, add_special_tokens=False))
    content = b'{"tokenize_response":%b,"templated_text":%b}' % (tokens, encode(text))
    return Response(content, media_type="application/json")


# ---- routes


def routes(backend: Backend, config: ServerConfig) -> APIRouter:
    router = APIRouter()

    @router.post("/tokenize")
    async def tokenize_route(body: Json) -> Response:
        if "inputs" in body:
            return await in_their_shape(as_tgi(body))
        return JSONResponse(await tokenize(backend, config, body))

    async def as_tgi(body: Json) -> Response:
        wanted = parse(TokenizeRequest, body)
        special = wanted.add_special_tokens
        return await asyncio.to_thread(
            tokens_reply, _tokenizer(backend), wanted.inputs, add_special_tokens=special
        )

    @router.post("/detokenize")
    async def detokenize(body: ToDetokenize) -> Json:
        ids = body.tokens
        if ids and not 0 <= min(ids) <= max(ids) <= MAX_INT:
            raise InvalidRequest(f"tokens: must be whole numbers from 0 to {MAX_INT}", "tokens")
        text = await asyncio.to_thread(_tokenizer(backend).decode, ids, skip_special_tokens=False)
        return {"prompt": text}

    @router.get("/version")
    async def version() -> Json:
        return {"version": __version__}

    @router.get("/tokenizer_info")
    async def tokenizer_info_route() -> Json:
        return tokenizer_info(backend)

    async def chat_tokenize(body: ChatRequest) -> Response:
        talk = await prepare(backend, body, config)
        return await asyncio.to_thread(chat_tokens_reply, talk.tokenizer, talk.prompt_ids)

    router.add_api_route("/chat_tokenize", chat_tokenize, methods=["POST"], route_class_override=TgiRoute)
    return router
