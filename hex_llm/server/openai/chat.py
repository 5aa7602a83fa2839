"""/v1/chat/completions, which Vertex's and other routes answer with too.

A chat becomes a prompt by the model's template, and what the model says becomes a message again: its parsers
tell reasoning, content and calls of tools apart, in a whole text as in one that grows.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import Any

from fastapi import APIRouter, Request, Response

from hex_llm.config import ServerConfig
from hex_llm.errors import ConfigError, InvalidRequest, ModelError
from hex_llm.frontend.beside import LONG_TEXT, read
from hex_llm.frontend.outputs import Delta
from hex_llm.sampling_params import SamplingParams, StructuredOutputs
from hex_llm.server.common.backend import Backend, answer, begin, size_of, together
from hex_llm.server.common.body import check_num_values, shown, values_in
from hex_llm.server.common.body_route import BodyRoute
from hex_llm.server.common.replies import Listed, Whole
from hex_llm.server.common.streams import ReplyStream, StreamDelta, streamed, unless_gone
from hex_llm.server.openai import logprobs
from hex_llm.server.openai.replies import (
    ChunkStream,
    Fields,
    Telling,
    answered,
    check_model,
    end_of,
    given,
    head_of,
    whole,
)
from hex_llm.server.openai.schemas import BatchChatRequest, ChatRequest
from hex_llm.text.chat import encode_chat
from hex_llm.text.reasoning import ReasoningParser, format_name_for, may_reason, reasoning_parser
from hex_llm.text.tokenizer import Tokenizer
from hex_llm.text.tool_calls import PARSERS, ForcedCall, ForcedCalls, forced_schema, parser_name_for, schemas
from hex_llm.text.tool_formats import Call, ToolParser
from hex_llm.types import CompletionOutput, FinishReason, RequestOutput

log = logging.getLogger(__name__)

# What chat_template_kwargs may not hold: fields of the request say it.
RESERVED = frozenset(
    (
        *("tokenizer", "messages", "template", "special_tokens", "tools", "documents", "chat_template"),
        *("add_generation_prompt", "continue_final_message", "add_special_tokens", "tokenize"),
    )
)


# Fields of a message that clients read, whether or not there is something in them.
UNSAID = dict.fromkeys(("refusal", "annotations", "audio", "function_call", "reasoning"))


def check_parsers(config: ServerConfig) -> None:
    name = config.tool_call_parser
    if name not in (None, "none", *PARSERS):
        raise ConfigError(
            f"--tool_call_parser={shown(str(name))}: must be none or one of {', '.join(PARSERS)}"
        )
    if config.reasoning_parser not in (None, "none"):
        try:
            reasoning_parser(config.reasoning_parser)
        except ConfigError as error:
            raise ConfigError(f"--reasoning_parser={error}") from None


def tell_unknown_formats(config: ServerConfig, template: str) -> None:
    """Says at the start that the template has nothing of a format that a flag names."""
    taught = {"tool_call_parser": parser_name_for(template), "reasoning_parser": format_name_for(template)}
    for flag, format_name in taught.items():
        if getattr(config, flag) not in (None, "none") and format_name is None:
            log.warning("--%s: the chat template tells the model of no such format", flag)


async def chat_reply(backend: Backend, request: Request, body: ChatRequest, config: ServerConfig) -> Response:
    body.follow(config)
    if body.stream:
        return await streamed(request, await stream_chat(backend, body, config))
    return await unless_gone(request, chat(backend, body, config))


async def chat(backend: Backend, request: ChatRequest, config: ServerConfig) -> Whole:
    talk = await prepare(backend, request, config)
    output = await answered(backend, talk.prompt_ids, request, talk.params)
    head = head_of(backend, request, "chatcmpl", "chat.completion")
    return Whole(size_of(output), partial(_reply, talk, head, output))


def _reply(talk: PreparedChat, head: Fields, output: RequestOutput) -> Fields:
    reply = whole(head, [output], [talk.choice(one) for one in output.outputs])
    ids = Listed(output.prompt_token_ids) if talk.request.return_token_ids else None
    extras = {"prompt_logprobs": logprobs.of_prompt(output), "prompt_token_ids": ids}
    if talk.new_reasoning_parser is not None:
        num_thought = sum(map(talk.num_thought, output.outputs))
        reply["usage"]["completion_tokens_details"] = {"reasoning_tokens": num_thought}
    return {**reply, **extras, **given({"metadata": talk.request.metadata})}


async def stream_chat(
    backend: Backend, request: ChatRequest, config: ServerConfig, *, usage_at_end: bool = False
) -> ReplyStream:
    """`usage_at_end`: also without `include_usage` the last chunk tells it, as Google's clients expect."""
    talk = await prepare(backend, request, config)
    head = head_of(backend, request, "chatcmpl", "chat.completion.chunk")
    readers: list[Reader] = []

    def new_choice() -> Telling:
        growing = GrowingMessage(talk, ends_alone=usage_at_end)
        readers.append(growing.reader)
        return growing.add

    return ChunkStream(
        [begin(backend, talk.prompt_ids, request, talk.params)],
        talk.params,
        request,
        head | given({"metadata": request.metadata}),
        new_choice,
        tells_prompt_ids=request.return_token_ids,
        usage_at_end=usage_at_end,
        num_thought=(lambda: sum(one.num_thought for one in readers)) if talk.new_reasoning_parser else None,
    )


