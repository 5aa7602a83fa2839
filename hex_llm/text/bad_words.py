"""The token sequences that write a word which a request does not want."""

from __future__ import annotations

from hex_llm.errors import InvalidRequest, one_line
from hex_llm.text.tokenizer import Tokenizer

_BEFORE = "\n"  # no token joins it to a word


def bad_word_ids(tokenizer: Tokenizer, word: str) -> list[list[int]]:
    """The word at the start of a text, after a space, and right after another character.

    These are its usual tokens: a model that spells it otherwise can still write it, and a longer word whose
    tokens begin with these cannot be written. None of the sequences ends with another one: that one is
    enough to prevent both.
    """
    word = word.lstrip(" ")
    if not word:
        raise InvalidRequest("bad_words: a word must hold more than spaces", "bad_words")
    found = [tokenizer.encode(text, add_special_tokens=False) for text in (word, " " + word)]
    before, inside = (tokenizer.encode(text, add_special_tokens=False) for text in (_BEFORE, _BEFORE + word))
    if inside[: len(before)] == before:
        found.append(inside[len(before) :])
    if not all(found):
        raise InvalidRequest(f"bad_words: {one_line(word)[:80]} has no tokens", "bad_words")
    distinct = [list(ids) for ids in dict.fromkeys(map(tuple, found))]
    return [ids for ids in distinct if not any(_ends_with(ids, other) for other in distinct)]


def _ends_with(ids: list[int], other: list[int]) -> bool:
    return len(other) < len(ids) and ids[-len(other) :] == other
