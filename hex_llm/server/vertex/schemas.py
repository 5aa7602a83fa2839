"""The bodies that Vertex AI's routes take, in four dialects, which `prediction_of` tells apart."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from hex_llm.errors import InvalidRequest
from hex_llm.server.common.body import MAX_PROMPTS, Kind, Prompt, Sampling, Whole, not_built, parse, shown
from hex_llm.server.openai.schemas import ChatRequest
from hex_llm.server.tgi import schemas as tgi

Fields = dict[str, Any]

MARK = "@requestFormat"  # its one value makes an instance a chat completion
ALIASES = {
    **dict.fromkeys(("maxDecodeSteps", "maxOutputTokens"), "max_tokens"),
    **dict.fromkeys(("dynamic-lora", "lora_id"), "dynamic_lora"),
    "topK": "top_k",
    "topP": "top_p",
}


class GenerateRequest(Sampling):
    """One instance of a Vertex prediction."""

    prompt: Prompt
    logprobs: Whole | None = None
    echo: bool | None = None
    raw_response: bool = False

    def sampled(self) -> Fields:
        sent = super().sampled()
        # A raw response tells each output's cumulative log-probability.
        return {"logprobs": 0, **sent} if self.raw_response else sent


class TgiBody(NamedTuple):
    """A request of TGI's own, as it came."""

    body: Fields


class TgiInstances(NamedTuple):
    requests: Sequence[ChatRequest | tgi.GenerateRequest]
    num_sequences: int


class Chats(NamedTuple):
    requests: Sequence[ChatRequest]
    is_stream: bool
    is_wrapped: bool  # they came as instances, so predictions are expected


class Prompts(NamedTuple):
    requests: Sequence[GenerateRequest]
    is_stream: bool


Prediction = TgiBody | TgiInstances | Chats | Prompts


def prediction_of(body: Fields) -> Prediction:
    is_wrapped = "instances" in body
    if "inputs" in body and not is_wrapped and not body.keys() & {"prompt", MARK}:
        return TgiBody(body)
    instances = instances_of(body)
    if is_wrapped and any(map(_is_tgi, instances)):
        return _tgi_instances(instances)
    is_stream = _is_stream(instances)
    # OpenAI's own body comes without a mark.
    if _is_chat(instances) or (not is_wrapped and "messages" in body):
        return Chats(_parse_all(ChatRequest, _without(instances, MARK)), is_stream, is_wrapped)
    return Prompts(_parse_all(GenerateRequest, _without(instances, MARK, "stream")), is_stream)


def flat(instance: Any, where: str) -> Fields:
    """The fields of an instance and of its `parameters`, under the names that they have here."""
    own = dict(_object(instance, where))
    nested = _object_or_null(own.pop("parameters", None), "parameters")
    fields: Fields = {}
    for written, value in (*own.items(), *nested.items()):
        name = ALIASES.get(written, written)
        if name in fields:
            raise InvalidRequest(f"{where}: {shown(name)} is given twice", shown(name))
        fields[name] = value
    return fields


def _object(value: Any, where: str) -> Fields:
    if not isinstance(value, dict):
        raise InvalidRequest.at(where, "must be an object")
    return value


def _object_or_null(value: Any, where: str) -> Fields:
    return {} if value is None else _object(value, where)


def instances_of(body: Fields) -> list[Fields]:
    """Every instance's fields; its own count before those that all share."""
    if "instances" not in body:
        return [flat(body, "body")]
    for name in body:
        if name not in ("instances", "parameters", MARK):
            raise InvalidRequest.at(shown(name), not_built(name))
    instances = body["instances"]
    if not isinstance(instances, list) or not 1 <= len(instances) <= MAX_PROMPTS:
        raise InvalidRequest.at("instances", f"must be a list of 1 to {MAX_PROMPTS} objects")
    shared = flat(_object_or_null(body.get("parameters"), "parameters"), "parameters")
    shared |= {name: body[name] for name in (MARK,) if name in body}
    return [shared | flat(instance, f"instances.{i}") for i, instance in enumerate(instances)]


def _is_tgi(instance: Fields) -> bool:
    return "inputs" in instance or ("messages" in instance and MARK not in instance)


def _is_chat(instances: Sequence[Fields]) -> bool:
    """All of them must bear the mark, or none."""
    marks = [instance.get(MARK) for instance in instances]
    if any(mark not in (None, "chatCompletions") for mark in marks) or len(set(marks)) > 1:
        raise InvalidRequest.at(MARK, "only chatCompletions is known, for all instances or for none")
    return marks[0] is not None


def _is_stream(instances: Sequence[Fields]) -> bool:
    values = [instance.get("stream") for instance in instances]
    if not all(value is None or isinstance(value, bool) for value in values):
        raise InvalidRequest.at("stream", "must be true or false")
    if any(values) and len(values) > 1:
        raise InvalidRequest.at("stream", "only one instance can be streamed")
    return bool(values[0])


def _without(instances: Sequence[Fields], *names: str) -> list[Fields]:
    return [{name: instance[name] for name in instance if name not in names} for instance in instances]


def _parse_all(kind: type[Kind], instances: Sequence[Fields]) -> list[Kind]:
    return [parse(kind, instance, where) for where, instance in _placed(instances)]


def _placed(instances: Sequence[Fields]) -> Iterator[tuple[str, Fields]]:
    """Each, behind what its faults begin with."""
    for i, instance in enumerate(instances):
        yield f"instances.{i}." if len(instances) > 1 else "", instance


def _tgi_instances(instances: Sequence[Fields]) -> TgiInstances:
    requests: list[ChatRequest | tgi.GenerateRequest] = []
    num_sequences = 0
    for where, instance in _placed(instances):
        for name in ("details", "decoder_input_details", "top_n_tokens", "stream"):
            if instance.get(name):
                raise InvalidRequest(f"{where}{name}: a prediction is a text and nothing else", name)
        if "messages" in instance:
            requests.append(chat := parse(ChatRequest, instance, where))
            num_sequences += chat.params().num_choices
        else:
            requests.append(request := _tgi_request(instance, where))
            num_sequences += request.parameters.params(max_tokens=None).num_choices
    return TgiInstances(requests, num_sequences)


def _tgi_request(instance: Fields, where: str) -> tgi.GenerateRequest:
    """Unlike on TGI's own route, all parameters count."""
    values = {name: value for name, value in instance.items() if name not in ("inputs", "stream")}
    if "max_tokens" in values:  # so Google's samples for TGI's container call it
        if "max_new_tokens" in values:
            raise InvalidRequest(f"{where}max_new_tokens is given twice", "max_new_tokens")
        values["max_new_tokens"] = values.pop("max_tokens")
    if "dynamic_lora" in values:
        values = {"adapter_id": values.pop("dynamic_lora"), **values}
    parameters = parse(tgi.Parameters, {"do_sample": True, **values}, where)
    return parse(tgi.GenerateRequest, {"inputs": instance.get("inputs"), "parameters": parameters}, where)