async def chat_batch(backend: Backend, request: BatchChatRequest, config: ServerConfig) -> Whole:
    chats = request.chats()
    backend.check_room(len(chats))
    talks = [await prepare(backend, chat, config) for chat in chats]
    outputs = await together(answer(backend, talk.prompt_ids, request, talk.params) for talk in talks)
    head = head_of(backend, request, "chatcmpl", "chat.completion")

    def make() -> Fields:
        pairs = zip(talks, outputs, strict=True)
        return whole(head, outputs, [talk.choice(output.outputs[0]) for talk, output in pairs])

    return Whole(size_of(*outputs), make)


def routes(backend: Backend, config: ServerConfig) -> APIRouter:
    """Raises ConfigError for a parser that is not known."""
    check_parsers(config)
    if backend.tokenizer is not None and backend.tokenizer.chat_template:
        tell_unknown_formats(config, backend.tokenizer.chat_template)
    router = APIRouter(prefix="/v1", route_class=BodyRoute)

    @router.post("/chat/completions")
    async def chat_completions(body: ChatRequest, request: Request) -> Response:
        return await chat_reply(backend, request, body, config)

    @router.post("/chat/completions/batch")
    async def chat_completions_batch(body: BatchChatRequest, request: Request) -> Response:
        body.follow(config)
        return await unless_gone(request, chat_batch(backend, body, config))

    return router


# ---- from a request to a prompt


@dataclass(frozen=True)
class PreparedChat:
    """A chat on its way to the engine and back."""

    request: ChatRequest
    tokenizer: Tokenizer
    prompt_ids: list[int]
    params: SamplingParams
    new_tool_parser: Callable[[], ToolParser] | None
    new_reasoning_parser: Callable[[], ReasoningParser] | None

    def reader(self) -> Reader:
        reasoning, tools = self.new_reasoning_parser, self.new_tool_parser
        return Reader(self.request, reasoning and reasoning(), tools and tools())

    @property
    def echoed(self) -> str:
        last = self.request.messages[-1]
        return (last.text or "") if self.request.echo and last.role == "assistant" else ""

    def choice(self, output: CompletionOutput) -> Fields:
        reader = self.reader()
        news = reader.add(output.text, ended=True)
        return {
            "message": self._message(news),
            "logprobs": self.logprobs(output),
            **end_of(output),
            "finish_reason": reader.finish_reason(output.finish_reason),
            "token_ids": Listed(output.token_ids) if self.request.return_token_ids else None,
        }

    def num_thought(self, output: CompletionOutput) -> int:
        """Tokens of reasoning; their tags are not counted."""
        assert self.new_reasoning_parser is not None
        reasoning, _ = self.new_reasoning_parser().add(output.text, ended=True)
        return min(len(self.tokenizer.encode(reasoning, add_special_tokens=False)), len(output.token_ids))

    def _message(self, news: Fields) -> Fields:
        calls = [
            {name: call[name] for name in ("id", "type", "function")} for call in news.pop("tool_calls", ())
        ]
        content = self.echoed + news.pop("content", "")
        spoken = {"role": "assistant", "content": content or (None if calls else "")}
        return {**spoken, **UNSAID, **news, **({"tool_calls": calls} if calls else {})}

    def logprobs(self, output: CompletionOutput | Delta) -> Fields | None:
        as_ids = self.request.return_tokens_as_token_ids
        all_told = self.params.logprob_token_ids or self.params.logprobs == -1
        num_top = None if all_told else self.params.logprobs or 0
        return logprobs.of_chat(self.tokenizer, output, num_top, as_ids=as_ids)


async def prepare(
    backend: Backend, request: ChatRequest, config: ServerConfig, *, only_prompt: bool = False
) -> PreparedChat:
    """If more is wanted than its prompt: QueueFull, and a prompt surely longer than the model takes is
    refused."""
    check_model(backend, config, request.model)
    return await read(_num_chars(request), partial(_prepare, backend, request, config, only_prompt))


