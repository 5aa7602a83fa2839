"""GGUF: judged by transformers' own GGUF loader, and by the models that the files were made from."""

from __future__ import annotations

import os
import random
import struct
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import ml_dtypes
import numpy as np
import pytest
import torch
import transformers
from gguf import GGMLQuantizationType as Q
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from hex_llm.config import EngineConfig
from hex_llm.errors import ModelError
from hex_llm.models.families import model_spec
from hex_llm.models.params import abstract_weights, declared
from hex_llm.weights.gguf import GGUFFile, gguf_tokenizer, open_gguf
from hex_llm.weights.gguf_blocks import FORMATS
from hex_llm.weights.grouped import E2M1, Form, form_of
from hex_llm.weights.model_files import open_model
from hex_llm.weights.source import fetch
from tests.tiny import GLM, GPT_OSS, MINISTRAL3
from tests.weights.gguf_files import convert, encode, random_model, write
from tests.weights.grouped import assert_parts_give_the_same

ALL = (slice(None), slice(None))
GEMMA = {"head_dim": 16, "hidden_activation": "gelu_pytorch_tanh"}
PHI3 = {"tie_word_embeddings": False}


@pytest.fixture(scope="session")
def default_model() -> Path:
    return fetch(None, cache_dir=EngineConfig().cache_dir)


def whole(tensor: Any) -> np.ndarray:
    return tensor.read(ALL[: len(tensor.shape)])


def read_all(file: GGUFFile) -> None:
    for tensor in file.checkpoint.values():
        whole(tensor)


def judge(path: Path, config: dict[str, Any]) -> tuple[Any, dict[str, np.ndarray]]:
    """transformers' config and weights of the same file; `from_pretrained` itself would want accelerate.

    Our config only makes the parameters whose names it looks for: another reading of the file takes 8 s.
    """
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**config))
    found = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=model)
    weights = {name: weight.numpy() for name, weight in found["tensors"].items()}
    assert set(model.state_dict()) - set(weights) <= {"lm_head.weight"}
    return transformers.AutoConfig.for_model(**found["config"]), weights


def assert_same_config(ours: dict[str, Any], theirs: Any, *, but: Sequence[str] = ()) -> None:
    for name, value in ours.items():
        if name in ("architectures", "rope_scaling", "hidden_activation", *but) or not hasattr(theirs, name):
            continue
        assert getattr(theirs, name) == value, name
    ropes = theirs.rope_parameters
    assert ropes.get("full_attention", ropes)["rope_theta"] == pytest.approx(ours["rope_theta"])


@pytest.mark.slow
def test_every_tensor_of_the_default_model(default_model: Path) -> None:
    file = open_gguf(default_model)
    config, weights = judge(default_model, file.config)
    assert_same_config(file.config, config)
    assert set(weights) == set(file.checkpoint)
    for name, tensor in file.checkpoint.items():
        np.testing.assert_array_equal(whole(tensor), weights[name], err_msg=name)


def test_parts_for_products(default_model: Path) -> None:
    checkpoint = open_gguf(default_model).checkpoint
    for name in ("self_attn.q_proj", "self_attn.o_proj", "mlp.down_proj"):
        tensor = checkpoint[f"model.layers.3.{name}.weight"]
        assert form_of(tensor) == Form(4, 32, has_offsets=True)
        for rows in (slice(None), slice(7, 77)):
            assert_parts_give_the_same(tensor, (rows, slice(None)), 32)
            assert_parts_give_the_same(tensor, (rows, slice(48, 208)), 16)
    assert_parts_give_the_same(checkpoint["model.embed_tokens.weight"], (slice(9, 700), slice(None)), 32)
    assert form_of(checkpoint["model.norm.weight"]) is None


