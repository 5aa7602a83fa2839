"""How models write calls of tools: one parser for each format, under the names that vLLM gives them.

Whatever way a text is cut into pieces, the result is the same. What was told is never taken back, and half a
call is none: it is told when all of it is there, and is content if it breaks or the text ends before that.
Of the tools, only the schemas of their arguments are known, to the formats that do not tell types.
"""

from __future__ import annotations

import ast
import contextlib
import json
import re
import secrets
import string
import uuid
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from hex_llm.sampling_params import is_unicode
from hex_llm.text.json_stream import Give, Malformed, Reading, Stream, json_object

NAME = re.compile(r"[\w.:/-]+")
NAME_KEYS = ("name", "function")
ARGUMENTS_KEYS = ("arguments", "parameters")
OTHER_KEYS = ("type", "id")  # before a call is told, other keys show that it is none
_QUOTED = {quote: re.compile(rf"[^{quote}\\\n]+") for quote in "'\""}
_UNQUOTED = re.compile(r"[^'\"()\[\]{}]+")
_CLOSING = {"(": ")", "[": "]", "{": "}"}
_WITHIN_JSON = re.compile(r'":$|[,\[{]$')
_JSON_WORDS = {"null": None, "true": True, "false": False}


@dataclass(frozen=True)
class Call:
    index: int
    id: str
    name: str
    arguments: str  # a JSON object


@dataclass(frozen=True)
class ToolDelta:
    content: str
    calls: list[Call]


