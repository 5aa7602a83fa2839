"""The tokenizer in a GGUF file's metadata: byte-level BPE (`gpt2`) or that of SentencePiece (`llama`).

The file names the way in which text is cut (`pre`) without describing it; the ways are `bpe.py`'s. The ids
are those of transformers 5 for the same file, but that special tokens go around a text as the file asks.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from tokenizers import AddedToken
from tokenizers.models import BPE

from hex_llm.errors import ModelError
from hex_llm.text import bpe
from hex_llm.text.tokenizer import Fast, Tokenizer
from hex_llm.weights.gguf_reader import Metadata

_CONTROL, _USER_DEFINED = 3, 4  # token types
_NAMES = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
# A file names one end of a text; a chat model may end its turns with another.
_TURN_ENDS = {
    *("<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>"),
    *("<|eot|>", "<|eom|>", "<|return|>", "<|call|>"),  # Llama 4, gpt-oss
}

# None: as GPT-2 does. SmolLM's own tokenizer parts digits besides; transformers 5 leaves that out, from the
# GGUF file and from the model's folder alike, and we keep to transformers.
_SPLITS = {
    "default": None,
    "gpt-2": None,
    "smollm": None,
    "llama-bpe": bpe.LLAMA3_SPLIT,
    "llama3": bpe.LLAMA3_SPLIT,
    "llama-v3": bpe.LLAMA3_SPLIT,
    "dbrx": bpe.LLAMA3_SPLIT,  # Phi-4
    "qwen2": bpe.QWEN2_SPLIT,
    "deepseek-r1-qwen": bpe.QWEN2_SPLIT,
    "chatglm-bpe": bpe.LLAMA3_SPLIT,
    "glm4": bpe.LLAMA3_SPLIT,
    "gpt-4o": bpe.O200K_SPLIT,  # gpt-oss
    "llama4": bpe.O200K_SPLIT,
    "minimax-m2": bpe.O200K_SPLIT,
    "tekken": bpe.TEKKEN_SPLIT,
}
_WHOLE_FIRST = ("llama-bpe", "llama3", "llama-v3", "tekken")


def build_tokenizer(path: Path, metadata: Metadata) -> Tokenizer:
    tokens, model = metadata.get("tokenizer.ggml.tokens"), str(metadata.get("tokenizer.ggml.model"))[:40]
    if not isinstance(tokens, list) or not tokens or model not in _MODELS:
        raise ModelError(
            f"{path}: holds no tokenizer of a supported model ({', '.join(_MODELS)}) but {model!r}; "
            "name a tokenizer with --tokenizer"
        )
    try:
        tokenizer = _MODELS[model](metadata, tokens)
        names = _special_tokens(metadata, tokens)
        added = _added(metadata, tokens, names)
        tokenizer.add_tokens([token for token in added if tokenizer.token_to_id(token.content) is not None])
        bpe.surround(tokenizer, *_around(metadata, names))
    except ModelError as error:
        raise ModelError(f"{path}: {error}") from None
    except Exception as error:  # the library raises nothing more particular
        reason = " ".join(str(error).split())[:120]
        raise ModelError(
            f"{path}: its metadata makes no tokenizer ({reason}); convert the model again"
        ) from None
    template = metadata.get("tokenizer.chat_template")
    return Tokenizer(
        Fast(tokenizer), end_ids(metadata), names, template if isinstance(template, str) else None
    )


def end_ids(metadata: Metadata) -> tuple[int, ...]:
    """The tokens that end a text or a turn, the file's own end of text first."""
    named = (metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom"))
    control = set(np.flatnonzero(_types(metadata) == _CONTROL).tolist())
    tokens = metadata.get("tokenizer.ggml.tokens", ())
    # In gpt-oss a message ends so, and the turn goes on.
    turn_ends = _TURN_ENDS - {"<|end|>"} if "<|return|>" in tokens else _TURN_ENDS
    ends = [i for i, token in enumerate(tokens) if token in turn_ends and i in control]
    return tuple(dict.fromkeys(i for i in (*named, *ends) if type(i) is int))


def _byte_level(metadata: Metadata, tokens: list[str]) -> tokenizers.Tokenizer:
    pre = str(metadata.get("tokenizer.ggml.pre", "default"))[:40]
    if pre not in _SPLITS:
        raise ModelError(
            f"pre-tokenizer {pre!r} is not supported ({', '.join(_SPLITS)} are); use --tokenizer"
        )
    # Llama 3 and Mistral take a word that is a token for that token, whatever the merges would make of it.
    model = BPE(_vocab(tokens), _merges(metadata), ignore_merges=pre in _WHOLE_FIRST)
    return bpe.byte_level(model, split=_SPLITS[pre])


def _sentencepiece(metadata: Metadata, tokens: list[str]) -> tokenizers.Tokenizer:
    arch = str(metadata.get("general.architecture"))
    if arch.startswith("gemma"):
        # Conversion spells runs of spaces as such, and gives the user's tokens a score that says nothing.
        tokens = ["▁" * len(token) if token.strip(" ") == "" else token for token in tokens]
        scores: Any = -np.arange(len(tokens))
    else:
        scores = metadata.get("tokenizer.ggml.scores", ())
    vocab = _vocab(tokens)
    ranks = {token: -score for token, score in zip(tokens, np.asarray(scores).tolist(), strict=True)}
    tokenizer = bpe.sentencepiece(vocab, _merges(metadata) or bpe.merges_of(vocab, ranks, longest_first=True))
    if arch.startswith("gemma"):
        bpe.shape_gemma(tokenizer)
    elif arch == "phi3":
        bpe.shape_phi3(tokenizer)
    else:
        bpe.shape_llama(tokenizer, prefix=_flag(metadata, "add_space_prefix", True))
    return tokenizer


_MODELS: dict[str, Callable[[Metadata, list[str]], tokenizers.Tokenizer]] = {
    "gpt2": _byte_level,
    "llama": _sentencepiece,
}


def _vocab(tokens: list[str]) -> bpe.Vocab:
    return {token: i for i, token in enumerate(tokens)}


def _merges(metadata: Metadata) -> bpe.Merges:
    merges = [tuple(merge.split(" ")) for merge in metadata.get("tokenizer.ggml.merges", ())]
    return [(left, right) for left, right in merges]


def _special_tokens(metadata: Metadata, tokens: list[str]) -> dict[str, str]:
    ids = {name: metadata.get(f"tokenizer.ggml.{key}_token_id") for key, name in _NAMES.items()}
    return {name: tokens[i] for name, i in ids.items() if type(i) is int and 0 <= i < len(tokens)}


def _types(metadata: Metadata) -> np.ndarray[Any, Any]:
    return np.asarray(metadata.get("tokenizer.ggml.token_type", ()))


def _added(metadata: Metadata, tokens: list[str], names: dict[str, str]) -> list[AddedToken]:
    """The tokens that are found whole in a text."""
    kinds = dict(zip(tokens, _types(metadata).tolist(), strict=False))
    special = {token for token, kind in kinds.items() if kind == _CONTROL} | set(names.values())
    whole = special | {token for token, kind in kinds.items() if kind == _USER_DEFINED}
    # Phi-3's special tokens swallow the white space after them, which no key of the file says.
    is_phi3 = metadata.get("general.architecture") == "phi3" and metadata["tokenizer.ggml.model"] == "llama"
    eager = special - {"<unk>", "<s>", "<|endoftext|>"} if is_phi3 else set()
    return [
        AddedToken(token, special=token in special, normalized=False, rstrip=token in eager)
        for token in tokens
        if token in whole
    ]


def _around(metadata: Metadata, names: dict[str, str]) -> tuple[str | None, str | None]:
    """What goes before and after a text."""
    is_old = (
        metadata.get("tokenizer.ggml.model") == "llama" or metadata.get("tokenizer.ggml.pre") in _WHOLE_FIRST
    )
    bos = names.get("bos_token") if _flag(metadata, "add_bos_token", is_old) else None
    return bos, names.get("eos_token") if _flag(metadata, "add_eos_token", False) else None


def _flag(metadata: Metadata, key: str, default: bool) -> bool:
    return bool(metadata.get(f"tokenizer.ggml.{key}", default))
