"""What an output must conform to, as a grammar in llguidance's dialect of Lark."""

from __future__ import annotations

import json
import re
import sys

from llguidance import regex_to_lark
from llguidance.gbnf_to_lark import gbnf_to_lark

from hex_llm.sampling_params import StructuredOutputs

# White space is bounded: small models would otherwise fill their output with it. It is not forbidden either:
# one space, or a new line with its indentation, leaves a model the habits it was trained to.
JSON_OPTIONS = {
    "whitespace_pattern": r" |\n( {0,24}|\t{0,8})",
    "coerce_one_of": True,  # oneOf, where its branches may overlap, is taken as anyOf
}
# Without this, llguidance allows only its own way to cut text that has no alternative into tokens.
_END = '\n%llguidance {"no_forcing": true}\n'


def to_lark(wanted: StructuredOutputs) -> str:
    """ValueError says what is wrong with a schema or an EBNF grammar; llguidance finds the rest."""
    structure = _structure(wanted)
    if wanted.reasoning:
        *start, end = map(json.dumps, wanted.reasoning)
        structure = (
            f"start: {'(reasoning SPACE?)?' if start else 'reasoning SPACE?'} %lark {{\n{structure}\n}}\n"
            # To the first end: there may be others behind it.
            f"reasoning[lazy]: REASONING\nREASONING: {' '.join(start)} /(?s:.*)/ {end}\nSPACE: /\\s{{1,8}}/"
        )
    return structure + _END


def _structure(wanted: StructuredOutputs) -> str:
    if wanted.json is not None or wanted.json_object:
        return f"start: %json {_schema(wanted.json or _ANY_OBJECT)}"
    if wanted.regex is not None:
        return f"start: /{regex_to_lark(wanted.regex, 'd')}/"  # \d: only 0 to 9
    if wanted.choice:  # a terminal, not a rule: one automaton instead of as many as there are texts
        return f"start: CHOICE\nCHOICE: {' | '.join(map(json.dumps, wanted.choice))}"
    assert wanted.grammar is not None
    is_ebnf = re.search(r"^\s*[\w-]+\s*::=", wanted.grammar, re.MULTILINE)
    return _from_ebnf(wanted.grammar) if is_ebnf else wanted.grammar


_ANY_OBJECT = '{"type": "object"}'


def _schema(text: str) -> str:
    try:
        schema = json.loads(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    except ValueError as error:
        raise ValueError(f"not valid JSON: {error}") from None
    if isinstance(schema, dict):
        own = schema.get("x-guidance")
        schema["x-guidance"] = {**(own if isinstance(own, dict) else {}), **JSON_OPTIONS}
    return json.dumps(schema)


def _from_ebnf(text: str) -> str:
    """llama.cpp's dialect, and xgrammar's, which lets an alternative begin on a new line."""
    text = re.sub(r"\n\s*\|", " |", text)
    # The converter loses the zeros of \u00e9.
    text = re.sub(r"\\(?:\\|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8})", _unescaped, text)
    try:
        return gbnf_to_lark(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    except Exception as error:  # the converter raises nothing more particular
        raise ValueError(str(error)) from None


def _unescaped(match: re.Match[str]) -> str:
    number = int(match[0][2:] or "0", 16)
    char = chr(number) if number <= sys.maxunicode else ""
    return char if char.isalnum() or char > "\xa0" else match[0]
