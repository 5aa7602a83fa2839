"""Text while tokens come: judged by the decoding of the whole, and by a plain search for the stop strings."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from itertools import accumulate
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hex_llm.config import EngineConfig
from hex_llm.sampling_params import SamplingParams
from hex_llm.text.detokenize import Detokenizer
from hex_llm.text.tokenizer import Tokenizer, load_tokenizer
from hex_llm.weights.gguf import gguf_tokenizer, open_gguf
from hex_llm.weights.source import fetch
from tests.server.fakes import FIRST_BYTE, byte_tokenizer
from tests.text.corpus import TEXTS, bos_id
from tests.text.test_tokenizer import gemma, gemma_model_file, llama2, llama2_model_file, qwen2

KINDS: dict[str, tuple[Callable[[Path], None], str] | None] = {
    "default": None,
    "qwen2": (qwen2, "auto"),
    "llama2": (llama2, "auto"),
    "gemma": (gemma, "auto"),
    "slow": (llama2_model_file, "slow"),
    "slow gemma": (gemma_model_file, "slow"),
}
PREFIXED = ("llama2", "slow")  # a space goes before the text
SOME = settings(max_examples=60, deadline=None, derandomize=True)
PLAIN = SamplingParams()


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def tokenizer(kind: str, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    made = KINDS[kind]
    if made is None:
        return gguf_tokenizer(open_gguf(fetch(None, cache_dir=EngineConfig().cache_dir)))
    folder = tmp_path_factory.mktemp("tokenizer")
    made[0](folder)
    return load_tokenizer(folder, mode=made[1])


def plain(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False)


def bytes_as_ids(tokenizer: Tokenizer, data: bytes) -> list[int]:
    """A token for each byte."""
    of = {tokenizer.codec.token_bytes(i, False): i for i in reversed(range(tokenizer.vocab_size))}
    return [of[bytes([byte])] for byte in data]


def sequences(tokenizer: Tokenizer) -> st.SearchStrategy[list[int]]:
    """Any ids, unknown ones too; often special ones, parts of characters, and texts."""
    ids = range(tokenizer.vocab_size)
    special = [
        i for i in ids if tokenizer.codec.token_bytes(i, True) != tokenizer.codec.token_bytes(i, False)
    ]
    parts = [i for i in ids if "\ufffd" in tokenizer.shown(i)]
    assert special
    assert parts
    one = st.sampled_from(special) | st.sampled_from(parts) | st.integers(-2, tokenizer.vocab_size + 5)
    texts = st.sampled_from(["日本🙂", "naïve café", " 👩‍👩‍👧", *TEXTS]).map(
        lambda text: plain(tokenizer, text)
    )
    chunk = st.lists(one, min_size=1, max_size=6) | texts | texts.map(lambda ids: ids[:-1])
    return st.lists(chunk, max_size=6).map(lambda chunks: [i for chunk in chunks for i in chunk])


def one_by_one(detokenizer: Detokenizer, ids: Sequence[int]) -> list[str]:
    """The pieces; the last is what `ended` brings."""
    return [*(detokenizer.add([i]) for i in ids), detokenizer.add([], ended=True)]


def test_pieces_join_to_the_decoding_of_the_whole(tokenizer: Tokenizer) -> None:
    @SOME
    @given(sequences(tokenizer), st.booleans(), st.data())
    def check(ids: list[int], skip: bool, data: st.DataObject) -> None:
        params = SamplingParams(skip_special_tokens=skip)
        whole = tokenizer.decode(ids, skip_special_tokens=skip)
        single, grouped = Detokenizer(tokenizer, params), Detokenizer(tokenizer, params)
        assert "".join(one_by_one(single, ids)) == whole
        cuts = sorted(data.draw(st.lists(st.integers(0, len(ids)), max_size=5)))
        pieces = [grouped.add(ids[a:b]) for a, b in zip([0, *cuts], cuts, strict=False)]
        pieces.append(grouped.add(ids[cuts[-1] if cuts else 0 :], ended=True))
        assert "".join(pieces) == whole
        assert single.num_tokens == grouped.num_tokens == len(ids)
        assert Detokenizer(tokenizer, params).add(ids, ended=True) == whole

    check()


def test_text_continues_the_prompt(tokenizer: Tokenizer, kind: str) -> None:
    for text in ("Hello world, the theory", " naïve 日本🙂 the end", "<s> the"):
        ids = plain(tokenizer, text)
        for cut in range(len(ids) + 1):
            prompt = tokenizer.decode(ids[:cut])
            output = Detokenizer(tokenizer, PLAIN, ids[:cut]).add(ids[cut:], ended=True)
            # A character that the prompt began is shown whole.
            assert prompt.rstrip("\ufffd") + output == tokenizer.decode(ids)
    begun = plain(tokenizer, "Hello")
    word = plain(tokenizer, "Hello the")[len(begun) :]
    assert Detokenizer(tokenizer, PLAIN, begun).add(word) == " the"
    assert Detokenizer(tokenizer, PLAIN).add(word) == ("the" if kind in PREFIXED else " the")


def test_prompts_without_text(tokenizer: Tokenizer, kind: str) -> None:
    word = plain(tokenizer, "the")
    assert bos_id(tokenizer) is not None or kind == "qwen2"
    bos = bos_id(tokenizer) if bos_id(tokenizer) is not None else tokenizer.eos_ids[0]
    assert Detokenizer(tokenizer, PLAIN, [bos]).add(word) == "the"
    shown = Detokenizer(tokenizer, SamplingParams(skip_special_tokens=False), [bos])
    assert shown.add(word) == (" the" if kind in PREFIXED else "the")


def test_special_tokens(tokenizer: Tokenizer) -> None:
    end = tokenizer.eos_ids[0]
    ids = [*plain(tokenizer, "Hello"), end]
    name = tokenizer.codec.token_bytes(end, False).decode()
    assert Detokenizer(tokenizer, PLAIN).add(ids) == "Hello"
    assert Detokenizer(tokenizer, SamplingParams(skip_special_tokens=False)).add(ids) == "Hello" + name


def test_no_half_characters(tokenizer: Tokenizer) -> None:
    detokenizer = Detokenizer(tokenizer, PLAIN, plain(tokenizer, "the"))
    ids = bytes_as_ids(tokenizer, "é日🙂".encode())
    assert [detokenizer.add([i]) for i in ids] == ["", "é", "", "", "日", "", "", "", "🙂"]


@pytest.mark.parametrize(
    ("data", "pieces"),
    [
        (b"\x80", ["\ufffd", ""]),  # no character begins so: certain at once
        (b"\xe6\x97a", ["", "", "\ufffda", ""]),
        (b"\xe6\x97\xe6\x97\xa5", ["", "", "\ufffd", "", "日", ""]),
        (b"\xf0\x9f", ["", "", "\ufffd"]),
        (b"\xed\xa0\x80", ["", "", "\ufffd" * 3, ""]),  # half a surrogate pair
        ("日".encode() + b"\x80", ["", "", "日", "\ufffd", ""]),
    ],
)
def test_bytes_that_are_no_characters(tokenizer: Tokenizer, data: bytes, pieces: list[str]) -> None:
    detokenizer = Detokenizer(tokenizer, PLAIN, plain(tokenizer, "the"))
    assert one_by_one(detokenizer, bytes_as_ids(tokenizer, data)) == pieces


# ---- stop strings


def first_stop(texts: Sequence[str], params: SamplingParams) -> tuple[str, str | None, int]:
    """By trying every place: the text, the stop string, the tokens; `texts`: all text after each token."""
    before = texts[params.min_tokens - 1] if 0 < params.min_tokens <= len(texts) else ""
    for num, text in enumerate(texts, start=1):
        ends = [
            (start + len(stop), -len(stop), stop)
            for stop in params.stop
            for start in range(len(text))
            if text.startswith(stop, start) and start + len(stop) > len(before)
        ]
        if ends and num > params.min_tokens:
            end, minus_length, stop = min(ends)
            return text[: end if params.include_stop_str_in_output else end + minus_length], stop, num
    return texts[-1] if texts else "", None, len(texts)


def some_stop(random: Random, text: str) -> str:
    """A part of the text, perhaps with a letter changed: a stop string, or nearly."""
    start, length = random.randint(0, len(text)), random.randint(1, 5)
    part = text[start : start + length] or "a"
    return part if random.random() < 0.5 else part[:-1] + random.choice("ab日")


@pytest.fixture(scope="module")
def letters(tokenizer: Tokenizer) -> list[int]:
    """Tokens that write texts of few letters: many stop strings and near misses."""
    ids = [i for text in ("a", "b", "ab", "ba", "aa") for i in plain(tokenizer, "x" + text)[1:]]
    return [*dict.fromkeys(ids), *bytes_as_ids(tokenizer, "日".encode())]


def test_stop_strings_as_by_plain_search(tokenizer: Tokenizer, letters: list[int]) -> None:
    found = []

    @settings(SOME, max_examples=400)
    @given(st.lists(st.sampled_from(letters), max_size=25), st.randoms())
    def check(ids: list[int], random: Random) -> None:
        free = Detokenizer(tokenizer, PLAIN, letters[:1])
        texts = list(accumulate(free.add([i]) for i in ids))
        if texts:
            texts[-1] += free.add([], ended=True)
        params = SamplingParams(
            max_tokens=None,
            stop=tuple(some_stop(random, texts[-1] if texts else "") for _ in range(random.randrange(4))),
            include_stop_str_in_output=random.random() < 0.5,
            min_tokens=random.choice([0, 0, 3, 6]),
        )
        want = first_stop(texts, params)
        found.append(want[1])
        single, grouped = (Detokenizer(tokenizer, params, letters[:1]) for _ in range(2))
        pieces = one_by_one(single, ids)
        assert ("".join(pieces), single.stopped_by, single.num_tokens) == want
        cut = random.randint(0, len(ids))
        first = grouped.add(ids[:cut])
        assert want[0].startswith(first)
        rest = grouped.add(ids[cut:], ended=True)
        assert (first + rest, grouped.stopped_by, grouped.num_tokens) == want

    check()
    assert None in found
    assert len(set(found)) > 20


def pieces_of(tokenizer: Tokenizer, text: str, **params: object) -> tuple[list[str], Detokenizer]:
    """A token for each letter."""
    start = plain(tokenizer, "the")
    detokenizer = Detokenizer(tokenizer, SamplingParams(**{"max_tokens": None, **params}), start)
    return one_by_one(detokenizer, bytes_as_ids(tokenizer, text.encode())), detokenizer


def test_what_may_begin_a_stop_string_waits(tokenizer: Tokenizer) -> None:
    pieces, _ = pieces_of(tokenizer, "xaabxaa", stop=["aac"])
    assert pieces == ["x", "", "", "aab", "x", "", "", "aa"]
    pieces, _ = pieces_of(tokenizer, "aaac.", stop=["aac"])
    assert pieces == ["", "", "a", "", "", ""]
    pieces, _ = pieces_of(tokenizer, "xaabaac.", stop=["aac"], include_stop_str_in_output=True)
    assert pieces == [*"xaabaac", "", ""]


@pytest.mark.parametrize(
    ("text", "stop", "left", "by"),
    [
        ("xabcd", ["abcd", "bc"], "xa", "bc"),  # ends first
        ("xabcd", ["cd", "abcd"], "x", "abcd"),  # ends together: the longest
        ("xabcd", ["abc", "ab"], "x", "ab"),  # one begins the other
        ("ababac", ["abac"], "ab", "abac"),  # overlaps itself
        ("x日", ["日"], "x", "日"),
        ("aaa", ["aa"], "", "aa"),
    ],
)
def test_which_stop_string(tokenizer: Tokenizer, text: str, stop: list[str], left: str, by: str) -> None:
    for order in (stop, stop[::-1]):
        pieces, detokenizer = pieces_of(tokenizer, text, stop=order)
        assert ("".join(pieces), detokenizer.stopped_by) == (left, by)
        pieces, detokenizer = pieces_of(tokenizer, text, stop=order, include_stop_str_in_output=True)
        assert ("".join(pieces), detokenizer.stopped_by) == (left + by, by)


@pytest.mark.parametrize(
    ("min_tokens", "left", "num"),
    [(0, "x", 3), (2, "x", 3), (3, "xab.", 6), (5, "xab.", 6), (6, "xab.ab", 6)],
)
def test_stop_strings_must_end_after_min_tokens(
    tokenizer: Tokenizer, min_tokens: int, left: str, num: int
) -> None:
    pieces, detokenizer = pieces_of(tokenizer, "xab.ab", stop=["ab"], min_tokens=min_tokens)
    assert ("".join(pieces), detokenizer.num_tokens) == (left, num)
    assert (detokenizer.stopped_by is None) == (min_tokens == 6)


def test_the_end_of_a_long_match_takes_no_longer_than_other_tokens() -> None:
    stops = tuple("a" * (6000 + i) + "b" for i in range(64))
    made = Detokenizer(byte_tokenizer(), SamplingParams(stop=stops))
    a, c = (FIRST_BYTE + ord(char) for char in "ac")
    started = time.thread_time()
    made.add([a] * 5000)
    each = (time.thread_time() - started) / 5000
    started = time.thread_time()
    assert made.add([c]) == "a" * 5000 + "c"
    assert time.thread_time() - started < 50 * each


def test_tokens_after_the_stop_string_are_ignored(tokenizer: Tokenizer) -> None:
    ids = plain(tokenizer, "Hello world, the theory")
    detokenizer = Detokenizer(tokenizer, SamplingParams(stop=("wor",)))
    num = next(n for n in range(len(ids)) if "wor" in tokenizer.decode(ids[:n]))
    assert detokenizer.add([*ids, *ids]) == "Hello "
    assert detokenizer.add(ids) == ""
    assert detokenizer.add(ids, ended=True) == ""
    assert (detokenizer.stopped_by, detokenizer.num_tokens) == ("wor", num)


def test_a_stop_string_of_what_is_no_character(tokenizer: Tokenizer) -> None:
    detokenizer = Detokenizer(tokenizer, SamplingParams(stop=("\ufffd",)))
    assert one_by_one(detokenizer, bytes_as_ids(tokenizer, b"x\xe6")) == ["x", "", ""]
    assert detokenizer.stopped_by == "\ufffd"


# ---- work


class CountedCodec:
    """Counts the ids that are turned into text."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.codec = tokenizer.codec
        self.vocab_size, self.prefix = self.codec.vocab_size, self.codec.prefix
        self.token_id, self.encode = self.codec.token_id, self.codec.encode
        self.longest, self.num = self.codec.longest, 0

    def token_bytes(self, token_id: int, skip_special_tokens: bool) -> bytes:
        self.num += 1
        return self.codec.token_bytes(token_id, skip_special_tokens)