class ToolParser:
    """Reads one choice's text. A format says what may open calls, and what follows there."""

    needs_special_tokens = True  # in the text: in some models the marks are such tokens
    marks: tuple[str, ...] = ()  # that open calls wherever they stand
    closing_marks: tuple[str, ...] = ()  # that may stand behind calls, and mean nothing
    first = ""  # the character that opens calls where it is the first of the text
    opens_anywhere = False  # the same character, also behind other text, if that does not end within JSON

    def __init__(self, schemas: Mapping[str, Any] = MappingProxyType({})) -> None:
        """`schemas`: of the arguments of each tool."""
        self.schemas = schemas
        self._stream = Stream()
        self._reading = self._read()
        self._mark = ""  # of what is read now
        self._num_calls = 0
        self._call_is_last = False  # of what was told
        self._told_last = ""  # the last characters of content, but for white space
        self._space: list[str] = []  # behind what was told; told together with content that follows
        self._content: list[str] = []
        self._calls: list[Call] = []

    def add(self, text: str, *, ended: bool) -> ToolDelta:
        """What is new with this text, behind which no other comes if it has `ended`. Never raises."""
        self._stream.add(text, ended)
        next(self._reading, None)
        told = ToolDelta("".join(self._content), self._calls)
        self._content, self._calls = [], []
        return told

    def calls(self) -> Reading[None]:
        """Reads from behind a mark, or from the first character: a call or a list of them, unless the format
        says otherwise. Malformed: what is not told is content."""
        if (yield from self._stream.solid()) == "[":
            yield from self.call_list()
        else:
            yield from self.call()

    def new_id(self) -> str:
        return f"call_{uuid.uuid4().hex[:24]}"

    # ---- for formats

    def tell(self, name: str, arguments: str) -> None:
        """Of a call, which is all that was read since it was last settled."""
        self._calls.append(Call(self._num_calls, self.new_id(), name, arguments))
        self._num_calls += 1
        self._space, self._call_is_last = [], True
        self.settle()

    def settle(self) -> None:
        """What was read up to here will not be content."""
        self._stream.seen = []

    def call_list(self) -> Reading[None]:
        yield from self._stream.expect("[")
        yield from self.several(self.call, ",")
        yield from self._stream.expect("]")
        self.settle()

    def several(self, one: Callable[[], Reading[None]], separator: str) -> Reading[None]:
        yield from one()
        while (yield from self._stream.solid()) == separator:
            self._stream.take(1)
            yield from one()

    def word(self, end: str, letters: re.Pattern[str]) -> Reading[str]:
        """Some letters, before an end that has none of them first."""
        read: list[str] = []
        yield from self._stream.run(letters, read.append)
        if not read:
            raise Malformed
        yield from self._stream.expect(end)
        return "".join(read)

    def call(self) -> Reading[None]:
        """A JSON object with a name and arguments, in any order. Behind a mark, the name is enough."""
        name: str | None = None
        arguments: str | None = None
        yield from self._stream.solid()
        yield from self._stream.expect("{")
        while True:
            key = yield from self._key()
            if key in NAME_KEYS and name is None:
                name = yield from self._name()
            elif key in ARGUMENTS_KEYS and arguments is None:
                arguments = yield from self._arguments()
            elif key in OTHER_KEYS or not (name is None or arguments is None):
                yield from self._stream.value(str)
            else:
                raise Malformed
            if (yield from self._stream.solid()) != ",":
                break
            self._stream.take(1)
        yield from self._stream.expect("}")
        if name is None or (arguments is None and not self._mark):
            raise Malformed
        self.tell(name, arguments or "{}")

    def _key(self) -> Reading[str]:
        key = yield from self._stream.string()
        yield from self._stream.solid()
        yield from self._stream.expect(":")
        return key

    def _name(self) -> Reading[str]:
        name = yield from self._stream.string()
        if not NAME.fullmatch(name):
            raise Malformed
        return name

    def object(self) -> Reading[str]:
        """A JSON object."""
        if (yield from self._stream.solid()) != "{":
            raise Malformed
        return (yield from self._value())

    def _value(self) -> Reading[str]:
        raw: list[str] = []
        yield from self._stream.value(raw.append)
        return "".join(raw)

    def _arguments(self) -> Reading[str]:
        """Some models write an object as a string, or null."""
        text = yield from self._value()
        if text.startswith("{"):
            return text
        if text.startswith('"'):
            text = json.loads(text)
        arguments = "{}" if text in ("", "null") else json_object(text)
        if arguments is None or not is_unicode(arguments):
            raise Malformed
        return arguments

    # ---- text

    def _read(self) -> Reading[None]:
        if self.first and (yield from self._stream.solid(self._tell)) == self.first:
            yield from self._try_calls("")
        signs = (*self.marks, *self.closing_marks, *(self.first if self.opens_anywhere else ""))
        while sign := (yield from self._stream.until(signs, self._tell)):
            if sign == self.first and not _WITHIN_JSON.search(self._told_last):
                yield from self._try_calls("")
                continue
            self._stream.take(len(sign))
            if sign in self.marks:
                yield from self._try_calls(sign)
            elif sign == self.first or not self._call_is_last:
                self._tell(sign)
        if not self._call_is_last:
            self._content += self._space

    def _try_calls(self, mark: str) -> Reading[None]:
        self._mark = mark
        self._stream.seen = [mark]
        with contextlib.suppress(Malformed):
            yield from self.calls()
        self.give_up()

    def give_up(self) -> None:
        """What was read since it was last settled is content."""
        self._tell("".join(self._stream.seen or ()))
        self._stream.seen = None

    def _tell(self, content: str) -> None:
        solid = content.rstrip()
        if solid:
            self._content += [*self._space, solid]
            self._space, self._call_is_last = [], False
            self._told_last = (self._told_last + solid)[-2:]
        self._space.append(content[len(solid) :])


class Llama3Json(ToolParser):
    """{"name": ..., "parameters": {...}}, several with or without ; between. Llama 4 has other marks."""

    marks = ("<|python_tag|>", "<|python_start|>")
    closing_marks = ("<|python_end|>",)
    first = "{"
    opens_anywhere = True

    def calls(self) -> Reading[None]:
        yield from self.several(self.call, ";")


