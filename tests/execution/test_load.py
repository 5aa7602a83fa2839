"""Loading against numpy: what every device holds, how often each byte is read, and what is refused."""

from __future__ import annotations

import doctest
import math
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from hex_llm.errors import ModelError
from hex_llm.execution import load
from hex_llm.execution.load import check_room, init_weights, load_weights
from hex_llm.execution.weight_plan import WeightPlan, plan_weights
from hex_llm.models import params
from hex_llm.models.families import model_spec
from hex_llm.models.linear import Dense
from hex_llm.models.params import FeedForward, Param, Piece, declared
from hex_llm.models.spec import ModelSpec
from hex_llm.parallel.shardings import make_mesh
from hex_llm.weights.checkpoint import Slices
from hex_llm.weights.safetensors import open_safetensors

F32 = np.dtype(np.float32)
HEADS, KV_HEADS, HEAD, WIDTH, FFN, EXPERTS = 8, 2, 4, 16, 24, 3
BASE = {
    "vocab_size": 32,
    "hidden_size": WIDTH,
    "intermediate_size": FFN,
    "num_hidden_layers": 2,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD,
    "num_local_experts": EXPERTS,
    "num_experts_per_tok": 1,
}
FAMILIES = {
    "llama": ("LlamaForCausalLM", {"attention_bias": True, "mlp_bias": True}),
    "llama-mqa": ("LlamaForCausalLM", {"num_key_value_heads": 1, "vocab_size": 33}),
    "llama-mha": ("LlamaForCausalLM", {"num_key_value_heads": HEADS}),
    "gemma2": ("Gemma2ForCausalLM", {"num_key_value_heads": HEADS}),
    "phi3": ("Phi3ForCausalLM", {}),
    "mixtral": ("MixtralForCausalLM", {"num_key_value_heads": HEADS}),
    "llama4": ("Llama4ForCausalLM", {"interleave_moe_layer_step": 2, "intermediate_size_mlp": 40}),
}


def spec_of(family: str) -> ModelSpec:
    architecture, changes = FAMILIES[family]
    return model_spec({"architectures": [architecture], **BASE, **changes})


class Memory:
    """A checkpoint tensor that counts how often each of its elements is read."""

    def __init__(self, values: np.ndarray) -> None:
        self.values, self.shape = values, values.shape
        self.reads = np.zeros(values.shape, int)

    def read(self, index: Slices, integers: Any = None) -> np.ndarray:
        self.reads[index] += 1
        return self.values[index].copy()


def params_of(spec: ModelSpec) -> list[Param]:
    return declared(params.abstract_weights(spec))


def checkpoint_of(spec: ModelSpec) -> dict[str, Memory]:
    random = np.random.default_rng(0)
    shapes = {piece.name: piece.shape for param in params_of(spec) for piece in param.pieces}
    return {name: Memory(random.standard_normal(shape, F32)) for name, shape in shapes.items()}


# ---- the judge: what the parameters are, written down a second time


class Judge:
    def __init__(self, spec: ModelSpec, checkpoint: dict[str, Memory]) -> None:
        self.spec, self.checkpoint = spec, checkpoint

    def __call__(self, name: str) -> np.ndarray:
        return self.checkpoint[name].values

    def qkv(self, prefix: str, kind: str) -> np.ndarray:
        stored, repeat = self.spec.num_kv_heads // self.spec.kv_repeat, self.spec.kv_repeat
        if self.spec.names.fused:
            cuts = np.cumsum([HEADS * HEAD, stored * HEAD])
            q, k, v = np.split(self(f"{prefix}qkv_proj.{kind}"), cuts)
        else:
            q, k, v = (self(f"{prefix}{name}_proj.{kind}") for name in "qkv")
        k, v = (x.reshape(stored, 1, HEAD, *x.shape[1:]).repeat(repeat, 0) for x in (k, v))
        return np.concatenate([q.reshape(len(k), -1, HEAD, *q.shape[1:]), k, v], axis=1)

    def out(self, prefix: str) -> np.ndarray:
        return self(f"{prefix}o_proj.weight").reshape(WIDTH, self.spec.num_kv_heads, -1, HEAD)

    def gate_up(self, prefix: str, kind: str = "weight") -> np.ndarray:
        if self.spec.names.fused:
            return np.stack(np.split(self(f"{prefix}gate_up_proj.{kind}"), 2), axis=1)
        return np.stack([self(f"{prefix}{name}_proj.{kind}") for name in ("gate", "up")], axis=1)

    def experts(self, prefix: str) -> tuple[np.ndarray, np.ndarray]:
        if self.spec.names.stacked_experts:
            gate_up = self(prefix + "experts.gate_up_proj").swapaxes(1, 2)
            halves = np.stack([gate_up[:, :FFN], gate_up[:, FFN:]], axis=1)
            return halves, self(prefix + "experts.down_proj").swapaxes(1, 2)
        each = [f"{prefix}experts.{e}." for e in range(EXPERTS)]
        gate_up = np.stack([np.stack([self(f"{e}{w}.weight") for w in ("w1", "w3")]) for e in each])
        return gate_up, np.stack([self(f"{e}w2.weight") for e in each])


