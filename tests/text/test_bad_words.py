"""Bad words: their sequences are met where a text has the word, and nowhere else."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from hex_llm.errors import InvalidRequest
from hex_llm.text.bad_words import BadWords, bad_word_ids
from hex_llm.text.tokenizer import Tokenizer, load_tokenizer
from tests.text.test_tokenizer import gemma, llama2, llama2_legacy, llama2_model_file, llama3, mistral, qwen2

KINDS: dict[str, tuple[Callable[[Path], None], str]] = {
    "llama3": (llama3, "auto"),
    "qwen2": (qwen2, "auto"),
    "llama2": (llama2, "auto"),
    "legacy": (llama2_legacy, "auto"),
    "mistral": (mistral, "auto"),
    "gemma": (gemma, "auto"),
    "slow": (llama2_model_file, "slow"),
}
WORDS = ["the", "theory", "Hello", "zebra", "Straße", "日本", "🙂", "theory of", "\n\n", "don't", "12"]


@pytest.fixture(scope="module", params=KINDS)
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    shape, mode = KINDS[request.param]
    folder = tmp_path_factory.mktemp("tokenizer")
    shape(folder)
    return load_tokenizer(folder, mode=mode)


def met(tokenizer: Tokenizer, word: str, text: str) -> bool:
    ids = tokenizer.encode(text)
    bad = bad_word_ids(tokenizer, word)
    return any(ids[i : i + len(some)] == some for some in bad for i in range(len(ids)))


@pytest.mark.parametrize("word", WORDS)
def test_the_word_is_met_everywhere(tokenizer: Tokenizer, word: str) -> None:
    for text in (word, f"{word} is", f"is {word}", f"is {word}, or", f"is {word} or"):
        assert met(tokenizer, word, text), text
    if word.strip() == word:
        assert met(tokenizer, word, f"is\n{word} or")


@pytest.mark.parametrize("word", WORDS)
def test_other_texts_are_free(tokenizer: Tokenizer, word: str) -> None:
    assert not met(tokenizer, word, "A quick brown fox, and some more English.")


@pytest.mark.parametrize("word", WORDS)
def test_the_sequences_write_the_word_and_none_is_idle(tokenizer: Tokenizer, word: str) -> None:
    found = bad_word_ids(tokenizer, word)
    assert found
    for ids in found:
        assert tokenizer.decode(ids).lstrip(" ") == word
        assert not any(other != ids and ids[-len(other) :] == other for other in found)
    assert bad_word_ids(tokenizer, "  " + word) == found


def test_with_and_without_a_space_need_not_be_as_long(tmp_path: Path) -> None:
    llama3(tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    found = bad_word_ids(tokenizer, "lazy")
    assert len({len(ids) for ids in found}) == 2, "this test wants such a word"
    assert {tokenizer.decode(ids) for ids in found} == {"lazy", " lazy"}


@pytest.mark.parametrize("word", ["", " ", "   "])
def test_no_word(tokenizer: Tokenizer, word: str) -> None:
    with pytest.raises(InvalidRequest, match="spaces") as caught:
        bad_word_ids(tokenizer, word)
    assert caught.value.param == "bad_words"


def test_a_word_that_is_normalized_away() -> None:
    codec = SimpleNamespace(encode=lambda text, special: [1] * text.count("\n"))
    with pytest.raises(InvalidRequest, match="no tokens") as caught:
        bad_word_ids(Tokenizer(cast(Any, codec), (), {}, None), "\u200b")
    assert caught.value.param == "bad_words"


def naive(sequences: list[list[int]], ids: list[int]) -> set[int]:
    return {s[-1] for s in sequences if len(s) == 1 or ids[1 - len(s) :] == s[:-1]}


def test_what_may_not_follow_is_what_a_search_finds() -> None:
    rng = random.Random(0)
    for _ in range(200):
        sequences = [rng.choices(range(3), k=rng.randint(1, 5)) for _ in range(rng.randint(1, 6))]
        words, state, ids = BadWords(sequences), 0, list[int]()
        for _ in range(40):
            assert words.forbidden(state) == naive(sequences, ids)
            ids.append(rng.randrange(3))
            state = words.after(state, ids[-1])


def test_a_token_costs_the_same_however_long_the_words_are() -> None:
    """Counted, not timed: the states that are visited for each token, where every word nearly matches."""
    words = BadWords([[1] * length + [2] for length in range(1, 90)])
    visited = 0

    class Counted(list[dict[int, int]]):
        def __getitem__(self, state: Any) -> Any:
            nonlocal visited
            visited += 1
            return super().__getitem__(state)

    words.transitions = Counted(words.transitions)
    state = 0
    for i in range(10_000):
        state = words.after(state, 3 if i % 50 == 49 else 1)
    assert visited < 5 * 10_000
