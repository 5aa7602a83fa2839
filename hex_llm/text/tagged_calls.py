"""Formats of calls that are no JSON as a whole: names and arguments between tags, and Harmony's messages.

An argument's text says little of its type. Where the tool's schema wants a string it is one; elsewhere it is
what it is as JSON, or else a string.
"""

from __future__ import annotations

import json
import re

from hex_llm.text.json_stream import Malformed, Reading, json_value
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
        items = []
        while (yield from self._stream.one_of((self.key_tags[0], self.end))) != self.end:
            key = yield from self.word(self.key_tags[1], _KEY)
            if self.value_tag:
                yield from self._stream.one_of((self.value_tag,))
            value = yield from self._argument(is_text=self._is_text(name, key))
            items.append(f"{json.dumps(key, ensure_ascii=False)}: {value}")
        self.tell(name, f"{{{', '.join(items)}}}")

    def _is_text(self, name: str, key: str) -> bool:
        properties = (self.schemas.get(name) or {}).get("properties")
        schema = properties.get(key) if isinstance(properties, dict) else None
        return isinstance(schema, dict) and schema.get("type") == "string"

    def _argument(self, *, is_text: bool) -> Reading[str]:
        """As JSON. A line end behind the opening tag and one before the other are none of it."""
        if (yield from self._stream.peek()) == "\n":
            self._stream.take(1)
        read: list[str] = []
        if not (yield from self._stream.until((self.value_end,), read.append)):
            raise Malformed
        self._stream.take(len(self.value_end))
        text = "".join(read).removesuffix("\n")
        value = None if is_text else json_value(text)
        return json.dumps(text, ensure_ascii=False) if value is None else value


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
        self.tell(name, (yield from self.object()))
