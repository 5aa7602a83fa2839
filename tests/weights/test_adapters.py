"""Adapters' files: what is read from them, what is refused, and who may name which."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save

from hex_llm.config import EngineConfig
from hex_llm.errors import ConfigError, InvalidRequest, ModelError, SourceError, UnknownModel
from hex_llm.weights.adapter_source import AdapterNames, adapter_folder, read_files, stamp_of
from hex_llm.weights.adapters import Adapter, parse_adapter
from tests.weights.conftest import Bucket, Child
from tests.weights.hub_server import Hub

MODULE = "model.layers.0.self_attn.q_proj"
NAME = f"base_model.model.{MODULE}"
FLOAT32, FLOAT16 = np.dtype(np.float32), np.dtype(np.float16)
MAX_BYTES = 1 << 20


def tensors(rank: int = 2, scale: float = 1.0, name: str = NAME) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    shapes = {f"{name}.lora_A.weight": (rank, 6), f"{name}.lora_B.weight": (4, rank)}
    return {key: rng.standard_normal(shape).astype(np.float32) * scale for key, shape in shapes.items()}


def parsed(weights: dict[str, Any] | bytes, dtype: np.dtype[Any] = FLOAT32, **config: Any) -> Adapter:
    values = {"peft_type": "LORA", "r": 2, "lora_alpha": 3, "base_model_name_or_path": "org/base", **config}
    data = weights if isinstance(weights, bytes) else save(weights)
    return parse_adapter(json.dumps(values).encode(), data, 4, dtype)


@pytest.mark.parametrize(
    ("config", "scale"),
    [
        ({}, 3 / 2),
        ({"use_rslora": True}, 3 / 2**0.5),
        ({"alpha_pattern": {"k_proj": 9, "self_attn.q_proj": 8}}, 8 / 2),
        ({"r": 7, "rank_pattern": {".*q_proj": 2}}, 3 / 2),
        ({"alpha_pattern": {"roj": 9}, "init_lora_weights": "gaussian", "lora_dropout": 0.1}, 3 / 2),
    ],
)
def test_what_is_added_is_scaled(config: dict[str, Any], scale: float) -> None:
    given = tensors()
    adapter = parsed(given, **config)
    [(name, (down, up))] = adapter.modules.items()
    assert (name, adapter.base) == (MODULE, "org/base")
    np.testing.assert_array_equal(down, given[f"{NAME}.lora_A.weight"])
    np.testing.assert_allclose(up, given[f"{NAME}.lora_B.weight"] * scale, rtol=1e-6)


def test_embeddings_are_tables() -> None:
    rng, name = np.random.default_rng(0), "base_model.model.model.embed_tokens"
    a, b = rng.standard_normal((2, 9)), rng.standard_normal((5, 2))
    copied = {f"{name}.base_layer.weight": np.zeros((9, 5))}
    given = {f"{name}.lora_embedding_A": a, f"{name}.lora_embedding_B": b, **copied}
    [(down, up)] = parsed(given).modules.values()
    np.testing.assert_allclose(up @ down, 1.5 * (b @ a).T, rtol=1e-5)


def test_the_digest_is_of_all_bytes() -> None:
    digests = [
        parsed(tensors()),
        parsed(tensors(), lora_dropout=0.5),
        parsed(tensors(scale=2)),
        parsed(tensors()),
    ]
    first, *others, last = [one.digest for one in digests]
    assert first == last
    assert len({first, *others}) == 3


HALF = {key: value for key, value in tensors().items() if "lora_A" in key}
CASES: list[tuple[Any, dict[str, Any], str]] = [
    (tensors(rank=5), {"r": 5}, "rank 5 is above the limit, 4 (--max_lora_rank)"),
    (tensors(), {"r": 1_000_000_000}, "rank 2, but adapter_config.json says 1e+09"),
    (tensors(), {"r": 10**400}, "r must be a number"),
    (tensors(), {"r": None}, "r must be a number"),
    (tensors(), {"lora_alpha": float("nan")}, "lora_alpha must be a number"),
    (tensors(), {"lora_alpha": "2"}, "lora_alpha must be a number"),
    (tensors(), {"alpha_pattern": {"(a+)+$": 1}}, "alpha_pattern has a pattern that is not supported"),
    (tensors(), {"rank_pattern": {".*.*.*.*x": 1}}, "rank_pattern has a pattern that is not supported"),
    (tensors(), {"rank_pattern": {"*": 1}}, "rank_pattern has a pattern that is not supported"),
    (tensors(), {"rank_pattern": [1]}, "rank_pattern must be an object"),
    (tensors(), {"use_dora": True}, "use_dora is not supported"),
    (tensors(), {"modules_to_save": ["lm_head"]}, "modules_to_save is not supported"),
    (tensors(), {"trainable_token_indices": [1]}, "trainable_token_indices is not supported"),
    (tensors(), {"something_new": {"a": 1}}, "something_new is not supported"),
    (tensors(), {"bias": "all"}, "bias is not supported"),
    (tensors(), {"peft_type": "IA3"}, "peft_type IA3 is not supported"),
    (tensors(), {"init_lora_weights": "pissa_niter_4"}, "init_lora_weights pissa_niter_4 means another base"),
    (tensors(scale=np.nan), {}, "not finite"),
    (tensors(scale=np.inf), {}, "not finite"),
    (tensors(scale=1e30), {"lora_alpha": 1e9}, "not finite"),
    (HALF, {}, "only one of its two matrices"),
    ({**HALF, f"{NAME}.lora_B.weight": np.zeros((4, 3))}, {}, "do not fit together"),
    ({**HALF, f"{NAME}.lora_B.weight": np.zeros(4)}, {}, "do not fit together"),
    ({**tensors(), f"{NAME}.lora_magnitude_vector": np.zeros(4)}, {}, "which is no part of a LoRA"),
    ({**tensors(), "base_model.model.lm_head.weight": np.zeros((4, 3))}, {}, "which is no part of a LoRA"),
    ({}, {}, "trains no module"),
    ({key: value.astype(np.int8) for key, value in tensors().items()}, {}, "holds I8, not floats"),
    (b"", {}, "broken or cut short"),
    (save(tensors())[:-1], {}, "broken or cut short"),
    ((1 << 62).to_bytes(8, "little") + b"{}", {}, "broken or cut short"),
]


@pytest.mark.parametrize(
    ("weights", "config", "message"), CASES, ids=lambda value: value if isinstance(value, str) else ""
)
def test_what_cannot_be_served_is_refused_by_name(weights: Any, config: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=re.escape(message)):
        parsed(weights, **config)


def test_what_the_type_cannot_hold_is_refused() -> None:
    with pytest.raises(ModelError, match="not finite numbers in float16"):
        parsed(tensors(scale=1e6), FLOAT16)


@pytest.mark.parametrize("text", [b"", b"[]", b"\xff", b"[" * 100_000, b'{"peft_type": "LORA"'])
def test_a_config_that_is_none(text: bytes) -> None:
    with pytest.raises(ModelError, match=r"adapter_config.json"):
        parse_adapter(text, save(tensors()), 4, FLOAT32)


# ---- names


def names(**flags: Any) -> AdapterNames:
    return AdapterNames(EngineConfig(enable_lora=True, **flags))


@pytest.mark.parametrize(
    ("allowed", "name"),
    [
        ("gs://,hf://", "gs://bucket/a"),
        ("gs://bucket/some", "gs://bucket/some/a"),
        ("hf://", "org/name"),
        ("hf://org", "org/name@" + "0" * 40),
        ("/data/adapters", "/data/adapters/a"),
        ("/data/adapters/", "/data/adapters/x/../a"),
        ("/", "/anything"),
    ],
)
def test_places_that_are_allowed(allowed: str, name: str) -> None:
    assert names(allowed_lora_sources=allowed).resolve(name) == (name, name)


@pytest.mark.parametrize(
    ("allowed", "name", "error"),
    [
        ("gs://,hf://", "gpt-4o", UnknownModel),
        ("gs://", "org/name", UnknownModel),
        ("hf://org", "organisation/name", UnknownModel),
        ("hf://org", "org/../name", UnknownModel),
        ("gs://,hf://", "/etc", InvalidRequest),
        ("gs://,hf://", "file:///etc", InvalidRequest),
        ("gs://,hf://", "http://169.254.169.254/a", InvalidRequest),
        ("gs://bucket", "gs://bucket-of-others/a", InvalidRequest),
        ("/data", "/data/../etc", InvalidRequest),
        ("/data", "/database", InvalidRequest),
        ("/data", "~/a", InvalidRequest),
        ("/data", "../a", InvalidRequest),
        ("/data", "a" * 5000, UnknownModel),
        ("/data", "\0", UnknownModel),
    ],
)
def test_places_that_are_not(allowed: str, name: str, error: type[InvalidRequest]) -> None:
    with pytest.raises(error) as refused:
        names(allowed_lora_sources=allowed).resolve(name)
    assert type(refused.value) is error
    assert refused.value.param == "model"
    assert len(str(refused.value)) < 200
    assert str(refused.value).isprintable()


def test_names_that_are_given_at_the_start(tmp_path: Path) -> None:
    text = f"one={tmp_path},two=org/name three=gs://b/c"
    assert names(lora_modules=text).resolve("one") == ("one", str(tmp_path))
    assert names(lora_modules=text).registered == {
        "one": str(tmp_path),
        "two": "org/name",
        "three": "gs://b/c",
    }
    as_json = '{"name": "one", "path": "org/name", "base_model_name": "x"}'
    assert names(lora_modules=as_json).registered == {"one": "org/name"}
    for wrong in ("one", "=x", "one=", "a=b,a=c", '{"name": 1, "path": "x"}', "[1]", "{"):
        with pytest.raises(ConfigError, match="--lora_modules"):
            names(lora_modules=wrong)
    with pytest.raises(InvalidRequest, match="--enable_lora"):
        AdapterNames(EngineConfig(lora_modules=text)).resolve("one")


# ---- files


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A folder that is allowed, beside one that is not; each has an adapter `a`."""
    for folder in ("in", "out"):
        (tmp_path / folder / "a").mkdir(parents=True)
        (tmp_path / folder / "a" / "adapter_config.json").write_text("{}")
        (tmp_path / folder / "a" / "adapter_model.safetensors").write_bytes(folder.encode())
    return tmp_path / "in"


