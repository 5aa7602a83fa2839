"""Calls of tools: each format as its models write it, and its faults."""

from __future__ import annotations

import gc
import json
import time
from collections.abc import Callable
from functools import partial

import pytest

from hex_llm.text.tool_calls import PARSERS, ForcedCall, ForcedCalls, parser_name_for
from hex_llm.text.tool_formats import ToolParser

Calls = list[tuple[str, str]]
SCHEMAS = {
    "get_weather": {"properties": {"city": {"type": "string"}, "days": {"type": "integer"}}},
    "run": {"properties": {"code": {"type": "string"}, "more": {"type": "object"}}},
}
MAKERS: dict[str, Callable[[], ToolParser]] = {
    **{name: partial(parser, SCHEMAS) for name, parser in PARSERS.items()},
    "ForcedCalls": ForcedCalls,
    "ForcedCall": lambda: ForcedCall("f"),
}


def read(parser: ToolParser, *pieces: str) -> tuple[str, Calls]:
    """Content and calls, put together as a client does it."""
    told = [parser.add(piece, ended=i + 1 == len(pieces)) for i, piece in enumerate(pieces)]
    calls = [call for one in told for call in one.calls]
    assert [call.index for call in calls] == list(range(len(calls)))
    assert len({call.id for call in calls}) == len(calls)
    return "".join(one.content for one in told), [(call.name, call.arguments) for call in calls]


WEATHER = ("get_weather", '{"city": "Paris", "days": 3}')
ODD = ("run", r'{"code": "if (a) { print(\"}]\\\\\"); }", "more": {"x": [1, -2.5e3, [], {}, null, true]}}')
NOW = ("now", "{}")


def as_json(call: tuple[str, str], key: str = "arguments") -> str:
    return f'{{"name": "{call[0]}", "{key}": {call[1]}}}'


def parameters(call: tuple[str, str]) -> str:
    return as_json(call, "parameters")


# Arguments as they stand between tags.
ITEMS = {
    "get_weather": {"city": "Paris", "days": "3"},
    "run": {"code": json.loads(ODD[1])["code"], "more": '{"x": [1, -2.5e3, [], {}, null, true]}'},
    "now": {},
}


def of_coder(name: str) -> str:
    items = "".join(f"<parameter={key}>\n{text}\n</parameter>\n" for key, text in ITEMS[name].items())
    return f"<function={name}>\n{items}</function>"


def of_minimax(name: str) -> str:
    items = "".join(f'<parameter name="{key}">{text}</parameter>\n' for key, text in ITEMS[name].items())
    return f'<invoke name="{name}">\n{items}</invoke>'


def of_glm(name: str) -> str:
    items = ITEMS[name].items()
    lines = (f"<arg_key>{key}</arg_key>\n<arg_value>{text}</arg_value>\n" for key, text in items)
    return f"<tool_call>{name}\n{''.join(lines)}</tool_call>"


def of_harmony(call: tuple[str, str]) -> str:
    return f"<|channel|>commentary to=functions.{call[0]}<|message|>{call[1]}<|call|>"