@pytest.mark.parametrize("name", [one.name for one in FORMATS.values() if one.form])
def test_blocks_are_what_the_package_makes_of_them(name: str) -> None:
    layout = next(one for one in FORMATS.values() if one.name == name)
    form, take_apart = layout.form, layout.take_apart
    assert form is not None
    assert take_apart is not None
    raw = np.random.default_rng(0).integers(0, 256, (200, layout.size), dtype=np.uint8)
    with np.errstate(invalid="ignore", over="ignore"):
        expected = gguf.quants.dequantize(raw.reshape(-1), Q[name]).reshape(200, layout.block)
        codes, scales, offsets = take_apart(raw)
        assert codes.dtype == form.dtype
        codes = E2M1.take(codes) if form.is_e2m1 else codes
        values = (codes.reshape(200, -1, form.group).astype(np.float32) - form.zero) * scales[..., None]
        values = values if offsets is None else values + offsets[..., None]
        np.testing.assert_array_equal(layout.values(raw), expected)
    assert (offsets is not None) == form.has_offsets
    np.testing.assert_array_equal(values.reshape(200, -1), expected)


def test_the_default_model_is_read_in_time(default_model: Path) -> None:
    start = time.process_time()
    file = open_gguf(default_model)
    gguf_tokenizer(file)
    read_all(file)
    assert time.process_time() - start < 10


@pytest.mark.parametrize(
    ("architecture", "kind", "changes"),
    [
        ("LlamaForCausalLM", Q.F32, {"tie_word_embeddings": True}),
        ("LlamaForCausalLM", Q.Q4_0, {"num_key_value_heads": 1}),
        ("LlamaForCausalLM", Q.Q8_0, {"head_dim": 32}),
        ("Qwen2ForCausalLM", Q.Q5_1, {}),
        ("Gemma2ForCausalLM", Q.Q8_0, {**GEMMA, "tie_word_embeddings": True}),
        ("Phi3ForCausalLM", Q.Q5_0, PHI3),
        ("Qwen3ForCausalLM", Q.Q8_0, {"head_dim": 16, "tie_word_embeddings": True}),
        ("Gemma3ForCausalLM", Q.F32, {**GEMMA, "tie_word_embeddings": True, "sliding_window": 9}),
    ],
)
def test_as_transformers_reads_it(
    architecture: str, kind: Q, changes: dict[str, Any], tmp_path: Path
) -> None:
    path = convert(random_model(architecture, **changes), tmp_path / "m.gguf", kind=kind)
    file = open_gguf(path)
    config, weights = judge(path, file.config)
    assert file.config["architectures"] == [architecture]
    but = ["sliding_window", "original_max_position_embeddings"]
    but += {"Qwen3ForCausalLM": ["head_dim"], "Gemma3ForCausalLM": ["query_pre_attn_scalar"]}.get(
        architecture, []
    )
    assert_same_config(file.config, config, but=but)
    for name, tensor in file.checkpoint.items():
        np.testing.assert_array_equal(whole(tensor), weights[name], err_msg=name)
    assert set(weights) == set(file.checkpoint)


def test_gemma_as_it_was_before_conversion(tmp_path: Path) -> None:
    model = random_model("GemmaForCausalLM", head_dim=32, tie_word_embeddings=True)
    file = open_gguf(convert(model, tmp_path / "m.gguf"))
    assert file.config["hidden_act"] == "gelu_pytorch_tanh"
    assert (file.config["head_dim"], file.config["tie_word_embeddings"]) == (32, True)
    for name, tensor in file.checkpoint.items():
        np.testing.assert_allclose(whole(tensor), model.state_dict()[name], atol=1e-6, err_msg=name)


MOE = {"num_local_experts": 4, "num_experts_per_tok": 2}
MULTIPLIERS = ("embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling")