def assert_same(ours: jax.Array | Dense, whole: np.ndarray) -> None:
    ours = ours.array if isinstance(ours, Dense) else ours
    np.testing.assert_array_equal(ours, whole)
    for shard in ours.addressable_shards:
        np.testing.assert_array_equal(shard.data, whole[shard.index])


def assert_feed_forward(ours: FeedForward, judge: Judge, prefix: str) -> None:
    if ours.router is None:
        assert_same(ours.gate_up, judge.gate_up(prefix))
        assert_same(ours.down, judge(prefix + "down_proj.weight"))
    else:
        gate_up, down = judge.experts(prefix)
        assert_same(ours.gate_up, gate_up)
        assert_same(ours.down, down)
        stacked = judge.spec.names.stacked_experts is not None
        assert_same(ours.router, judge(prefix + ("router.weight" if stacked else "gate.weight")))
        assert (ours.shared is not None) == stacked
    if ours.gate_up_bias is not None:
        assert_same(ours.gate_up_bias, judge.gate_up(prefix, "bias"))
        assert_same(ours.down_bias, judge(prefix + "down_proj.bias"))
    if ours.shared is not None:
        assert_feed_forward(ours.shared, judge, prefix + "shared_expert.")


@pytest.mark.parametrize("devices", [1, 4, 8])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_device_holds_its_slice_and_no_byte_is_read_twice(family: str, devices: int) -> None:
    spec, mesh = spec_of(family).split_over(devices), make_mesh(devices)
    checkpoint = checkpoint_of(spec)
    weights = load_weights(plan_weights(spec), checkpoint, mesh, F32)
    judge, names = Judge(spec, checkpoint), spec.names
    assert_same(weights.embed, judge(names.prefix + "embed_tokens.weight"))
    assert_same(weights.norm, judge(names.prefix + "norm.weight"))
    assert (weights.head is None) == spec.tied
    if weights.head is not None:
        assert_same(weights.head, judge(names.head))
    for i, layer in enumerate(weights.layers):
        prefix = f"{names.prefix}layers.{i}."
        assert_same(layer.attn_norm, judge(prefix + "input_layernorm.weight"))
        assert_same(layer.qkv, judge.qkv(prefix + "self_attn.", "weight"))
        assert_same(layer.out, judge.out(prefix + "self_attn."))
        if spec.qkv_bias:
            assert_same(layer.qkv_bias, judge.qkv(prefix + "self_attn.", "bias"))
            assert_same(layer.out_bias, judge(prefix + "self_attn.o_proj.bias"))
        assert_feed_forward(layer.ffn, judge, prefix + names.ffn)
    reads = Counter({name: int(tensor.reads.max()) for name, tensor in checkpoint.items()})
    assert set(reads.values()) == {1}, reads.most_common(3)
    assert all(tensor.reads.min() == 1 for tensor in checkpoint.values())


def test_split_parameters_are_split() -> None:
    weights = load_weights(
        plan_weights(spec := spec_of("llama").split_over(8)), checkpoint_of(spec), make_mesh(8), F32
    )
    layer = weights.layers[0]
    split = (weights.embed, layer.qkv, layer.qkv_bias, layer.out, layer.ffn.gate_up, layer.ffn.down)
    for array in jax.tree.leaves(split):
        assert math.prod(array.addressable_shards[0].data.shape) * 8 == array.size


