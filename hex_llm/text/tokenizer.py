"""Text to token ids and back, from the files of a Hugging Face model: the ids are those of transformers 5.

Two codecs stand behind `Tokenizer`: the `tokenizers` library and, for `slow`, the `sentencepiece` package.
Not known here: what is in a chat template, streaming, GGUF. Nothing in the model's folder is executed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol, TypeVar

import tokenizers
from tokenizers import AddedToken, models, normalizers

from hex_llm.errors import ConfigError, InvalidRequest, ModelError
from hex_llm.sampling_params import is_unicode
from hex_llm.text import bpe
from hex_llm.text.spm import SentencePieceModel, Slow, parse_model

_MAX_BYTES = 200 << 20
_MAX_UTF8 = 4  # bytes of a character
V = TypeVar("V")
Settings = dict[str, Any]  # tokenizer_config.json


class Codec(Protocol):
    @property
    def vocab_size(self) -> int: ...
    def token_id(self, token: str) -> int | None: ...
    def token(self, token_id: int) -> str:
        """As the vocabulary writes it; "" if there is none."""

    def encode(self, text: str, add_special_tokens: bool) -> list[int]: ...

    @property
    def longest(self) -> tuple[int, bytes] | None:
        """Bytes of text that a token stands for at most, and bytes that no token stands for, which are left
        out; None: a token may stand for any number."""

    @property
    def special_ids(self) -> AbstractSet[int]:
        """Of tokens that stand for no text."""

    @property
    def has_bytes(self) -> bool:
        """A token adds the same bytes to every text that has begun."""

    @property
    def prefix(self) -> str:
        """What a text does not show of its start: the space that `encode` puts there, or nothing."""

    def token_bytes(self, token_id: int, skip_special_tokens: bool) -> bytes:
        """What the token adds to a text that has begun: bytes, for it may hold a part of a character."""


class PerToken(dict[int, V]):
    """What is made of a token's bytes, once for each token."""

    def __init__(self, make: Callable[[bytes], V], codec: Codec, skip_special_tokens: bool = False) -> None:
        self._make, self._codec, self._skip = make, codec, skip_special_tokens

    def __missing__(self, token_id: int) -> V:
        self[token_id] = value = self._make(self._codec.token_bytes(token_id, self._skip))
        return value