# What a model writes, the content, and the calls in it.
WRITTEN: dict[str, list[tuple[str, str, Calls]]] = {
    "llama3_json": [
        (parameters(WEATHER), "", [WEATHER]),
        (f"<|python_tag|>{parameters(ODD)}", "", [ODD]),
        (f"{parameters(WEATHER)}; {parameters(ODD)};{parameters(NOW)}\n", "", [WEATHER, ODD, NOW]),
        (f"{parameters(WEATHER)}\n{parameters(NOW)}", "", [WEATHER, NOW]),
        (f'{{"type": "function", {parameters(WEATHER)[1:]}', "", [WEATHER]),
        ('{"type": "function", "function": "now", "parameters": {}}', "", [NOW]),
        (f"I'll look: {parameters(WEATHER)} One moment.", "I'll look: One moment.", [WEATHER]),
        (f"Look.\n<|python_tag|>{as_json(WEATHER)}", "Look.", [WEATHER]),
        (f"<|python_start|>{parameters(WEATHER)}<|python_end|>", "", [WEATHER]),
        ('<|python_tag|>brave_search.call(query="x")', '<|python_tag|>brave_search.call(query="x")', []),
    ],
    "llama4_pythonic": [
        ('[get_weather(city="Paris", days=3)]', "", [WEATHER]),
        ("<|python_start|>[get_weather(city='Paris', days=3), now()]<|python_end|>", "", [WEATHER, NOW]),
        (
            "[run(code='if (a) { print(\"}]\\\\\\\\\"); }', more={'x': [1, -2500.0, [], {}, None, True]})]",
            "",
            [("run", ODD[1].replace("-2.5e3", "-2500.0"))],
        ),
        ("[f(a=(1, 2), b=true, c=null)]", "", [("f", '{"a": [1, 2], "b": true, "c": null}')]),
        ("[f(a='two\nlines')]", "", [("f", r'{"a": "two\nlines"}')]),
        ("[os.path.join(a='é')]", "", [("os.path.join", '{"a": "é"}')]),
        ("[f(x=b'z'), now()]", "[f(x=b'z')", [NOW]),
        ("[see here](https://example.org) and [a(b)]", "[see here](https://example.org) and [a(b)]", []),
        ("[1, 2, 3]", "[1, 2, 3]", []),
    ],
    "hermes": [
        (f"<tool_call>\n{as_json(WEATHER)}\n</tool_call>", "", [WEATHER]),
        (
            f"Wait.\n\n<tool_call>\n{as_json(ODD)}\n</tool_call>\n<tool_call>\n{as_json(NOW)}\n</tool_call>\n",
            "Wait.",
            [ODD, NOW],
        ),
        (f"<tool_call>{as_json(NOW)}</tool_call>\n\nThat is all. ", "\n\nThat is all. ", [NOW]),
        (f"<tool_call>{as_json(NOW)}\n<tool_call>{as_json(WEATHER)}", "", [NOW, WEATHER]),
        ('<tool_call>{"arguments": {"name": "x"}, "name": "f"}</tool_call>', "", [("f", '{"name": "x"}')]),
        ('<tool_call>{"name": "now"}<tool_call>{"name": "now", "arguments": null}', "", [NOW, NOW]),
        (r'<tool_call>{"name": "f", "arguments": "{\"a\": \"\\n\"}"}', "", [("f", r'{"a": "\n"}')]),
        ("2 < 3 and <tool> is no </tool_call>", "2 < 3 and <tool> is no </tool_call>", []),
    ],
    "internlm": [
        (f"Hm.<|action_start|><|plugin|>\n{parameters(WEATHER)}<|action_end|>\n", "Hm.", [WEATHER]),
        ("<|action_start|><|interpreter|>\n1", "<|action_start|><|interpreter|>\n1", []),
    ],
    "mistral": [
        (f"[TOOL_CALLS][{as_json(WEATHER)}]", "", [WEATHER]),
        (f'[TOOL_CALLS] [ {as_json(NOW)} , {as_json(ODD)[:-1]}, "id": "a1b2c3d4e"}} ]', "", [NOW, ODD]),
        (f"Hi[TOOL_CALLS]get_weather[ARGS]{WEATHER[1]}[TOOL_CALLS]now[ARGS]{{}}", "Hi", [WEATHER, NOW]),
        (f"[TOOL_CALLS]get_weather{WEATHER[1]}[TOOL_CALLS]run{ODD[1]}", "", [WEATHER, ODD]),
        (f"[TOOL_CALLS]run[CALL_ID]a1b2c3d4e[ARGS]{ODD[1]}", "", [ODD]),
        ("[TOOL_CALLS]not a call", "[TOOL_CALLS]not a call", []),
    ],
    "phi4_mini_json": [
        (f"functools[{as_json(WEATHER)}]", "", [WEATHER]),
        (f"Sure.\nfunctools[\n  {as_json(ODD)},\n  {as_json(NOW)}\n]\nDone?", "Sure.\nDone?", [ODD, NOW]),
        (f"<|tool_call|>[{as_json(WEATHER)}, {as_json(NOW)}]<|/tool_call|>", "", [WEATHER, NOW]),
        (f"<|tool_call|>{as_json(WEATHER)}<|/tool_call|>", "", [WEATHER]),
        ("import functools\n", "import functools\n", []),
        ("functools[]", "functools[]", []),
    ],
    "qwen3_coder": [
        (f"<tool_call>\n{of_coder('get_weather')}\n</tool_call>", "", [WEATHER]),
        (
            f"Hm.\n<tool_call>\n{of_coder('run')}\n</tool_call>\n<tool_call>{of_coder('now')}</tool_call>",
            "Hm.",
            [ODD, NOW],
        ),
        (f"{of_coder('now')}\n{of_coder('get_weather')}</tool_call> So.", " So.", [NOW, WEATHER]),
        ("<function=f><parameter=a>\n\n x\n\n</parameter></function>", "", [("f", r'{"a": "\n x\n"}')]),
        ("<function=f><parameter=a>True</parameter></function>", "", [("f", '{"a": true}')]),
        ("see <function>", "see <function>", []),
    ],
    "minimax_m2": [
        (f"<minimax:tool_call>\n{of_minimax('get_weather')}\n</minimax:tool_call>", "", [WEATHER]),
        (
            f"Hm.\n<minimax:tool_call>\n{of_minimax('run')}\n{of_minimax('now')}\n</minimax:tool_call>\n",
            "Hm.",
            [ODD, NOW],
        ),
        ("<minimax:tool_call>no", "<minimax:tool_call>no", []),
    ],
    "glm45": [
        (of_glm("get_weather"), "", [WEATHER]),
        (f"Wait.\n{of_glm('run')}\n{of_glm('now')}", "Wait.", [ODD, NOW]),
        ("<tool_call>now</tool_call> So.", " So.", [NOW]),
        ("<tool_call>f<arg_key>a</arg_key><arg_value>b,</arg_value></tool_call>", "", [("f", '{"a": "b,"}')]),
        ("2 < 3 <arg_key>", "2 < 3 <arg_key>", []),
    ],
    "granite": [
        (f"<|tool_call|>[{as_json(WEATHER)}, {as_json(NOW)}]", "", [WEATHER, NOW]),
        (f"<tool_call>{as_json(ODD)}</tool_call>", "", [ODD]),
        (f"Well. <|tool_call|> {as_json(NOW)}", "Well.", [NOW]),
        ("<|tool_call|>[]", "<|tool_call|>[]", []),
    ],
    "openai": [
        (of_harmony(WEATHER), "", [WEATHER]),
        (f"Let me see.{of_harmony(ODD)}", "Let me see.", [ODD]),
        (f"{of_harmony(NOW)}{of_harmony(WEATHER)}", "", [NOW, WEATHER]),
        (of_harmony(("f", "no")), of_harmony(("f", "no")), []),
    ],
    "pythonic": [('[get_weather(city="Paris", days=3), now()]', "", [WEATHER, NOW])],
    "ForcedCalls": [
        (f"[{parameters(WEATHER)}, {parameters(ODD)}]", "", [WEATHER, ODD]),
        (f"[\n {parameters(NOW)}\n]", "", [NOW]),
    ],
    "ForcedCall": [(WEATHER[1], "", [("f", WEATHER[1])]), ("{}", "", [("f", "{}")])],
}  # fmt: skip
EVERY = [(name, *one) for name, all_of_it in WRITTEN.items() for one in all_of_it]
TEXTS = {name: [text for text, _, _ in all_of_it] for name, all_of_it in WRITTEN.items()}


