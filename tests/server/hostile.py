"""Bodies that no honest client sends, for every route that takes one, and what becomes of each.

Values are judged by what the route's own schema says of their field: what is not legal must be refused.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

from hex_llm.sampling_params import MAX_INT
from hex_llm.server import tokens
from hex_llm.server.anthropic.schemas import CountRequest, MessagesRequest
from hex_llm.server.common.body import Body
from hex_llm.server.openai import schemas
from hex_llm.server.openai.chat import RESERVED
from hex_llm.server.openai.pooling import EmbeddingRequest, RerankRequest, ScoreRequest
from hex_llm.server.openai.responses_schemas import ResponsesRequest
from hex_llm.server.tgi import schemas as tgi_schemas
from hex_llm.server.vertex.schemas import GenerateRequest

Json = dict[str, Any]

REFUSED = frozenset((400, 422))
ANSWERED = frozenset((200,))
EITHER = REFUSED | ANSWERED
TOO_LARGE = frozenset((413,))
JSON_TYPE = "application/json"
HELLO = "hello"


@dataclass(frozen=True)
class Case:
    name: str
    path: str
    content: bytes
    statuses: frozenset[int] = REFUSED
    content_type: str | None = JSON_TYPE


@dataclass(frozen=True)
class Door:
    """A way for a body into the server. `kind` describes the object that `within` leads to."""

    path: str
    body: Json
    kind: type[Body]
    within: tuple[str | int, ...] = ()
    streams: bool = True
    generates: bool = True

    @property
    def name(self) -> str:
        return f"{self.path} {'.'.join(map(str, (*self.body, *self.within)))}"

    def bodies(self, **fields: Any) -> Iterator[Json]:
        """With these fields, whole and streamed."""
        body = deepcopy(self.body)
        inner: Any = body
        for step in self.within:
            inner = inner[step]
        inner.update(fields)
        yield body
        if self.streams:
            yield {**body, "stream": True}

    @property
    def is_chat(self) -> bool:
        return self.kind is ResponsesRequest or issubclass(self.kind, schemas.ChatRequest)


CHAT = {"messages": [{"role": "user", "content": HELLO}]}
MARKED = {"@requestFormat": "chatCompletions", **CHAT}
PROMPT, INPUTS = {"prompt": HELLO}, {"inputs": HELLO}
TGI = {**INPUTS, "parameters": {"max_new_tokens": 5}}
SHARED = {"instances": [PROMPT], "parameters": {"max_tokens": 5}}
IN_PARAMETERS = ("parameters",)

DOORS = [
    Door("/v1/completions", PROMPT, schemas.CompletionRequest),
    Door("/v1/chat/completions", CHAT, schemas.ChatRequest),
    Door("/v1/responses", {"input": HELLO}, ResponsesRequest),
    Door("/v1/messages", {**CHAT, "max_tokens": 50}, MessagesRequest),
    Door("/v1/messages/count_tokens", CHAT, CountRequest, streams=False, generates=False),
    Door("/v1/embeddings", {"input": HELLO}, EmbeddingRequest, streams=False),
    Door("/v1/score", {"text_1": HELLO, "text_2": HELLO}, ScoreRequest, streams=False),
    Door("/v1/rerank", {"query": HELLO, "documents": [HELLO]}, RerankRequest, streams=False),
    Door("/generate", PROMPT, GenerateRequest),
    Door("/generate", {"instances": [PROMPT]}, GenerateRequest, ("instances", 0), streams=False),
    Door("/generate", SHARED, GenerateRequest, IN_PARAMETERS, streams=False),
    Door("/generate", {"instances": [MARKED]}, schemas.ChatRequest, ("instances", 0), streams=False),
    Door("/generate", TGI, tgi_schemas.Parameters, IN_PARAMETERS),
    Door("/vertex", {"instances": [INPUTS], "parameters": {}}, tgi_schemas.Parameters, IN_PARAMETERS, False),
    Door("/vertex", {"instances": [CHAT]}, schemas.ChatRequest, ("instances", 0), streams=False),
    Door("/", TGI, tgi_schemas.Parameters, IN_PARAMETERS),
    Door("/generate_stream", TGI, tgi_schemas.Parameters, IN_PARAMETERS),
    Door("/invocations", TGI, tgi_schemas.Parameters, IN_PARAMETERS),
    Door("/invocations", PROMPT, schemas.CompletionRequest),
    Door("/invocations", CHAT, schemas.ChatRequest),
    Door("/tokenize", PROMPT, tokens.PromptToTokenize, streams=False, generates=False),
    Door("/tokenize", CHAT, tokens.ChatToTokenize, streams=False, generates=False),
    Door("/tokenize", INPUTS, tgi_schemas.TokenizeRequest, streams=False, generates=False),
    Door("/chat_tokenize", CHAT, schemas.ChatRequest, streams=False, generates=False),
    Door("/detokenize", {"tokens": [5]}, tokens.ToDetokenize, streams=False, generates=False),
]

# ---- numbers

NUMBERS = [
    *(math.nan, math.inf, -math.inf, -0.0, 0.5, 1e308, -1, 2**31, 2**53 + 1, 2**63 - 1, 2**63, 2**64),
    *(-(2**63) - 1, 10**400, True, False, "1", "", [], {}),
]
TOKEN_IDS = [
    math.nan,
    math.inf,
    -1,
    300,
    0.5,
    1e308,
    2**31,
    2**63 - 1,
    2**64,
    10**400,
    True,
    "1",
    None,
    [],
    {},
]
LISTS = ("stop_token_ids", "allowed_token_ids", "tokens")
MORE_LIMITS = {"priority": {"minimum": -MAX_INT, "maximum": MAX_INT}}  # which only the engine knows


def of_numbers(door: Door) -> Iterator[Case]:
    for name, known in door.kind.model_json_schema()["properties"].items():
        types = {one.get("type") for one in (known, *known.get("anyOf", ()))}
        if types & {"integer", "number"}:
            limits = {**known, **(MORE_LIMITS.get(name, {}) if door.generates else {})}
            for value in NUMBERS:
                statuses = EITHER if _is_legal(limits, "number" in types, value) else REFUSED
                if statuses is EITHER and "number" in types and value == 0:
                    statuses = ANSWERED  # also the negative one
                yield from _cases(door, f"{name}={value!r:.30}", statuses, {name: value})
        elif name in LISTS:
            for value in TOKEN_IDS:
                statuses = REFUSED if door.generates or value != 300 else EITHER  # how many ids there are
                yield from _cases(door, f"{name}=[{value!r:.30}]", statuses, {name: [5, value]})
        elif name == "logit_bias":
            for bias in ({"5": one} for one in (math.nan, math.inf, True, "1", [], {}, None)):
                yield from _cases(door, f"logit_bias={bias}", REFUSED, {name: bias})
            for token_id in ("", "-1", "5.0", "1e1", "٥", "9" * 400, "x"):
                yield from _cases(door, f"logit_bias {token_id:.9}", REFUSED, {name: {token_id: 1}})


def _is_legal(limits: Json, takes_floats: bool, value: Any) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    if isinstance(value, float) and not (math.isfinite(value) and (takes_floats or value.is_integer())):
        return False
    if "exclusiveMinimum" in limits and value <= limits["exclusiveMinimum"]:
        return False
    return limits.get("minimum", -math.inf) <= value <= limits.get("maximum", math.inf)


def _cases(door: Door, name: str, statuses: frozenset[int], fields: Json) -> Iterator[Case]:
    for body in door.bodies(**fields):
        yield Case(name, door.path, json.dumps(body).encode(), statuses)


# ---- texts

WRITTEN = json.dumps(HELLO).encode()
NO_TEXTS = {
    "not UTF-8": b"\xff\xfe",
    "half a character": b"\xe4\xbd",
    "overlong": b"\xc0\xaf",
    "a surrogate": b"\xed\xa0\x80",
    "a written surrogate": rb"\ud800",
    "surrogates, swapped": rb"\udc00\ud800",
    "a bare NUL": b"\0",
    "a bare newline": b"\n",
}
ODD_TEXTS = {
    "NUL": rb"a\u0000b",
    "BOM": b"\xef\xbb\xbfa",
    "right to left": "\u202eabc\u2066".encode(),
    "joiners": "👩\u200d👩\u200d👧".encode() * 50,
    "no characters": rb"\uffff\ufffe",
    "special tokens": b"</s><s>" * 100,
    "a template": b"{{ ''.__class__.__mro__ }}{% for i in range(10**9) %}{% endfor %}",
    "an event": rb"\n\ndata: [DONE]\n\n",
}
LONG_TEXTS = {
    "a megabyte": b"lorem ipsum " * 87_382,
    "one character": b"a" * 1_000_000,
    "special tokens": b"</s>" * 100_000,
    "spaces": b" " * 1_000_000,
}


def of_texts(door: Door) -> Iterator[Case]:
    written = [json.dumps(body).encode() for body in door.bodies()]
    for content in (content for content in written if WRITTEN in content):
        for statuses, texts in ((REFUSED, NO_TEXTS), (ANSWERED, ODD_TEXTS)):
            for name, text in texts.items():
                yield Case(name, door.path, content.replace(WRITTEN, b'"%b"' % text), statuses)
        yield Case("32 MB", door.path, content.replace(WRITTEN, b'"%b"' % (b"a" * (32 << 20))), TOO_LARGE)
    if door.is_chat:
        yield from _of_chats(door)


HALF = "\ud800"


def of_halves(door: Door) -> Iterator[Case]:
    """Half of a surrogate pair in every field, whatever its type, and beside fields."""
    for name in sorted(door.kind.model_json_schema()["properties"].keys() - {"stream"}):
        for value in (HALF, [HALF], {"type": HALF}, {HALF: "a"}):
            yield from _cases(door, f"{name}={value!r}", REFUSED, {name: value})
    for raw in (rb"\udfff", b"\xed\xbf\xbf"):
        inside = json.dumps(door.body).encode()[:-1]
        yield Case(f"{raw!r}", door.path, inside + b', "user": "%b"}' % raw)
    whole = json.dumps({**door.body, "user": HALF}, ensure_ascii=False)
    yield Case("UTF-16", door.path, whole.encode("utf-16", "surrogatepass"))


def of_long_texts(door: Door) -> Iterator[Case]:
    statuses = REFUSED if door.generates else ANSWERED
    written = [json.dumps(body).encode() for body in door.bodies()]
    for content in (content for content in written if WRITTEN in content):
        for name, text in LONG_TEXTS.items():
            yield Case(name, door.path, content.replace(WRITTEN, b'"%b"' % text), statuses)
    if door.is_chat:
        field = "input" if door.kind is ResponsesRequest else "messages"
        message = {"role": "user", "content": HELLO}
        yield from _cases(door, "10k messages", statuses, {field: [message] * 10_000})


def _of_chats(door: Door) -> Iterator[Case]:
    message = {"role": "user", "content": HELLO}
    field = "input" if door.kind is ResponsesRequest else "messages"
    for content in (5, None, {}, [5], ["user"], [None], [{"type": "image_url"}], [{"type": "text"}]):
        yield from _cases(door, f"content={content}", REFUSED, {field: [{**message, "content": content}]})
    for role in (5, None, {}, ["user"], "", "x" * 100_000):
        yield from _cases(door, f"role={role!r:.20}", REFUSED, {field: [{**message, "role": role}]})


# ---- JSON

UNKNOWN_FIELDS = ("less deep", "many keys", "a long key", "prototypes", "attributes")  # Anthropic's pass


def of_json(door: Door) -> Iterator[Case]:
    good = json.dumps(door.body).encode()
    inside = good[:-1]
    bad = {
        "empty": b"",
        "a space": b" ",
        "zero bytes": bytes(100),
        "a list": b"[]",
        "many bodies": b"[%b]" % b",".join([good] * 1000),
        "a text": b'"a"',
        "a number": b"5",
        "null": b"null",
        "true": b"true",
        "NaN": b"NaN",
        "no object": b"{}",
        "cut off": inside,
        "more behind": good + b"x",
        "two": good + good,
        "a comma too many": inside + b",}",
        "a comment": b"/**/" + good,
        "single quotes": good.replace(b'"', b"'"),
        "lists in lists": inside + b', "user": %b%b}' % (b"[" * 100_000, b"]" * 100_000),
        "open lists": b"[" * 100_000,
        "objects in objects": inside + b', "user": %b1%b}' % (b'{"a":' * 40_000, b"}" * 40_000),
        "less deep": inside + b', "user": %b%b}' % (b"[" * 900, b"]" * 900),
        "many keys": inside + b"," + b",".join(b'"%d":1' % i for i in range(40_000)) + b"}",
        "a long key": inside + b',"%b":1}' % (b"a" * 1_000_000),
        "a long number": inside + b',"model":1%b}' % (b"0" * 1_000_000),
        "a long float": inside + b',"model":1.%b}' % (b"0" * 1_000_000),
        "a large exponent": inside + b',"model":1e%b}' % (b"9" * 1_000_000),
        "a key given twice": inside + b"," + good[1:-1].split(b":")[0] + b":5}",
        "prototypes": inside + b',"__proto__":{"a":1}}',
        "attributes": inside + b',"__class__":1,"model_config":{}}',
        "an odd key": inside + rb',"\ud800":1}',
    }
    lenient = issubclass(door.kind, CountRequest)
    for name, content in bad.items():
        yield Case(name, door.path, content, EITHER if lenient and name in UNKNOWN_FIELDS else REFUSED)
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data", "x", "", None):
        yield Case(f"type {kind}", door.path, good, content_type=kind)
    for name, content in {"UTF-16": good.decode().encode("utf-16"), "BOM": b"\xef\xbb\xbf" + good}.items():
        yield Case(name, door.path, content, EITHER)


def of_huge_json(door: Door) -> Iterator[Case]:
    """Nearly as large as a body may be, and made of as many values as possible."""
    (name, *_) = door.body
    values = {"lists": b",".join([b"[]"] * 3_000_000), "numbers": b",".join([b"5"] * 5_000_000)}
    for kind, value in values.items():
        yield Case(kind, door.path, b'{"%b": [%b]}' % (name.encode(), value), TOO_LARGE)
    keys = b",".join(b'"%d":1' % i for i in range(800_000))
    yield Case("keys", door.path, b"{%b}" % keys, TOO_LARGE)


# ---- templates

TEMPLATES = [
    "{% for i in range(10**9) %}{% endfor %}",
    "{{ 'a' * 10**10 }}",
    "{{ lipsum.__globals__['os'].system('true') }}",
    "{{ cycler.__init__.__globals__ }}",
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{% include '/etc/passwd' %}",
    "{{ messages.append(1) }}",
    "{{",
    "",
    "a" * 2_000_000,
]


def of_templates(door: Door) -> Iterator[Case]:
    for template in TEMPLATES:
        yield from _cases(door, f"chat_template={template:.30}", REFUSED, {"chat_template": template})
        within = {"chat_template_kwargs": {"chat_template": template}}
        yield from _cases(door, f"kwargs.chat_template={template:.30}", REFUSED, within)
    for name in sorted(RESERVED):
        for value in (None, True, [], HELLO):
            yield from _cases(door, f"kwargs.{name}", REFUSED, {"chat_template_kwargs": {name: value}})
    for value in (5, "a", [], [["tokenize", True]]):
        yield from _cases(door, f"kwargs={value}", REFUSED, {"chat_template_kwargs": value})
    for name in ("self", "loop", "range", "raise_exception", "__class__", "", "a b", "{{", "x" * 10_000):
        yield from _cases(door, f"kwargs.{name:.20}", EITHER, {"chat_template_kwargs": {name: "{{ 7 * 7 }}"}})
