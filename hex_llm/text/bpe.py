"""The shapes of BPE tokenizers: how a family cuts text before the merges, and joins the pieces again.

A vocabulary and its merges go in, a `tokenizers.Tokenizer` like the one that transformers builds comes out.
Not known here: the files that these come from.
"""

from __future__ import annotations

from collections.abc import Mapping

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
    found = [
        (rank, sign * cut, token)
        for token, rank in ranks.items()
        if len(token) <= _LONGEST_MERGED
        for cut in range(1, len(token))
        if token[:cut] in vocab and token[cut:] in vocab
    ]
    found.sort(key=lambda item: item[:2])
    return [(token[: abs(cut)], token[abs(cut) :]) for _, cut, token in found]


def surround(tokenizer: Tokenizer, bos: str | None, eos: str | None) -> None:
    """The tokens that `encode` puts around a text; None: none."""
    around = [(token, tokenizer.token_to_id(token)) for token in (bos, eos) if token is not None]
    single = [token for token in (bos, "$A", eos) if token is not None]
    tokenizer.post_processor = processors.TemplateProcessing(single=single, special_tokens=around)
