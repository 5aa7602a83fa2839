"""Structured outputs: random walks through what is allowed must give conforming texts, and nothing hostile
may take long, take much or end the process."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import tokenizers
from tokenizers import pre_tokenizers

from hex_llm.config import EngineConfig
from hex_llm.errors import InvalidRequest
from hex_llm.sampling_params import StructuredOutputs
from hex_llm.text.grammar import GrammarFactory, Matcher, Vocabulary
from hex_llm.text.tokenizer import Fast, Tokenizer, load_tokenizer
from hex_llm.weights.gguf import gguf_tokenizer, open_gguf
from hex_llm.weights.source import fetch
from tests.text.corpus import train_byte_level, train_sentencepiece, write_json

Bits = np.ndarray[Any, np.dtype[np.bool_]]
TOKENIZERS = ("default", "byte_level", "llama", "gemma", "slow", "unigram")


def trained(name: str, folder: Path) -> Tokenizer:
    if name == "byte_level":
        cut = pre_tokenizers.ByteLevel(add_prefix_space=False)
        train_byte_level(cut, ["<|endoftext|>", "<|im_end|>"]).save(str(folder / "tokenizer.json"))
        eos = "<|endoftext|>"
    else:
        kind = "unigram" if name == "unigram" else "bpe"
        train_sentencepiece(folder / "tokenizer.model", gemma=name == "gemma", kind=kind)
        eos = "<eos>" if name == "gemma" else "</s>"
    kind = "GemmaTokenizer" if name == "gemma" else "LlamaTokenizer"
    write_json(folder / "tokenizer_config.json", {"tokenizer_class": kind, "eos_token": eos})
    write_json(folder / "config.json", {"model_type": "llama"})
    return load_tokenizer(folder, mode="slow" if name == "slow" else "auto")


class Setting:
    """A tokenizer, and a factory whose logits are wider than it and which has two ends of a text."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.eos_ids = (*tokenizer.eos_ids, tokenizer.eos_ids[0] + 1)
        self.vocab_size = tokenizer.vocab_size + 77
        self.factory = GrammarFactory(tokenizer, self.vocab_size, self.eos_ids)
        self.start = tokenizer.encode("a", add_special_tokens=False)
        vocabulary = Vocabulary.of(tokenizer, self.vocab_size, self.eos_ids)
        assert vocabulary is not None
        self.vocabulary = vocabulary
        self.closing = [vocabulary.tokens.index(char.encode()) for char in '"}]:,;09']

    def compile(self, **wanted: Any) -> Matcher:
        return self.factory.compile(StructuredOutputs(**wanted))

    def decode(self, ids: list[int]) -> str:
        """As it follows other text."""
        return self.tokenizer.decode([*self.start, *ids], skip_special_tokens=False).removeprefix("a")

    def id_of(self, text: str) -> int:
        return self.vocabulary.tokens.index(text.encode())

    def allowed(self, matcher: Matcher) -> Bits:
        words = matcher.mask()
        assert words.shape == (-(-self.vocab_size // 32),)
        assert words.dtype == np.int32
        bits = np.unpackbits(words.view(np.uint8), bitorder="little").astype(bool)
        assert not bits[self.tokenizer.vocab_size :].any()
        assert len({bool(bits[i]) for i in self.eos_ids}) == 1
        return bits

    def walk(self, matcher: Matcher, rng: random.Random) -> str:
        """Takes tokens at random, after a while rather those that bring it to an end."""
        ids: list[int] = []
        while len(ids) < 200:
            bits = self.allowed(matcher)
            self.refuses(matcher, bits, rng)
            token_id = self.choose(bits, len(ids), rng)
            assert matcher.accept(token_id)
            if token_id in self.eos_ids:
                return self.decode(ids)
            ids.append(token_id)
        raise AssertionError(f"no end is in sight of {self.decode(ids)}")

    def choose(self, bits: Bits, num_tokens: int, rng: random.Random) -> int:
        closing = [*self.eos_ids, *self.closing] if num_tokens > 30 else rng.sample(self.eos_ids, k=1)
        if num_tokens > 30 or rng.random() < 0.2:
            for token_id in closing:
                if bits[token_id]:
                    return token_id
        return int(rng.choice(np.flatnonzero(bits)))

    def refuses(self, matcher: Matcher, bits: Bits, rng: random.Random) -> None:
        for token_id in rng.choices(np.flatnonzero(~bits), k=3) if not bits.all() else []:
            assert not matcher.accept(int(token_id))
        for token_id in (-1, self.vocab_size, 2**40):
            assert not matcher.accept(token_id)
        if rng.random() < 0.05:
            assert (self.allowed(matcher) == bits).all()


@pytest.fixture(scope="module")
def default() -> Iterator[Setting]:
    path = fetch(None, cache_dir=EngineConfig().cache_dir)
    setting = Setting(gguf_tokenizer(open_gguf(path)))
    yield setting
    setting.factory.close()


@pytest.fixture(scope="module", params=TOKENIZERS)
def setting(
    request: pytest.FixtureRequest, default: Setting, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Setting]:
    if request.param == "default":
        yield default
        return
    made = Setting(trained(request.param, tmp_path_factory.mktemp(request.param)))
    yield made
    made.factory.close()


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
        matcher = factory.compile(StructuredOutputs(regex=".*"))
        assert matcher.mask().shape == (32,)
        assert not matcher.accept(1000)
    finally:
        factory.close()


def test_a_tokenizer_of_another_kind_is_refused(default: Setting) -> None:
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    for tokenizer, eos_ids in ((Tokenizer(Fast(words), (0,), {}, None), (0,)), (default.tokenizer, ())):
        with pytest.raises(InvalidRequest, match="not supported with this model's kind of tokenizer"):
            GrammarFactory(tokenizer, 2, eos_ids).compile(StructuredOutputs(regex="a"))


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


# ---- hostile ones


def chain(link: str, last: str, length: int) -> str:
    return "\n".join([*(link.replace("+", str(i + 1)).replace("@", str(i)) for i in range(length)), last])


def references(length: int) -> str:
    links: dict[str, Any] = {f"d{i}": {"items": {"$ref": f"#/$defs/d{i + 1}"}} for i in range(length)}
    return json.dumps({"$defs": {**links, f"d{length}": {"type": "null"}}, "$ref": "#/$defs/d0"})


def nested(depth: int) -> str:
    return '{"type":"object","properties":{"a":' * depth + "{}" + "}}" * depth


BOMBS = {
    **{f"regex {text[:20]}": {"regex": text} for text in (
        "(a+)+b", "(.*)*x", "(a|a)*b", ".{0,65535}{65535}", "(a{1,1000}){1,1000}{1,1000}", "(.*a){20}.*",
        "(a|b)*a(a|b){30}", "a?" * 5000 + "a" * 5000, "a" * 1_000_000, "[a-z]*" * 2000, "." * 300_000,
    )},
    "schema nested": {"json": nested(10_000)},
    "schema chained": {"json": references(8000)},  # overflows llguidance's stack
    "10k anyOf": {"json": json.dumps({"anyOf": [{"required": [f"k{i}"]} for i in range(10_000)]})},
    "maxItems": {"json": json.dumps({"type": "array", "minItems": 2**31, "maxItems": 2**31 + 1})},
    "maxLength": {"json": json.dumps({"type": "string", "minLength": 2**31})},
    "pattern": {"json": json.dumps({"type": "string", "pattern": "(a{1,999}){1,999}{1,999}"})},
    "patterns": {"json": json.dumps({"allOf": [{"pattern": f".*{i}.*"} for i in range(30)]})},  # for ever
    "big enum": {"json": json.dumps({"enum": [f"v{i}" for i in range(80_000)]})},
    "many properties": {"json": json.dumps({"properties": {f"p{i}": {} for i in range(20_000)}})},
    "multipleOf": {"json": json.dumps({"type": "integer", "multipleOf": 999_999_937})},
    "rules chained": {"grammar": chain("r@: r+", 'start: r0\nr9999: "a"', 9999)},
    "terminals chained": {"grammar": chain("R@: R+", 'start: R0\nR9999: "a"', 9999)},
    "terminals doubled": {"grammar": chain("R@: R+ R+", 'start: R0\nR60: "a"', 60)},
    "90k alternatives": {"grammar": "start: " + " | ".join(f'"w{i}"' for i in range(90_000))},  # quadratic
    "ambiguous": {"grammar": 'start: a\na: a a a | "x" | '},
    "optional": {"grammar": 'start: "x"' + ' "b"?' * 20_000},
    "left recursion": {"grammar": 'start: start "a" | "b"'},
    "parentheses": {"grammar": "start: " + "(" * 100_000},
    "EBNF chained": {"grammar": chain("r@ ::= r+", 'root ::= r0\nr9999 ::= "a"', 9999)},
}  # fmt: skip


def follow(setting: Setting, matcher: Matcher, most: int = 60) -> None:
    rng = random.Random(0)
    for _ in range(most):
        bits = setting.allowed(matcher)
        if matcher.stopped:
            return
        bits[list(setting.eos_ids)] = False
        if not bits.any():
            return
        assert matcher.accept(int(rng.choice(np.flatnonzero(bits))))


@pytest.mark.parametrize("name", BOMBS)
def test_hostile_ones_are_bounded(default: Setting, name: str) -> None:
    default.compile(regex="a")  # the process is there
    process, memory = default.factory._process, psutil.Process().memory_info().rss
    begin = time.monotonic()
    with ThreadPoolExecutor(1) as pool:
        compiling = pool.submit(default.compile, **BOMBS[name])
        longest = longest_wait(compiling.done)
    assert time.monotonic() - begin < 5
    assert longest < 0.5  # other threads run meanwhile
    try:
        matcher = compiling.result()
        begin = time.monotonic()
        follow(default, matcher)
    except InvalidRequest:  # as it may be
        pass
    assert time.monotonic() - begin < 5
    assert psutil.Process().memory_info().rss - memory < 150 << 20
    assert default.factory._process is process  # only its child has died
    assert default.compile(choice=("x",)).accept(default.id_of("x"))


def longest_wait(done: Callable[[], bool]) -> float:
    longest, last = 0.0, time.monotonic()
    while not done():
        time.sleep(0.002)
        longest, last = max(longest, time.monotonic() - last), time.monotonic()
    return longest


AMBIGUOUS = "start: s\ns: " + " | ".join(f"s /[a-z]{{{i},}}/" for i in range(1, 200)) + ' | "x"'


@pytest.mark.parametrize(
    "wanted",
    [
        {"regex": "((a{0,100}b{0,100}){0,100}c{0,100}){0,100}"},  # llguidance gives up
        {"grammar": AMBIGUOUS},  # we do
    ],
    ids=["fuel", "time"],
)
def test_what_gets_too_complex_later_ends_its_request_only(default: Setting, wanted: dict[str, Any]) -> None:
    matcher = default.compile(**wanted)
    begin = time.thread_time()
    with pytest.raises(InvalidRequest, match="too complex to be followed further") as refused:
        follow(default, matcher, 1000)
    assert refused.value.param == "structured_outputs"
    assert not matcher.stopped
    assert time.thread_time() - begin < 10
    with pytest.raises(InvalidRequest):
        matcher.mask()


def test_nothing_is_kept_of_what_is_done(default: Setting) -> None:
    def compile_some(first: int, count: int) -> None:
        for i in range(first, first + count):
            schema = {"type": "object", "properties": {f"k{i}": {"minimum": i}}, "required": [f"k{i}"]}
            default.compile(json=json.dumps(schema)).mask()

    compile_some(0, 20)
    assert default.factory._process is not None
    processes = [psutil.Process(), psutil.Process(default.factory._process.pid)]
    before = [process.memory_info().rss for process in processes]
    compile_some(1000, 100)
    for process, start in zip(processes, before, strict=True):
        assert process.memory_info().rss - start < 8 << 20


# ---- the process


def test_threads_may_compile_at_once(default: Setting) -> None:
    def check(i: int) -> bool:
        matcher = default.compile(choice=(f"x{i}",))
        ids = default.tokenizer.encode(f"x{i}", add_special_tokens=False)
        return all(matcher.accept(token_id) for token_id in ids) and matcher.stopped

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(check, range(40)))


def test_a_process_that_was_killed_is_started_again(default: Setting) -> None:
    default.compile(regex="a")
    assert default.factory._process is not None
    os.kill(default.factory._process.pid, signal.SIGKILL)
    assert default.compile(regex="a").accept(default.id_of("a"))


def test_close_leaves_nothing_behind(default: Setting) -> None:
    num_threads, num_fds = threading.active_count(), psutil.Process().num_fds()
    factory = GrammarFactory(default.tokenizer, default.vocab_size, default.eos_ids)
    factory.compile(StructuredOutputs(regex="a"))
    process = factory._process
    assert process is not None
    factory.close()
    factory.close()
    assert not psutil.pid_exists(process.pid)
    assert (threading.active_count(), psutil.Process().num_fds()) == (num_threads, num_fds)