@pytest.mark.parametrize(
    ("architecture", "changes"),
    [
        ("GraniteForCausalLM", dict(zip(MULTIPLIERS, (12.0, 0.5, 0.25, 8.0), strict=True))),
        ("SmolLM3ForCausalLM", {"num_hidden_layers": 4}),
        ("Olmo2ForCausalLM", {}),
        ("Qwen3MoeForCausalLM", {**MOE, "num_experts": 4, "moe_intermediate_size": 32, "head_dim": 16}),
        ("Glm4MoeForCausalLM", {**GLM, "use_qk_norm": True, "attention_bias": True}),
        ("MiniMaxM2ForCausalLM", {**MOE, "head_dim": 16, "rotary_dim": 8}),
        ("Ministral3ForCausalLM", MINISTRAL3),
    ],
)
def test_it_is_served_as_before_conversion(architecture: str, changes: Any, tmp_path: Path) -> None:
    """The same parameters and the same model, of what transformers saves and of the file."""
    model = random_model(architecture, **changes)
    if architecture == "Qwen3MoeForCausalLM":
        model.config.norm_topk_prob = True
    model.save_pretrained(tmp_path)
    saved, file = open_model(tmp_path), open_gguf(convert(model, tmp_path / "m.gguf"))
    spec, expected = model_spec(file.config), model_spec(saved.config)
    assert replace(spec, norm_eps=expected.norm_eps) == expected
    assert saved.checkpoint is not None
    for param in declared(abstract_weights(spec)):
        for piece in param.pieces:
            theirs = whole(saved.checkpoint[piece.name])
            np.testing.assert_allclose(
                whole(file.checkpoint[piece.name]), theirs, atol=1e-6, err_msg=piece.name
            )


def test_layers_that_predict_further_are_left_out(tmp_path: Path) -> None:
    model, further = random_model("Glm4MoeForCausalLM", **GLM), "blk.3.nextn.eh_proj.weight"
    file = open_gguf(convert(model, tmp_path / "m.gguf", extra={further: np.zeros((4, 8))}))
    assert (file.config["num_hidden_layers"], file.config["partial_rotary_factor"]) == (3, 0.5)
    assert not [name for name in file.checkpoint if "layers.3" in name]
    keys = {"glm4moe.nextn_predict_layers": 4}
    assert "4 layers" in refusal(convert(model, tmp_path / "m.gguf", keys=keys))
    keys = {"glm4moe.expert_weights_norm": 2}
    assert "expert_weights_norm" in refusal(convert(model, tmp_path / "m.gguf", keys=keys))


def test_experts_in_mxfp4_are_multiplied_as_they_are(tmp_path: Path) -> None:
    model = random_model("GptOssForCausalLM", **GPT_OSS)
    file = open_gguf(convert(model, tmp_path / "m.gguf", experts=Q.MXFP4))
    tensor = file.checkpoint["model.layers.1.mlp.experts.3.down_proj.weight"]
    assert form_of(tensor) == Form(4, 32, is_float=True)
    assert_parts_give_the_same(tensor, ALL, 32)
    assert file.checkpoint["model.layers.1.mlp.experts.up_proj_bias"].shape == (4, 96)
    assert file.checkpoint["model.layers.1.self_attn.sinks"].shape == (4,)


def test_mixtral_has_one_tensor_per_expert(tmp_path: Path) -> None:
    model = random_model("MixtralForCausalLM", num_local_experts=4, num_experts_per_tok=2)
    file = open_gguf(convert(model, tmp_path / "m.gguf", kind=Q.F16))
    expected = {key: file.config[key] for key in ("num_local_experts", "num_experts_per_tok", "model_type")}
    assert expected == {"num_local_experts": 4, "num_experts_per_tok": 2, "model_type": "mixtral"}
    weights = {name: weight.numpy().astype(np.float16) for name, weight in model.state_dict().items()}
    for layer in range(2):
        both = weights[f"model.layers.{layer}.mlp.experts.gate_up_proj"]
        down = weights[f"model.layers.{layer}.mlp.experts.down_proj"]
        moe = f"model.layers.{layer}.block_sparse_moe"
        for i in range(4):
            gate, up = np.split(both[i], 2)
            for name, want in (("w1", gate), ("w2", down[i]), ("w3", up)):
                np.testing.assert_array_equal(
                    whole(file.checkpoint[f"{moe}.experts.{i}.{name}.weight"]), want
                )
        gate = file.checkpoint[f"{moe}.gate.weight"]
        np.testing.assert_array_equal(whole(gate), weights[f"model.layers.{layer}.mlp.gate.weight"])
        query = f"model.layers.{layer}.self_attn.q_proj.weight"
        np.testing.assert_array_equal(whole(file.checkpoint[query]), weights[query])


