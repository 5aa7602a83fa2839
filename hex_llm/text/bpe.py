"""The shapes of BPE tokenizers: how a family cuts text before the merges, and joins the pieces again.

A vocabulary and its merges go in, a `tokenizers.Tokenizer` like the one that transformers builds comes out.
Not known here: the files that these come from.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

Vocab = dict[str, int]
Merges = list[tuple[str, str]]

_SPACE = "▁"
_LONGEST_MERGED = 256  # no piece is longer; without a limit a hostile file's could take for ever
_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2_SPLIT = _SPLIT % ""  # one digit at a time
LLAMA3_SPLIT = _SPLIT % "{1,3}"
# Capitals before small letters begin a word.
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED_SPLIT = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+%s|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*%s|\p{{N}}%s"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TEKKEN_SPLIT = _CASED_SPLIT % ("", "", "")
_ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
O200K_SPLIT = _CASED_SPLIT % (_ENDINGS, _ENDINGS, "{1,3}")


def _byte_characters() -> dict[str, int]:
    """The printable characters that stand for the 256 bytes in byte-level vocabularies."""
    own = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in own]
    return {chr(byte): byte for byte in own} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTE_OF = _byte_characters()


def bytes_of(token: str) -> bytes | None:
    """What a token of a byte-level vocabulary stands for; None: it is not spelled in those characters."""
    return bytes(_BYTE_OF[char] for char in token) if all(char in _BYTE_OF for char in token) else None


def byte_level(
    model: models.BPE,
    *,
    split: str | None = None,
    prefix: bool = False,
    normalizer: normalizers.Normalizer | None = None,
) -> Tokenizer:
    """BPE over bytes, which are those of the words that `split` finds; None: cut as GPT-2 does."""
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = cut_as_gpt2(prefix)
    if split is not None:
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(split), behavior="isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=prefix, use_regex=False),
            ]
        )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def cut_as_gpt2(prefix: bool) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=prefix)


def sentencepiece(vocab: Vocab, merges: Merges) -> Tokenizer:
    """BPE over characters, and over the bytes of those that it lacks; it needs one of the shapes below."""
    return Tokenizer(models.BPE(vocab, merges, fuse_unk=True, byte_fallback=True))


def shape_llama(tokenizer: Tokenizer, *, prefix: bool = True, legacy: bool = False) -> None:
    """A space goes before the text; if `legacy`, also before the text after each special token."""
    scheme = "never" if not prefix else "always" if legacy else "first"
    tokenizer.normalizer = None
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(_SPACE, prepend_scheme=scheme, split=False)
    tokenizer.decoder = _decoder(prefix)


def shape_phi3(tokenizer: Tokenizer) -> None:
    """A space goes before every stretch of text, also before one that begins with a space."""
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend(_SPACE), normalizers.Replace(" ", _SPACE)]
    )
    tokenizer.decoder = _decoder(prefix=True)


def shape_gemma(tokenizer: Tokenizer) -> None:
    tokenizer.normalizer = normalizers.Replace(" ", _SPACE)
    tokenizer.decoder = _decoder(prefix=False)


def _decoder(prefix: bool) -> decoders.Decoder:
    steps = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    return decoders.Sequence([*steps, decoders.Strip(" ", left=1)] if prefix else steps)


def merges_of(vocab: Vocab, ranks: Mapping[str, float], *, longest_first: bool) -> Merges:
    """SentencePiece keeps no merges: every way to cut a token in two tokens, by the rank of what it makes.

    Of a token's own cuts, those with the longest left part come first, or last.
    """
    sign = -1 if longest_first else 1
    merges = [
        (rank, sign * cut, token)
        for token, rank in ranks.items()
        if len(token) <= _LONGEST_MERGED
        for cut in range(1, len(token))
        if token[:cut] in vocab and token[cut:] in vocab
    ]
    merges.sort(key=lambda item: item[:2])
    return [(token[: abs(cut)], token[abs(cut) :]) for _, cut, token in merges]


def surround(tokenizer: Tokenizer, bos: str | None, eos: str | None) -> None:
    """The tokens that `encode` puts around a text; None: none."""
    around = [(token, tokenizer.token_to_id(token)) for token in (bos, eos) if token is not None]
    single = [token for token in (bos, "$A", eos) if token is not None]
    tokenizer.post_processor = processors.TemplateProcessing(single=single, special_tokens=around)


# ---- how much text a token can stand for

_NFC_SHRINKS = 3  # at most: three letters of Hangul become a syllable of the size of one
_UTF8 = (*range(0xC0), *range(0xC2, 0xF5))  # the bytes that occur in it
_KEEPING = {"ByteLevel", "Digits", "Metaspace", "NFC", "Prepend", "Sequence"}  # steps that leave nothing out


def longest_token(tokenizer: Tokenizer) -> tuple[int, bytes] | None:
    """Bytes of text that a token stands for at most, and the bytes that no token stands for, which are left
    out; None: where this is not certain."""
    vocab, added = tokenizer.get_vocab(with_added_tokens=False), tokenizer.get_added_tokens_decoder()
    if not isinstance(tokenizer.model, models.BPE) or any(one.lstrip or one.rstrip for one in added.values()):
        return None
    parts = [part for part in (tokenizer.normalizer, tokenizer.pre_tokenizer) if part is not None]
    steps = [step for part in parts for step in _steps(json.loads(part.__getstate__()))]
    kinds = {step["type"] for step in steps}
    if not all(map(_keeps, steps)):
        return None
    lost = b""
    if "ByteLevel" in kinds:
        longest = max(map(len, vocab))
        lost = bytes(byte for char, byte in _BYTE_OF.items() if char not in vocab)
    elif all(f"<0x{byte:02X}>" in vocab for byte in _UTF8):
        longest = max(len(token.encode()) for token in vocab)
    else:
        return None
    longest = max([longest, *(len(one.content.encode()) for one in added.values())])
    return longest * (_NFC_SHRINKS if "NFC" in kinds else 1), lost


def _steps(part: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield part
    for one in part.get("normalizers") or part.get("pretokenizers") or ():
        yield from _steps(one)


def _keeps(step: Mapping[str, Any]) -> bool:
    if step["type"] == "Split":
        return step.get("behavior") != "Removed"
    if step["type"] == "Replace":
        return step.get("pattern") == {"String": " "} and step.get("content") == _SPACE
    return step["type"] in _KEEPING
