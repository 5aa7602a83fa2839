"""Tokenizers from a model's folder: judged by transformers' AutoTokenizer on the same files."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
import transformers
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers.tokenization_utils_base import generate_merges

from hex_llm.errors import ConfigError, InvalidRequest, ModelError
from hex_llm.text import bpe
from hex_llm.text.tokenizer import load_tokenizer
from tests.text.corpus import TEXTS, bos_id, split, train_byte_level, train_sentencepiece, write_json

transformers.logging.set_verbosity_error()

LLAMA3 = ["<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
CHATML = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TOOL = {"content": "<tool>", "lstrip": False, "rstrip": True, "normalized": False, "special": False}


def folder_of(path: Path, model_type: str, **settings: Any) -> Path:
    write_json(path / "config.json", {"model_type": model_type, "eos_token_id": 2})
    write_json(path / "tokenizer_config.json", settings)
    return path


def sentencepiece_bpe(folder: Path, *, gemma: bool = False) -> Tokenizer:
    """As in the tokenizer.json of Llama 2 and of Gemma."""
    path = train_sentencepiece(folder / "train.model", gemma=gemma)
    model = sentencepiece.SentencePieceProcessor(model_file=str(path))
    vocab = {model.id_to_piece(i): i for i in range(model.vocab_size())}
    tokenizer = Tokenizer(
        models.BPE(vocab, generate_merges(vocab), unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    space = [normalizers.Replace(" ", "▁")]
    tokenizer.normalizer = normalizers.Sequence(space if gemma else [normalizers.Prepend("▁"), *space])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence(steps if gemma else [*steps, decoders.Strip(" ", 1, 0)])
    bos = "<bos>" if gemma else "<s>"
    special = ["<unk>", bos, "<eos>" if gemma else "</s>"]
    more = ["<pad>", "<start_of_turn>", "<end_of_turn>"] if gemma else []
    tokenizer.add_special_tokens(
        [AddedToken(token, normalized=False, special=True) for token in special + more]
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A", special_tokens=[(bos, tokenizer.token_to_id(bos))]
    )
    path.unlink()
    return tokenizer


def llama2(folder: Path, model_type: str = "llama", **settings: Any) -> None:
    sentencepiece_bpe(folder).save(str(folder / "tokenizer.json"))
    names = {
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": {"__type": "AddedToken", "content": "<unk>"},
    }
    folder_of(folder, model_type, tokenizer_class="LlamaTokenizer", add_bos_token=True, **names, **settings)


def llama2_legacy(folder: Path) -> None:
    llama2(folder, legacy=True)


def mistral(folder: Path) -> None:
    llama2(folder, "mistral", legacy=True)


def phi3(folder: Path) -> None:
    user = {"content": "<|user|>", "lstrip": False, "rstrip": True, "normalized": False, "special": True}
    llama2(folder, "phi3", added_tokens_decoder={"520": user, "521": TOOL})


def llama3(folder: Path) -> None:
    tokenizer = train_byte_level(split(bpe.LLAMA3_SPLIT), LLAMA3)
    template = processors.TemplateProcessing(
        single="<|begin_of_text|> $A", special_tokens=[("<|begin_of_text|>", 0)]
    )
    tokenizer.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=False), template])
    tokenizer.enable_truncation(8)  # some files have that by mistake; neither of us heeds it
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {
        "bos_token": "<|begin_of_text|>",
        "eos_token": "<|eot_id|>",
        "clean_up_tokenization_spaces": True,
    }
    folder_of(folder, "llama", tokenizer_class="PreTrainedTokenizerFast", **names)
    write_json(folder / "generation_config.json", {"eos_token_id": [1, 4]})


def qwen2(folder: Path) -> None:
    tokenizer = train_byte_level(split(bpe.QWEN2_SPLIT), [])
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in CHATML])
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {"bos_token": None, "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    folder_of(folder, "qwen2", tokenizer_class="Qwen2Tokenizer", **names)


def smollm2(folder: Path) -> None:
    cut = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    train_byte_level(cut, CHATML).save(str(folder / "tokenizer.json"))
    names = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "unk_token": "<|endoftext|>"}
    extra = {"additional_special_tokens": ["<|im_start|>", "<tool>"], "add_prefix_space": False}
    folder_of(folder, "llama", tokenizer_class="GPT2Tokenizer", **names, **extra)


def gemma(folder: Path) -> None:
    sentencepiece_bpe(folder, gemma=True).save(str(folder / "tokenizer.json"))
    names = {"bos_token": "<bos>", "eos_token": "<eos>", "unk_token": "<unk>", "pad_token": "<pad>"}
    folder_of(folder, "gemma2", tokenizer_class="GemmaTokenizer", **names)


def llama2_model_file(folder: Path, **settings: Any) -> None:
    train_sentencepiece(folder / "tokenizer.model")
    names = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", **settings}
    folder_of(
        folder, "llama", tokenizer_class="LlamaTokenizer", add_bos_token=True, add_eos_token=True, **names
    )


def gemma_model_file(folder: Path) -> None:
    train_sentencepiece(folder / "tokenizer.model", gemma=True)
    names = {"bos_token": "<bos>", "eos_token": "<eos>", "unk_token": "<unk>", "pad_token": "<pad>"}
    folder_of(folder, "gemma2", tokenizer_class="GemmaTokenizer", add_bos_token=True, **names)


def vocab_files(folder: Path, pattern: str | None) -> None:
    cut = pre_tokenizers.ByteLevel(add_prefix_space=False) if pattern is None else split(pattern)
    trained = json.loads(train_byte_level(cut, []).to_str())["model"]
    write_json(folder / "vocab.json", trained["vocab"])
    lines = ["#version: 0.2", *(" ".join(merge) for merge in trained["merges"])]
    (folder / "merges.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")


def qwen2_vocab(folder: Path) -> None:
    vocab_files(folder, bpe.QWEN2_SPLIT)
    size = len(json.loads((folder / "vocab.json").read_text()))
    added = {
        str(size + i): {"content": token, "special": True, "normalized": False}
        for i, token in enumerate(CHATML)
    }
    names = {"bos_token": None, "eos_token": "<|im_end|>", "unk_token": None, "pad_token": "<|endoftext|>"}
    folder_of(folder, "qwen2", tokenizer_class="Qwen2Tokenizer", added_tokens_decoder=added, **names)


def gpt2_vocab(folder: Path) -> None:
    """The oldest layout: what is special stands in files of its own."""
    vocab_files(folder, None)
    size = len(json.loads((folder / "vocab.json").read_text()))
    folder_of(folder, "llama", tokenizer_class="GPT2Tokenizer")
    write_json(
        folder / "special_tokens_map.json",
        {"eos_token": "<|im_end|>", "bos_token": {"content": "<|im_start|>"}},
    )
    write_json(folder / "added_tokens.json", {"<|im_start|>": size, "<|im_end|>": size + 1})


SHAPES: list[Callable[[Path], None]] = [
    *(llama2, llama2_legacy, mistral, phi3, llama3, qwen2, smollm2, gemma),
    *(llama2_model_file, gemma_model_file, qwen2_vocab, gpt2_vocab),
]


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.__name__)
def test_as_auto_tokenizer(shape: Callable[[Path], None], tmp_path: Path) -> None:
    shape(tmp_path)
    ours, theirs = load_tokenizer(tmp_path), transformers.AutoTokenizer.from_pretrained(tmp_path)
    for text in [*TEXTS, "<|user|>\n hi<tool>  x"]:
        for special in (True, False):
            ids = ours.encode(text, add_special_tokens=special)
            assert ids == theirs.encode(text, add_special_tokens=special), text
            assert ours.decode(ids, skip_special_tokens=special) == theirs.decode(
                ids, skip_special_tokens=special
            ), text
    assert bos_id(ours) == theirs.bos_token_id
    assert theirs.eos_token_id in ours.eos_ids
    named = {name: token for name, token in theirs.special_tokens_map.items() if isinstance(token, str)}
    assert {name: ours.special_tokens[name] for name in ("bos_token", "eos_token") if name in named} == {
        name: named[name] for name in ("bos_token", "eos_token") if name in named
    }


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.__name__)
def test_any_ids_decode_as_with_auto_tokenizer(shape: Callable[[Path], None], tmp_path: Path) -> None:
    shape(tmp_path)
    ours, theirs = load_tokenizer(tmp_path), transformers.AutoTokenizer.from_pretrained(tmp_path)
    broken = {i for i in range(ours.vocab_size) if theirs.convert_ids_to_tokens(i) in HIGH_BYTES}
    ids = [*(i for i in range(ours.vocab_size) if i not in broken), 10**6]
    draw = random.Random(0)
    for skip in (True, False):
        for _ in range(200):
            some = draw.choices(ids, k=draw.randrange(12))
            assert ours.decode(some, skip_special_tokens=skip) == theirs.decode(
                some, skip_special_tokens=skip, clean_up_tokenization_spaces=False
            ), some
    assert bool(broken) == ("gemma" in shape.__name__ or shape in (llama2, *LLAMA2_LIKE))


HIGH_BYTES = {f"<0x{byte:02X}>" for byte in range(0x80, 0x100)}
LLAMA2_LIKE = (llama2_legacy, mistral, phi3, llama2_model_file)


@pytest.mark.parametrize("mode", ["auto", "slow"])
def test_byte_tokens(mode: str, tmp_path: Path) -> None:
    """What is a character stays one beside what is none; transformers would drop both."""
    llama2_model_file(tmp_path)
    ours = load_tokenizer(tmp_path, mode=mode)

    def decode(data: bytes) -> str:
        return ours.decode([found for byte in data if (found := ours.codec.token_id(f"<0x{byte:02X}>"))])

    assert decode("日本🙂".encode()) == "日本🙂"
    assert decode("日".encode() + b"\xff\xe6\x97") == "日\ufffd\ufffd"
    assert decode(b"\n\xe6\x97a\x80 b") == "\n\ufffda\ufffd b"
    assert decode(b" a") == "a"


def test_slow_decodes_any_ids_as_sentencepiece(tmp_path: Path) -> None:
    llama2_model_file(tmp_path)
    ours = load_tokenizer(tmp_path, mode="slow")
    package = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "tokenizer.model"))
    ids = [i for i in range(package.vocab_size()) if package.id_to_piece(i) not in HIGH_BYTES]
    draw = random.Random(0)
    for _ in range(500):
        # Begun with a word: the package and we differ about spaces at the start that are not of a word.
        some = [*package.encode("the"), *draw.choices(ids, k=draw.randrange(12))]
        assert ours.decode(some) == package.decode(some), [package.id_to_piece(i) for i in some]


def test_slow_is_sentencepiece(tmp_path: Path) -> None:
    llama2_model_file(tmp_path, added_tokens_decoder={"520": TOOL})
    ours = load_tokenizer(tmp_path, mode="slow")
    package = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "tokenizer.model"))
    for text in TEXTS:
        if "<s>" not in text and "<tool>" not in text:
            ids = ours.encode(text)
            assert ids == [1, *package.encode(text), 2] if text else ids == [1, 2]
            assert ours.decode(ids) == package.decode(package.encode(text))
    assert (bos_id(ours), ours.eos_ids, ours.vocab_size) == (1, (2,), 521)
    ids = ours.encode("a<tool>  b<s>", add_special_tokens=False)
    assert ids == [*package.encode("a"), 520, *package.encode("xb")[-1:], 1]
    assert ours.decode(ids) == "a<tool>b"
    assert ours.decode([*ids, 10**6, -1], skip_special_tokens=False) == "a<tool>b<s>"


def test_slow_needs_its_file(tmp_path: Path) -> None:
    qwen2_vocab(tmp_path)
    with pytest.raises(ModelError, match=r"needs the file tokenizer\.model"):
        load_tokenizer(tmp_path, mode="slow")
    with pytest.raises(ConfigError, match="auto and slow"):
        load_tokenizer(tmp_path, mode="quick")


def test_a_unigram_model_is_left_to_its_package(tmp_path: Path) -> None:
    train_sentencepiece(tmp_path / "tokenizer.model", kind="unigram")
    package = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "tokenizer.model"))
    ours = load_tokenizer(tmp_path)
    assert ours.encode("Hello world") == [1, *package.encode("Hello world")]
    assert (ours.eos_ids, dict(ours.special_tokens)) == ((2,), {"bos_token": "<s>", "eos_token": "</s>"})


def test_end_of_sequence_ids(tmp_path: Path) -> None:
    llama3(tmp_path)
    assert load_tokenizer(tmp_path).eos_ids == (4, 1)
    write_json(tmp_path / "generation_config.json", {"eos_token_id": 3})
    assert load_tokenizer(tmp_path).eos_ids == (4, 3)
    (tmp_path / "generation_config.json").unlink()
    assert load_tokenizer(tmp_path).eos_ids == (4, 2)


def test_where_the_chat_template_comes_from(tmp_path: Path) -> None:
    llama3(tmp_path)
    assert load_tokenizer(tmp_path).chat_template is None
    write_json(tmp_path / "chat_template.json", {"chat_template": "from json"})
    assert load_tokenizer(tmp_path).chat_template == "from json"
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "named"}]
    folder_of(tmp_path, "llama", chat_template=named)
    assert load_tokenizer(tmp_path).chat_template == "named"
    folder_of(tmp_path, "llama", chat_template="plain")
    assert load_tokenizer(tmp_path).chat_template == "plain"
    (tmp_path / "chat_template.jinja").write_text("from jinja")
    assert load_tokenizer(tmp_path).chat_template == "from jinja"


def test_custom_code_is_not_run(tmp_path: Path) -> None:
    settings = {"auto_map": {"AutoTokenizer": ["tokenization_own.OwnTokenizer", None]}}
    (tmp_path / "tokenization_own.py").write_text("raise SystemExit('ran')")
    folder_of(tmp_path, "llama", **settings)
    train_sentencepiece(tmp_path / "tokenizer.model")
    for mode in ("auto", "slow"):
        with pytest.raises(ModelError, match="auto_map"):
            load_tokenizer(tmp_path, mode=mode)
    train_byte_level(split(bpe.LLAMA3_SPLIT), LLAMA3).save(str(tmp_path / "tokenizer.json"))
    assert load_tokenizer(tmp_path).encode("hi")


def test_half_a_surrogate_pair_fails_the_request_only(tmp_path: Path) -> None:
    llama3(tmp_path)
    with pytest.raises(InvalidRequest, match="surrogate"):
        load_tokenizer(tmp_path).encode("a\ud800b")


def corrupt(name: str, content: bytes) -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_bytes(content) and None


def replaced(name: str, how: Callable[[Path], None]) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        (folder / name).unlink()
        how(folder / name)

    return damage


def huge(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(1 << 30)  # sparse


MINIMAL = {"version": "1.0", "added_tokens": [], "model": {"type": "BPE", "vocab": {"a": 0}, "merges": []}}
PANIC = {**MINIMAL, "normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}}
DAMAGE = {
    "not json": (corrupt("tokenizer.json", b"{"), "make no tokenizer"),
    "json of something else": (corrupt("tokenizer.json", b"[1, 2]"), "make no tokenizer"),
    "deep": (corrupt("tokenizer_config.json", b"[" * 100_000), "not valid JSON"),
    "no utf-8": (corrupt("tokenizer_config.json", b'{"a": "\xff\xfe"}'), "not valid JSON"),
    "a list": (corrupt("tokenizer_config.json", b"[]"), "JSON object"),
    "bad merge": (
        corrupt("tokenizer.json", json.dumps(MINIMAL).replace("[]}", '["x y"]}').encode()),
        "make no",
    ),
    "panic": (corrupt("tokenizer.json", json.dumps(PANIC).encode()), "make no tokenizer"),
    "bad generation config": (corrupt("generation_config.json", b"nope"), "generation_config.json"),
    "added tokens": (
        corrupt("tokenizer_config.json", b'{"added_tokens_decoder": {"x": 1}}'),
        "make no tokenizer",
    ),
    "added token": (corrupt("tokenizer_config.json", b'{"added_tokens_decoder": {"1": {}}}'), "not a token"),
    "folder": (replaced("tokenizer.json", Path.mkdir), "not a file"),
    "fifo": (replaced("tokenizer.json", os.mkfifo), "not a file"),
    "1 GB": (replaced("tokenizer.json", huge), "200 MiB"),
    "gone": (replaced("tokenizer.json", lambda path: None), "no tokenizer"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damaged_files(name: str, tmp_path: Path) -> None:
    llama3(tmp_path)
    damage, reason = DAMAGE[name]
    damage(tmp_path)
    with pytest.raises(ModelError, match=reason) as caught:
        load_tokenizer(tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("mode", ["auto", "slow"])
def test_damaged_sentencepiece_models(mode: str, tmp_path: Path) -> None:
    path = train_sentencepiece(tmp_path / "tokenizer.model")
    good = path.read_bytes()
    for content in (b"", b"\xff" * 100, good[:1000], good[: len(good) // 2], good[50:]):
        path.write_bytes(content)
        with pytest.raises(ModelError, match=r"not a SentencePiece model|make no tokenizer"):
            load_tokenizer(tmp_path, mode=mode)
