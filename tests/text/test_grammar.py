"""Structured outputs: random walks through what is allowed give conforming texts; faults are named."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tokenizers

from hex_llm.errors import InvalidRequest
from hex_llm.sampling_params import StructuredOutputs
from hex_llm.text.grammar import GrammarFactory
from hex_llm.text.tokenizer import Fast, Tokenizer
from tests.text.grammars import Setting

# ---- what comes out conforms

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 10},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["a", "b\n", "日本"]}, "minItems": 1, "maxItems": 3},
        "score": {"type": ["number", "null"]},
        "kind": {"oneOf": [{"const": "x"}, {"type": "boolean"}]},
    },
    "required": ["name", "age", "tags", "kind"],
    "additionalProperties": False,
}


def conforms_to_schema(text: str) -> bool:
    value = json.loads(text)
    return (
        set(value) - {"score"} == {"name", "age", "tags", "kind"}
        and isinstance(value["name"], str)
        and len(value["name"]) <= 10
        and type(value["age"]) is int
        and 0 <= value["age"] <= 120
        and 1 <= len(value["tags"]) <= 3
        and set(value["tags"]) <= {"a", "b\n", "日本"}
        and isinstance(value.get("score"), int | float | None)
        and (value["kind"] == "x" or type(value["kind"]) is bool)
    )


REGEX = r'^(\d{3}-)?[a-f]{2,5}(é|日本|\s/)?["/\]]$'
CHOICES = ("yes", "no", "yes, but", "a.b*", 'quo"te', "two\nlines", "日本", r"\d+", "a|b", " led", "/x/")
LARK = """
?start: sum
sum: NUMBER ("+" NUMBER)* ";"
NUMBER: /[0-9]{1,4}/
"""
EBNF = r"""
# a list
root ::= item+ end
item ::= "- " [a-z0-9/\u00e9]{1,5} "\n"
    | "* " ("x" | "y")