@dataclass(frozen=True)
class Tokenizer:
    codec: Codec
    eos_ids: tuple[int, ...]
    special_tokens: Mapping[str, str]  # as templates name them: bos_token, eos_token, ...
    chat_template: str | None

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        self.check(text)
        return self.codec.encode(text, add_special_tokens)

    def check(self, text: str) -> None:
        if not is_unicode(text):
            raise InvalidRequest("the text holds half of a surrogate pair, which is no character")

    def refuse_longer(self, text: str, max_len: int) -> None:
        """Raises InvalidRequest for a text that has so many tokens at least, as far as its size tells: to cut
        it into tokens would take much longer."""
        if self.codec.longest is None:
            return
        longest, lost = self.codec.longest
        enough = 2 * max_len * longest  # no need to look at more
        if len(text) * _MAX_UTF8 < max_len * longest:
            return
        num_bytes = len(text[:enough].encode("utf-8", "surrogatepass").translate(None, lost))
        if num_bytes >= max_len * longest:
            raise InvalidRequest(
                f"the prompt has at least {num_bytes // longest} tokens; prompt and output together may have "
                f"{max_len}",
                "prompt",
            )

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Ids that the vocabulary does not have (a model's output may be wider) give no text."""
        data = b"".join(self.codec.token_bytes(i, skip_special_tokens) for i in ids)
        return data.decode("utf-8", "replace").removeprefix(self.codec.prefix)

    def shown(self, token_id: int) -> str:
        """One token for people's eyes, special or not, with U+FFFD for a part of a character."""
        return self._shown[token_id]

    @cached_property
    def _shown(self) -> PerToken[str]:
        return PerToken(lambda data: data.decode("utf-8", "replace"), self.codec)

    @cached_property
    def byte_values(self) -> PerToken[list[int]]:
        """Of each token, special or not; not to be changed."""
        return PerToken(list, self.codec)

    @cached_property
    def texts(self) -> PerToken[str | None]:
        """What tokens add to a text that has begun; None: their bytes are not whole characters."""
        return PerToken(_whole_text, self.codec)

    @cached_property
    def plain_texts(self) -> PerToken[str | None]:
        """The same without special tokens."""
        return PerToken(_whole_text, self.codec, skip_special_tokens=True)

    @property
    def vocab_size(self) -> int:
        return self.codec.vocab_size


def _whole_text(data: bytes) -> str | None:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return None


_BYTE_TOKEN = re.compile("<0x([0-9A-Fa-f]{2})>")  # SentencePiece's
_BEGUN = "a"  # stands for the text before a token
_LONG = 1024  # characters: `tokenizers` lets other threads run only while it encodes a batch


class Fast:
    """The `tokenizers` library.

    Its own `decode` is not used: for a run of byte tokens that is not all valid UTF-8 it drops also the
    characters that are, so that text which a stream has shown would be gone when one more byte came.
    """

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self.tokenizer = tokenizer
        self.vocab_size = tokenizer.get_vocab_size()
        self._join = " ".join if tokenizer.decoder is None else tokenizer.decoder.decode
        self.special_ids = {i for i, token in tokenizer.get_added_tokens_decoder().items() if token.special}
        state = tokenizer.decoder.__getstate__().decode() if tokenizer.decoder else ""
        self.has_bytes = re.search(r'"type":\s*"(ByteLevel|ByteFallback|Metaspace)"', state) is not None
        self._bytes: dict[int, bytes] = {}
        self.prefix = self._running("▁a").removesuffix(self._join(["▁a"]))
        self.longest = bpe.longest_token(tokenizer)

    def token_id(self, token: str) -> int | None:
        return self.tokenizer.token_to_id(token)

    def token(self, token_id: int) -> str:
        return self.tokenizer.id_to_token(token_id) or ""

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        if len(text) < _LONG:
            return self.tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        return self.tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids

    def encode_with_places(self, text: str, add_special_tokens: bool) -> Iterator[tuple[int, int, int]]:
        """Each token, and from where to where it stands in the text."""
        [encoding] = self.tokenizer.encode_batch([text], add_special_tokens=add_special_tokens)
        for i, token_id in enumerate(encoding.ids):
            yield token_id, *(encoding.token_to_chars(i) or (0, 0))

    def token_bytes(self, token_id: int, skip_special_tokens: bool) -> bytes:
        if skip_special_tokens and token_id in self.special_ids:
            return b""
        if token_id not in self._bytes:
            token = self.tokenizer.id_to_token(token_id) if 0 <= token_id < 1 << 32 else None
            if token is None:
                return b""
            self._bytes[token_id] = self._bytes_of(token)
        return self._bytes[token_id]

    def _bytes_of(self, token: str) -> bytes:
        text = self._running(token)
        if "\ufffd" not in text:
            return text.encode()
        if match := _BYTE_TOKEN.fullmatch(token):
            return bytes.fromhex(match[1])
        return bpe.bytes_of(token) or text.encode()

    def _running(self, token: str) -> str:
        return self._join([_BEGUN, token]).removeprefix(_BEGUN)


def load_tokenizer(folder: Path, *, mode: str = "auto") -> Tokenizer:
    """`auto`: tokenizer.json, tokenizer.model, or vocab.json and merges.txt; `slow`: tokenizer.model."""
    if mode not in ("auto", "slow"):
        raise ConfigError(f"--tokenizer_mode={mode}: allowed are auto and slow")
    try:
        return _load(folder, slow=mode == "slow")
    except ModelError:
        raise
    except BaseException as error:
        # Where the library panics, it raises what is not even an Exception.
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:120]
        raise ModelError(f"the tokenizer's files make no tokenizer ({reason}); fetch them again") from error


def _load(folder: Path, slow: bool) -> Tokenizer:
    settings = _settings(folder)
    codec = _slow(folder, settings) if slow else _fast(folder, settings)
    names = _special_tokens(settings)
    eos = [codec.token_id(names.get("eos_token", "")), *_configured_eos(folder)]
    eos_ids = tuple(dict.fromkeys(i for i in eos if i is not None))
    return Tokenizer(codec, eos_ids, names, _chat_template(folder, settings))


def _fast(folder: Path, settings: Settings) -> Codec:
    if (folder / "tokenizer.json").exists():
        return Fast(_from_json(folder, settings))
    _refuse_code(settings)
    if (folder / "tokenizer.model").exists():
        return _from_model(folder, settings)
    if (folder / "vocab.json").exists() and (folder / "merges.txt").exists():
        return Fast(_from_vocab(folder, settings))
    raise ModelError(
        "no tokenizer in the model's folder: tokenizer.json, tokenizer.model or vocab.json with merges.txt; "
        "name one with --tokenizer"
    )


