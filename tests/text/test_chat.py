"""Chat templates: judged by transformers' apply_chat_template, with the features that our families' have."""

from __future__ import annotations

import time
from typing import Any

import pytest
import transformers
from tokenizers import Tokenizer, models

from hex_llm.errors import InvalidRequest, ModelError
from hex_llm.text.chat import MAX_OUTPUT, render_chat

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}

LLAMA2 = """{% if messages[0]['role'] == 'system' %}{% set loop_messages = messages[1:] %}
{%- set system_message = '<<SYS>>\\n' + messages[0]['content'] + '\\n<</SYS>>\\n\\n' %}{% else %}
{%- set loop_messages = messages %}{% set system_message = '' %}{% endif %}{% for message in loop_messages %}
{%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
{{- raise_exception('Roles must alternate!') }}{% endif %}
{%- if message['role'] == 'user' %}
{{- bos_token + '[INST] ' + (system_message if loop.first else '') + message['content'].strip() + '[/INST]' }}
{%- else %}{{ ' ' + message['content'].strip() + ' ' + eos_token }}{% endif %}{% endfor %}"""

LLAMA3 = """{{ bos_token }}{% set start, end = '<|start_header_id|>', '<|end_header_id|>' %}
{%- if not date_string is defined %}{% set date_string = strftime_now("%d %b %Y") %}{% endif %}
{%- if messages[0].role == 'system' %}{% set system = messages[0].content | trim %}
{%- set messages = messages[1:] %}{%- else %}{% set system = "" %}{% endif %}{{ start }}system{{ end }}

Today: {{ date_string[:0] }}{% if tools is not none %}{% for t in tools %}{{ t | tojson(indent=4) }}

{% endfor %}{% endif %}{{ system }}<|eot_id|>{% for message in messages %}
{%- if message.tool_calls is defined and message.tool_calls %}{% if message.tool_calls | length != 1 %}
{{- raise_exception("This model only supports single tool-calls at once!") }}{% endif %}
{%- set call = message.tool_calls[0].function %}{{ start }}assistant{{ end }}

{"name": "{{ call.name }}", "parameters": {{ call.arguments | tojson }}}<|eot_id|>
{%- elif message.role in ("tool", "ipython") %}{{ start }}ipython{{ end }}

{{ message.content | tojson if message.content is mapping else message.content }}<|eot_id|>
{%- else %}{{ start + message['role'] + end + '\\n\\n' + message['content'] | trim + '<|eot_id|>' }}
{%- endif %}{% endfor %}{% if add_generation_prompt %}{{ start + 'assistant' + end + '\\n\\n' }}{% endif %}"""

GEMMA = """{{ bos_token }}{% if messages[0]['role'] == 'system' %}
{{ raise_exception('System role not supported') }}{% endif %}
{% for message in messages %}{% if message['role'] == 'assistant' %}{% set role = 'model' %}{% else %}
{% set role = message['role'] %}{% endif %}{{ '<start_of_turn>' + role + '
' + message['content'] | trim + '<end_of_turn>
' }}{% endfor %}{% if add_generation_prompt %}{{'<start_of_turn>model
'}}{% endif %}"""

MISTRAL = """{%- set ns = namespace(index=0, last=none) %}{{ bos_token }}
{%- for message in messages if message.role != 'system' %}
  {%- set ns.index = ns.index + 1 %}
  {%- if message.role == "user" %}
    {%- if tools is not none and loop.last %}[AVAILABLE_TOOLS] [
      {%- for tool in tools %}{%- set tool = tool.function %}
        {{- '{"type": "function", "function": {' }}
        {%- for key, val in tool.items() if key != "return" %}
          {%- if val is string %}{{ '"' + key + '": "' + val + '"' }}
          {%- else %}{{ '"' + key + '": ' + val|tojson }}{% endif %}
          {%- if not loop.last %}{{ ", " }}{% endif %}{% endfor %}{{- "}}" }}
      {%- endfor %}][/AVAILABLE_TOOLS]{% endif %}
    {{- "[INST] " + message["content"] + "[/INST]" }}
  {%- elif message.role == "assistant" %}{{ " " + message["content"]|trim + eos_token }}
  {%- else %}{%- continue %}{% endif %}
{%- endfor %}{{ ns.index }}"""

PHI3 = """{% for message in messages %}{% if message['role'] == 'system' and message.content %}{{'<|system|>
' + message['content'] + '<|end|>
'}}{% elif message['role'] == 'user' %}{{'<|user|>
' + message['content'] + '<|end|>
'}}{% elif message['role'] == 'assistant' %}{% generation %}{{'<|assistant|>
' + message['content'] + '<|end|>
'}}{% endgeneration %}{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>
' }}{% else %}{{ eos_token }}{% endif %}"""

