"""SentencePiece: what a tokenizer.model holds, and the `slow` codec, which hands texts to the package."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from tokenizers import AddedToken

from hex_llm.errors import ModelError

_UNIGRAM = 1  # a trainer's model_type
_CONTROL, _USER_DEFINED = 3, 4  # a piece's type
# normalizer_spec { add_dummy_prefix: false }; what follows a message is merged into it. Only a text's start
# gets the space, not each part of it between two added tokens.
NO_DUMMY_PREFIX = b"\x1a\x02\x18\x00"


@dataclass(frozen=True)
class SentencePieceModel:
    data: bytes
    pieces: list[str]
    added: dict[int, AddedToken]  # pieces that are found whole in the text: control symbols and the user's
    is_bpe: bool
    prefix: bool  # a space goes before the text


def parse_model(data: bytes, name: str) -> SentencePieceModel:
    """`name` is for the message if the file is damaged."""
    try:
        message = _fields(data)
        pieces = [_fields(piece) for piece in message[1]]
        trainer, normalizer = _fields(message[2][-1]), _fields(message[3][-1])
        texts = [piece[1][-1].decode() for piece in pieces]
    except (IndexError, UnicodeDecodeError, AttributeError, TypeError) as error:
        raise ModelError(f"{name} is not a SentencePiece model; fetch it again") from error
    added = {
        i: AddedToken(texts[i], normalized=False, special=piece[3][-1] == _CONTROL)
        for i, piece in enumerate(pieces)
        if piece[3] and piece[3][-1] in (_CONTROL, _USER_DEFINED)
    }
    is_bpe = bool(trainer[3]) and trainer[3][-1] != _UNIGRAM
    return SentencePieceModel(data, texts, added, is_bpe, prefix=not normalizer[3] or bool(normalizer[3][-1]))


def _fields(data: bytes) -> defaultdict[int, list[Any]]:
    """A protocol buffer's values by field number, undecoded; IndexError where it is none."""
    fields: defaultdict[int, list[Any]] = defaultdict(list)
    position = 0
    while position < len(data):
        key, position = _varint(data, position)
        if key & 7 == 0:
            value, position = _varint(data, position)
            fields[key >> 3].append(value)
            continue
        size, position = (
            _varint(data, position) if key & 7 == 2 else ({1: 8, 5: 4}.get(key & 7, len(data) + 1), position)
        )
        if position + size > len(data):
            raise IndexError
        fields[key >> 3].append(data[position : position + size])
        position += size
    return fields


def _varint(data: bytes, position: int) -> tuple[int, int]:
    value = shift = 0
    while data[position] & 0x80:
        value |= (data[position] & 0x7F) << shift
        shift, position = shift + 7, position + 1
    return value | data[position] << shift, position + 1


class Slow:
    """The package knows nothing of the tokens added to its model: these are cut out of the text first."""

    longest = None  # its normalizer may leave out any number of spaces
    has_bytes = True

    def __init__(
        self, model: SentencePieceModel, added: Mapping[int, AddedToken], bos: str | None, eos: str | None
    ):
        from sentencepiece import SentencePieceProcessor

        self.processor = SentencePieceProcessor(model_proto=model.data + NO_DUMMY_PREFIX)
        self.prefix = " " if model.prefix else ""
        self.added = added
        self.ids = {token.content: i for i, token in added.items()}
        self.pattern = _any_of(added.values())
        self.vocab_size = max([len(model.pieces) - 1, *added]) + 1
        self.num_pieces = len(model.pieces)
        unknown = {i for i in range(self.num_pieces) if self.processor.is_unknown(i)}
        self.special_ids = {i for i, token in added.items() if token.special} | unknown - set(added)
        self.start, self.end = ([] if token is None else [self.ids[token]] for token in (bos, eos))

    def token_id(self, token: str) -> int | None:
        if token in self.ids:
            return self.ids[token]
        token_id: int = self.processor.piece_to_id(token)
        return token_id if self.processor.id_to_piece(token_id) == token else None

    def token(self, token_id: int) -> str:
        known = 0 <= token_id < self.num_pieces
        added = self.added.get(token_id)
        return added.content if added else self.processor.id_to_piece(token_id) if known else ""

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        ids: list[int] = []
        position = 0
        for match in self.pattern.finditer(text):
            ids += self._plain(text[position : match.start()], position)
            ids.append(self.ids[match[match.lastindex or 0]])
            position = match.end()
        ids += self._plain(text[position:], position)
        return [*self.start, *ids, *self.end] if add_special_tokens else ids

    def _plain(self, text: str, position: int) -> list[int]:
        prefix = "" if position else self.prefix
        ids: list[int] = self.processor.encode(prefix + text) if text else []
        return ids

    def token_bytes(self, token_id: int, skip_special_tokens: bool) -> bytes:
        if token := self.added.get(token_id):
            return b"" if skip_special_tokens and token.special else token.content.encode()
        if not 0 <= token_id < self.num_pieces:
            return b""
        piece: str = self.processor.id_to_piece(token_id)
        if self.processor.is_byte(token_id):
            return bytes.fromhex(piece[3:5])  # <0xE6>
        if self.processor.is_unknown(token_id):
            piece = self.processor.decode([token_id])
        return piece.replace("▁", " ").encode()


def _any_of(tokens: Iterable[AddedToken]) -> re.Pattern[str]:
    """Any of the tokens, the longer first, with the space that it swallows; the one group is the token."""
    space = {False: "", True: r"\s*"}
    longest_first = sorted(tokens, key=lambda token: -len(token.content))
    parts = [space[t.lstrip] + f"({re.escape(t.content)})" + space[t.rstrip] for t in longest_first]
    return re.compile("|".join(parts) or "(?!)")