@pytest.mark.parametrize(("name", "text", "content", "calls"), EVERY)
def test_calls_are_found(name: str, text: str, content: str, calls: Calls) -> None:
    assert read(MAKERS[name](), text) == (content, calls)
    for _, arguments in calls:
        assert isinstance(json.loads(arguments), dict)


@pytest.mark.parametrize(("name", "text", "content", "calls"), EVERY)
def test_calls_are_found_character_by_character(name: str, text: str, content: str, calls: Calls) -> None:
    assert read(MAKERS[name](), *text, "") == (content, calls)


PLAIN = 'Hello! {"a": 1, "name": 2} [1, "x"] <b>f(x)</b> `if (a) { b }`\n\n tail \n'


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize(
    "text", ["", " ", "\n{", PLAIN, PLAIN[7:], '{"answer": {"name": "f", "parameters": {}}}']
)
def test_other_text_stays_as_it_is(name: str, text: str) -> None:
    if name == "ForcedCall":
        text = "x" + text
    assert read(MAKERS[name](), text) == (text, [])


@pytest.mark.parametrize("name", PARSERS)
def test_content_is_told_at_once(name: str) -> None:
    """But for white space, and what may be the beginning of a mark."""
    parser = PARSERS[name]()
    for piece in ("Hello", " there", ", a", " < b"):
        assert parser.add(piece, ended=False).content == piece
    assert parser.add(" \n", ended=False).content == ""
    assert parser.add("x", ended=False).content == " \nx"