QWEN = """{%- if tools %}
    {{- '<|im_start|>system\\n' }}{%- for tool in tools %}
        {{- "\\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "<|im_end|>\\n" }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role in ("user", "assistant") or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == "tool" %}
        {%- if loop.first or messages[loop.index0 - 1].role != "tool" %}{{ '<|im_start|>user' }}{% endif %}
        {{- message.content }}
    {%- endif %}
    {% if loop.index > 50 %}{% break %}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and not enable_thinking %}{{ '<think></think>' }}{% endif %}
{%- endif %}
"""

SMOLLM2 = """{% for message in messages %}
{%- if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system
You are SmolLM<|im_end|>
' }}{% endif %}{{'<|im_start|>' + message['role'] + '
' + message['content'] + '<|im_end|>' + '
'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant
' }}{% endif %}"""

BLOCKS = """{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}
{%- for part in m.content %}
{%- if part.type == 'text' %}[{{ part.text | trim }}]{% endif %}{% endfor %}{% endif %}{{ eos_token }}
{% endfor %}{% for d in documents or [] %}{{ d.title }}:{{ d['text'] }}{% endfor %}{{ undefined_thing }}"""

TEMPLATES = {
    "llama2": LLAMA2,
    "llama3": LLAMA3,
    "gemma": GEMMA,
    "mistral": MISTRAL,
    "phi3": PHI3,
    "qwen": QWEN,
    "smollm2": SMOLLM2,
    "blocks": BLOCKS,
}

TALKS: dict[str, list[dict[str, Any]]] = {
    "one": [{"role": "user", "content": "  What is <b>1 & 2</b>? 日本語 'quotes' \"double\" 🙂\n"}],
    "three": [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": " Hello! "},
        {"role": "user", "content": "And {{ now }}?"},
    ],
    "system": [{"role": "system", "content": "Be brief. "}, {"role": "user", "content": "Hi"}],
}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "The weather in a <place> & its surroundings, ünïcode",
            "parameters": {
                "type": "object",
                "properties": {"place": {"type": "string"}},
                "required": ["place"],
            },
        },
    }
]
CALL = [
    {"role": "user", "content": "Rain?"},
    {
        "role": "assistant",
        "tool_calls": [{"type": "function", "function": {"name": "w", "arguments": {"p": "Köln"}}}],
    },
    {"role": "tool", "content": {"rain": True, "mm": 1.5}},
]


@pytest.fixture(scope="module")
def judge() -> Any:
    backend = Tokenizer(models.BPE({token: i for i, token in enumerate(SPECIAL.values())}, []))
    return transformers.PreTrainedTokenizerFast(tokenizer_object=backend, **SPECIAL)


def theirs(judge: Any, template: str, messages: Any, **options: Any) -> str:
    return judge.apply_chat_template(messages, chat_template=template, tokenize=False, **options)


def ours(template: str | None, messages: Any, **options: Any) -> str:
    return render_chat(template, messages, special_tokens=SPECIAL, **options)


@pytest.mark.parametrize("talk", TALKS)
@pytest.mark.parametrize("name", TEMPLATES)
def test_as_transformers(judge: Any, name: str, talk: str) -> None:
    template, messages = TEMPLATES[name], TALKS[talk]
    for options in [
        {"add_generation_prompt": True},
        {"add_generation_prompt": False},
        {"add_generation_prompt": True, "tools": TOOLS, "enable_thinking": False, "date_string": "x"},
    ]:
        if name == "gemma" and talk == "system":
            with pytest.raises(InvalidRequest, match=r"^System role not supported$"):
                ours(template, messages, **options)
        else:
            assert ours(template, messages, **options) == theirs(judge, template, messages, **options)


def test_tool_calls(judge: Any) -> None:
    options = {"tools": TOOLS, "add_generation_prompt": True}
    assert ours(LLAMA3, CALL, **options) == theirs(judge, LLAMA3, CALL, **options)
    two = [CALL[0], {**CALL[1], "tool_calls": CALL[1]["tool_calls"] * 2}]
    with pytest.raises(InvalidRequest, match="single tool-calls"):
        ours(LLAMA3, two)


def test_content_blocks_and_documents(judge: Any) -> None:
    messages = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": " a "}]}]
    options = {"documents": [{"title": "T", "text": "body"}], "add_generation_prompt": False}
    assert ours(BLOCKS, messages, **options) == theirs(judge, BLOCKS, messages, **options)


@pytest.mark.parametrize("name", ["qwen", "gemma", "smollm2", "llama2", "phi3"])
def test_the_last_message_continued(judge: Any, name: str) -> None:
    for text in ("The answer is", "The answer is ", "x"):
        messages = [{"role": "user", "content": "x Hi"}, {"role": "assistant", "content": text}]
        options = {"add_generation_prompt": False, "continue_final_message": True}
        prompt = ours(TEMPLATES[name], messages, **options)
        assert prompt == theirs(judge, TEMPLATES[name], messages, **options)
        assert messages[-1]["content"] == text  # the caller's messages are left alone