class Pythonic(ToolParser):
    """[get_weather(city="Paris", days=3), now()] at the beginning or behind a mark."""

    marks = ("<|python_start|>",)
    closing_marks = ("<|python_end|>",)
    first = "["

    def calls(self) -> Reading[None]:
        yield from self._stream.solid()
        yield from self._stream.expect("[")
        yield from self.several(self._python_call, ",")
        yield from self._stream.expect("]")
        if self._call_is_last:
            self.settle()

    def _python_call(self) -> Reading[None]:
        """One whose arguments are no data is content, but those behind it may be calls."""
        yield from self._stream.solid()
        letters: list[str] = []
        yield from self._stream.run(NAME, letters.append)
        name = "".join(letters)
        source = yield from self._in_brackets()
        arguments = _python_arguments(source) if name else None
        if arguments is None:
            self.give_up()
            self.settle()
        else:
            self.tell(name, arguments)

    def _in_brackets(self) -> Reading[str]:
        """From an opening bracket to the one that closes it."""
        yield from self._stream.expect("(")
        source, closing = ["("], [")"]
        while closing:
            yield from self._stream.run(_UNQUOTED, source.append)
            char = yield from self._stream.peek()
            if char in _QUOTED:
                yield from self._quoted(source.append)
                continue
            if char in _CLOSING:
                closing.append(_CLOSING[char])
            elif char != closing.pop():
                raise Malformed
            source.append(self._stream.take(1))
        return "".join(source)

    def _quoted(self, give: Give) -> Reading[None]:
        """A string; line ends in it, which Python does not allow, are mended."""
        quote = self._stream.take(1)
        give(quote)
        while True:
            yield from self._stream.run(_QUOTED[quote], give)
            if not (yield from self._stream.peek()):
                raise Malformed
            char = self._stream.take(1)
            give(r"\n" if char == "\n" else char)
            if char == quote:
                return
            if char == "\\" and (yield from self._stream.peek()):
                give(self._stream.take(1))


class Hermes(ToolParser):
    """<tool_call>{"name": ..., "arguments": {...}}</tool_call>, repeated, with text around it. Granite's mark
    is the other, and a list follows it."""

    marks = ("<tool_call>", "<|tool_call|>")
    closing_marks = ("</tool_call>",)


class InternLM(ToolParser):
    """<|action_start|><|plugin|>{"name": ..., "parameters": {...}}<|action_end|>"""

    marks = ("<|action_start|><|plugin|>",)
    closing_marks = ("<|action_end|>",)


class Phi4MiniJson(ToolParser):
    """functools[{"name": ..., "arguments": {...}}, ...], or the list between marks."""

    marks = ("functools", "<|tool_call|>")
    closing_marks = ("<|/tool_call|>",)


class Mistral(ToolParser):
    """[TOOL_CALLS][{"name": ..., "arguments": {...}}, ...], or a mark, a name and arguments for each call."""

    marks = ("[TOOL_CALLS]",)

    def new_id(self) -> str:
        """As their templates want it."""
        return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))

    def calls(self) -> Reading[None]:
        if (yield from self._stream.solid()) in ("[", "{"):
            yield from super().calls()
            return
        name: list[str] = []
        yield from self._stream.run(NAME, name.append)
        if (yield from self._stream.solid()) == "[":
            yield from self._marks_behind_name()
        if not name:
            raise Malformed
        self.tell("".join(name), (yield from self.object()))

    def _marks_behind_name(self) -> Reading[None]:
        yield from self._stream.expect("[")
        if (yield from self._stream.peek()) == "C":
            yield from self._stream.expect("CALL_ID]")
            yield from self._stream.run(NAME, str)
            yield from self._stream.expect("[")
        yield from self._stream.expect("ARGS]")


class _JsonWords(ast.NodeTransformer):
    def visit_Name(self, node: ast.Name) -> ast.Constant:
        return ast.Constant(_JSON_WORDS[node.id])


def _python_arguments(source: str) -> str | None:
    """As JSON, if they are keywords with plain data. Nothing of it is run."""
    try:
        with warnings.catch_warnings(action="ignore"):  # of escapes that are none
            call = ast.parse(f"f{source}", mode="eval").body
        assert isinstance(call, ast.Call)
        values = {keyword.arg: _JsonWords().visit(keyword.value) for keyword in call.keywords}
        arguments = {name: ast.literal_eval(value) for name, value in values.items()}
        text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    except (SyntaxError, ValueError, TypeError, KeyError, RecursionError, MemoryError):
        return None
    return None if call.args or None in arguments or not is_unicode(text) else text
