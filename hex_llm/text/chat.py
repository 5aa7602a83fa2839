"""Messages to a prompt, by the model's chat template, as transformers' apply_chat_template renders it.

A template is code from the model's files: it runs in Jinja's immutable sandbox and sees plain data only. What
it writes or multiplies is limited in size; its time is not: that takes a process of its own.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from hex_llm.errors import InvalidRequest, ModelError
from hex_llm.text.tokenizer import Tokenizer

MAX_OUTPUT = 16 << 20  # characters
_MAX_PRODUCT = 1 << 20  # elements of a repeated string or list, and bits of a power
_ASKS_FOR_CONTENT = re.compile(r"(?<!reasoning_)content\W{0,3} *(is|==|!=) *(not +)?none", re.IGNORECASE)
_TAG = "hex-llm-continues-here "  # its last character shows whether the template trims messages


def render_chat(
    template: str | None,
    messages: Sequence[Mapping[str, Any]],
    *,
    special_tokens: Mapping[str, str],
    tools: Sequence[Mapping[str, Any]] | None = None,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    documents: Sequence[Mapping[str, Any]] | None = None,
    **kwargs: Any,
) -> str:
    """The prompt, special tokens written out. What the template refuses, InvalidRequest says in its words.

    `continue_final_message` leaves the last message open for the model to go on with, which excludes
    `add_generation_prompt`. `kwargs` are further variables for the template.
    """
    if not template:
        raise InvalidRequest(
            "the model has no chat template: send it a prompt instead of messages", "messages"
        )
    if continue_final_message and add_generation_prompt:
        raise InvalidRequest(
            "continue_final_message excludes add_generation_prompt", "continue_final_message"
        )
    given = {**special_tokens, **kwargs, "messages": messages, "tools": tools, "documents": documents}
    try:
        variables = _plain(given)
        last = _mark_end(variables["messages"]) if continue_final_message else None
        text = _render(_compile(template), variables | {"add_generation_prompt": add_generation_prompt})
    except InvalidRequest:
        raise
    except (jinja2.TemplateSyntaxError, SecurityError) as error:
        raise ModelError(f"the model's chat template is not usable: {_line(error)}") from error
    except Exception as error:  # whatever a template's code may run into, on the messages of this request
        raise InvalidRequest(f"the chat template cannot render this: {_line(error)}", "messages") from error
    return text if last is None else _cut(text, last)


def encode_chat(
    tokenizer: Tokenizer,
    messages: Sequence[Mapping[str, Any]],
    *,
    template: str | None = None,
    add_special_tokens: bool = False,
    max_len: int | None = None,
    **options: Any,
) -> tuple[str, list[int]]:
    """The prompt as text and as ids, by the tokenizer's own template if no other is given.

    Templates usually write the special tokens. A prompt that has surely so many tokens as `max_len` is
    refused. `options` are as for `render_chat`.
    """
    template = template or tokenizer.chat_template
    special_tokens = tokenizer.special_tokens
    text = render_chat(
        template, _by_known_roles(template, messages), special_tokens=special_tokens, **options
    )
    if max_len is not None:
        tokenizer.refuse_longer(text, max_len)
    return text, tokenizer.encode(text, add_special_tokens=add_special_tokens)


def _by_known_roles(
    template: str | None, messages: Sequence[Mapping[str, Any]]
) -> Sequence[Mapping[str, Any]]:
    """OpenAI's newer name of the system is unknown to most templates, which would leave its words out. And
    only templates that ask whether there is a content can do without: others get an empty one."""
    if template is None:
        return messages
    knows_developer, asks_for_content = "developer" in template, _ASKS_FOR_CONTENT.search(template)
    known = []
    for message in messages:
        if not knows_developer and message.get("role") == "developer":
            message = {**message, "role": "system"}
        if not asks_for_content and message.get("content") is None:
            message = {**message, "content": ""}
        known.append(message)
    return known


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__


def _plain(value: Any) -> Any:
    """A copy of JSON's types only: the methods of any other object would be open to the template."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, Mapping):
        return {str(name): _plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    raise InvalidRequest(f"a chat template takes JSON values, not {type(value).__name__}", "messages")


def _render(template: jinja2.Template, variables: dict[str, Any]) -> str:
    parts: list[str] = []
    size = 0
    for part in template.generate(variables):
        parts.append(part)
        size += len(part)
        if size > MAX_OUTPUT:
            raise InvalidRequest(f"the prompt has more than {MAX_OUTPUT} characters", "messages")
    return "".join(parts)


# ---- continue_final_message


def _mark_end(messages: list[dict[str, Any]]) -> str:
    """Write the tag behind the last message's text, which is returned."""
    holder, key = (messages[-1], "content") if messages else ({}, "content")
    if isinstance(content := holder.get(key), list):
        blocks = [block for block in content if isinstance(block, dict) and "text" in block]
        holder, key = (blocks[-1], "text") if blocks else ({}, "text")
    text = holder.get(key)
    if not isinstance(text, str):
        raise InvalidRequest.at("continue_final_message", "the last message has no text")
    holder[key] = text + _TAG
    return text


def _cut(text: str, last: str) -> str:
    place = text.rfind(_TAG.strip())
    if place < 0 or last.strip() not in text[:place]:
        raise InvalidRequest.at("continue_final_message", "the chat template leaves out the last message")
    return text[:place] if text.startswith(_TAG, place) else text[:place].rstrip()


# ---- what templates of Hugging Face models expect to find


@functools.lru_cache(maxsize=16)
def _compile(template: str) -> jinja2.Template:
    environment = _Sandbox(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _tojson
    environment.globals = {
        "range": environment.globals["range"],
        "dict": lambda *args, **kwargs: dict(*args, **kwargs),  # without the attributes of the class
        "namespace": Namespace,
        "raise_exception": _raise,
        "strftime_now": lambda pattern: datetime.now().strftime(pattern),
    }
    return environment.from_string(template)


class _Sandbox(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset(("*", "**"))

    def unsafe_undefined(self, obj: Any, attribute: str) -> NoReturn:
        raise SecurityError(f"it reaches for {attribute!r} of a {type(obj).__name__}")

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if isinstance(left, int) and isinstance(right, int):
            size = left.bit_length() * right if operator == "**" else 0
        else:
            pairs = ((left, right), (right, left))
            size = max(
                (len(a) * b for a, b in pairs if isinstance(a, str | list) and isinstance(b, int)), default=0
            )
        if size > _MAX_PRODUCT:
            raise SecurityError(f"the result of {operator} is too large")
        return super().call_binop(context, operator, left, right)


class _Generation(Extension):
    """`{% generation %}` marks what the model wrote, for training; here it only holds its content."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: Any = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own would escape HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise(message: str) -> NoReturn:
    raise InvalidRequest(str(message), "messages")
