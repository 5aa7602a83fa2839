"""/v1/models, and vLLM's routes that give adapters names and take them away."""

from __future__ import annotations

import time
from typing import Annotated, Any

from fastapi import APIRouter, Response
from pydantic import Field

from hex_llm.config import ServerConfig
from hex_llm.errors import InvalidRequest
from hex_llm.sampling_params import SamplingParams
from hex_llm.server.common.backend import Backend, answer
from hex_llm.server.common.body import Body, EngineRequest, Whole
from hex_llm.server.common.body_route import BodyRoute
from hex_llm.weights.adapter_source import unknown

Name = Annotated[str, Field(pattern=r"^[\w.:/-]{1,128}$")]


class LoadRequest(Body):
    lora_name: Name
    lora_path: Annotated[str, Field(min_length=1, max_length=4096)]
    load_inplace: bool = False


class UnloadRequest(Body):
    lora_name: str
    lora_int_id: Whole | None = None  # vLLM's own number of it, by which nothing is known here


async def load_adapter(backend: Backend, body: LoadRequest) -> str:
    """Under a name from now on, if it can be served: one token of it proves that."""
    name, names = body.lora_name, backend.adapters
    if name == backend.model_name or (name in names.registered and not body.load_inplace):
        raise InvalidRequest.at("lora_name", f"{name} has been loaded already (load_inplace replaces it)")
    await answer(backend, [0], EngineRequest(dynamic_lora=body.lora_path), SamplingParams(max_tokens=1))
    names.registered[name] = names.resolve(body.lora_path).source
    return f"Success: LoRA adapter '{name}' added successfully."


def unload_adapter(backend: Backend, body: UnloadRequest) -> str:
    """Who uses it goes on."""
    if backend.adapters.registered.pop(body.lora_name, None) is None:
        raise unknown(body.lora_name)
    return f"Success: LoRA adapter '{body.lora_name}' removed successfully."


def routes(backend: Backend, config: ServerConfig) -> APIRouter:
    router = APIRouter(prefix="/v1", route_class=BodyRoute)
    started = int(time.time())

    @router.get("/models")
    async def models() -> dict[str, Any]:
        base = {
            "id": backend.model_name,
            "object": "model",
            "created": started,
            "owned_by": "hex_llm",
            "root": backend.model_name,
            "parent": None,
            "max_model_len": backend.max_len,
            "permission": [],
        }
        adapters = backend.adapters.registered if backend.adapters.is_on else {}
        cards = [{**base, "id": name, "root": at, "parent": base["id"]} for name, at in adapters.items()]
        return {"object": "list", "data": [base, *cards]}

    if config.allow_runtime_lora_updating:

        @router.post("/load_lora_adapter", response_class=Response)
        async def load(body: LoadRequest) -> Response:
            return Response(await load_adapter(backend, body), media_type="text/plain")

        @router.post("/unload_lora_adapter", response_class=Response)
        async def unload(body: UnloadRequest) -> Response:
            return Response(unload_adapter(backend, body), media_type="text/plain")

    return router