def test_json_that_is_no_call_is_told_as_soon_as_that_is_known() -> None:
    parser = PARSERS["llama3_json"]()
    assert parser.add('{"answer": ', ended=False).content == '{"answer":'
    assert parser.add("[{", ended=False).content == " [{"


@pytest.mark.parametrize(
    ("name", "head"),
    [
        ("llama3_json", '{"name": "f", "parameters": '),
        ("hermes", '<tool_call>{"name": "f", "arguments": '),
        ("mistral", "[TOOL_CALLS]f[ARGS]"),
        ("mistral", '[TOOL_CALLS][{"name": "f", "arguments": '),
        ("phi4_mini_json", 'functools[{"name": "f", "arguments": '),
        ("ForcedCalls", '[{"name": "f", "parameters": '),
        ("ForcedCall", ""),
    ],
)
def test_half_a_call_is_none(name: str, head: str) -> None:
    """It is told when all of it is there; what the end cuts off is content, but for one that is forced."""
    parser, text = MAKERS[name](), f'{head}{{"text": "Once upon'
    told = parser.add(text, ended=False)
    assert (told.content, told.calls) == ("", [])
    rest = '"}' + "}" * ('"name"' in head)
    [call] = parser.add(rest, ended=False).calls
    assert (call.name, call.arguments) == ("f", '{"text": "Once upon"}')
    content = "" if name.startswith("Forced") else text
    assert read(MAKERS[name](), text) == read(MAKERS[name](), *text, "") == (content, [])


def test_ids_of_mistral_are_as_its_templates_want_them() -> None:
    (call,) = PARSERS["mistral"]().add("[TOOL_CALLS]now{}", ended=True).calls
    assert call.id is not None
    assert len(call.id) == 9
    assert call.id.isalnum()


# ---- faults

