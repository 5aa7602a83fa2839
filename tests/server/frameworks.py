"""Programs made with others' frameworks, for an environment that has those: `python … NAME ADDRESS`.

Each asks for a text, for the same in pieces, for calls, for calls in pieces, and goes on with the tools'
results. It prints what it got as JSON.
"""

import json
import sys
from collections.abc import Callable, Iterable
from typing import Any

QUESTION = "How is the weather in Rome and Bonn?"
RESULT = "rain"


def langchain(address: str) -> dict[str, Any]:
    from langchain_core.messages import HumanMessage, ToolMessage
    from langchain_core.tools import tool
    from langchain_openai import ChatOpenAI

    @tool
    def weather(place: str) -> str:
        """Of a place."""
        return RESULT

    model = ChatOpenAI(base_url=f"{address}/v1", api_key="none", model="fake", max_retries=0)
    with_tools = model.bind_tools([weather])
    asked = [HumanMessage(QUESTION)]
    answer = with_tools.invoke(asked)
    streamed: Any = None
    for chunk in with_tools.stream(asked):
        streamed = chunk if streamed is None else streamed + chunk
    results = [
        ToolMessage(weather.invoke(call["args"]), tool_call_id=call["id"]) for call in answer.tool_calls
    ]
    return {
        "text": model.invoke(asked).content,
        "pieces": [chunk.content for chunk in model.stream(asked)],
        "calls": [[call["name"], call["args"]] for call in answer.tool_calls],
        "streamed calls": [[call["name"], call["args"]] for call in streamed.tool_calls],
        "end": with_tools.invoke([*asked, answer, *results]).content,
        "tokens": answer.usage_metadata["output_tokens"],
    }


def llama_index(address: str) -> dict[str, Any]:
    from llama_index.core.llms import ChatMessage
    from llama_index.core.tools import FunctionTool
    from llama_index.llms.openai_like import OpenAILike

    def weather(place: str) -> str:
        """Of a place."""
        return RESULT

    model = OpenAILike(
        api_base=f"{address}/v1",
        api_key="none",
        model="fake",
        is_chat_model=True,
        is_function_calling_model=True,
        max_retries=0,
    )
    tools = [FunctionTool.from_defaults(weather)]
    asked = [ChatMessage(role="user", content=QUESTION)]
    answer = model.chat_with_tools(tools, chat_history=asked, allow_parallel_tool_calls=True)
    *_, streamed = model.stream_chat_with_tools(tools, chat_history=asked, allow_parallel_tool_calls=True)
    calls = model.get_tool_calls_from_response(answer)
    results = [
        ChatMessage(role="tool", content=RESULT, additional_kwargs={"tool_call_id": call.tool_id})
        for call in calls
    ]

    def plain(some: Iterable[Any]) -> list[Any]:
        return [[call.tool_name, call.tool_kwargs] for call in some]

    return {
        "text": model.chat(asked).message.content,
        "pieces": [chunk.delta for chunk in model.stream_chat(asked)],
        "calls": plain(calls),
        "streamed calls": plain(model.get_tool_calls_from_response(streamed)),
        "end": model.chat_with_tools(tools, chat_history=[*asked, answer.message, *results]).message.content,
        "tokens": answer.raw.usage.completion_tokens,
    }


def litellm(address: str, model: str) -> dict[str, Any]:
    """As the client that `model`'s prefix names: OpenAI's, vLLM's or Anthropic's."""
    import litellm

    weather = {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Of a place.",
            "parameters": {
                "type": "object",
                "properties": {"place": {"type": "string"}},
                "required": ["place"],
            },
        },
    }
    base = address if model.startswith("anthropic/") else f"{address}/v1"
    asked: list[Any] = [{"role": "user", "content": QUESTION}]

    def complete(messages: list[Any], **fields: Any) -> Any:
        return litellm.completion(
            model, messages, api_base=base, api_key="none", max_tokens=1000, num_retries=0, **fields
        )

    def plain(reply: Any) -> list[Any]:
        calls = reply.choices[0].message.tool_calls
        return [[call.function.name, json.loads(call.function.arguments)] for call in calls]

    answer = complete(asked, tools=[weather])
    streamed = litellm.stream_chunk_builder(list(complete(asked, tools=[weather], stream=True)))
    message = answer.choices[0].message
    results = [{"role": "tool", "tool_call_id": call.id, "content": RESULT} for call in message.tool_calls]
    return {
        "text": complete(asked).choices[0].message.content,
        "pieces": [chunk.choices[0].delta.content for chunk in complete(asked, stream=True)],
        "calls": plain(answer),
        "streamed calls": plain(streamed),
        "end": complete([*asked, message, *results], tools=[weather]).choices[0].message.content,
        "tokens": answer.usage.completion_tokens,
    }


def litellm_as(prefix: str) -> Callable[[str], dict[str, Any]]:
    return lambda address: litellm(address, f"{prefix}/fake")


PROGRAMS: dict[str, Callable[[str], dict[str, Any]]] = {
    "langchain": langchain,
    "llama_index": llama_index,
    "litellm as OpenAI": litellm_as("openai"),
    "litellm as vLLM": litellm_as("hosted_vllm"),
    "litellm as Anthropic": litellm_as("anthropic"),
}

if __name__ == "__main__":
    print(json.dumps(PROGRAMS[sys.argv[1]](sys.argv[2])))