def test_the_worked_example() -> None:
    """Of params.py: a family declares it so, and these are the stretches that are read."""
    example = doctest.DocTestParser().get_doctest(params.__doc__, vars(params), "example", None, None)
    assert doctest.DocTestRunner().run(example, clear_globs=False).failed == 0
    qkv: Param = example.globs["qkv"]
    changes = {"num_attention_heads": 4, "intermediate_size": 8}
    spec = model_spec({"architectures": ["LlamaForCausalLM"], **BASE, **changes})
    declared_one = params.abstract_weights(spec).layers[0].qkv.array
    named = tuple(replace(piece, name=piece.name.split(".")[-2]) for piece in declared_one.pieces)
    assert replace(declared_one, pieces=named) == qkv

    read: set[tuple[str, int, int]] = set()

    class Noted(Memory):
        def read(self, index: Slices, integers: Any = None) -> np.ndarray:
            read.add((name_of[self], index[0].start, index[0].stop))
            return super().read(index, integers)

    checkpoint = {piece.name: Noted(np.ones(piece.shape, F32)) for piece in qkv.pieces}
    name_of = {tensor: name for name, tensor in checkpoint.items()}
    load_weights(WeightPlan(qkv), checkpoint, make_mesh(2), F32)  # type: ignore[arg-type]
    second = {("q_proj", 8, 16), ("k_proj", 4, 8), ("v_proj", 4, 8)}
    assert read == {("q_proj", 0, 8), ("k_proj", 0, 4), ("v_proj", 0, 4)} | second


def test_large_parameters_are_read_in_stretches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load, "READ_BYTES", 100)
    for family in ("llama", "mixtral", "llama4"):
        test_every_device_holds_its_slice_and_no_byte_is_read_twice(family, 4)


# ---- checks


@pytest.mark.parametrize("family", FAMILIES)
def test_a_missing_tensor_is_named_before_anything_is_read(family: str) -> None:
    spec = spec_of(family)
    for name in checkpoint_of(spec):
        checkpoint = checkpoint_of(spec)
        del checkpoint[name]
        with pytest.raises(ModelError) as caught:
            load_weights(plan_weights(spec), checkpoint, make_mesh(1), F32)
        assert f"lacks {name}:" in str(caught.value)
        assert not any(tensor.reads.any() for tensor in checkpoint.values())


@pytest.mark.parametrize("shape", [(WIDTH,), (WIDTH, WIDTH), (HEADS * HEAD, WIDTH, 1), (0, 0), ()])
def test_a_wrong_shape_is_named_with_the_right_one(shape: tuple[int, ...]) -> None:
    spec, name = spec_of("llama"), "model.layers.1.self_attn.q_proj.weight"
    checkpoint = {**checkpoint_of(spec), name: Memory(np.zeros(shape, F32))}
    with pytest.raises(ModelError) as caught:
        load_weights(plan_weights(spec), checkpoint, make_mesh(1), F32)
    said = f"{name} has shape {list(shape)}, but config.json asks for {[HEADS * HEAD, WIDTH]}"
    assert str(caught.value).startswith(said)


def test_an_error_of_a_reader_comes_through() -> None:
    class Broken(Memory):
        def read(self, index: Slices, integers: Any = None) -> np.ndarray:
            raise ModelError("cut short")

    spec = spec_of("llama")
    checkpoint = {**checkpoint_of(spec), "model.norm.weight": Broken(np.zeros(WIDTH, F32))}
    with pytest.raises(ModelError, match="cut short"):
        load_weights(plan_weights(spec), checkpoint, make_mesh(4), F32)


@pytest.mark.parametrize("stored", ["float64", "float32", "float16", "bfloat16", "float8_e4m3fn"])
@pytest.mark.parametrize("wanted", ["float32", "bfloat16", "float16"])
def test_values_are_converted(stored: str, wanted: str) -> None:
    spec = spec_of("phi3")
    checkpoint = checkpoint_of(spec)
    for tensor in checkpoint.values():
        tensor.values = tensor.values.astype(np.dtype(getattr(ml_dtypes, stored, stored)))
    weights = load_weights(
        plan_weights(spec), checkpoint, make_mesh(1), np.dtype(getattr(ml_dtypes, wanted, wanted))
    )
    values = checkpoint["model.embed_tokens.weight"].values
    embed = weights.embed.array
    assert embed.dtype == wanted
    np.testing.assert_array_equal(embed, values.astype(embed.dtype))


