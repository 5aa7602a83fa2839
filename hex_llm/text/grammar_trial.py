"""Trying grammars out where they can do no harm: in a process that the kernel ends when one takes too much.

llguidance's own limits bound a step, but not every compilation: some grammars take for ever and some overflow
its stack. So each is compiled first in a fork of a process of its own, with limits of time, memory and stack,
and after everybody else's work.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import subprocess
import sys
from dataclasses import asdict
from typing import Any

import msgspec
import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from hex_llm.errors import HexError
from hex_llm.sampling_params import StructuredOutputs
from hex_llm.text.lark import to_lark
from hex_llm.text.vocabulary import Vocabulary

LIMITS = LLParserLimits(
    step_max_items=20_000,  # items are compared with each other: the time is quadratic
    max_lexer_states=30_000,  # 1 to 2 kB each
    max_grammar_size=50_000,
    verbose_errors=False,
)
TRIAL_BYTES = 128 << 20
WALL_SECONDS = 10  # for each second of a processor that a trial may take, which others may be using
SIMPLEST = (10.0, {"regex": "a"})
LEAST_BYTES = 128 << 10  # of a compiled grammar
NICENESS = 10  # of trials: everybody else's work comes first

Answer = dict[str, Any]  # {"lark", "bytes"}, {"refusal"} or {"late"}


class Trial:
    """A process that tries grammars out, one at a time. It starts with the first; one thread calls this."""

    def __init__(self, vocabulary: Vocabulary, seconds: float) -> None:
        """`seconds` of a processor's time are what compiling one, and its first mask, may take."""
        self.process: subprocess.Popen[bytes] | None = None
        self._vocabulary, self._seconds = vocabulary, seconds

    def start(self) -> None:
        """The process, where there is none: at the priority of the thread that calls, until it is ready."""
        if self.process is None:
            self.process = _start()
            _send(self.process, self._vocabulary)

    def ask(self, wanted: StructuredOutputs) -> Answer:
        for _ in range(2):  # it may have been killed from outside
            try:
                self.start()
                assert self.process is not None
                return _exchange(self.process, self._seconds, wanted)
            except (OSError, ValueError):
                self.close()
        raise HexError("structured_outputs: the process that tries them out does not start")

    def close(self) -> None:
        """Ends the process; a later call would start another."""
        if self.process is not None:
            self.process.kill()
            self.process.communicate()
        self.process = None


def _start() -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-c", "from hex_llm.text.grammar_trial import serve_trials; serve_trials()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,  # where llguidance panics, it writes there what the request holds
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        start_new_session=True,  # Ctrl-C is not for it; it ends with its input
    )


def _exchange(process: subprocess.Popen[bytes], seconds: float, wanted: StructuredOutputs) -> Answer:
    """ValueError or OSError: the process is gone."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(json.dumps([seconds, asdict(wanted)]).encode() + b"\n")
    process.stdin.flush()
    answer: Answer = json.loads(process.stdout.readline())
    return answer


def _send(process: subprocess.Popen[bytes], vocabulary: Vocabulary) -> None:
    assert process.stdin is not None
    tokens = msgspec.msgpack.encode((vocabulary.tokens, vocabulary.special_token_ids, vocabulary.eos_ids))
    process.stdin.write(b"%d\n%b" % (len(tokens), tokens))


# ---- the other process


def _received() -> Vocabulary:
    """What `_send` sent; what is known matters only to who asks."""
    sent = sys.stdin.buffer.read(int(sys.stdin.buffer.readline()))
    kind = tuple[list[bytes], list[int], tuple[int, ...]]
    tokens, special_token_ids, eos_ids = msgspec.msgpack.decode(sent, type=kind)
    return Vocabulary(tokens, special_token_ids, eos_ids, known=np.zeros(0, np.int32))


def serve_trials() -> None:
    """A vocabulary, then for each line an answer, until there are no more."""
    table = _received().table()
    os.nice(max(NICENESS - os.nice(0), 0))
    here = resource.getrlimit(resource.RLIMIT_STACK)[0]
    # Half of what a thread has that compiles it again: where there is no limit, glibc gives 2 MiB.
    stack = (2 << 20 if here == resource.RLIM_INFINITY else here) // 2
    resource.setrlimit(resource.RLIMIT_STACK, (stack, stack))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    least = json.loads(_in_fork(table, json.dumps(SIMPLEST).encode())).get("bytes", 0)
    for line in sys.stdin.buffer:
        answer = json.loads(_in_fork(table, line))
        if "bytes" in answer:  # what any grammar touches first is no part of this one
            answer["bytes"] = max(answer["bytes"] - least, 0) + LEAST_BYTES
        sys.stdout.buffer.write(json.dumps(answer).encode() + b"\n")
        sys.stdout.buffer.flush()


def _in_fork(table: LLTokenizer, line: bytes) -> bytes:
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        with contextlib.suppress(BaseException), os.fdopen(writer, "wb") as file:
            seconds, wanted = json.loads(line)
            # Either signal ends it, whatever it is at.
            signal.setitimer(signal.ITIMER_PROF, seconds)
            signal.setitimer(signal.ITIMER_REAL, seconds * WALL_SECONDS)
            most = _num_bytes(0) + TRIAL_BYTES
            resource.setrlimit(resource.RLIMIT_AS, (most, most))
            file.write(json.dumps(_attempt(table, StructuredOutputs(**wanted))).encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as file:
        answer = file.read()
    status = os.waitpid(pid, 0)[1]
    return (
        answer if status == 0 and answer else json.dumps(_DEATHS.get(os.WTERMSIG(status), _KILLED)).encode()
    )


def _num_bytes(which: int) -> int:
    """Of this process: 0, all that it has asked for; 1, what it has in memory."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[which]) * resource.getpagesize()


_KILLED = {"refusal": "too complex"}
_DEATHS: dict[int, Answer] = {
    signal.SIGPROF: {"late": True},
    signal.SIGALRM: {"late": True},
    signal.SIGSEGV: {"refusal": "too complex: nested or chained too deeply"},
    signal.SIGABRT: {"refusal": f"too complex: it takes more than {TRIAL_BYTES >> 20} MiB to compile"},
}


def _attempt(table: LLTokenizer, wanted: StructuredOutputs) -> Answer:
    before = _num_bytes(1)
    try:
        lark = to_lark(wanted)
        matcher = LLMatcher(table, lark, log_level=0, limits=LIMITS)
        matcher.compute_bitmask()
    except ValueError as error:
        return {"refusal": str(error)}
    if matcher.is_error():
        return {"refusal": matcher.get_error()}
    return {"lark": lark, "bytes": _num_bytes(1) - before}
