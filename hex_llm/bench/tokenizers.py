"""Where the number of tokens of a text comes from: a tokenizer here, or the server's own."""

from __future__ import annotations

import argparse
import json

from hex_llm.bench.client import Server
from hex_llm.config import EngineConfig
from hex_llm.errors import HexError
from hex_llm.text import chat
from hex_llm.text.tokenizer import Tokenizer
from hex_llm.weights.model_files import open_tokenizer
from hex_llm.weights.source import fetch_for

SMALLEST_VOCABULARY = 10_000  # taken where nobody tells it: ids below it exist in every model of today


class ServerTokenizer:
    """Asks /tokenize of vLLM and hex_llm. Raises HexError if the server has none."""

    def __init__(self, server: Server, model: str) -> None:
        self._server, self._model = server, model
        self.encode("a")
        try:
            self.vocab_size = int(json.loads(server.ask("/tokenizer_info"))["vocab_size"])
        except (HexError, ValueError, KeyError):
            self.vocab_size = SMALLEST_VOCABULARY

    def encode(self, text: str) -> list[int]:
        return self.tokens(prompt=text)

    def tokens(self, **prompt: object) -> list[int]:
        """Of a `prompt` or of `messages`."""
        try:
            return list(json.loads(self._server.ask("/tokenize", {"model": self._model, **prompt}))["tokens"])
        except (ValueError, KeyError, TypeError) as error:
            raise HexError(f"{self._server.base_url}/tokenize: the answer holds no tokens") from error


BenchTokenizer = Tokenizer | ServerTokenizer


def encode_chat(tokenizer: BenchTokenizer, text: str) -> list[int]:
    """One user's message in the model's chat template; without one, the text."""
    messages = [{"role": "user", "content": text}]
    if isinstance(tokenizer, Tokenizer):
        return chat.encode_chat(tokenizer, messages)[1] if tokenizer.chat_template else tokenizer.encode(text)
    try:
        return tokenizer.tokens(messages=messages)
    except HexError:  # it has no template
        return tokenizer.encode(text)


def find_tokenizer(
    args: argparse.Namespace, server: Server, model: str, *, required: bool
) -> BenchTokenizer | None:
    """That of --tokenizer, else the server's, else, if one is required, that of --model."""
    if args.skip_tokenizer_init:
        return None
    name = args.tokenizer
    if not name:
        try:
            return ServerTokenizer(server, model)
        except HexError:
            name = args.model if required else None
    path = fetch_for(EngineConfig(), name, tokenizer_only=True) if name else None
    return open_tokenizer(path, args.tokenizer_mode) if path else None
