"""The token sequences that write a word which a request does not want, and what may not follow for that."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

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
        raise InvalidRequest.at("bad_words", "a word must hold more than spaces")
    sequences = [tokenizer.encode(text, add_special_tokens=False) for text in (word, " " + word)]
    before, inside = (tokenizer.encode(text, add_special_tokens=False) for text in (_BEFORE, _BEFORE + word))
    if inside[: len(before)] == before:
        sequences.append(inside[len(before) :])
    if not all(sequences):
        raise InvalidRequest.at("bad_words", f"{one_line(word)[:80]} has no tokens")
    distinct = [list(ids) for ids in dict.fromkeys(map(tuple, sequences))]
    return [ids for ids in distinct if not any(_ends_with(ids, other) for other in distinct)]


def _ends_with(ids: list[int], other: list[int]) -> bool:
    return len(other) < len(ids) and ids[-len(other) :] == other


class BadWords:
    """Which tokens would complete one of several sequences: Aho and Corasick's automaton over all but the
    last token of each, so that a token costs the same however many and long the sequences are."""

    def __init__(self, sequences: Iterable[Sequence[int]]) -> None:
        self.transitions: list[dict[int, int]] = [{}]  # of each state, by token
        self._ends: list[frozenset[int]] = [frozenset()]  # of each state
        self._shorter: list[int] = [0]  # the state of the longest proper end of what led to each state
        for ids in sequences:
            state = self._state_of(ids[:-1])
            self._ends[state] |= {ids[-1]}
        self._link()

    def after(self, state: int, token_id: int) -> int:
        """The state after one more token; the first state is 0."""
        while state and token_id not in self.transitions[state]:
            state = self._shorter[state]
        return self.transitions[state].get(token_id, 0)

    def forbidden(self, state: int) -> frozenset[int]:
        return self._ends[state]

    def _state_of(self, ids: Sequence[int]) -> int:
        state = 0
        for token_id in ids:
            if token_id not in self.transitions[state]:
                self.transitions[state][token_id] = len(self.transitions)
                self.transitions.append({})
                self._ends.append(frozenset())
                self._shorter.append(0)
            state = self.transitions[state][token_id]
        return state

    def _link(self) -> None:
        """Shorter states first: each builds on those of its ends."""
        queue = deque(self.transitions[0].values())
        while queue:
            state = queue.popleft()
            for token_id, longer in self.transitions[state].items():
                self._shorter[longer] = self.after(self._shorter[state], token_id)
                queue.append(longer)
            if ends := self._ends[self._shorter[state]]:
                self._ends[state] |= ends
