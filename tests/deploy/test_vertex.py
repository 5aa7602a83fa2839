"""`hex-llm deploy vertex`: the calls of the seeds' documentation, and a stand-in for Vertex AI's front."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import httpx
import pytest

from hex_llm.cli import main
from hex_llm.flags import parse
from tests.deploy.test_files import tool
from tests.server.fakes import FakeBackend, byte_tokenizer
from tests.server.live import live

Config = Callable[[str], str]


def calls(script: str) -> dict[str, dict[str, Any]]:
    """By the name of what is called, its arguments; a variable is its name."""
    found = {}
    for node in ast.walk(ast.parse(script)):
        if isinstance(node, ast.Call) and (name := ast.unparse(node.func)) != "print":
            found[name] = {one.arg: value_of(one.value) for one in node.keywords}
    return found


def value_of(node: ast.expr) -> Any:
    try:
        return eval(ast.unparse(node), {})
    except NameError:
        return ast.unparse(node)


def dry(capsys: pytest.CaptureFixture[str], *argv: str) -> dict[str, dict[str, Any]]:
    assert main(["deploy", "vertex", *argv, "--dry-run"]) == 0, capsys.readouterr().err
    return calls(capsys.readouterr().out)


def test_70b_over_four_hosts(config: Config, capsys: pytest.CaptureFixture[str]) -> None:
    """Hex-LLM's example of a TPU 4x4 topology."""
    made = dry(capsys, config("70b"), "--on=v5e", "--service-account=a@b.c", "--max-replicas=2", "--clean-up")
    upload = made["aiplatform.Model.upload"]
    assert upload["serving_container_command"] == ["python", "-m", "hex_llm.server.api_server"]
    assert upload["serving_container_ports"] == [7080]
    assert (upload["serving_container_predict_route"], upload["serving_container_health_route"]) == (
        "/generate",
        "/ping",
    )
    assert upload["serving_container_shared_memory_size_mb"] == 16 * 1024
    assert upload["serving_container_deployment_timeout"] == 7200
    engine, server = parse(upload["serving_container_args"], {})
    assert (engine.tensor_parallel_size, engine.num_hosts, server.port) == (16, 4, 7080)
    deploy = made["model.deploy"]
    assert (deploy["machine_type"], deploy["tpu_topology"]) == ("ct5lp-hightpu-4t", "4x4")
    assert (deploy["deploy_request_timeout"], deploy["service_account"]) == (1800, "a@b.c")
    assert (deploy["min_replica_count"], deploy["max_replica_count"]) == (1, 2)
    assert [*made][-3:] == ["endpoint.undeploy_all", "endpoint.delete", "model.delete"]


def test_405b_on_eight_gpus(config: Config, capsys: pytest.CaptureFixture[str]) -> None:
    """Hugging Face's example of Llama 3.1 405B in FP8."""
    made = dry(capsys, config("405b-fp8"), "--on=H100", "--project=p", "--region=r", "--seed=3")
    assert made["aiplatform.init"] == {"project": "p", "location": "r"}
    deploy = made["model.deploy"]
    assert (deploy["machine_type"], deploy["accelerator_count"]) == ("a3-highgpu-8g", 8)
    assert deploy["accelerator_type"] == "NVIDIA_H100_80GB"
    assert "--seed=3" in made["aiplatform.Model.upload"]["serving_container_args"]
    assert "instances" in made["endpoint.predict"]