def test_the_last_block_continued(judge: Any) -> None:
    content = [{"type": "text", "text": "first"}, {"type": "text", "text": "second"}]
    messages = [{"role": "assistant", "content": content}]
    options = {"add_generation_prompt": False, "continue_final_message": True}
    assert ours(BLOCKS, messages, **options) == theirs(judge, BLOCKS, messages, **options) == "[first][second"


def test_what_cannot_be_continued() -> None:
    talk = TALKS["three"]
    with pytest.raises(InvalidRequest, match="excludes"):
        ours(QWEN, talk, continue_final_message=True)
    for template, messages in [
        (QWEN, []),
        (QWEN, [{"role": "assistant"}]),
        (QWEN, [{"role": "assistant", "content": [{"type": "image"}]}]),
        ("{{ bos_token }}", talk),
    ]:
        with pytest.raises(InvalidRequest, match="continue_final_message") as caught:
            ours(template, messages, continue_final_message=True, add_generation_prompt=False)
        assert caught.value.param == "continue_final_message"


def test_no_template() -> None:
    for template in (None, ""):
        with pytest.raises(InvalidRequest, match="no chat template"):
            ours(template, TALKS["one"])


ATTACKS = [
    "{{ lipsum.__globals__['os'].popen('touch canary').read() }}",
    "{{ lipsum.__globals__ }}",
    "{{ cycler.__init__.__globals__.os }}",
    "{{ joiner.__init__.__globals__.os }}",
    "{{ namespace.__init__.__globals__ }}",
    "{{ namespace.__class__ }}",
    "{{ dict.__globals__ }}",
    "{{ dict.mro() }}",
    "{{ range.__class__ }}",
    "{{ raise_exception.__globals__ }}",
    "{{ strftime_now.__globals__ }}",
    "{{ self.__init__.__globals__ }}",
    "{{ self._TemplateReference__context }}",
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ ''['__class__'] }}",
    "{{ messages|attr('__class__') }}",
    "{{ messages | map(attribute='__class__') | list }}",
    "{{ '{0.__class__.__mro__}'.format('') }}",
    "{{ ('{0.__cla' ~ 'ss__}') | format('') }}{{ '%s'.__mod__ }}",
    "{{ messages.append(1) }}",
    "{% set ns = namespace() %}{{ ns.__init__ }}{{ ns.__class__ }}",
    "{{ messages.__reduce_ex__(2) }}",
    "{% for k in messages.__iter__.__self__ %}{% endfor %}",
    "{% include '/etc/passwd' %}",
    "{% import 'os' as os %}",
    "{% extends '/etc/passwd' %}",
    "{{ 'a' * 10**10 }}",
    "{{ [0] * 10**10 }}",
    "{{ 10**10 * 'a' }}",
    "{{ 9 ** (9 ** 9) }}",
    "{% for i in range(10**9) %}{% endfor %}",
    "{% for i in range(99999) %}{% for j in range(99999) %}{{ 'aaaaaaaaa' * 999 }}{% endfor %}{% endfor %}",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "{{ unclosed",
    "{% for %}",
]


@pytest.mark.parametrize("attack", ATTACKS)
def test_attacks_are_stopped(attack: str) -> None:
    start = time.perf_counter()
    with pytest.raises((InvalidRequest, ModelError)) as caught:
        ours(attack, TALKS["one"])
    assert time.perf_counter() - start < 5
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400


def test_objects_are_not_handed_to_templates() -> None:
    class Tempting:
        def run(self) -> str:
            raise AssertionError

    with pytest.raises(InvalidRequest, match="Tempting"):
        ours("{{ messages[0].content.run() }}", [{"role": "user", "content": Tempting()}])
    deep: Any = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(InvalidRequest):
        ours("{{ messages }}", deep)


def test_the_output_is_limited() -> None:
    with pytest.raises(InvalidRequest, match="more than"):
        ours(
            "{{ messages[0].content }}{{ messages[0].content }}",
            [{"role": "user", "content": "a" * (MAX_OUTPUT // 2 + 1)}],
        )
    assert (
        len(ours("{{ messages[0].content }}", [{"role": "user", "content": "a" * (MAX_OUTPUT // 2)}]))
        == MAX_OUTPUT // 2
    )


def test_what_the_messages_lack_fails_the_request() -> None:
    with pytest.raises(InvalidRequest, match="cannot render"):
        ours(SMOLLM2, [{"role": "user"}])
    with pytest.raises(InvalidRequest, match="cannot render"):
        ours(SMOLLM2, [{"role": "user", "content": None}])
