"""Structured outputs: which tokens may come next, so that the text conforms to what a request wants.

llguidance does the matching. Its own limits (`LIMITS`) bound a step, but not every compilation: some schemas
take for ever and some overflow its stack, which would end the server. So each is compiled first in a forked
process that the kernel ends when it takes too long or too much, and only what passed there is compiled here.
Not known here: requests, sampling, the model.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper, regex_to_lark
from llguidance.gbnf_to_lark import gbnf_to_lark

from hex_llm.errors import HexError, InvalidRequest, one_line
from hex_llm.sampling_params import MAX_GRAMMAR, StructuredOutputs
from hex_llm.text.spm import Slow
from hex_llm.text.tokenizer import Fast, Tokenizer

LIMITS = LLParserLimits(
    step_max_items=20_000,  # items are compared with each other: the time is quadratic
    max_lexer_states=30_000,  # 1 to 2 kB each
    max_grammar_size=50_000,
    verbose_errors=False,
)
TRIAL_SECONDS = 2.0  # for compiling and one mask; then as long again here
TRIAL_BYTES = 128 << 20
# The time of a processor that a sequence may take in all: other sequences wait meanwhile.
FOLLOW_SECONDS, FOLLOW_SECONDS_PER_TOKEN = 1.0, 0.01
# White space is bounded: small models would otherwise fill their output with it. It is not forbidden either:
# one space, or a new line with its indentation, leaves a model the habits it was trained to.
JSON_OPTIONS = {
    "whitespace_pattern": r" |\n( {0,24}|\t{0,8})",
    "coerce_one_of": True,  # oneOf, where its branches may overlap, is taken as anyOf
}
# Without this, llguidance allows only its own way to cut text that has no alternative into tokens.
_END = '\n%llguidance {"no_forcing": true}\n'
_PARAM = "structured_outputs"


class GrammarFactory:
    """Makes matchers for one model; any thread may call it. The process starts with the first call."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_ids: Sequence[int]) -> None:
        """`vocab_size` is the width of the logits. With a large one this holds the GIL for a second or two,
        so it is done before there are requests; a tokenizer that cannot be used is refused to these."""
        self._vocabulary = Vocabulary.of(tokenizer, vocab_size, eos_ids)
        self._table = None if self._vocabulary is None else self._vocabulary.table()
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def compile(self, wanted: StructuredOutputs) -> Matcher:
        """Takes about TRIAL_SECONDS twice at the most, once no other call is under way, and frees the GIL."""
        _check(wanted)
        if self._vocabulary is None or self._table is None:
            raise InvalidRequest(f"{_PARAM}: not supported with this model's kind of tokenizer", _PARAM)
        with self._lock:
            answer = self._ask(self._vocabulary, wanted)
        if "lark" not in answer:
            raise _refused(wanted, answer["refusal"])
        inner = LLMatcher(self._table, answer["lark"], log_level=0, limits=LIMITS)
        if inner.is_error():
            raise _refused(wanted, inner.get_error())
        return Matcher(inner, self._vocabulary)

    def close(self) -> None:
        """Ends the process; a later call would start another."""
        with self._lock:
            self._end()

    def _ask(self, vocabulary: Vocabulary, wanted: StructuredOutputs) -> dict[str, str]:
        for _ in range(2):  # it may have been killed from outside
            try:
                if self._process is None:
                    self._process = _start()
                    _send(self._process, vocabulary)
                return _exchange(self._process, wanted)
            except (OSError, ValueError):
                self._end()
        raise HexError(f"{_PARAM}: the process that tries them out does not start")

    def _end(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
        self._process = None


class Matcher:
    """How far one sequence has come. InvalidRequest: it cannot be followed further."""

    def __init__(self, inner: LLMatcher, vocabulary: Vocabulary) -> None:
        self._inner, self._vocabulary = inner, vocabulary
        self._seconds_left = FOLLOW_SECONDS

    def copy(self) -> Matcher:
        """For another sequence that has come equally far, much faster than compiling again."""
        return Matcher(self._inner.deep_copy(), self._vocabulary)

    def mask(self) -> npt.NDArray[np.int32]:
        """Bit i of word w: token 32 * w + i may come next. The ends of a text may where it is complete."""
        with self._watched():
            allowed = np.frombuffer(self._inner.compute_bitmask(), np.int32)
        return allowed[: len(self._vocabulary.known)] & self._vocabulary.known

    def accept(self, token_id: int) -> bool:
        """False, and nothing has changed: the token does not conform."""
        if not self._vocabulary.knows(token_id):
            return False
        if self.stopped:
            return token_id in self._vocabulary.eos_ids
        self._seconds_left += FOLLOW_SECONDS_PER_TOKEN
        with self._watched():
            return self._inner.try_consume_tokens([token_id]) == 1

    @property
    def stopped(self) -> bool:
        """Nothing may follow but the end."""
        return self._inner.is_stopped() and not self._inner.is_error()

    @contextlib.contextmanager
    def _watched(self) -> Iterator[None]:
        begin = time.thread_time()
        yield
        self._seconds_left -= time.thread_time() - begin
        reason = "it takes too long" if self._seconds_left < 0 else self._inner.get_error()
        if reason:  # a mask would be that of an end
            reason = f"{_PARAM}: too complex to be followed further ({_shortened(reason)})"
            raise InvalidRequest(reason, _PARAM)


# ---- the vocabulary


@dataclass(frozen=True)
class Vocabulary:
    """What llguidance must know of a tokenizer, under the names that it uses."""

    tokens: list[bytes]  # one for each logit
    special_token_ids: list[int]  # these stand for no text
    eos_ids: tuple[int, ...]
    known: npt.NDArray[np.int32]  # a mask of those that the tokenizer has

    @classmethod
    def of(cls, tokenizer: Tokenizer, vocab_size: int, eos_ids: Sequence[int]) -> Vocabulary | None:
        """None: it is not known what text the tokens stand for, or how a text ends."""
        codec = tokenizer.codec
        found = _fast(codec) if isinstance(codec, Fast) else _slow(codec) if isinstance(codec, Slow) else None
        eos_ids = tuple(i for i in eos_ids if 0 <= i < vocab_size)
        if found is None or not eos_ids:
            return None
        texts, special = found
        known = np.zeros(-(-vocab_size // 32) * 32, bool)
        known[[i for i in {*texts, *eos_ids} if i < vocab_size]] = True
        return cls(
            tokens=[texts.get(i, b"") for i in range(vocab_size)],
            special_token_ids=sorted(i for i in {*special, *eos_ids} if i < vocab_size),
            eos_ids=eos_ids,
            known=np.packbits(known, bitorder="little").view(np.int32),
        )

    @property
    def eos_token_id(self) -> int:
        return self.eos_ids[0]

    bos_token_id = None

    def __call__(self, text: str | bytes) -> list[int]:
        raise NotImplementedError("nothing is to be cut into tokens here")

    def knows(self, token_id: int) -> bool:
        return 0 <= token_id < len(self.tokens) and bool(self.known[token_id >> 5] >> (token_id & 31) & 1)

    def table(self) -> LLTokenizer:
        return LLTokenizer(TokenizerWrapper(self), eos_token=list(self.eos_ids))


def _fast(codec: Fast) -> tuple[dict[int, bytes], set[int]] | None:
    """The bytes of each token as the decoder makes them, and the special tokens."""
    decoder: Any = codec.tokenizer.decoder
    kinds = set(re.findall(r'"type":\s*"(\w+)"', decoder.__getstate__().decode() if decoder else ""))
    if "ByteLevel" in kinds:
        to_bytes = _byte_level
    elif kinds & {"ByteFallback", "Metaspace"}:
        to_bytes = _sentencepiece
    else:
        return None
    added = codec.tokenizer.get_added_tokens_decoder()
    texts = {i: to_bytes(token) for token, i in codec.tokenizer.get_vocab(with_added_tokens=True).items()}
    special = {i for i, token in added.items() if token.special}
    return texts | {i: added[i].content.encode() for i in special}, special


def _slow(codec: Slow) -> tuple[dict[int, bytes], set[int]]:
    processor, added = codec.processor, codec.added
    texts = {i: _sentencepiece(processor.id_to_piece(i)) for i in range(codec.num_pieces)}
    texts |= {i: token.content.encode() for i, token in added.items()}
    special = {i for i, token in added.items() if token.special}
    return texts, special | {i for i in range(codec.num_pieces) if processor.is_unknown(i)} - set(added)


def _sentencepiece(token: str) -> bytes:
    if re.fullmatch(r"<0x[0-9A-F]{2}>", token):
        return bytes([int(token[3:5], 16)])
    return token.replace("▁", " ").encode()


def _byte_level(token: str) -> bytes:
    """A token that is not spelled in the letters that stand for bytes is meant as it is."""
    try:
        return token.translate(_BYTES).encode("latin-1")
    except UnicodeEncodeError:
        return token.encode()


def _letters_of_bytes() -> Mapping[int, int]:
    """GPT-2's: the printable characters of Latin-1 are their own bytes, those from U+0100 on are the rest."""
    plain = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in plain]
    no_letters = dict.fromkeys(others, 0xFFFF)
    return no_letters | {0x100 + i: byte for i, byte in enumerate(others)}


_BYTES = _letters_of_bytes()


# ---- what is wanted, in Lark


def _check(wanted: StructuredOutputs) -> None:
    text = "".join(filter(None, (wanted.json, wanted.regex, wanted.grammar, *wanted.choice)))
    if len(text) > MAX_GRAMMAR:
        raise _refused(wanted, f"more than {MAX_GRAMMAR} characters in all")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise _refused(wanted, "it holds half of a surrogate pair, which is no character") from None


def to_lark(wanted: StructuredOutputs) -> str:
    """ValueError says what is wrong with a schema or an EBNF grammar; llguidance finds the rest."""
    if wanted.json is not None or wanted.json_object:
        return f"start: %json {_schema(wanted.json or _ANY_OBJECT)}{_END}"
    if wanted.regex is not None:
        return f"start: /{regex_to_lark(wanted.regex, 'd')}/{_END}"  # \d: only 0 to 9
    if wanted.choice:  # a terminal, not a rule: one automaton instead of as many as there are texts
        return f"start: CHOICE\nCHOICE: {' | '.join(map(json.dumps, wanted.choice))}{_END}"
    assert wanted.grammar is not None
    is_ebnf = re.search(r"^\s*[\w-]+\s*::=", wanted.grammar, re.MULTILINE)
    return (_from_ebnf(wanted.grammar) if is_ebnf else wanted.grammar) + _END


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


# ---- the trial


def _start() -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-c", "from hex_llm.text.grammar import serve_trials; serve_trials()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,  # where llguidance panics, it writes there what the request holds
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        start_new_session=True,  # Ctrl-C is not for it; it ends with its input
    )


def _exchange(process: subprocess.Popen[bytes], wanted: StructuredOutputs) -> dict[str, str]:
    """ValueError or OSError: the process is gone."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(json.dumps(asdict(wanted)).encode() + b"\n")
    process.stdin.flush()
    answer: dict[str, str] = json.loads(process.stdout.readline())
    return answer


def _send(process: subprocess.Popen[bytes], vocabulary: Vocabulary) -> None:
    assert process.stdin is not None
    tokens = msgspec.msgpack.encode((vocabulary.tokens, vocabulary.special_token_ids, vocabulary.eos_ids))
    process.stdin.write(b"%d\n%b" % (len(tokens), tokens))


def _received() -> Vocabulary:
    """What `_send` sent; what is known matters only to who asks."""
    sent = sys.stdin.buffer.read(int(sys.stdin.buffer.readline()))
    kind = tuple[list[bytes], list[int], tuple[int, ...]]
    tokens, special_token_ids, eos_ids = msgspec.msgpack.decode(sent, type=kind)
    return Vocabulary(tokens, special_token_ids, eos_ids, known=np.zeros(0, np.int32))


def serve_trials() -> None:
    """The other process: a vocabulary, then for each line an answer, until there are no more."""
    table = _received().table()
    here = resource.getrlimit(resource.RLIMIT_STACK)[0]
    # Half of what a thread has that compiles it again: where there is no limit, glibc gives 2 MiB.
    stack = (2 << 20 if here == resource.RLIM_INFINITY else here) // 2
    resource.setrlimit(resource.RLIMIT_STACK, (stack, stack))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for line in sys.stdin.buffer:
        sys.stdout.buffer.write(_in_fork(table, line).replace(b"\n", b"") + b"\n")
        sys.stdout.buffer.flush()


def _in_fork(table: LLTokenizer, line: bytes) -> bytes:
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        with contextlib.suppress(BaseException), os.fdopen(writer, "wb") as file:
            signal.setitimer(signal.ITIMER_REAL, TRIAL_SECONDS)  # SIGALRM ends it, whatever it is at
            num_pages = int(open("/proc/self/statm").read().split()[0])  # noqa: SIM115
            most = num_pages * resource.getpagesize() + TRIAL_BYTES
            resource.setrlimit(resource.RLIMIT_AS, (most, most))
            file.write(json.dumps(_attempt(table, StructuredOutputs(**json.loads(line)))).encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as file:
        answer = file.read()
    status = os.waitpid(pid, 0)[1]
    if status == 0 and answer:
        return answer
    return json.dumps({"refusal": _DEATHS.get(os.WTERMSIG(status), "too complex")}).encode()


_DEATHS: dict[int, str] = {
    signal.SIGALRM: f"too complex: it takes more than {TRIAL_SECONDS:g} s to compile",
    signal.SIGSEGV: "too complex: nested or chained too deeply",
    signal.SIGABRT: f"too complex: it takes more than {TRIAL_BYTES >> 20} MiB to compile",
}


def _attempt(table: LLTokenizer, wanted: StructuredOutputs) -> dict[str, str]:
    try:
        lark = to_lark(wanted)
        matcher = LLMatcher(table, lark, log_level=0, limits=LIMITS)
        matcher.compute_bitmask()
    except ValueError as error:
        return {"refusal": str(error)}
    return {"refusal": matcher.get_error()} if matcher.is_error() else {"lark": lark}


# ---- refusals


def _refused(wanted: StructuredOutputs, reason: str) -> InvalidRequest:
    kind = next(name for name, value in asdict(wanted).items() if value)
    if kind != "grammar":  # a place in our Lark
        reason = re.sub(r"^(at )?\d+\(\d+\): ", "", reason)
    return InvalidRequest(f"{_PARAM}.{kind}: {_shortened(reason)}", _PARAM)


def _shortened(reason: str) -> str:
    """One line without excerpts, of which both ends are kept: the fault is named at the one or the other."""
    if reason.startswith("NoExtension"):
        return "no text conforms to it"
    if reason.startswith("panic") or "limits." in reason:
        return "too complex"
    lines = [line for line in reason.splitlines() if not re.match(r"\s*\d+ \| |\s*\^+\s*$", line)]
    text = one_line(" ".join(" ".join(lines).removesuffix("<non-verbose/>").split()))
    return text if len(text) <= 300 else f"{text[:150]} ... {text[-150:]}"
