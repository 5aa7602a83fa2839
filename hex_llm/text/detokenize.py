"""The text of one sequence while its tokens come, and the stop strings in it.

Tokens are taken for the bytes that they add: these join to whole characters before any text is released, and
every character passes the stop strings once. So a sequence costs time in proportion to its length, and the
text does not depend on how the tokens were grouped. Not known here: why a sequence ends otherwise, requests.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from hex_llm.sampling_params import SamplingParams
from hex_llm.text.tokenizer import Tokenizer

_MAX_PENDING = 3  # bytes of a character that is not finished, and so tokens that hold them


class Detokenizer:
    """Text of one growing sequence of generated tokens; never a half character.

    The text continues that of `prompt_ids`: a SentencePiece word keeps the space before it, and a character
    that the prompt begins is shown whole when it is finished. Where the prompt has no text, the text is that
    of `tokenizer.decode`.

    The stop string that ends first counts; of those that end together the longest. It must end in the text
    of a token after the first `params.min_tokens`; it may have begun before. Text that may be the beginning
    of one is held back until it is not, unless `params.include_stop_str_in_output`.
    """

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams, prompt_ids: Sequence[int] = ()) -> None:
        self.stopped_by: str | None = None  # the stop string that was found: the text is cut there
        self.num_tokens = 0  # with the token that completed the stop string; those after it do not count
        self._codec = tokenizer.codec
        self._params = params
        self._stops = [_Stop(text) for text in params.stop]
        self._begins = frozenset(text[0] for text in params.stop)
        self._none_begun = True  # of the stop strings
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._utf8.decode(b"".join(self._bytes(i) for i in prompt_ids[-_MAX_PENDING:]))
        self._prefix = "" if any(self._bytes(i) for i in prompt_ids) else self._codec.prefix
        self._held = ""  # text that may be the beginning of a stop string
        self._ended = False
        self._texts = tokenizer.plain_texts if params.skip_special_tokens else tokenizer.texts
        self._is_plain = False  # nothing before the next token changes what it adds

    def add(self, token_ids: Sequence[int], *, ended: bool = False) -> str:
        """The new text that is now certain; `ended`: no more tokens will come, everything is released."""
        assert not self._ended, "tokens after the end"
        self._ended = ended
        if not self._stops:
            self.num_tokens += len(token_ids)
            if self._is_plain and len(token_ids) == 1 and (text := self._texts[token_ids[0]]) is not None:
                return text
            text = self._unprefixed(self._utf8.decode(b"".join(map(self._bytes, token_ids)), ended))
            self._is_plain = not self._prefix and not self._utf8.getstate()[0]
            return text
        pieces = []
        for token_id in token_ids:
            if self.stopped_by is None:
                self.num_tokens += 1
                pieces.append(self._take(self._utf8.decode(self._bytes(token_id))))
        if ended and self.stopped_by is None:
            pieces += [self._take(self._utf8.decode(b"", final=True)), self._held]
        return "".join(pieces)

    def _bytes(self, token_id: int) -> bytes:
        return self._codec.token_bytes(token_id, self._params.skip_special_tokens)

    def _unprefixed(self, text: str) -> str:
        if text and self._prefix:
            text, self._prefix = text.removeprefix(self._prefix), ""
        return text

    def _take(self, text: str) -> str:
        """Text with whole characters: release what is certain, hold the rest."""
        if not text:
            return ""
        text = self._unprefixed(text)
        if self._none_begun and self._begins.isdisjoint(text):
            return text
        matches = [(end, -len(stop.text), stop.text) for stop in self._stops for end in stop.feed(text)]
        num_held, known = len(self._held), self._held + text
        if matches and self.num_tokens > self._params.min_tokens:
            end, minus_length, self.stopped_by = min(matches)
            released = num_held + end + (0 if self._params.include_stop_str_in_output else minus_length)
        elif self._params.include_stop_str_in_output:
            released = len(known)
        else:
            released = len(known) - max(stop.num_matched for stop in self._stops)
        self._held = "" if self.stopped_by is not None else known[released:]
        self._none_begun = not any(stop.num_matched for stop in self._stops)
        return known[:released]


class _Stop:
    """A stop string, looked for as the text comes (Knuth, Morris, Pratt): in time linear in that text, and
    nearly constant for each character of it.

    What would take time linear in the stop string, which may be long, is done only as far as it is met.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self.num_matched = 0  # the longest beginning of `text`, not all of it, that ends what came so far
        self._borders = [0]  # of the beginnings of `text`: the longest shorter one that ends them
        self._others = [0]  # the longest of those that go on with another character, or nothing

    def feed(self, text: str) -> list[int]:
        """Where in `text` the stop string ends, every time; it may have begun before."""
        ends = []
        position = 0
        while position < len(text):
            if not self.num_matched:
                position = text.find(self.text[0], position)
                if position < 0:
                    break
            self.num_matched = self._longer(self.num_matched, text[position])
            position += 1
            if self.num_matched == len(self._borders) + 1:
                self._add_border(self._longer(self._borders[-1], self.text[self.num_matched - 1]))
            if self.num_matched == len(self.text):
                ends.append(position)
                self.num_matched = self._borders[-1]
        return ends

    def _add_border(self, border: int) -> None:
        self._borders.append(border)
        num = len(self._borders)
        same = border and num < len(self.text) and self.text[border] == self.text[num]
        self._others.append(self._others[border - 1] if same else border)

    def _longer(self, num_matched: int, char: str) -> int:
        """The longest beginning of `text` that still matches when `char` follows."""
        while num_matched and self.text[num_matched] != char:
            num_matched = self._others[num_matched - 1]
        return num_matched + (self.text[num_matched] == char)