def _num_chars(request: ChatRequest) -> int:
    """Of what the template gets, with some for each value; counted until the text is a long one."""
    size = 0
    values: list[Any] = [request.documents, request.chat_template, request.chat_template_kwargs]
    for message in islice(request.messages, LONG_TEXT >> 6):
        values += [message.text, [call.function.arguments for call in message.tool_calls]]
    values += [tool.function.parameters for tool in islice(request.tools, LONG_TEXT >> 6)]
    for value in values_in(values):
        size += 64 + (len(value) if isinstance(value, str) else 0)
        if size >= LONG_TEXT:
            break
    return size


def _prepare(backend: Backend, request: ChatRequest, config: ServerConfig, only_prompt: bool) -> PreparedChat:
    params, tokenizer = request.params(backend.sampling_defaults), backend.tokenizer
    if not only_prompt:
        backend.check_room(params.num_choices)
    if tokenizer is None:
        raise InvalidRequest.at(
            "messages",
            "this server has no tokenizer (--skip_tokenizer_init); send token ids to /v1/completions",
        )
    if request.chat_template is not None and not config.trust_request_chat_template:
        raise InvalidRequest.at(
            "chat_template", "this server does not take one (--trust_request_chat_template)"
        )
    check_num_values([tool.function.parameters for tool in request.tools], "tools:")
    tool_choice = request.tool_choice_name()
    new_tool_parser = None if only_prompt else _tool_parser(request, config, tokenizer, tool_choice)
    if params.structured_outputs is not None and tool_choice == "auto":
        new_tool_parser = None  # the structure leaves no room for calls
    params = _for_calls(request, params, tool_choice, new_tool_parser)
    any_length = only_prompt or params.truncate_prompt_tokens is not None
    if request.kv_transfer_params is not None and (ids := request.kv_transfer_params.prompt_token_ids or []):
        text = tokenizer.decode(ids[-100:], skip_special_tokens=False)  # of which only the end matters
    else:
        text, ids = _encode(tokenizer, request, tool_choice, None if any_length else backend.max_len)
    structure = params.structured_outputs
    new_reasoning_parser = _reasoning_parser(request, config, tokenizer, text, structure is not None)
    if new_reasoning_parser is not None:
        parser = new_reasoning_parser()
        if structure is not None:
            params = replace(params, structured_outputs=replace(structure, reasoning=parser.around))
        elif parser.needs_special_tokens:
            params = replace(params, skip_special_tokens=False)
    return PreparedChat(request, tokenizer, ids, params, new_tool_parser, new_reasoning_parser)


def _reasoning_parser(
    request: ChatRequest, config: ServerConfig, tokenizer: Tokenizer, prompt: str, structured: bool
) -> Callable[[], ReasoningParser] | None:
    named = config.reasoning_parser
    name = named or format_name_for(request.chat_template or tokenizer.chat_template)
    if name in (None, "none") or not may_reason(str(name), request.chat_template_kwargs, prompt):
        return None
    new_parser = partial(
        reasoning_parser, str(name), prompt[-100:], by_prompt=named is None, structured=structured
    )
    # A structure comes behind tags, and has no room for channels.
    return None if structured and new_parser().needs_special_tokens else new_parser


def _tool_parser(
    request: ChatRequest, config: ServerConfig, tokenizer: Tokenizer, tool_choice: str
) -> Callable[[], ToolParser] | None:
    if tool_choice == "none":
        return None
    if tool_choice == "required":
        return ForcedCalls
    if tool_choice != "auto":
        return lambda: ForcedCall(tool_choice)
    if not config.enable_auto_tool_choice:
        raise InvalidRequest.at("tool_choice", "this server does not take auto (--enable_auto_tool_choice)")
    template = request.chat_template or tokenizer.chat_template
    name = config.tool_call_parser or parser_name_for(template)
    if name in (None, "none"):
        raise InvalidRequest.at(
            "tools",
            "the model's chat template knows no calls; force them by tool_choice, or name their "
            "format with --tool_call_parser",
        )
    return partial(PARSERS[str(name)], schemas([tool.plain() for tool in request.tools]))


def _for_calls(
    request: ChatRequest,
    params: SamplingParams,
    tool_choice: str,
    new_tool_parser: Callable[[], ToolParser] | None,
) -> SamplingParams:
    if new_tool_parser is None:
        return params
    if tool_choice == "auto":
        special = new_tool_parser().needs_special_tokens
        return replace(params, skip_special_tokens=False) if special else params
    tools = [tool.plain() for tool in request.tools]
    schema = forced_schema(tools, tool_choice, parallel=request.parallel_tool_calls)
    return replace(params, structured_outputs=StructuredOutputs(json=json.dumps(schema)))