def _from_json(folder: Path, settings: Settings) -> tokenizers.Tokenizer:
    text = _read(folder / "tokenizer.json").decode("utf-8", "replace")
    tokenizer = tokenizers.Tokenizer.from_str(text)
    # For these classes transformers 5 takes only vocabulary, merges and post-processor out of the file.
    kind = _class_of(folder, settings)
    if kind in ("LlamaTokenizer", "CodeLlamaTokenizer") and '"ByteLevel"' not in text:
        _shape_llama(tokenizer, settings)
    elif kind == "GPT2Tokenizer":
        tokenizer.pre_tokenizer = bpe.cut_as_gpt2(bool(settings.get("add_prefix_space")))
    _add_tokens(tokenizer, settings)
    return tokenizer


def _class_of(folder: Path, settings: Settings) -> str | None:
    """The tokenizer's class, unless it is of a type of model for which transformers passes over it."""
    if _json(folder / "config.json").get("model_type") in ("mistral", "mixtral", "phi3", "qwen2"):
        return None
    return str(settings.get("tokenizer_class")).removesuffix("Fast")


def _shape_llama(tokenizer: tokenizers.Tokenizer, settings: Settings) -> None:
    prefix = settings.get("add_prefix_space")
    bpe.shape_llama(tokenizer, prefix=prefix is None or bool(prefix), legacy=bool(settings.get("legacy")))


def _from_model(folder: Path, settings: Settings) -> Codec:
    model = _sentencepiece(folder, settings)
    if not model.is_bpe:
        return _slow(folder, settings)
    vocab = {piece: i for i, piece in enumerate(model.pieces)}
    tokenizer = bpe.sentencepiece(vocab, bpe.merges_of(vocab, vocab, longest_first=False))
    if str(settings.get("tokenizer_class")).startswith("Gemma"):
        bpe.shape_gemma(tokenizer)
    else:
        _shape_llama(tokenizer, settings)
    tokenizer.add_tokens(list(model.added.values()))
    _add_tokens(tokenizer, settings)
    bpe.surround(tokenizer, *_around(settings))
    return Fast(tokenizer)


def _from_vocab(folder: Path, settings: Settings) -> tokenizers.Tokenizer:
    paths = [folder / "vocab.json", folder / "merges.txt"]
    for path in paths:
        _check(path)
    model = models.BPE.from_file(*map(str, paths))
    settings.setdefault("eos_token", "<|endoftext|>")
    if str(settings.get("tokenizer_class")).startswith("Qwen2"):
        tokenizer = bpe.byte_level(model, split=bpe.QWEN2_SPLIT, normalizer=normalizers.NFC())
    else:
        settings.setdefault("bos_token", "<|endoftext|>")
        tokenizer = bpe.byte_level(model, prefix=bool(settings.get("add_prefix_space")))
    _add_tokens(tokenizer, settings)
    for i, token in _added(settings).items():
        if tokenizer.token_to_id(token.content) != i:
            raise ModelError(
                f"added token {token.content!r} cannot have the id {i}; make a tokenizer.json of it"
            )
    bpe.surround(tokenizer, *_around(settings | {"add_bos_token": settings.get("add_bos_token", False)}))
    return tokenizer


def _slow(folder: Path, settings: Settings) -> Codec:
    if not (folder / "tokenizer.model").exists():
        raise ModelError(
            "--tokenizer_mode=slow needs the file tokenizer.model, which the model's folder lacks; use auto"
        )
    _refuse_code(settings)
    model = _sentencepiece(folder, settings)
    return Slow(model, model.added | _added(settings), *_around(settings))


def _sentencepiece(folder: Path, settings: Settings) -> SentencePieceModel:
    """The model; its own names for the ends of a text go into `settings` where these name none."""
    model = parse_model(_read(folder / "tokenizer.model"), "tokenizer.model")
    control = {token.content for token in model.added.values()}
    for name, usual in (("bos_token", {"<s>", "<bos>"}), ("eos_token", {"</s>", "<eos>"})):
        for token in usual & control:
            settings.setdefault(name, token)
    return model


def _refuse_code(settings: Settings) -> None:
    if "auto_map" in settings:
        raise ModelError(
            "tokenizer_config.json wants its own code to be run (auto_map), which hex_llm never does; "
            "add a tokenizer.json to the folder or name another tokenizer with --tokenizer"
        )


