"""Formats of calls that are no JSON as a whole: names and arguments between tags, and Harmony's messages.

An argument's text says little of its type. Where the tool's schema wants a string it is one, told as it
comes; elsewhere it is what it is as JSON, or else a string.
"""

from __future__ import annotations

import json
import re

from hex_llm.text.json_stream import Give, Malformed, Reading, json_value
from hex_llm.text.tool_formats import NAME, ToolParser

_KEY = re.compile(r"[^<>\"\n]+")
HARMONY_CALL, HARMONY_MESSAGE = "<|channel|>commentary to=functions.", "<|message|>"


class Tagged(ToolParser):
    """A name, and then each argument's name and text, between the tags that a format has."""

    name_tags = ("", "")  # around a call's name; the first may be a mark itself
    key_tags = ("", "")  # around an argument's name
    value_tag = ""  # behind that
    value_end = ""
    end = ""  # of a call

    def calls(self) -> Reading[None]:
        if self._mark != self.name_tags[0]:
            yield from self._stream.one_of(self.name_tags[:1])
        name = yield from self.word(self.name_tags[1], NAME)
        give, before = None, "{"
        while (yield from self._stream.one_of((self.key_tags[0], self.end))) != self.end:
            key = yield from self.word(self.key_tags[1], _KEY)
            if self.value_tag:
                yield from self._stream.one_of((self.value_tag,))
            give = give or self.begin(name)
            give(f"{before}{json.dumps(key, ensure_ascii=False)}: ")
            before = ", "
            yield from self._value(give, is_text=self._is_text(name, key))
        (give or self.begin(name))("}" if give else "{}")
        self.settle()

    def _is_text(self, name: str, key: str) -> bool:
        properties = (self.schemas.get(name) or {}).get("properties")
        schema = properties.get(key) if isinstance(properties, dict) else None
        return isinstance(schema, dict) and schema.get("type") == "string"

    def _value(self, give: Give, *, is_text: bool) -> Reading[None]:
        """A line end behind the opening tag and one before the other are none of it."""
        if (yield from self._stream.peek()) == "\n":
            self._stream.take(1)
        held: list[str] = []

        def pass_on(text: str) -> None:
            text = "".join([*held, text])
            held[:] = ["\n"] if text.endswith("\n") else []
            give(json.dumps(text[: len(text) - len(held)], ensure_ascii=False)[1:-1])

        if is_text:
            give('"')
        if not (yield from self._stream.until((self.value_end,), pass_on if is_text else held.append)):
            raise Malformed
        self._stream.take(len(self.value_end))
        if is_text:
            give('"')
        else:
            text = "".join(held).removesuffix("\n")
            value = json_value(text)
            give(json.dumps(text, ensure_ascii=False) if value is None else value)


class Qwen3Coder(Tagged):
    """<tool_call><function=get_weather><parameter=city>Paris</parameter></function></tool_call>"""

    marks = ("<tool_call>", "<function=")
    closing_marks = ("</tool_call>",)
    name_tags = ("<function=", ">")
    key_tags = ("<parameter=", ">")
    value_end = "</parameter>"
    end = "</function>"


class MiniMaxM2(Tagged):
    """The same with other words; several calls may stand between the outer tags."""

    marks = ("<minimax:tool_call>", '<invoke name="')
    closing_marks = ("</minimax:tool_call>",)
    name_tags = ('<invoke name="', '">')
    key_tags = ('<parameter name="', '">')
    value_end = "</parameter>"
    end = "</invoke>"


class Glm45(Tagged):
    """<tool_call>get_weather, and on a line each <arg_key>city</arg_key> with its <arg_value>..."""

    marks = ("<tool_call>",)
    key_tags = ("<arg_key>", "</arg_key>")
    value_tag = "<arg_value>"
    value_end = "</arg_value>"
    end = "</tool_call>"


class Harmony(ToolParser):
    """A message of gpt-oss to a function, whose header reasoning.py has made plain."""

    marks = (HARMONY_CALL,)
    closing_marks = ("<|call|>",)

    def calls(self) -> Reading[None]:
        name = yield from self.word(HARMONY_MESSAGE, NAME)
        if (yield from self._stream.solid()) != "{":
            raise Malformed
        yield from self._stream.value(self.begin_soon(name))
        self.settle()