def _encode(
    tokenizer: Tokenizer, request: ChatRequest, tool_choice: str, max_len: int | None
) -> tuple[str, list[int]]:
    kwargs = request.chat_template_kwargs
    for name in RESERVED & kwargs.keys():
        raise InvalidRequest.at("chat_template_kwargs", f"not {name}")
    if request.reasoning_effort is not None:
        kwargs = {"reasoning_effort": request.reasoning_effort, **kwargs}
    try:
        return encode_chat(
            tokenizer,
            [message.plain() for message in request.messages],
            template=request.chat_template,
            add_special_tokens=request.add_special_tokens,
            max_len=max_len,
            # A model that is to call none is not told of them.
            tools=None if tool_choice == "none" else [tool.plain() for tool in request.tools],
            documents=request.documents,
            add_generation_prompt=request.add_generation_prompt,
            continue_final_message=request.continue_final_message,
            **kwargs,
        )
    except ModelError as error:
        if request.chat_template is None:
            raise
        raise InvalidRequest.at("chat_template", str(error)) from error


# ---- from what a model says to a message


class Reader:
    """One choice's text, whole or as it comes: what is new in its message, as OpenAI's deltas tell it."""

    def __init__(
        self, request: ChatRequest, reasoning: ReasoningParser | None, tools: ToolParser | None
    ) -> None:
        self._max_calls = None if request.parallel_tool_calls else 1
        self._includes_reasoning = request.include_reasoning
        self._reasoning = reasoning
        self._tools = tools
        self._has_called = False
        self.num_thought = 0  # tokens that brought reasoning, and not its tags; told in pieces, nearly
        self._num_pending = 0  # tokens of which nothing was shown yet

    def add(self, text: str, *, ended: bool, num_tokens: int = 0) -> Fields:
        """Only what there is."""
        news: Fields = {}
        if self._reasoning is not None:
            reasoning, text = self._reasoning.add(text, ended=ended)
            self._num_pending += num_tokens
            if reasoning:
                self.num_thought += self._num_pending if self.num_thought else num_tokens
            if reasoning or text:
                self._num_pending = 0
            if reasoning and self._includes_reasoning:
                # vLLM's newer name beside the one that everybody knows.
                news["reasoning_content"] = news["reasoning"] = reasoning
        calls: list[Call] = []
        if self._tools is not None:
            delta = self._tools.add(text, ended=ended)
            text, calls = delta.content, delta.calls
        if text:
            news["content"] = text
        allowed = [_call(call) for call in calls if self._max_calls is None or call.index < self._max_calls]
        if allowed:
            self._has_called = True
            news["tool_calls"] = allowed
        return news

    def finish_reason(self, reason: FinishReason | None) -> str | None:
        return "tool_calls" if self._has_called and reason is FinishReason.STOP else reason


def _call(call: Call) -> Fields:
    function = {"name": call.name, "arguments": call.arguments}
    return {"index": call.index, "id": call.id, "type": "function", "function": function}


class GrowingMessage:
    """One choice of a chat, for the chunks of a stream."""

    def __init__(self, talk: PreparedChat, *, ends_alone: bool = False) -> None:
        """`ends_alone`: some clients read nothing else from a chunk that also tells the usage."""
        self._talk = talk
        self.reader = talk.reader()
        self._ends_alone = ends_alone
        self._begun = False

    def add(self, news: StreamDelta) -> Iterable[Fields]:
        delta, ended = news.delta, news.delta.finish_reason is not None
        message = self.reader.add(delta.text, ended=ended, num_tokens=len(delta.token_ids))
        wants_ids = self._talk.request.return_token_ids
        if not (message or ended or delta.logprobs or (wants_ids and delta.token_ids)):
            return
        if not self._begun:
            self._begun = True
            first = {"role": "assistant", "content": self._talk.echoed}
            yield {"delta": first, "logprobs": None, "finish_reason": None}
        fields: Fields = {"delta": message, "logprobs": None, "finish_reason": None}
        if delta.logprobs:
            fields["logprobs"] = self._talk.logprobs(delta)
        if wants_ids:
            fields["token_ids"] = delta.token_ids
        if ended:
            if self._ends_alone and len(fields["delta"]):
                yield fields
                fields = {"delta": {}, "logprobs": None}
            reason = self.reader.finish_reason(delta.finish_reason)
            fields |= {"finish_reason": reason, "stop_reason": delta.stop_reason}
        yield fields