def test_experts_of_a_file_of_2023(tmp_path: Path) -> None:
    model = random_model("MixtralForCausalLM", num_local_experts=2, num_experts_per_tok=2)
    parts = {f"blk.0.ffn_{part}.{i}.weight": np.full((2, 32), i) for part in ("gate", "up") for i in range(2)}
    file = open_gguf(convert(model, tmp_path / "m.gguf", extra=parts))
    assert whole(file.checkpoint["model.layers.0.block_sparse_moe.experts.1.w3.weight"])[0, 0] == 1


@pytest.mark.parametrize("kind", [Q[form.name] for form in FORMATS.values()], ids=lambda kind: kind.name)
def test_slices_of_every_format(kind: Q, tmp_path: Path) -> None:
    sizes = {"hidden_size": 512, "intermediate_size": 256, "vocab_size": 24, "num_hidden_layers": 1}
    model = random_model("LlamaForCausalLM", **sizes)
    path = convert(model, tmp_path / "m.gguf", kind=kind)
    tensor = open_gguf(path).checkpoint["model.embed_tokens.weight"]
    embedding = model.state_dict()["model.embed_tokens.weight"].numpy()
    expected = gguf.quants.dequantize(encode(embedding, kind), kind)
    types = {Q.F16: np.float16, Q.BF16: ml_dtypes.bfloat16}
    for rows, columns in [
        ALL,
        (slice(3, 7), slice(0, 512)),
        (slice(0, 24), slice(100, 301)),
        (slice(5, 5), slice(9)),
    ]:
        part = tensor.read((rows, columns))
        assert part.dtype == types.get(kind, np.float32)
        np.testing.assert_array_equal(part.astype(np.float32), expected[rows, columns])


def test_slices_of_interleaved_rows(tmp_path: Path) -> None:
    model = random_model("LlamaForCausalLM", attention_bias=True)
    file = open_gguf(convert(model, tmp_path / "m.gguf"))
    assert file.config["attention_bias"] is True
    weight, bias = (f"model.layers.1.self_attn.k_proj.{kind}" for kind in ("weight", "bias"))
    want = {name: model.state_dict()[name].numpy() for name in (weight, bias)}
    for start, stop in [(0, 16), (16, 32), (3, 21), (31, 32)]:
        part = file.checkpoint[weight].read((slice(start, stop), slice(8, 40)))
        np.testing.assert_array_equal(part, want[weight][start:stop, 8:40])
        np.testing.assert_array_equal(
            file.checkpoint[bias].read((slice(start, stop),)), want[bias][start:stop]
        )


def rope_scaling(tmp_path: Path, arch: str, keys: dict[str, Any], extra: Any = ()) -> Any:
    model = random_model(f"{arch}ForCausalLM", **(PHI3 if arch == "Phi3" else {}))
    keys = {f"{arch.lower()}.{key}": value for key, value in keys.items()}
    return open_gguf(convert(model, tmp_path / "m.gguf", keys=keys, extra=extra)).config


def test_rope_scaling_of_the_metadata(tmp_path: Path) -> None:
    linear = {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}
    assert rope_scaling(tmp_path, "Llama", linear)["rope_scaling"] == {"rope_type": "linear", "factor": 4.0}
    assert rope_scaling(tmp_path, "Llama", {"rope.scale_linear": 2.0})["rope_scaling"]["factor"] == 2.0
    assert rope_scaling(tmp_path, "Llama", {"rope.scaling.type": "none"})["rope_scaling"] is None
    yarn = {
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": 4.0,
        "rope.scaling.original_context_length": 32,
    }
    found = rope_scaling(tmp_path, "Qwen2", yarn)["rope_scaling"]
    assert (found["rope_type"], found["factor"], found["original_max_position_embeddings"]) == (
        "yarn",
        4.0,
        32,
    )
    with pytest.raises(ModelError, match="'odd'"):
        rope_scaling(tmp_path, "Llama", {"rope.scaling.type": "odd", "rope.scaling.factor": 4.0})


