"""Reasoning in a model's output, apart from its answer: between tags at the beginning, or in channels.

White space behind either tag belongs to neither. However a text is cut into pieces, the result is the same.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from hex_llm.errors import ConfigError, one_line
from hex_llm.text.json_stream import Malformed, Reading, Stream
from hex_llm.text.tagged_calls import HARMONY_CALL, HARMONY_MESSAGE


class Tags(NamedTuple):
    """What stands around reasoning."""

    start: str = "<think>"
    end: str = "</think>"
    starts_thinking: bool = False  # even without a tag, because that may be the end of the prompt
    call: str | None = None  # what ends reasoning too, and is content


FORMATS: dict[str, Tags | None] = {
    "deepseek_r1": Tags(starts_thinking=True),
    "glm45": Tags(call="<tool_call>"),
    "granite": Tags("Here is my thought process:", "Here is my response:"),
    "minimax_m2": Tags(starts_thinking=True, call="<minimax:tool_call>"),
    "mistral": Tags("[THINK]", "[/THINK]", call="[TOOL_CALLS]"),
    "openai_gptoss": None,  # channels
    "phi4": Tags(),
    "qwen3": Tags(starts_thinking=True, call="<tool_call>"),
}
# What only templates of a format have in them, the most telling ones first.
_TAUGHT_BY = {
    "<|channel|>": "openai_gptoss",
    "[THINK]": "mistral",
    "Here is my thought process": "granite",
    "<minimax:tool_call>": "minimax_m2",
    "<arg_key>": "glm45",
    "</think>": "qwen3",
}
_RECIPIENT = re.compile(r"to=functions\.([\w.:/-]+)")
_START, _CHANNEL, _CALL = "<|start|>", "<|channel|>", "<|call|>"
_ENDS = ("<|end|>", "<|return|>", _CALL, _START, _CHANNEL)


class ReasoningParser:
    """Reads one choice's text. Without an end tag, all behind the start is reasoning."""

    needs_special_tokens = False  # in the text

    def __init__(self, tags: Tags = Tags()) -> None:  # noqa: B008
        self._tags = tags
        # As StructuredOutputs wants them, for what comes behind.
        self.around = (tags.end,) if tags.starts_thinking else (tags.start, tags.end)
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
        untagged, tags = (yield from self._start()), self._tags
        if untagged is None or tags.starts_thinking:
            self._reasoning.append(untagged or "")
            ends = (tags.end,) if tags.call is None else (tags.end, tags.call)
            if (yield from self._stream.until(ends, self._reasoning.append)) == tags.end:
                self._stream.take(len(tags.end))
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
            yield from self._stream.expect(self._tags.start)
        except Malformed:
            return "".join(read)
        finally:
            self._stream.seen = None
        yield from self._stream.solid()
        return None


class Channels(ReasoningParser):
    """Harmony, which gpt-oss writes: messages with headers. Those of the channel `analysis` are reasoning; a
    call of a function is content as tagged_calls.py reads it; a header that is cut off is nothing."""

    needs_special_tokens = True

    def _read(self) -> Reading[None]:
        while sign := (yield from self._stream.until((_START, _CHANNEL), self._content.append)):
            self._stream.take(len(sign))
            header: list[str] = []
            if not (yield from self._stream.until((HARMONY_MESSAGE,), header.append)):
                return
            self._stream.take(len(HARMONY_MESSAGE))
            yield from self._message(sign + "".join(header))

    def _message(self, header: str) -> Reading[None]:
        recipient = _RECIPIENT.search(header)
        is_reasoning = recipient is None and f"{_CHANNEL}analysis" in header
        if recipient is not None:
            self._content.append(f"{HARMONY_CALL}{recipient[1]}{HARMONY_MESSAGE}")
        give = (self._reasoning if is_reasoning else self._content).append
        end = yield from self._stream.until(_ENDS, give)
        if end not in (_START, _CHANNEL):
            self._stream.take(len(end))
        if recipient is not None and end:
            self._content.append(_CALL)


def reasoning_parser(
    name: str, prompt: str = "", *, by_prompt: bool = False, structured: bool = False
) -> ReasoningParser:
    """For what comes behind a prompt, which with `by_prompt` alone tells whether reasoning comes first.
    `structured`: of what follows it is known that it is neither reasoning nor a call that a tag opens."""
    if name not in FORMATS:
        known = ", ".join(FORMATS)
        raise ConfigError(f"{one_line(name)}: no such format of reasoning; there are {known}")
    tags = FORMATS[name]
    if tags is None:
        return Channels()
    is_open = prompt.rstrip().endswith(tags.start)
    tagged = by_prompt or structured
    tags = tags._replace(starts_thinking=is_open or (tags.starts_thinking and not tagged))
    return ReasoningParser(tags._replace(call=None) if structured else tags)


def format_name_for(chat_template: str | None) -> str | None:
    """Which of FORMATS a chat template tells of; None: of none that we know."""
    template = chat_template or ""
    return next((name for sign, name in _TAUGHT_BY.items() if sign in template), None)


def may_reason(name: str, template_kwargs: Mapping[str, Any], prompt: str) -> bool:
    """A chat can tell templates not to let the model think, who then may write both tags themselves."""
    tags = FORMATS[name]
    has_ended = tags is not None and prompt.rstrip().endswith(tags.end)
    return not has_ended and (name != "qwen3" or template_kwargs.get("enable_thinking") is not False)
