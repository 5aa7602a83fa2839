"""Beam search as vLLM does it: each step asks for one token behind each beam, and the likeliest go on.

A step's beams share all but their last token, so the prefix cache holds nearly all of each.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice

from hex_llm.errors import InvalidRequest
from hex_llm.frontend.beside import read
from hex_llm.sampling_params import MAX_LOGPROBS, SamplingParams
from hex_llm.server.common.backend import Backend, answer, together
from hex_llm.server.common.body import Sampling
from hex_llm.text.tokenizer import Tokenizer
from hex_llm.types import CompletionOutput, FinishReason, Logprobs, RequestOutput

MAX_WIDTH = MAX_LOGPROBS // 2  # each step looks at twice as many tokens
MAX_STEPS = 512  # each of which looks at all tokens anew; that many also if nothing is said
NOT_WITH_BEAMS = (
    "structured_outputs",
    "prompt_logprobs",
    "truncate_prompt_tokens",
    "min_tokens",
    "stop",
    "echo",
    "logprob_token_ids",
)


@dataclass(frozen=True)
class Beam:
    ids: tuple[int, ...] = ()  # behind the prompt
    logprob: float = 0.0
    logprobs: tuple[Logprobs, ...] = ()
    ended: bool = False  # with the last of the ids

    def score(self, num_prompt: int, length_penalty: float) -> float:
        return self.logprob / max(num_prompt + len(self.ids) - self.ended, 1) ** length_penalty


async def beam_search(
    backend: Backend, prompt: str | list[int], request: Sampling, params: SamplingParams, penalty: float
) -> RequestOutput:
    """The n best of `best_of` beams. Raises InvalidRequest for what cannot be done with beams."""
    tokenizer, width = backend.tokenizer, params.num_choices
    if tokenizer is None:
        raise InvalidRequest.at("use_beam_search", "this server has no tokenizer (--skip_tokenizer_init)")
    if width > MAX_WIDTH:
        raise InvalidRequest.at("use_beam_search", f"at most {MAX_WIDTH} beams (n or best_of)")
    if (params.max_tokens or 0) > MAX_STEPS:
        raise InvalidRequest.at("max_tokens", f"at most {MAX_STEPS} with use_beam_search")
    for name in NOT_WITH_BEAMS:
        if getattr(params, name):
            raise InvalidRequest.at(name, "not together with use_beam_search")
    if isinstance(prompt, str):
        prompt = await read(len(prompt), partial(tokenizer.encode, prompt))
    room = backend.max_len - len(prompt)
    # Greedy: what beams are chosen by are the model's own log-probabilities.
    one = replace(params, n=1, best_of=None, max_tokens=1, temperature=0.0, logprobs=2 * width)
    ends = () if params.ignore_eos else (*tokenizer.eos_ids, *params.stop_token_ids)

    def best(some: Iterable[Beam], most: int) -> list[Beam]:
        return sorted(some, key=lambda beam: beam.score(len(prompt), penalty), reverse=True)[:most]

    beams, ended, num_cached = [Beam()], list[Beam](), 0
    for _ in range(max(min(params.max_tokens or MAX_STEPS, room), 1)):
        steps = await together(answer(backend, [*prompt, *beam.ids], request, one) for beam in beams)
        num_cached = num_cached or steps[0].num_cached_tokens
        grown = [new for beam, step in zip(beams, steps, strict=True) for new in _grown(beam, step, ends)]
        ended += [beam for beam in grown if beam.ended]
        beams = best((beam for beam in grown if not beam.ended), width)
        if not beams:
            break
    likeliest = best([*ended, *beams], params.n)
    outputs = [_output(i, beam, tokenizer, params) for i, beam in enumerate(likeliest)]
    return RequestOutput("", prompt, outputs, None, None, num_cached, True)


def _grown(beam: Beam, step: RequestOutput, ends: Collection[int]) -> list[Beam]:
    [candidates] = step.outputs[0].logprobs or [{}]
    return [
        Beam((*beam.ids, i), beam.logprob + of.logprob, (*beam.logprobs, candidates), i in ends)
        for i, of in candidates.items()
    ]


def _output(index: int, beam: Beam, tokenizer: Tokenizer, params: SamplingParams) -> CompletionOutput:
    shown = beam.ids[:-1] if beam.ended and not params.include_stop_str_in_output else beam.ids
    text = tokenizer.decode(shown, skip_special_tokens=params.skip_special_tokens)
    reason, logprobs = FinishReason.STOP if beam.ended else FinishReason.LENGTH, None
    if (num_top := params.logprobs) is not None:  # the chosen token first, as elsewhere
        pairs = zip(beam.ids, beam.logprobs, strict=True)
        logprobs = [
            {i: of[i], **dict(islice(of.items(), num_top if num_top >= 0 else None))} for i, of in pairs
        ]
    return CompletionOutput(index, list(beam.ids), text, reason, None, beam.logprob, logprobs)
