"""What lies in deploy/: that it is well formed, and speaks of flags, routes and metrics that there are."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from hex_llm.config import ServerConfig
from hex_llm.flags import parse, read_flags
from hex_llm.server.app import create_app
from tests.server.apps import asked
from tests.server.fakes import FakeBackend, byte_tokenizer

ROOT = Path(__file__).parent.parent.parent
DEPLOY = ROOT / "deploy"
MANIFESTS = sorted(one for one in DEPLOY.rglob("*.yaml") if one.name != "kustomization.yaml")
# Tools that may be installed elsewhere, so as not to change the versions of what is tested.
TOOLS = os.pathsep.join(
    filter(None, (os.environ.get("DEPLOY_TOOLS"), str(Path(sys.executable).parent), os.environ["PATH"]))
)


def tool(name: str) -> str:
    found = shutil.which(name, path=TOOLS)
    if found is None:
        pytest.skip(f"{name} is not installed; DEPLOY_TOOLS names its folder")
    return found


def everything(node: Any) -> list[Any]:
    inner = node.values() if isinstance(node, dict) else node if isinstance(node, list) else ()
    return [node, *(one for part in inner for one in everything(part))]


def test_manifests_speak_of_flags_and_routes_that_there_are() -> None:
    nodes = [node for path in MANIFESTS for node in everything(yaml.safe_load(path.read_text()))]
    dicts = [node for node in nodes if isinstance(node, dict)]
    args = [node["args"] for node in dicts if "image" in node and "args" in node]
    assert len(args) == 3
    for one in args:
        read_flags(one)
    app = create_app(FakeBackend(byte_tokenizer()), ServerConfig())
    paths = {node["path"] for node in dicts if {"path", "port"} <= node.keys()}
    assert paths == {"/health"}
    assert asked(app, "GET", "/health").status_code == 200
    flags = re.findall(r"value: (--\S+)", "".join(p.read_text() for p in DEPLOY.rglob("kustomization.yaml")))
    assert len(flags) == 2
    parse(flags[:1], {})


def test_dashboards_and_scaling_speak_of_metrics_that_there_are() -> None:
    app = create_app(FakeBackend(byte_tokenizer()), ServerConfig())
    asked(app, "POST", "/v1/completions", json={"prompt": "a"})
    page = asked(app, "GET", "/metrics").text
    known = set(re.findall(r"^# TYPE (\S+)", page, re.MULTILINE))
    text = (DEPLOY / "grafana/hex_llm.json").read_text() + (
        DEPLOY / "kubernetes/autoscaling/hpa.yaml"
    ).read_text()
    named = {re.sub("_(bucket)$", "", name) for name in re.findall(r"(?:vllm|hex_llm):\w+", text)}
    assert len(named) > 12
    assert named <= known | {f"{one}_total" for one in known}, named - known
    panels = json.loads((DEPLOY / "grafana/hex_llm.json").read_text())["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels) == 9


def test_the_image_is_not_root_and_has_every_target() -> None:
    text = (DEPLOY / "Dockerfile").read_text()
    stages = re.findall(r"^FROM (\S+) AS (\S+)", text, re.MULTILINE)
    assert {"cpu", "gpu", "tpu"} <= {name for _, name in stages}
    users = re.findall(r"^USER (\S+)", text, re.MULTILINE)
    assert users == ["1000", "0", "1000"], "root installs the compiler and nothing else"
    assert 'ENTRYPOINT ["python", "-m", "hex_llm.server.api_server"]' in text
    extras = set(re.findall(r"/src\[([\w,]+)\]", text))
    assert extras == {"gcs", "gcs,gpu", "gcs,tpu"}


@pytest.mark.slow
def test_the_dockerfile_is_clean() -> None:
    done = subprocess.run([tool("hadolint"), DEPLOY / "Dockerfile"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "")


@pytest.mark.slow
@pytest.mark.parametrize(
    "path", [one for one in MANIFESTS if "kubernetes" in str(one)], ids=lambda path: path.name
)
def test_manifests_have_the_schemas_of_kubernetes(path: Path) -> None:
    manifest = yaml.safe_load(path.read_text())
    parts = [manifest]
    if manifest["kind"] == "LeaderWorkerSet":  # no kind of Kubernetes' own, but its pods are
        templates = manifest["spec"]["leaderWorkerTemplate"]
        parts = [
            {
                "apiVersion": "v1",
                "kind": "PodTemplate",
                "metadata": {"name": name},
                "template": templates[name],
            }
            for name in ("leaderTemplate", "workerTemplate")
        ]
    for part in parts:
        command = [tool("kubernetes-validate"), "--strict", "-"]
        done = subprocess.run(command, input=yaml.dump(part), capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr


# The fields of leaderworkerset.x-k8s.io/v1 and their values, as the API's types declare them; a pod template
# is Kubernetes' own.
LEADER_WORKER_SET: dict[str, Any] = {
    "replicas": int,
    "leaderWorkerTemplate": {
        "leaderTemplate": {"metadata": dict, "spec": dict},
        "workerTemplate": {"metadata": dict, "spec": dict},
        "size": int,
        "restartPolicy": ("RecreateGroupOnPodRestart", "RecreateGroupAfterStart", "None"),
        "subGroupPolicy": {"subGroupPolicyType": ("LeaderWorker", "LeaderExcluded"), "subGroupSize": int},
        "volumeClaimTemplates": list,
        "persistentVolumeClaimRetentionPolicy": dict,
    },
    "rolloutStrategy": {"type": ("RollingUpdate",), "rollingUpdateConfiguration": dict},
    "startupPolicy": ("LeaderCreated", "LeaderReady"),
    "networkConfig": {"subdomainPolicy": ("Shared", "UniquePerReplica")},
}


def check_fields(node: Any, schema: Any, where: str) -> None:
    match schema:
        case dict():
            assert node.keys() <= schema.keys(), where
            for name, value in node.items():
                check_fields(value, schema[name], f"{where}.{name}")
        case tuple():
            assert node in schema, where
        case _:
            assert type(node) is schema, where


def test_many_hosts_are_a_leader_worker_set() -> None:
    made = yaml.safe_load((DEPLOY / "kubernetes/hosts/leaderworkerset.yaml").read_text())
    assert (made["apiVersion"], made["kind"]) == ("leaderworkerset.x-k8s.io/v1", "LeaderWorkerSet")
    check_fields(made["spec"], LEADER_WORKER_SET, "spec")
    # The controller reads it of the set, and hands it on to the pods.
    assert made["metadata"]["annotations"].keys() == {"leaderworkerset.sigs.k8s.io/exclusive-topology"}
    templates = made["spec"]["leaderWorkerTemplate"]
    pods = [templates[name]["spec"]["containers"][0] for name in ("leaderTemplate", "workerTemplate")]
    assert pods[0]["args"] == pods[1]["args"], "every host gets the same command"
    engine, _ = parse(pods[0]["args"], {})
    chips = int(pods[0]["resources"]["limits"]["google.com/tpu"])
    assert (engine.num_hosts, engine.tensor_parallel_size) == (templates["size"], templates["size"] * chips)


@pytest.mark.slow
def test_patches_apply_to_the_base() -> None:
    """What kustomize would do with them, by hand."""
    base = yaml.safe_load((DEPLOY / "kubernetes/base/deployment.yaml").read_text())
    for name in ("gpu", "tpu"):
        patched = json.loads(json.dumps(base))
        overlay = yaml.safe_load((DEPLOY / f"kubernetes/{name}/kustomization.yaml").read_text())
        for change in yaml.safe_load(overlay["patches"][0]["patch"]):
            *way, last = change["path"].strip("/").split("/")
            node = patched
            for part in way:
                node = node[int(part)] if isinstance(node, list) else node[part]
            node.append(change["value"]) if last == "-" else node.__setitem__(last, change["value"])
        validate = tool("kubernetes-validate")
        done = subprocess.run(
            [validate, "--strict", "-"], input=yaml.dump(patched), capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout + done.stderr
