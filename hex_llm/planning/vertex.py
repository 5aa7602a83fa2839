"""A deployment on Vertex AI as the calls of its Python SDK, in order: printed, or made.

The values are those that Hex-LLM's documentation deploys its container with.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from hex_llm.errors import ConfigError, HexError, one_line
from hex_llm.planning.machines import GPU_SHARE, Slice

PORT = 7080
IMAGE = "REGION-docker.pkg.dev/PROJECT/REPOSITORY/hex-llm:TARGET"
SERVER = ["python", "-m", "hex_llm.server.api_server"]
QUESTION = {"prompt": "What is a car?", "max_tokens": 50, "temperature": 0}
INSTALL = "`pip install google-cloud-aiplatform`"


class Call(NamedTuple):
    """`result = target(**arguments)`; a value in angle brackets is the result of that name."""

    result: str
    target: str  # of the module `aiplatform`, or of an earlier result
    arguments: Mapping[str, Any]

    def __str__(self) -> str:
        given = "".join(f"\n    {name}={_shown(value)}," for name, value in self.arguments.items())
        return (
            f"{self.result} = " if self.result else ""
        ) + f"{self.target}({given}{chr(10) if given else ''})"


@dataclass(frozen=True)
class Deployment:
    model: str
    flags: Sequence[str]
    slice: Slice
    project: str = "PROJECT"
    region: str = "REGION"
    image: str = IMAGE
    environment: Mapping[str, str] = field(default_factory=dict)
    service_account: str | None = None
    replicas: tuple[int, int] = (1, 1)

    @property
    def name(self) -> str:
        return self.model.rstrip("/").rpartition("/")[2]

    @property
    def container_environment(self) -> dict[str, str]:
        gpu = {"XLA_PYTHON_CLIENT_MEM_FRACTION": str(GPU_SHARE)} if self.slice.chip.platform == "gpu" else {}
        return {"MODEL_ID": self.model, "DEPLOY_SOURCE": "hex-llm", **gpu, **self.environment}

    def start(self) -> list[Call]:
        upload = {
            "display_name": self.name,
            "serving_container_image_uri": self.image.replace("TARGET", self.slice.chip.platform),
            "serving_container_command": SERVER,
            "serving_container_args": [f"--model={self.model}", *self.flags],
            "serving_container_ports": [PORT],
            "serving_container_predict_route": "/generate",
            "serving_container_health_route": "/ping",
            "serving_container_environment_variables": self.container_environment,
            "serving_container_shared_memory_size_mb": 16 * 1024,
            "serving_container_deployment_timeout": 7200,
        }
        deploy = {"endpoint": "<endpoint>", "machine_type": self.slice.machine_type, **self._accelerators}
        deploy |= {"deploy_request_timeout": 1800, "service_account": self.service_account}
        deploy |= dict(zip(("min_replica_count", "max_replica_count"), self.replicas, strict=True))
        return [
            Call("", "aiplatform.init", {"project": self.project, "location": self.region}),
            Call("model", "aiplatform.Model.upload", upload),
            Call("endpoint", "aiplatform.Endpoint.create", {"display_name": f"{self.name}-endpoint"}),
            Call("", "model.deploy", {name: value for name, value in deploy.items() if value is not None}),
        ]

    @property
    def _accelerators(self) -> dict[str, Any]:
        if self.slice.chip.platform == "gpu":
            chips = {"accelerator_type": self.slice.chip.accelerator}
            return {**chips, "accelerator_count": self.slice.num_chips}
        return {"tpu_topology": self.slice.topology} if self.slice.num_hosts > 1 else {}

    def ask(self) -> list[Call]:
        return [Call("answer", "endpoint.predict", {"instances": [QUESTION]})]

    def clean_up(self) -> list[Call]:
        return [
            Call("", target, {}) for target in ("endpoint.undeploy_all", "endpoint.delete", "model.delete")
        ]


def make(calls: Sequence[Call], results: dict[str, Any]) -> None:
    """Makes the calls; `results` are those of earlier ones and become those of all. HexError: one failed."""
    for call in calls:
        first, *path = call.target.split(".")
        function = results[first]
        for name in path:
            function = getattr(function, name)
        given = {name: results.get(str(value)[1:-1], value) for name, value in call.arguments.items()}
        try:
            results[call.result or "_"] = function(**given)
        except Exception as error:
            reason = one_line(" ".join(str(error).split())[:300])
            raise HexError(f"{call.target}: {type(error).__name__}: {reason}") from error


def sdk() -> Any:
    try:
        from google.cloud import aiplatform  # type: ignore[import-untyped]
    except ImportError as error:
        raise ConfigError(
            f"Vertex AI needs its SDK: {INSTALL}; --dry-run prints the calls without it"
        ) from error
    return aiplatform


def _shown(value: Any) -> str:
    text = str(value)
    return text[1:-1] if text.startswith("<") and text.endswith(">") else repr(value)
