"""Tokenizers in GGUF metadata: judged by transformers' reading of the same file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sentencepiece
import transformers
from gguf import GGMLQuantizationType as Q
from tokenizers import pre_tokenizers

from hex_llm.config import EngineConfig
from hex_llm.errors import ModelError
from hex_llm.text import bpe
from hex_llm.text.tokenizer import Tokenizer
from hex_llm.weights.gguf import gguf_tokenizer, open_gguf
from hex_llm.weights.gguf_tokenizer import build_tokenizer, end_ids
from hex_llm.weights.source import fetch
from tests.text.corpus import TEXTS, bos_id, split, train_byte_level, train_sentencepiece
from tests.weights.gguf_files import write

CHATML = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def judge(path: Path) -> Any:
    return transformers.PreTrainedTokenizerFast.from_pretrained(path.parent, gguf_file=path.name)


def assert_same(ours: Tokenizer, theirs: Any, texts: list[str] = TEXTS) -> None:
    for text in texts:
        ids = ours.encode(text, add_special_tokens=False)
        assert ids == theirs.encode(text, add_special_tokens=False), text
        for skip in (False, True):
            assert ours.decode(ids, skip_special_tokens=skip) == theirs.decode(
                ids, skip_special_tokens=skip
            ), text


def test_the_default_model() -> None:
    path = fetch(None, cache_dir=EngineConfig().cache_dir)
    ours, theirs = gguf_tokenizer(open_gguf(path)), judge(path)
    assert_same(ours, theirs)
    assert ours.encode("hi") == theirs.encode("hi")
    assert (ours.eos_ids, bos_id(ours), ours.vocab_size) == ((2,), 1, len(theirs))
    assert ours.special_tokens == theirs.special_tokens_map
    assert ours.chat_template == theirs.chat_template


def keys(tokens: list[str], kinds: list[int], arch: str = "llama", **more: Any) -> dict[str, Any]:
    ids = {key: tokens.index(more.pop(key)) for key in list(more) if key.endswith("_token_id")}
    values = {"tokens": tokens, "token_type": kinds, **ids, **more}
    return {f"tokenizer.ggml.{key}": value for key, value in values.items()}


def file(folder: Path, metadata: dict[str, Any], arch: str = "llama") -> Path:
    (folder / "gguf").mkdir()  # transformers would prefer a tokenizer.model next to it
    return write(
        folder / "gguf" / "m.gguf", arch, metadata, {"token_embd.weight": (np.zeros((1, 32)), Q.F32)}
    )


def ours_of(metadata: dict[str, Any], arch: str = "llama") -> Tokenizer:
    return build_tokenizer(Path("m.gguf"), {"general.architecture": arch, **metadata})


def byte_level_keys(pre: str, pattern: str | None) -> dict[str, Any]:
    cut = pre_tokenizers.ByteLevel(add_prefix_space=False) if pattern is None else split(pattern)
    trained = train_byte_level(cut, CHATML)
    vocab = trained.get_vocab()
    tokens = [*sorted(vocab, key=vocab.__getitem__), "<tool>"]
    merges = [" ".join(merge) for merge in json.loads(trained.to_str())["model"]["merges"]]
    kinds = [3 if token in CHATML else 4 if token == "<tool>" else 1 for token in tokens]
    named = {"bos_token_id": "<|im_start|>", "eos_token_id": "<|endoftext|>"}
    return keys(tokens, kinds, model="gpt2", pre=pre, merges=merges, **named)


@pytest.mark.parametrize(
    ("pre", "pattern"),
    [("smollm", None), ("gpt-2", None), ("llama-bpe", bpe.LLAMA3_SPLIT), ("qwen2", bpe.QWEN2_SPLIT)],
)
def test_byte_level(pre: str, pattern: str | None, tmp_path: Path) -> None:
    metadata = byte_level_keys(pre, pattern)
    ours = ours_of(metadata)
    assert_same(ours, judge(file(tmp_path, metadata)))
    assert ours.eos_ids == (0, 2)  # <|im_end|>, too, ends a turn
    starts = ours.encode("hi")[0] == bos_id(ours)
    assert starts == (pre == "llama-bpe")


# Judged by the patterns themselves, as the models' tokenizer.json files spell them.
CASED = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+ENDS|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*ENDS|\p{N}DIGITS|"
    r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
O200K = CASED.replace("ENDS", "(?i:'s|'t|'re|'ve|'m|'ll|'d)?").replace("DIGITS", "{1,3}")
TEKKEN = CASED.replace("ENDS", "").replace("DIGITS", "")


@pytest.mark.parametrize(
    ("pre", "pattern"),
    [("gpt-4o", O200K), ("llama4", O200K), ("minimax-m2", O200K), ("tekken", TEKKEN)],
)
def test_words_of_newer_models(pre: str, pattern: str) -> None:
    trained, ours = train_byte_level(split(pattern), CHATML), ours_of(byte_level_keys(pre, pattern))
    for text in [*TEXTS, "HTTPServer'S aB/\n\nÀÉîÏ don'T 12345"]:
        text = text.replace("<tool>", "")
        assert ours.encode(text, add_special_tokens=False) == trained.encode(text).ids, text
    assert (ours.encode("hi")[0] == bos_id(ours)) == (pre == "tekken")


def test_a_message_of_gpt_oss_does_not_end_its_turn() -> None:
    tokens = ["<|return|>", "<|end|>", "<|call|>", "a"]
    metadata = keys(tokens, [3, 3, 3, 1], model="gpt2", eos_token_id="<|return|>")
    assert end_ids(metadata) == (0, 2)
    assert end_ids(keys(["</s>", *tokens[1:2]], [3, 3], eos_token_id="</s>")) == (0, 1)


def sentencepiece_keys(path: Path, *, gemma: bool = False, special: tuple[str, ...] = ()) -> dict[str, Any]:
    """As the converter writes them: the user's tokens with a score of -1000 and real spaces."""
    train_sentencepiece(path, gemma=gemma)
    model = sentencepiece.SentencePieceProcessor(model_file=str(path))
    size = model.vocab_size()
    tokens, scores, kinds = [], [], []
    for i in range(size):
        token, score = model.id_to_piece(i), model.get_score(i)
        kind = 2 if model.is_unknown(i) else 3 if model.is_control(i) else 6 if model.is_byte(i) else 1
        if gemma and kind == 1 and not token.strip("▁\n"):
            token, score, kind = token.replace("▁", " "), -1000.0, 4
        if token in ("<start_of_turn>", "<end_of_turn>"):
            score, kind = -1000.0, 3
        tokens, scores, kinds = [*tokens, token], [*scores, score], [*kinds, kind]
    tokens, scores, kinds = [*tokens, *special], scores + [-1000.0] * len(special), kinds + [3] * len(special)
    ends = (
        {"bos_token_id": "<bos>", "eos_token_id": "<eos>"}
        if gemma
        else {"bos_token_id": "<s>", "eos_token_id": "</s>"}
    )
    return keys(tokens, kinds, model="llama", scores=scores, unknown_token_id="<unk>", **ends)