class CountedText(str):
    """Counts the characters that are looked at."""

    num = 0

    def __getitem__(self, key: object) -> str:
        CountedText.num += 1
        return super().__getitem__(key)  # type: ignore[index]


def test_every_token_is_decoded_once(tokenizer: Tokenizer) -> None:
    ids = (plain(tokenizer, "the theory 日本🙂 ") + bytes_as_ids(tokenizer, b"\x80\xe6")) * 100
    codec = CountedCodec(tokenizer)
    counted = Tokenizer(codec, tokenizer.eos_ids, tokenizer.special_tokens, None)
    detokenizer = Detokenizer(counted, SamplingParams(stop=("theorem",)), plain(tokenizer, "Hello") * 1000)
    codec.num = 0
    one_by_one(detokenizer, ids)
    assert codec.num == len(ids)


def test_a_long_prompt_is_not_decoded(tokenizer: Tokenizer) -> None:
    codec = CountedCodec(tokenizer)
    counted = Tokenizer(codec, tokenizer.eos_ids, tokenizer.special_tokens, None)
    Detokenizer(counted, PLAIN, plain(tokenizer, "Hello") * 1000)
    assert codec.num < 10


@pytest.mark.parametrize("letters", ["a", "ab"])
def test_every_letter_is_compared_a_few_times(letters: str) -> None:
    """With a stop string that the text almost is, over and over, and one too long to be met."""
    codec = SimpleNamespace(prefix="", token_bytes=lambda token_id, skip: bytes([token_id]))
    text = (letters * 500 + "x") * 20
    stop = tuple(map(CountedText, (letters * 500 + "y", letters * 30_000)))
    detokenizer = Detokenizer(Tokenizer(cast(Any, codec), (), {}, None), SamplingParams(stop=stop))
    CountedText.num = 0
    assert "".join(one_by_one(detokenizer, text.encode())) == text
    assert 0 < CountedText.num < 2 * 8 * len(text)
