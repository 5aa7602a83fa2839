"""Text that comes in pieces, read as if it were all there; and JSON in it, checked while it comes.

Readers are generators: where the text is used up they yield, and go on when there is more, so no character
is read twice and nesting costs no stack. Not known here: what the text means.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Generator
from typing import TypeVar

T = TypeVar("T")
Reading = Generator[None, None, T]  # yields for more text, returns what it has read
Give = Callable[[str], object]

_PLAIN = re.compile(r'[^"\\\x00-\x1f]+')
_SPACE = re.compile(r"[ \t\r\n]+")
_WORD = re.compile(r"[-+.0-9A-Za-z]+")
_SCALAR = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][-+]?[0-9]+)?|true|false|null")
_PYTHON = {"None": "null", "True": "true", "False": "false"}
_HEX = frozenset("0123456789abcdefABCDEF")


@functools.cache
def _one_of(literals: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, literals)) or r"(?!)")


class Malformed(Exception):
    """The text is not what was to be read. What is behind the reader stays read."""


class Stream:
    """The text so far unread. `seen` gets all that is read, in order, unless it is None."""

    def __init__(self) -> None:
        self.seen: list[str] | None = None
        self.ended = False
        self.is_over = False  # a reader has come upon the end
        self._text, self._at = "", 0

    def add(self, text: str, ended: bool) -> None:
        self._text, self._at = self._text[self._at :] + text, 0
        self.ended = self.ended or ended

    def take(self, num_chars: int) -> str:
        taken = self._text[self._at : self._at + num_chars]
        self._at += len(taken)
        if self.seen is not None:
            self.seen.append(taken)
        return taken

    def peek(self) -> Reading[str]:
        """The next character; none at the end of the text."""
        while self._at == len(self._text) and not self.ended:
            yield
        self.is_over = self._at == len(self._text)
        return self._text[self._at : self._at + 1]

    def run(self, pattern: re.Pattern[str], give: Give) -> Reading[None]:
        """All characters that match: `pattern` is one class of characters, repeated."""
        while (yield from self.peek()):
            found = pattern.match(self._text, self._at)
            if found is None:
                return
            give(self.take(found.end() - self._at))

    def solid(self, give: Give = str) -> Reading[str]:
        """The next character that is no white space; that before it is read."""
        yield from self.run(_SPACE, give)
        return (yield from self.peek())

    def expect(self, literal: str) -> Reading[None]:
        for char in literal:
            if (yield from self.peek()) != char:
                raise Malformed
            self.take(1)

    def one_of(self, literals: tuple[str, ...]) -> Reading[str]:
        """Reads one of them, of which none is the beginning of another, and white space before it."""
        yield from self.solid()
        read = ""
        while read not in literals:
            char = yield from self.peek()
            if not char or not any(literal.startswith(read + char) for literal in literals):
                raise Malformed
            read += self.take(1)
        return read

    def until(self, marks: tuple[str, ...], give: Give) -> Reading[str]:
        """Gives what is before a mark, as soon as it is surely before it. The mark, which is unread; "" at
        the end of the text."""
        pattern = _one_of(marks)
        while True:
            found = pattern.search(self._text, self._at)
            end = found.start() if found else len(self._text) - self._num_begun(marks)
            if end > self._at:
                give(self.take(end - self._at))
            if found:
                return found[0]
            if self.ended:
                return ""
            yield

    def _num_begun(self, marks: tuple[str, ...]) -> int:
        """Characters at the end of the text that may be the first ones of a mark."""
        most = 0 if self.ended else min(len(self._text) - self._at, max(map(len, marks), default=0))
        ends = (self._text[-num:] for num in range(most, 0, -1))
        return next((len(end) for end in ends if any(mark.startswith(end) for mark in marks)), 0)

    # ---- JSON

    def string(self) -> Reading[str]:
        """A JSON string's value."""
        yield from self.solid()
        raw: list[str] = []
        yield from self._string(raw.append)
        return json.loads("".join(raw))

    def value(self, give: Give) -> Reading[None]:
        """Any JSON value, after white space; its text is given as it comes, without the outer white space.

        Faults that models have are mended: control characters and unknown escapes in strings, True, None.
        """
        yield from self.solid()
        closing: list[str] = []  # of the objects and lists that are open
        while True:
            yield from self._opening(closing, give)
            while closing:
                char = yield from self.solid(give)
                if char not in (",", closing[-1]):
                    raise Malformed
                give(self.take(1))
                if char == ",":
                    if closing[-1] == "}":
                        yield from self._key(give)
                    break
                closing.pop()
            else:
                return

    def _opening(self, closing: list[str], give: Give) -> Reading[None]:
        """A scalar, an empty object or list, or the beginning of others up to their first scalar."""
        while (char := (yield from self.solid(give))) in ("{", "["):
            give(self.take(1))
            end = "}" if char == "{" else "]"
            if (yield from self.solid(give)) == end:
                give(self.take(1))
                return
            closing.append(end)
            if end == "}":
                yield from self._key(give)
        if char == '"':
            yield from self._string(give)
            return
        letters: list[str] = []
        yield from self.run(_WORD, letters.append)
        word = "".join(letters)
        if not _SCALAR.fullmatch(word) and word not in _PYTHON:
            raise Malformed
        give(_PYTHON.get(word, word))

    def _key(self, give: Give) -> Reading[None]:
        yield from self.solid(give)
        yield from self._string(give)
        yield from self.solid(give)
        yield from self.expect(":")
        give(":")

    def _string(self, give: Give) -> Reading[None]:
        yield from self.expect('"')
        give('"')
        while True:
            yield from self.run(_PLAIN, give)
            char = yield from self.peek()
            self.take(1)
            if char == "\\":
                give((yield from self._escape()))
            elif char == '"' or not char:
                break
            else:
                give(json.dumps(char)[1:-1])
        if not char:
            raise Malformed
        give('"')

    def _escape(self) -> Reading[str]:
        """What stands behind a backslash, as an escape. Where that is none, the backslash is one itself."""
        char = yield from self.peek()
        if char != "u":
            return f"\\{self.take(1)}" if char and char in '"\\/bfnrt' else r"\\"
        self.take(1)
        digits = ""
        while len(digits) < 4 and (yield from self.peek()) in _HEX:
            digits += self.take(1)
        return rf"\u{digits}" if len(digits) == 4 else rf"\\u{digits}"


def json_value(text: str) -> str | None:
    """The text, mended as `Stream.value` does, if it is a JSON value."""
    stream, parts = Stream(), [""]
    stream.add(text, ended=True)

    def read() -> Reading[bool]:
        yield from stream.value(parts.append)
        return not (yield from stream.solid())

    try:
        next(read())
    except StopIteration as end:
        return "".join(parts) if end.value else None
    except Malformed:
        return None
    raise AssertionError("a text that has ended is read at once")


def json_object(text: str) -> str | None:
    value = json_value(text)
    return value if value is not None and value.startswith("{") else None