# ---- tokenizer_config.json and the files around it


def _settings(folder: Path) -> Settings:
    settings = _json(folder / "tokenizer_config.json")
    if "added_tokens_decoder" not in settings:  # files of before 2023-08
        settings |= _json(folder / "special_tokens_map.json")
        special = set(_special_tokens(settings).values()) | {token.content for token in _extra(settings)}
        settings["added_tokens_decoder"] = {
            i: {"content": token, "special": token in special, "normalized": token not in special}
            for token, i in _json(folder / "added_tokens.json").items()
        }
    return settings


def _special_tokens(settings: Settings) -> dict[str, str]:
    values = {name: _content(value) for name, value in settings.items() if name.endswith("_token")}
    return {name: value for name, value in values.items() if value is not None}


def _content(token: object) -> str | None:
    """A token is written as a text, or as an object with its properties."""
    content = token.get("content") if isinstance(token, dict) else token
    return content if isinstance(content, str) else None


def _extra(settings: Settings) -> list[AddedToken]:
    extra = settings.get("additional_special_tokens") or settings.get("extra_special_tokens") or []
    tokens = extra.values() if isinstance(extra, dict) else extra if isinstance(extra, list) else []
    return [_token(token, special=True) for token in tokens]


def _added(settings: Settings) -> dict[int, AddedToken]:
    tokens = {int(i): _token(token) for i, token in settings["added_tokens_decoder"].items()}
    return dict(sorted(tokens.items()))


def _token(token: object, *, special: bool = False) -> AddedToken:
    text = _content(token)
    if text is None:
        raise ModelError(f"{str(token)[:60]!r} in tokenizer_config.json is not a token")
    flags = token if isinstance(token, dict) else {}
    special = special or flags.get("special") is True
    names = ("lstrip", "rstrip", "single_word")
    normalized = flags.get("normalized", not special) is True
    return AddedToken(
        text, special=special, normalized=normalized, **{name: flags.get(name) is True for name in names}
    )


def _add_tokens(tokenizer: tokenizers.Tokenizer, settings: Settings) -> None:
    """These are found whole in the text; a token that was added before takes on the new properties."""
    tokenizer.add_tokens(list(_added(settings).values()))
    present = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    special = [_token(token, special=True) for token in _special_tokens(settings).values()]
    tokenizer.add_tokens([token for token in [*special, *_extra(settings)] if token.content not in present])


def _around(settings: Settings) -> tuple[str | None, str | None]:
    """What goes before and after a text."""
    names = _special_tokens(settings)
    return (
        names.get("bos_token") if settings.get("add_bos_token", True) else None,
        names.get("eos_token") if settings.get("add_eos_token", False) else None,
    )


def _configured_eos(folder: Path) -> list[int]:
    for name in ("generation_config.json", "config.json"):
        value = _json(folder / name).get("eos_token_id")
        ids = [i for i in (value if isinstance(value, list) else [value]) if type(i) is int]
        if ids:
            return ids
    return []


def _chat_template(folder: Path, settings: Settings) -> str | None:
    if (folder / "chat_template.jinja").exists():
        return _read(folder / "chat_template.jinja").decode("utf-8", "replace")
    template = settings.get("chat_template") or _json(folder / "chat_template.json").get("chat_template")
    if isinstance(template, list):  # of {"name": ..., "template": ...}
        template = {
            str(item.get("name")): item.get("template") for item in template if isinstance(item, dict)
        }
    if isinstance(template, dict):
        template = template.get("default")
    return template if isinstance(template, str) else None


def _json(path: Path) -> dict[str, Any]:
    """A JSON object; an empty one for a file that is not there."""
    if not path.exists():
        return {}
    try:
        values = json.loads(_read(path))
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path.name} is not valid JSON; fetch it again") from error
    if not isinstance(values, dict):
        raise ModelError(f"{path.name} must hold a JSON object; fetch it again")
    return values


def _read(path: Path) -> bytes:
    _check(path)
    try:
        return path.read_bytes()
    except OSError as error:
        raise ModelError(f"{path.name} cannot be read: {error.strerror}") from error


def _check(path: Path) -> None:
    if not path.is_file():
        raise ModelError(f"{path.name} is not a file; fetch the model again")
    if path.stat().st_size > _MAX_BYTES:
        raise ModelError(f"{path.name} has more than {_MAX_BYTES >> 20} MiB, which no tokenizer needs")