def test_rope_factors_in_tensors(tmp_path: Path) -> None:
    llama3 = rope_scaling(tmp_path, "Llama", {}, {"rope_freqs.weight": [1.0, 1.0, 2.5, 8.0]})
    assert llama3["rope_scaling"] == {"rope_type": "factors", "factors": [1.0, 1.0, 2.5, 8.0]}
    factors = {"rope_factors_long.weight": [2.0, 3.0], "rope_factors_short.weight": [1.0, 1.5]}
    keys = {
        "rope.scaling.original_context_length": 32,
        "rope.dimension_count": 12,
        "attention.sliding_window": 0,
    }
    phi3 = rope_scaling(tmp_path, "Phi3", keys, factors)
    assert phi3["rope_scaling"] == {
        "rope_type": "longrope",
        "long_factor": [2.0, 3.0],
        "short_factor": [1.0, 1.5],
    }
    assert phi3["original_max_position_embeddings"] == 32
    assert (phi3["partial_rotary_factor"], phi3["head_dim"], phi3["sliding_window"]) == (0.75, 16, None)
    with pytest.raises(ModelError, match="rope_factors_short"):
        rope_scaling(tmp_path, "Phi3", {}, {"rope_factors_long.weight": [2.0]})


def test_gemma2_soft_caps_and_query_scale(tmp_path: Path) -> None:
    keys = {"gemma2.attn_logit_softcapping": 20.0, "gemma2.attention.sliding_window": 16}
    small = open_gguf(
        convert(random_model("Gemma2ForCausalLM", **GEMMA), tmp_path / "m.gguf", keys=keys)
    ).config
    assert (small["attn_logit_softcapping"], small["final_logit_softcapping"]) == (20.0, 30.0)
    assert (small["sliding_window"], small["query_pre_attn_scalar"]) == (16, 256)
    large = random_model("Gemma2ForCausalLM", **GEMMA, num_hidden_layers=46, vocab_size=8)
    assert open_gguf(convert(large, tmp_path / "l.gguf")).config["query_pre_attn_scalar"] == 64 // 4


# ---- bad files


def refusal(path: Path) -> str:
    start = time.perf_counter()
    with pytest.raises(ModelError) as caught:
        open_gguf(path)
    assert time.perf_counter() - start < 10
    message = str(caught.value)
    assert "\n" not in message
    assert len(message) < 500
    return message


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return convert(
        random_model("LlamaForCausalLM"), tmp_path_factory.mktemp("good") / "m.gguf", kind=Q.Q4_0
    ).read_bytes()


def header(*, tensors: int = 0, pairs: int = 0, magic: bytes = b"GGUF", version: int = 3) -> bytes:
    return magic + struct.pack("<IQQ", version, tensors, pairs)


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


ARCH = text("general.architecture") + struct.pack("<I", 8) + text("llama")


def tensor_info(shape: tuple[int, ...], kind: int, offset: int, name: str = "token_embd.weight") -> bytes:
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)


def test_a_file_cut_anywhere(good: bytes, tmp_path: Path) -> None:
    path = tmp_path / "cut.gguf"
    last = len(good) - 32  # behind this there may be padding only
    cuts = [*range(0, 400, 7), *random.Random(0).sample(range(400, last), 150), last]
    for cut in cuts:
        path.write_bytes(good[:cut])
        refusal(path)