BROKEN_EARLY = [
    ("llama3_json", '{"name": "f", "parameters": {\'a\': 1}}'),
    ("llama3_json", '{"name": "f"}'),
    ("llama3_json", '{"name": "Jane Doe", "parameters": {}}'),
    ("llama3_json", '{"parameters": {}}'),
    ("llama3_json", '{"name": "f", "parameters": 3}'),
    ("llama3_json", '{"name": "f", "para'),
    ("hermes", "<tool_call>{'name': 'f', 'arguments': {}}</tool_call>"),
    ("hermes", '<tool_call>{"name": "f", "arguments": "hello"}</tool_call>'),
    ("hermes", r'<tool_call>{"name": "\ud800", "arguments": {}}</tool_call>'),
    ("hermes", r'<tool_call>{"name": "f", "arguments": "{\"a\": \"\ud800\"}"}</tool_call>'),
    ("hermes", "<tool_call></tool_call>"),
    ("hermes", '<tool_call>{"name": "f", "name": "g", "arguments": {}}</tool_call>'),
    ("mistral", "[TOOL_CALLS]f[ARGS]none"),
    ("mistral", '[TOOL_CALLS]{"a": 1}'),
    ("phi4_mini_json", 'functools[{"name": "f", "arguments": {]'),
    ("qwen3_coder", "<tool_call>\n<function=>\n</function>"),
    ("qwen3_coder", "<function=f>\n<parameters>"),
    ("qwen3_coder", '<tool_call>{"name": "now"}</tool_call>'),
    ("glm45", '<tool_call>{"name": "now"}</tool_call>'),
    ("glm45", "<tool_call>f<arg_key></arg_key>"),
    ("glm45", "<tool_call>f <arg_key>a</arg_key>1"),
    ("minimax_m2", '<invoke name="f"><parameter="a">'),
    ("openai", "<|channel|>commentary to=functions.<|message|>{}"),
    ("openai", "<|channel|>commentary to=functions.f<|message|>[1]"),
    ("llama4_pythonic", "[f(1)]"),
    ("llama4_pythonic", "[f(a=1)(b=2)]"[:6]),
    ("llama4_pythonic", "[f(a=__import__('os'))]"),
    ("llama4_pythonic", "[f(**{'a': 1})]"),
    ("llama4_pythonic", "[f(a=1e999)]"),
    ("llama4_pythonic", "[f(a='\\ud800')]"),
    ("llama4_pythonic", "[f(a=[)]"),
    ("llama4_pythonic", "[f(a=1 b=2)]"),
    ("llama4_pythonic", "[f(a={1, 2})]"),
    ("llama4_pythonic", "[f(a={**b})]"),
    ("llama4_pythonic", "[f(a=\0)]"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "text"), BROKEN_EARLY)
def test_what_is_no_call_is_content(name: str, text: str) -> None:
    assert read(PARSERS[name](), text) == (text, [])


BROKEN_LATE = [
    *(("hermes", f'<tool_call>{{"name": "f", "arguments": {{"a": [1, 2{end}') for end in ("", "}", " rest")),
    ("qwen3_coder", "<function=f><parameter=a>1</parameter> no"),
    ("qwen3_coder", "<function=run><parameter=code>a</param"),
    ("mistral", '[TOOL_CALLS]f[ARGS]{"a": 1'),
    ("openai", '<|channel|>commentary to=functions.f<|message|>{"a": 1'),
]


@pytest.mark.parametrize(("name", "text"), BROKEN_LATE)
def test_so_is_one_that_breaks_later(name: str, text: str) -> None:
    """And what follows may be a call again."""
    assert read(MAKERS[name](), text) == (text, [])
    again = f"<tool_call>{as_json(NOW)}"
    if name == "hermes":
        assert read(MAKERS[name](), f"{text} {again}") == (text, [NOW])


MENDED = {
    '{"a": "one\ntwo\t"}': {"a": "one\ntwo\t"},
    r'{"a": "\d+\'"}': {"a": r"\d+\'"},
    r'{"a": "C:\users\u12"}': {"a": r"C:\users\u12"},
    '{"a": True, "b": [None, False]}': {"a": True, "b": [None, False]},
}


@pytest.mark.parametrize("written", MENDED)
def test_common_faults_are_mended(written: str) -> None:
    text = f'<tool_call>{{"name": "f", "arguments": {written}}}</tool_call>'
    content, [(_, arguments)] = read(PARSERS["hermes"](), text)
    assert content == ""
    assert json.loads(arguments) == MENDED[written]


DEEP = [
    '{"name": "f", "parameters": {"a": ' + "[" * 100_000,
    '{"name": "f", "parameters": ' + '{"a": ' * 50_000 + "1" + "}" * 50_001,
    '<tool_call>{"arguments": ' + '{"a": ' * 50_000 + "1" + "}" * 50_000 + ', "name": "f"}',
    "[f(a=" + "[" * 50_000 + "]" * 50_000 + ")]",
    "[f(a=" + "(" * 100 + "1" + ",)" * 100 + ")]",
    "[f(a=" + "-" * 100_000 + "1)]",
    "[f(a=" + "1+" * 100_000 + "1)]",
    "[f(a=" + "not " * 100_000 + "1)]",
    "[f(a=" + "lambda: " * 20_000 + "1)]",
    "[f(a" + ".a" * 100_000 + "=1)]",
    "[f(a=" + "9" * 100_000 + ")]",
    "[f(a=0x" + "f" * 100_000 + ")]",
    "[f(a=" + '""' * 50_000 + ")]",
]