end ::= "\"" "\\;"
"""
KINDS: dict[str, tuple[dict[str, Any], Callable[[str], object]]] = {
    "json": ({"json": json.dumps(SCHEMA)}, conforms_to_schema),
    "json_object": ({"json_object": True}, lambda text: type(json.loads(text)) is dict),
    "regex": ({"regex": REGEX}, lambda text: re.fullmatch(REGEX, text)),
    "choice": ({"choice": CHOICES}, lambda text: text in CHOICES),
    "lark": ({"grammar": LARK}, lambda text: re.fullmatch(r"[0-9]{1,4}(\+[0-9]{1,4})*;", text)),
    "ebnf": (
        {"grammar": EBNF},
        lambda text: re.fullmatch(r"(- [a-z0-9/é]{1,5}\n|\* [xy])+\"\\;", text),
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_random_walks_conform(setting: Setting, kind: str) -> None:
    wanted, conforms = KINDS[kind]
    fresh = setting.compile(**wanted)
    seen = set()
    for seed in range(20):
        text = setting.walk(fresh.copy(), random.Random(seed))
        assert conforms(text), text
        seen.add(text)
    assert len(seen) > 5


def test_tokens_have_the_bytes_that_decoding_gives(setting: Setting) -> None:
    vocabulary = setting.vocabulary
    assert len(vocabulary.tokens) == setting.vocab_size
    num_checked = 0
    for token_id in set(range(setting.tokenizer.vocab_size)) - set(vocabulary.special_token_ids):
        text = vocabulary.tokens[token_id].decode("utf-8", "replace")
        if "�" not in text:
            assert setting.decode([token_id]) == text
            num_checked += 1
    assert num_checked > 200


SPELLINGS: dict[str, dict[str, Any]] = {
    "pretty": {"indent": 4},
    "plain": {},
    "compact": {"separators": (",", ":")},
}


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_real_texts_are_accepted_as_they_are_tokenized(setting: Setting, spelling: str) -> None:
    value = {"name": "Zoë", "age": 7, "tags": ["日本", "a"], "score": 1.5, "kind": True}
    text = json.dumps(value, ensure_ascii=False, **SPELLINGS[spelling])
    ids = setting.tokenizer.encode(f"a{text}", add_special_tokens=False)
    assert ids[: len(setting.start)] == setting.start
    matcher = setting.compile(json=json.dumps(SCHEMA))
    assert all(matcher.accept(i) for i in ids[len(setting.start) :])
    assert matcher.stopped


# ---- the end of a text


def test_the_ends_are_allowed_where_the_text_is_complete(default: Setting) -> None:
    matcher = default.compile(regex="x|xy?z")
    x, y = default.id_of("x"), default.id_of("y")
    assert not default.allowed(matcher)[list(default.eos_ids)].any()
    assert not matcher.accept(default.eos_ids[0])
    assert matcher.accept(x)
    assert default.allowed(matcher)[list(default.eos_ids)].all()
    assert not matcher.stopped
    for eos in default.eos_ids:
        ended = matcher.copy()
        assert ended.accept(eos)
        assert ended.stopped
    assert matcher.accept(y)
    assert not default.allowed(matcher)[list(default.eos_ids)].any()


def test_after_the_last_token_only_an_end_may_follow(default: Setting) -> None:
    matcher = default.compile(choice=("x",))
    assert matcher.accept(default.id_of("x"))
    assert matcher.stopped
    assert set(np.flatnonzero(default.allowed(matcher))) == set(default.eos_ids)
    assert not matcher.accept(default.id_of("x"))
    assert all(matcher.accept(eos) for eos in default.eos_ids)


def test_an_end_is_no_text(default: Setting) -> None:
    """Even where its spelling would conform."""
    matcher = default.compile(regex="<.*>x")
    assert not default.allowed(matcher)[list(default.eos_ids)].any()


def test_copies_go_their_own_ways(default: Setting) -> None:
    first = default.compile(choice=("xa", "yb"))
    second = first.copy()
    assert first.accept(default.id_of("x"))
    assert second.accept(default.id_of("y"))
    assert first.accept(default.id_of("a"))
    assert not second.accept(default.id_of("a"))


# ---- the vocabulary's width


def test_tokens_beyond_the_vocabulary_are_never_allowed(default: Setting) -> None:
    matcher = default.compile(grammar="start: <[*]>*")  # any token by its number
    assert default.allowed(matcher)[: default.tokenizer.vocab_size].all()
    for token_id in range(default.tokenizer.vocab_size, default.vocab_size):
        assert not matcher.accept(token_id)


def test_logits_may_be_narrower_than_the_vocabulary(default: Setting) -> None:
    factory = GrammarFactory(default.tokenizer, 1000, (2, 5000))
    try:
        matcher = factory.submit(StructuredOutputs(regex=".*")).result()
        assert matcher.mask().shape == (32,)
        assert not matcher.accept(1000)
    finally:
        factory.close()


def test_a_tokenizer_of_another_kind_is_refused(default: Setting) -> None:
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    for tokenizer, eos_ids in ((Tokenizer(Fast(words), (0,), {}, None), (0,)), (default.tokenizer, ())):
        with pytest.raises(InvalidRequest, match="not supported with this model's kind of tokenizer"):
            GrammarFactory(tokenizer, 2, eos_ids).submit(StructuredOutputs(regex="a")).result()


# ---- white space


def test_white_space_is_bounded(default: Setting) -> None:
    """A model that likes nothing better gets no further with it."""
    matcher = default.compile(json_object=True, json=None)
    spaces = [i for i in range(default.tokenizer.vocab_size) if (t := default.decode([i])) and not t.strip()]
    text = ""
    assert matcher.accept(default.id_of("{"))
    while found := [i for i in spaces if default.allowed(matcher)[i]]:
        assert matcher.accept(found[0])
        text += default.decode([found[0]])
    assert 0 < len(text) <= 25


# ---- refusals

REFUSALS = {
    "not JSON": ({"json": "{"}, ["structured_outputs.json", "not valid JSON"]),
    "not a schema": ({"json": "[1]"}, ["schema must be an object"]),
    "false": ({"json": "false"}, ["Unsatisfiable"]),
    "wrong type": ({"json": '{"type": 12}'}, ["type must be"]),
    "no such keyword": ({"json": '{"not": {}}'}, ["not"]),
    "remote": ({"json": '{"$ref": "http://127.0.0.1:1/x"}'}, ["127.0.0.1:1"]),
    "file": ({"json": '{"$ref": "file:///etc/passwd"}'}, ["does not fetch"]),
    "bad pattern": ({"json": '{"type": "string", "pattern": "["}'}, ["unclosed character class"]),
    "bad regex": ({"regex": "a)("}, ["structured_outputs.regex", "unopened group"]),
    "look-ahead": ({"regex": "a(?=b)"}, ["look-around"]),
    "deep": ({"regex": "(" * 10_000 + ")" * 10_000}, ["nested parentheses"]),
    "surrogate": ({"regex": "\ud800"}, ["surrogate"]),
    "surrogate choice": ({"choice": ("\ud800",)}, ["surrogate"]),
    "much choice": ({"choice": ("x" * 60_000,) * 20}, ["structured_outputs.choice", "characters in all"]),
    "blank grammar": ({"grammar": " "}, ["structured_outputs.grammar"]),
    "no such rule": ({"grammar": "start: nothing"}, ["nothing"]),
    "no such EBNF rule": ({"grammar": "root ::= nothing"}, ["nothing"]),
    "no root": ({"grammar": 'start ::= "a"'}, ["root"]),
    "deep EBNF": ({"grammar": "root ::= " + "(" * 9999}, ["nested too deeply"]),
    "never ends": ({"grammar": "start: a\na: b\nb: a"}, ["no text conforms"]),
    "$ref to itself": ({"json": '{"$ref": "#"}'}, ["no text conforms"]),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_refusals_name_the_fault(default: Setting, name: str) -> None:
    wanted, words = REFUSALS[name]
    with pytest.raises(InvalidRequest) as refused:
        default.compile(**wanted)
    message = str(refused.value)
    assert refused.value.param == "structured_outputs"
    assert message.isprintable()
    assert len(message) < 400
    assert all(word in message for word in words), message
