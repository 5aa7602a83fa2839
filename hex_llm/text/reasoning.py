"""Reasoning in a model's output, apart from its answer: <think>...</think> and then the content.

White space behind either tag belongs to neither. However a text is cut into pieces, the result is the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hex_llm.errors import ConfigError, one_line
from hex_llm.text.json_stream import Malformed, Reading, Stream

START, END = "<think>", "</think>"
# Whether the text begins with reasoning even without a tag, because that may be the end of the prompt.
STARTS_THINKING = {"deepseek_r1": True, "phi4": False, "qwen3": True}
CALL = {"qwen3": "<tool_call>"}  # what ends reasoning too, and is content


class ReasoningParser:
    """Reads one choice's text. Without an end tag, all behind the start is reasoning."""

    def __init__(self, *, starts_thinking: bool, call: str | None = None) -> None:
        self._starts_thinking = starts_thinking
        self._ends = (END,) if call is None else (END, call)
        self._stream = Stream()
        self._reading = self._read()
        self._reasoning: list[str] = []
        self._content: list[str] = []

    def add(self, text: str, *, ended: bool) -> tuple[str, str]:
        """What is new of the reasoning, and of the content; no other text comes if it has `ended`."""
        self._stream.add(text, ended)
        next(self._reading, None)
        reasoning, content = "".join(self._reasoning), "".join(self._content)
        self._reasoning.clear()
        self._content.clear()
        return reasoning, content

    def _read(self) -> Reading[None]:
        untagged = yield from self._start()
        if untagged is None or self._starts_thinking:
            self._reasoning.append(untagged or "")
            if (yield from self._stream.until(self._ends, self._reasoning.append)) == END:
                self._stream.take(len(END))
                yield from self._stream.solid()
        else:
            self._content.append(untagged)
        yield from self._stream.until((), self._content.append)

    def _start(self) -> Reading[str | None]:
        """Reads the tag and white space around it; if there is none, what it has read instead."""
        read: list[str] = []
        self._stream.seen = read
        yield from self._stream.solid()
        try:
            yield from self._stream.expect(START)
        except Malformed:
            return "".join(read)
        finally:
            self._stream.seen = None
        yield from self._stream.solid()
        return None


def reasoning_parser(name: str) -> ReasoningParser:
    if name not in STARTS_THINKING:
        known = ", ".join(STARTS_THINKING)
        raise ConfigError(f"{one_line(name)}: no such format of reasoning; there are {known}")
    return ReasoningParser(starts_thinking=STARTS_THINKING[name], call=CALL.get(name))


def may_reason(name: str, template_kwargs: Mapping[str, Any]) -> bool:
    """A chat can tell Qwen's templates not to let the model think."""
    return name != "qwen3" or template_kwargs.get("enable_thinking") is not False