@pytest.mark.parametrize("text", DEEP, ids=lambda text: text[:20] + text[30:40])
@pytest.mark.parametrize("name", PARSERS)
def test_nothing_is_too_deep(name: str, text: str) -> None:
    content, calls = read(PARSERS[name](), text)
    assert content or calls


REPEATED = [
    ("hermes", "<tool_call>"),
    ("hermes", '<tool_call>{"name": "f", '),
    ("hermes", f"<tool_call>{as_json(NOW)}</tool_call>"),
    ("hermes", "</tool_call"),
    ("llama3_json", "{"),
    ("llama3_json", " {x"),
    ("llama3_json", '{"name": '),
    ("llama3_json", f"{parameters(NOW)};"),
    ("mistral", "[TOOL_CALLS]x"),
    ("mistral", "[TOOL_CALLS][["),
    ("phi4_mini_json", "functools["),
    ("qwen3_coder", "<function=f><parameter=a>"),
    ("qwen3_coder", "<function=run><parameter=code>\n"),
    ("qwen3_coder", "</parameter"),
    ("glm45", "<tool_call>f<arg_key>a"),
    ("openai", "<|channel|>commentary to=functions.f<|message|>"),
    ("llama4_pythonic", "<|python_start|>[f("),
    ("llama4_pythonic", "<|python_start|>[f(a='"),
    ("llama4_pythonic", "[f(a="),
    ("ForcedCall", '{"a": "\\u1 \\'),
    ("ForcedCall", '{"a":'),
    ("ForcedCall", "  "),
]
# The first of each parser, usually.
FIRST = dict(reversed(REPEATED))


@pytest.mark.parametrize(
    ("name", "unit"),
    [pytest.param(name, unit, marks=[pytest.mark.slow] * (FIRST[name] != unit)) for name, unit in REPEATED],
)
def test_the_time_is_linear(name: str, unit: str) -> None:
    """At once and character by character; if it were quadratic, four times as much would take 16 times."""

    def seconds(num_chars: int) -> float:
        text = unit * (num_chars // len(unit))
        gc.disable()  # its time is that of all that other tests have left
        try:
            started = time.process_time()
            read(MAKERS[name](), text)
            read(MAKERS[name](), *text, "")
            return time.process_time() - started
        finally:
            gc.enable()

    assert seconds(80_000) < 8 * max(seconds(20_000), 0.02)


# ---- templates

TEMPLATES = {
    "internlm": "{{ '<|im_start|>system name=<|plugin|>\\n' }}",
    "glm45": "<tool_call>{function-name}\\n<arg_key>{arg-key-1}</arg_key>",
    "granite": "{{- '<|start_of_role|>assistant<|end_of_role|>' }}",
    "minimax_m2": "{%- set toolcall_begin_token = '<minimax:tool_call>' -%}",
    "openai": """{{- "<|start|>assistant<|channel|>commentary to=functions." }}""",
    "qwen3_coder": "<tool_call>\n<function=example_function_name>\n<parameter=example_parameter_1>",
    "hermes": 'within <tool_call></tool_call> XML tags:\\n<tool_call>\\n{\\"name\\": <function-name>,',
    "llama3_json": """{{- 'Respond in the format {"name": function name, "parameters": dictionary of ' }}""",
    "llama4_pythonic": "Use exact format: [func_name1(param1=value1, param2=value2), func_name2(...)]",
    "mistral": '{{- "[TOOL_CALLS] [" }}',
    "phi4_mini_json": "{{- '<|' + message['role'] + '|>' + message['content'] + '<|tool|>' }}",
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_templates_tell_their_format(name: str) -> None:
    assert parser_name_for(TEMPLATES[name]) == name
    assert name in PARSERS


@pytest.mark.parametrize("template", [None, "", "{{ messages }}", "<start_of_turn>user"])
def test_other_templates_tell_none(template: str | None) -> None:
    assert parser_name_for(template) is None