@pytest.mark.parametrize("devices", [1, 4])
def test_parameters_have_the_types_that_they_declare(devices: int, tmp_path: Path) -> None:
    """Of a real file: integers as they are stored, floats in the declared type or in the model's."""
    stored = {
        "packed": np.random.default_rng(0).integers(-(2**31), 2**31, (8, 6), np.int32),
        "scales": np.linspace(0, 1, 8, dtype=np.float16),
        "weight": np.linspace(-1, 1, 8, dtype=np.float16),
    }
    save_file(stored, tmp_path / "model.safetensors")
    held = {"packed": np.dtype(np.int32), "scales": F32, "weight": None}

    def params_of_types(**types: Any) -> dict[str, Param]:
        return {
            name: Param(
                values.shape,
                ("ffn", None)[: values.ndim],
                (Piece(name, values.shape, values.shape),),
                dtype=types[name],
            )
            for name, values in stored.items()
        }

    def loaded(**types: Any) -> Any:
        plan: Any = WeightPlan(params_of_types(**types))  # type: ignore[arg-type]
        return load_weights(
            plan, open_safetensors(tmp_path), make_mesh(devices), np.dtype(ml_dtypes.bfloat16)
        )

    arrays = loaded(**held)
    assert_same(arrays["packed"], stored["packed"])
    assert_same(arrays["scales"], stored["scales"].astype(F32))
    assert_same(arrays["weight"], stored["weight"].astype(ml_dtypes.bfloat16))
    with pytest.raises(ModelError, match=r"'packed' holds I32, but .* one of F64, F32"):
        loaded(**held | {"packed": None})
    with pytest.raises(ModelError, match=r"'packed' holds I32, but .* one of U8"):
        loaded(**held | {"packed": np.dtype(np.uint8)})
    with pytest.raises(ModelError, match=r"'weight' holds F16, but .* one of I32"):
        loaded(**held | {"weight": np.dtype(np.int32)})


# ---- room


class Device:
    """Of another platform than the CPU."""

    platform, process_index = "gpu", 0

    def __init__(self, free: int | None) -> None:
        self.free = free

    def memory_stats(self) -> dict[str, int] | None:
        return None if self.free is None else {"bytes_limit": self.free + 5, "bytes_in_use": 5}


def test_what_cannot_fit_is_refused_before_anything_is_made() -> None:
    config = {"architectures": ["LlamaForCausalLM"], **BASE, "num_hidden_layers": 200, "vocab_size": 1 << 20}
    spec = model_spec(config | {"hidden_size": 1 << 17, "intermediate_size": 1 << 19})
    for devices in (1, 8):
        with pytest.raises(ModelError) as caught:
            init_weights(plan_weights(held := spec.split_over(devices)), held, make_mesh(devices), F32, 0)
        message = str(caught.value)
        needed = re.match(
            rf"the weights need ([\d,.]+) GiB on each of {devices} device\(s\), .* GiB free", message
        )
        total = 4 * sum(math.prod(param.shape) for param in params_of(spec)) / 2**30
        assert float(needed[1].replace(",", "")) == pytest.approx(total / devices, rel=1e-3)
        assert message.isprintable()
    with pytest.raises(ModelError, match="GiB"):
        load_weights(plan_weights(spec), {}, make_mesh(1), F32)


def test_room_is_what_the_fullest_device_has(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = spec_of("llama-mqa").split_over(4)
    all_params, mesh = params_of(spec), make_mesh(4)
    shards = load_weights(plan_weights(spec), checkpoint_of(spec), mesh, F32)
    needed = sum(array.addressable_shards[0].data.nbytes for array in jax.tree.leaves(shards))
    for free in (needed, None):
        devices: Any = [Device(needed + 9), Device(free)]
        assert load.free_bytes(devices) == (needed + 9 if free is None else needed)
        monkeypatch.setattr(load, "free_bytes", lambda _, free=free: free)
        check_room(all_params, mesh, F32)
        monkeypatch.undo()
    monkeypatch.setattr(load, "free_bytes", lambda _: needed - 1)
    with pytest.raises(ModelError):
        check_room(all_params, mesh, F32)


# ---- random weights


def leaves(weights: Any) -> list[np.ndarray]:
    return [np.asarray(array) for array in jax.tree.leaves(weights)]


@pytest.mark.parametrize("family", ["llama-mha", "gemma2"])
def test_random_weights(family: str) -> None:
    spec, mesh = spec_of(family), make_mesh(4)
    one, other = (leaves(init_weights(plan_weights(spec), spec, make_mesh(1), F32, seed)) for seed in (1, 2))
    four = init_weights(plan_weights(spec), spec, mesh, F32, 1)
    for a, b, param in zip(one, leaves(four), params_of(spec), strict=True):
        np.testing.assert_array_equal(a, b)
        assert a.shape == param.shape
        if param.norm:
            assert (a == 1 - spec.norm_offset).all()
        else:
            assert np.std(a) == pytest.approx(load.INIT_SCALE, rel=0.3)
    assert any((a != b).any() for a, b in zip(one, other, strict=True))
    loaded = load_weights(plan_weights(spec), checkpoint_of(spec), mesh, F32)
    for ours, theirs in zip(jax.tree.leaves(four), jax.tree.leaves(loaded), strict=True):
        assert ours.sharding.is_equivalent_to(theirs.sharding, ours.ndim)
        assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype)