def test_files_inside_are_read(root: Path) -> None:
    assert read_files(root / "a", [root], MAX_BYTES) == (b"{}", b"in")
    (root / "link").symlink_to(root / "a")
    assert read_files(root / "link", [root], MAX_BYTES) == (b"{}", b"in")
    before = stamp_of(root / "a")
    (root / "a" / "new").write_bytes(b"in")
    os.replace(root / "a" / "new", root / "a" / "adapter_model.safetensors")
    assert stamp_of(root / "a") != before


def test_links_that_lead_out_are_not_followed(root: Path) -> None:
    outside = root.parent / "out" / "a"
    (root / "b").symlink_to(outside)
    (root / "c").mkdir()
    (root / "c" / "adapter_config.json").write_text("{}")
    (root / "c" / "adapter_model.safetensors").symlink_to(outside / "adapter_model.safetensors")
    for folder in (root / "b", root / "c", root / ".." / "out" / "a"):
        with pytest.raises(ModelError, match="outside of the allowed folders"):
            read_files(folder, [root], MAX_BYTES)


def test_what_is_no_file_is_not_waited_for(root: Path) -> None:
    weights = root / "a" / "adapter_model.safetensors"
    with pytest.raises(ModelError, match="larger than 1 bytes"):
        read_files(root / "a", [root], 1)
    weights.unlink()
    os.mkfifo(weights)
    with pytest.raises(ModelError, match="is not a file"):
        read_files(root / "a", [root], MAX_BYTES)