def test_llama_sentencepiece(tmp_path: Path) -> None:
    metadata = sentencepiece_keys(tmp_path / "tokenizer.model")
    ours = ours_of(metadata)
    assert_same(ours, judge(file(tmp_path, metadata)))
    assert ours.encode("hi")[0] == bos_id(ours) == 1
    without = ours_of(
        {**metadata, "tokenizer.ggml.add_bos_token": False, "tokenizer.ggml.add_eos_token": True}
    )
    assert without.encode("hi") == [*ours.encode("hi", add_special_tokens=False), 2]
    unprefixed = ours_of({**metadata, "tokenizer.ggml.add_space_prefix": False})
    assert unprefixed.encode("the", add_special_tokens=False) != ours.encode("the", add_special_tokens=False)


@pytest.mark.parametrize("arch", ["gemma", "gemma2"])
def test_gemma(arch: str, tmp_path: Path) -> None:
    metadata = sentencepiece_keys(tmp_path / "tokenizer.model", gemma=True)
    ours = ours_of(metadata, arch)
    assert_same(ours, judge(file(tmp_path, metadata, arch)))
    assert ours.encode("hi")[0] == bos_id(ours) == 2
    assert ours.eos_ids == (1, ours.codec.token_id("<end_of_turn>"))


def test_phi3(tmp_path: Path) -> None:
    special = ("<|endoftext|>", "<|user|>", "<|end|>", "<|assistant|>")
    metadata = sentencepiece_keys(tmp_path / "tokenizer.model", special=special)
    ours = ours_of(metadata, "phi3")
    assert_same(ours, judge(file(tmp_path, metadata, "phi3")), [t for t in TEXTS if "</s> " not in t])
    # As in Phi-3's own tokenizer.json, which transformers cannot know from the file.
    assert ours.encode("<|user|>\nhi<|end|>\n") == ours.encode("<|user|>hi<|end|>")
    assert ours.codec.token_id("<|end|>") in ours.eos_ids


def test_what_we_do_not_know() -> None:
    good = byte_level_keys("gpt-2", None)
    for change, reason in [
        ({"tokenizer.ggml.pre": "chameleon"}, "'chameleon'"),
        ({"tokenizer.ggml.model": "bert"}, "'bert'"),
        ({"tokenizer.ggml.tokens": []}, "no tokenizer"),
        ({"tokenizer.ggml.merges": ["no-such-token x"]}, "makes no tokenizer"),
        ({"tokenizer.ggml.merges": ["one two three"]}, "makes no tokenizer"),
        ({"tokenizer.ggml.model": "llama"}, "makes no tokenizer"),
    ]:
        with pytest.raises(ModelError, match=reason) as caught:
            ours_of({**good, **change})
        assert "\n" not in str(caught.value)