def test_a_token_is_not_shown(config: Config, capsys: pytest.CaptureFixture[str]) -> None:
    made = dry(capsys, config("8b"), "--on=v5e", "--hf-token=hf_secret", "--api-key=secret")
    environment = made["aiplatform.Model.upload"]["serving_container_environment_variables"]
    assert environment["HF_TOKEN"] == environment["VLLM_API_KEY"] == "***"
    assert "secret" not in str(made)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "--project: needs a value"),
        (["--project=p", "--region=r"], "--image: needs a value"),
        (["--sead=3"], "--sead: unknown flag; did you mean --seed?"),
        (["--project=p", "--region=r", "--image=i", "--on=v5e"], "pip install google-cloud-aiplatform"),
    ],
)
def test_deployments_that_cannot_be(
    flags: list[str], message: str, config: Config, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    monkeypatch.setitem(sys.modules, "google.cloud.aiplatform", None)
    assert main(["deploy", "vertex", config("8b"), *flags]) == 2
    assert message in capsys.readouterr().err


class Recorder:
    """Takes any call, and remembers it; stands for the SDK."""

    def __init__(self, made: list[str], name: str = "", fails: str = "") -> None:
        self._made, self._name, self._fails = made, name, fails

    def __getattr__(self, name: str) -> Recorder:
        return Recorder(self._made, f"{self._name}.{name}".strip("."), self._fails)

    def __call__(self, **given: Any) -> Recorder:
        self._made.append(self._name)
        if self._name == self._fails:
            raise RuntimeError("403 Permission denied on\nresource project p")
        return self

    def __iter__(self) -> Iterator[str]:
        return iter(["a car"])


@pytest.mark.parametrize("fails", ["", "Model.upload"])
def test_the_calls_are_made(
    fails: str, config: Config, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str] = []
    import google.cloud

    monkeypatch.setattr(google.cloud, "aiplatform", Recorder(made, fails=fails), raising=False)
    argv = [config("8b"), "--on=v5e", "--project=p", "--region=r", "--image=i", "--clean-up"]
    code = main(["deploy", "vertex", *argv])
    printed = capsys.readouterr()
    if fails:
        assert (code, made) == (1, ["init", "Model.upload"])
        assert printed.err == "error: RuntimeError: 403 Permission denied on resource project p\n"
    else:
        assert (code, printed.out) == (0, "a car\n")
        assert len(made) == 8


SIGNATURES = """
import inspect, json, sys
from google.cloud import aiplatform
owners = {"aiplatform": aiplatform, "model": aiplatform.Model, "endpoint": aiplatform.Endpoint}
for name, given in json.load(sys.stdin).items():
    first, *way = name.split(".")
    function = owners[first]
    for part in way:
        function = getattr(function, part)
    own = {} if inspect.ismethod(function) or first == "aiplatform" else {"self": None}
    inspect.signature(function).bind(**own, **given)
print("bound")
"""


@pytest.mark.slow
@pytest.mark.parametrize(("name", "on"), [("70b", "v5e"), ("405b-fp8", "H100")])
def test_the_calls_fit_the_real_sdk(
    name: str, on: str, config: Config, capsys: pytest.CaptureFixture[str]
) -> None:
    python = Path(tool("hadolint")).with_name("python")
    if subprocess.run([python, "-c", "import google.cloud.aiplatform"], capture_output=True).returncode:
        pytest.skip("google-cloud-aiplatform is not installed there")
    made = json.dumps(dry(capsys, config(name), f"--on={on}", "--clean-up"))
    done = subprocess.run([python, "-c", SIGNATURES], input=made, capture_output=True, text=True)
    assert done.stdout == "bound\n", done.stderr


# ---- a stand-in for Vertex AI's front

PREDICT, HEALTH = "/v1/endpoints/7/deployedModels/9:predict", "/v1/endpoints/7/deployedModels/9"
MAX_BYTES = 1_500_000  # of a request to a shared endpoint


class Front(BaseHTTPRequestHandler):
    """What a shared public endpoint does with requests before and behind the container."""

    container = ""

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        method = self.path.partition("/endpoints/7")[2]
        if len(body) > MAX_BYTES:
            self.reply(400, b'{"error": {"message": "Request payload size exceeds the limit"}}')
            return
        path = method.removeprefix("/invoke") if method.startswith("/invoke") else PREDICT
        if method == ":predict" and not json.loads(body).get("instances"):
            self.reply(400, b'{"error": {"message": "instances is empty"}}')
            return
        headers = {"content-type": "application/json", "x-vertex-ai-endpoint-id": "7"}
        answer = httpx.post(self.container + path, content=body, headers=headers, timeout=60)
        if method == ":predict" and answer.status_code == 200:
            told = {**answer.json(), "deployedModelId": "9", "modelVersionId": "1"}
            assert set(answer.json()) == {"predictions"}, "what else there is would be lost"
            self.reply(200, json.dumps(told).encode())
        else:
            self.reply(answer.status_code, answer.content)

    def reply(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: object) -> None: ...


@pytest.fixture(scope="module")
def vertex() -> Iterator[str]:
    """The address of the endpoint, behind which is a container that was told its routes."""
    with live(FakeBackend(byte_tokenizer()), predict_route=PREDICT, health_route=HEALTH) as container:
        assert httpx.get(container + HEALTH).status_code == 200
        front = ThreadingHTTPServer(("127.0.0.1", 0), type("Bound", (Front,), {"container": container}))
        Thread(target=front.serve_forever, args=(0.05,), daemon=True).start()
        yield f"http://127.0.0.1:{front.server_port}/v1/projects/p/locations/r/endpoints/7"
        front.shutdown()


CHAT = {"model": "", "messages": [{"role": "user", "content": "abc"}]}


def content_of(chat: Any) -> str:
    return str(chat["choices"][0]["message"]["content"])


def test_predictions_through_the_front(vertex: str) -> None:
    """As protobuf's structs bring them: every number is a float."""
    body = {"instances": [{"prompt": "abc", "max_tokens": 50.0, "temperature": 0.0, "top_k": 1.0}]}
    told = httpx.post(vertex + ":predict", json=body).json()
    assert told["deployedModelId"] == "9"
    assert "cba" in told["predictions"][0]
    marked = {"instances": [{**CHAT, "@requestFormat": "chatCompletions"}]}
    assert "cba" in content_of(httpx.post(vertex + ":predict", json=marked).json()["predictions"])
    tgi = {"instances": [{"inputs": "abc", "parameters": {"max_new_tokens": 9}}]}
    assert "cba" in httpx.post(vertex + ":predict", json=tgi).json()["predictions"][0]


def test_chats_through_the_front(vertex: str) -> None:
    for path in (":rawPredict", "/chat/completions", "/invoke/v1/chat/completions"):
        assert "cba" in content_of(httpx.post(vertex + path, json=CHAT).json())
    stream = httpx.post(vertex + ":streamRawPredict", json={**CHAT, "stream": True}).text
    assert stream.endswith("data: [DONE]\n\n")
    assert httpx.post(vertex + "/invoke/v1/completions", json={"prompt": "abc"}).status_code == 200


def test_what_the_front_refuses(vertex: str) -> None:
    large = {"instances": [{"prompt": "a" * MAX_BYTES}]}
    assert httpx.post(vertex + ":predict", json=large).status_code == 400
    assert httpx.post(vertex + ":predict", json={"instances": []}).status_code == 400
    wrong = httpx.post(vertex + ":predict", json={"instances": [{"prompt": "a", "max_tokens": -1}]})
    assert wrong.status_code == 400
    assert "max_tokens" in wrong.text