@pytest.mark.parametrize("source", ["/no/such/folder", "/a\0b", "/" + "a" * 5000])
def test_what_is_not_there_is_a_source_error(source: str) -> None:
    with pytest.raises(SourceError), adapter_folder(EngineConfig(), source, MAX_BYTES) as folder:
        stamp_of(folder)


# ---- other places

FILES = {"adapter_config.json": b"{}", "adapter_model.safetensors": b"weights"}
READ = """
import json, sys
from hex_llm.config import EngineConfig
from hex_llm.weights.adapter_source import adapter_folder, read_files
config = EngineConfig(enable_lora_cache=sys.argv[1] == "kept")
with adapter_folder(config, "org/a", int(sys.argv[2])) as folder:
    print(read_files(folder, None, 1000))
print(folder.exists())
"""


@pytest.mark.parametrize("kept", [True, False])
def test_a_bucket(bucket: Bucket, tmp_path: Path, kept: bool) -> None:
    bucket.put({f"a/{name}": data for name, data in {**FILES, "optimizer.pt": b"x"}.items()})
    config = EngineConfig(download_dir=str(tmp_path / "cache"), enable_lora_cache=kept)
    for _ in range(2):
        with adapter_folder(config, "gs://b/a", MAX_BYTES) as folder:
            assert read_files(folder, None, MAX_BYTES) == (b"{}", b"weights")
        assert folder.exists() == kept
    assert len(bucket.proxy.asked("download")) == (2 if kept else 4)
    bucket.proxy.log.clear()
    with (
        pytest.raises(SourceError, match="more than 3: not for this model"),
        adapter_folder(config, "gs://b/a", 3),
    ):
        pass
    with (
        pytest.raises(SourceError, match="there is no gs://b/none"),
        adapter_folder(config, "gs://b/none", 3),
    ):
        pass
    assert not bucket.proxy.asked("download")


@pytest.mark.parametrize("kept", ["kept", "thrown away"])
def test_the_hub(hub: Hub, child: Child, kept: str) -> None:
    hub.put("org/a", {**FILES, "adapter_model.bin": b"pickle"})

    def read(max_bytes: int) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", READ, kept, f"{max_bytes}"]
        env = {**os.environ, **child.environ}
        return subprocess.run(command, env=env, capture_output=True, text=True, check=False)

    assert read(1000).stdout == f"(b'{{}}', b'weights')\n{kept == 'kept'}\n"
    assert "more than 3: not for this model" in read(3).stderr
    assert any(Path(child.environ["HF_HOME"]).rglob("adapter_*")) == (kept == "kept")