def test_a_file_cut_after_it_was_opened(good: bytes, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(good)
    file = open_gguf(path)
    os.truncate(path, len(good) // 2)
    with pytest.raises(ModelError, match="cut short"):
        read_all(file)


BAD = {
    "magic": (header(magic=b"GGML"), "not a GGUF file"),
    "empty": (b"", "not a GGUF file"),
    "version 1": (header(version=1), "version 1"),
    "other byte order": (header(version=3 << 24), "version"),
    "2**60 tensors": (header(tensors=2**60), "announces"),
    "2**63 keys": (header(pairs=2**63), "announces"),
    "key past the end": (header(pairs=1) + struct.pack("<Q", 2**62) + bytes(64), "needs"),
    "string past the end": (header(pairs=1) + text("k") + struct.pack("<IQ", 8, 2**40) + bytes(64), "needs"),
    "array past the end": (
        header(pairs=1) + text("k") + struct.pack("<IIQ", 9, 4, 2**61) + bytes(64),
        "needs",
    ),
    "strings past the end": (
        header(pairs=1) + text("k") + struct.pack("<IIQ", 9, 8, 2**59) + bytes(64),
        "needs",
    ),
    "array of arrays": (
        header(pairs=1) + text("k") + struct.pack("<IIQ", 9, 9, 1) + bytes(64),
        "array of type 9",
    ),
    "value type": (header(pairs=1) + text("k") + struct.pack("<I", 77) + bytes(64), "type 77"),
    "alignment": (
        header(pairs=1) + text("general.alignment") + struct.pack("<II", 4, 7) + bytes(64),
        "general.alignment",
    ),
    "dimensions": (header(tensors=1) + text("t") + struct.pack("<I", 2**31) + bytes(64), "dimensions"),
    "type number": (header(tensors=1) + tensor_info((32,), 12345, 0) + bytes(64), "number 12345"),
    "type not taken": (header(tensors=1) + tensor_info((256,), 10, 0) + bytes(640), "Q2_K"),
    "not whole blocks": (header(tensors=1) + tensor_info((33,), 8, 0) + bytes(640), "shape"),
    "no size": (header(tensors=1) + tensor_info((32, 0), 0, 0) + bytes(640), "shape"),
    "absurd size": (header(tensors=1) + tensor_info((2**40, 2**40), 0, 0) + bytes(640), "ends at byte"),
    "offset": (header(tensors=1) + tensor_info((32,), 0, 2**50) + bytes(640), "ends at byte"),
    "two of a name": (header(tensors=2) + 2 * tensor_info((32,), 0, 0) + bytes(640), "twice"),
    "no architecture": (header() + bytes(64), "'None'"),
    "no tensors": (header(pairs=1) + ARCH + bytes(64), "token_embd"),
    "no keys": (
        header(tensors=1, pairs=1) + ARCH + tensor_info((32, 8), 0, 0) + bytes(2048),
        "embedding_length",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_header(name: str, tmp_path: Path) -> None:
    content, reason = BAD[name]
    path = tmp_path / "bad.gguf"
    path.write_bytes(content)
    assert reason in refusal(path)


def test_what_is_not_a_file(tmp_path: Path) -> None:
    assert "not a file" in refusal(tmp_path)
    assert "not a file" in refusal(tmp_path / "missing.gguf")
    os.mkfifo(tmp_path / "fifo.gguf")
    assert "not a file" in refusal(tmp_path / "fifo.gguf")


def test_models_that_we_do_not_take(tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", "falcon", {}, {"token_embd.weight": (np.zeros((4, 32)), Q.F32)})
    assert "llama, qwen2, qwen3, qwen3moe, gemma" in refusal(path)
    model = random_model("LlamaForCausalLM")
    assert "gguf-split" in refusal(convert(model, path, keys={"split.count": 3}))
    assert "attn_q_norm" in refusal(convert(model, path, extra={"blk.0.attn_q_norm.weight": np.zeros(8)}))
    assert "head_count" in refusal(convert(model, path, keys={"llama.attention.head_count": "four"}))
    assert "6 heads" in refusal(convert(model, path, keys={"llama.attention.head_count": 6}))
    assert "feed_forward_length" in refusal(convert(model, path, keys={"llama.feed_forward_length": [8, 9]}))
    per_layer = convert(model, path, keys={"llama.feed_forward_length": [96, 96]})
    assert open_gguf(per_layer).config["intermediate_size"] == 96


def test_random_damage_never_escapes(good: bytes, tmp_path: Path) -> None:
    """A damaged header either still makes a model or is refused."""
    rng = random.Random(1)
    end = good.index(b"token_embd.weight") + 1500
    path = tmp_path / "m.gguf"
    messages = []
    for _ in range(300):
        data = bytearray(good)
        for _ in range(rng.choice((1, 1, 4))):
            data[rng.randrange(4, end)] = rng.choice((0, 1, 9, 127, 255, rng.randrange(256)))
        path.write_bytes(data)
        start = time.perf_counter()
        try:
            file = open_gguf(path)
            gguf_tokenizer(file)
            read_all(file)
        except ModelError as error:
            messages.append(str(error))
        assert time.perf_counter() - start < 10
    assert len(messages) > 50
    assert not [message for message in messages if "\n" in message]
