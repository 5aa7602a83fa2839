"""Whole quantized models against transformers with the expanded weights, on 1 and 4 devices."""

from __future__ import annotations

import json
import logging
import math
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from jax.sharding import PartitionSpec as P
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from hex_llm.config import EngineConfig
from hex_llm.engine.loading import open_checkpoint, open_files, plan_model, rounding
from hex_llm.errors import ConfigError, ModelError
from hex_llm.execution.kernel_choice import Devices, choose_kernels
from hex_llm.execution.load import load_weights
from hex_llm.execution.programs import split_by_width
from hex_llm.execution.weight_plan import WeightPlan, plan_weights
from hex_llm.kernels import gpu_launch, reference
from hex_llm.kernels.attention import AttentionKernels, Batch, KVPages
from hex_llm.kernels.gpu_quantized import QuantizedWords
from hex_llm.kernels.sharded import ShardedMatrix
from hex_llm.models import decoder
from hex_llm.models.families import model_spec
from hex_llm.models.linear import Dense
from hex_llm.models.params import Weights
from hex_llm.models.quantized import Float8, Quantized
from hex_llm.parallel.shardings import TP, make_mesh
from hex_llm.weights.checkpoint import Checkpoint
from tests.engine.driving import make_config
from tests.models.test_families import NUM_COMPARED, TOLERANCE, check_logits
from tests.tiny import BASE, GPT_OSS, LLAMA4, MOE, Tiny, greedy
from tests.weights.packers import FORMATS, Format

BY_NAME = {form.name: form for form in FORMATS}
# A quarter of the inputs of `down`, and of the outputs of `gate`, is less than a group or a block.
SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_key_value_heads": 4}
LLAMA = Tiny("llama", "LlamaForCausalLM", SIZES)
MIXTRAL = Tiny("mixtral", "MixtralForCausalLM", {**SIZES, **MOE})
PHI3 = Tiny("phi3", "Phi3ForCausalLM", SIZES)
QUANTIZED = re.compile(r".*\.(\w+_proj|w[123])\.weight")  # not: embeddings, norms, routers, the head


def quantize(folder: Path, form: Format) -> Path:
    """Quantizes a plain model where it lies; gives a folder beside it that holds the expanded one."""
    config = json.loads((folder / "config.json").read_text())
    expanded, packed = {}, {}
    for name, weight in load_file(folder / "model.safetensors").items():
        if QUANTIZED.fullmatch(name):
            parts, expanded[name] = form.pack(weight)
            packed |= {f"{name.removesuffix('weight')}{end}": part for end, part in parts.items()}
        else:
            packed[name] = expanded[name] = weight
    beside = folder.with_name("expanded")
    beside.mkdir()
    (beside / "config.json").write_text(json.dumps(config))
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": form.config}))
    for path, tensors in ((folder, packed), (beside, expanded)):
        whole = {name: tensor.contiguous() for name, tensor in tensors.items()}
        save_file(whole, path / "model.safetensors", {"format": "pt"})
    return beside


# One CPU multiplies whole numbers of 16 bits, where floats have 24; several expand the weights in each step.
IN_WHOLE_NUMBERS = 5e-3


def check(
    folder: Path, judge: Any, prompt: list[int], devices: int, tolerance: float = TOLERANCE, **flags: Any
) -> None:
    out = greedy(judge, prompt, NUM_COMPARED, output_logits=True, return_dict_in_generate=True)
    with torch.no_grad():
        prompt_logits = judge(torch.tensor([prompt])).logits[0].numpy()
    check_logits(folder, devices, prompt, prompt_logits, torch.cat(out.logits).numpy(), tolerance, **flags)


def check_tiny(tiny: Tiny, form: Format, folder: Path, *device_counts: int) -> None:
    tiny.save(folder)
    judge = transformers.AutoModelForCausalLM.from_pretrained(
        quantize(folder, form), dtype=torch.float32, attn_implementation="eager"
    )
    for devices in device_counts:
        check(folder, judge, tiny.prompt(), devices, quantization="none")
        check(folder, judge, tiny.prompt(), devices, IN_WHOLE_NUMBERS if devices == 1 else TOLERANCE)


@pytest.mark.parametrize(
    ("tiny", "name"),
    [(LLAMA, "awq-64"), pytest.param(MIXTRAL, "gptq-4-32-act", marks=pytest.mark.slow)],
    ids=lambda of: of if isinstance(of, str) else of.name,
)
def test_logits_equal_those_of_the_expanded_weights(tiny: Tiny, name: str, tmp_path: Path) -> None:
    check_tiny(tiny, BY_NAME[name], tmp_path / "model", 1)  # on several devices: those below


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
@pytest.mark.parametrize("tiny", [LLAMA, MIXTRAL, PHI3], ids=lambda tiny: tiny.name)
def test_every_format(tiny: Tiny, form: Format, tmp_path: Path) -> None:
    check_tiny(tiny, form, tmp_path / "model", 4)


def test_a_model_that_transformers_quantized(tmp_path: Path) -> None:
    """Its products are of floats: bitsandbytes multiplies by what it expands, unless a CPU has bfloat16."""
    LLAMA.save(tmp_path / "plain")
    wanted = transformers.BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True
    )
    judge = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "plain", quantization_config=wanted, dtype=torch.float32, attn_implementation="eager"
    )
    judge.save_pretrained(tmp_path / "model")
    for module in judge.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False
    check(tmp_path / "model", judge, LLAMA.prompt(), 1)


@pytest.mark.parametrize(
    ("flag", "devices"), [("int8", 1), ("int4", 4), pytest.param("fp8", 4, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize(
    "tiny", [LLAMA, pytest.param(MIXTRAL, marks=pytest.mark.slow)], ids=lambda tiny: tiny.name
)
def test_plain_models_are_quantized_while_they_are_loaded(
    tiny: Tiny, flag: str, devices: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """By torch here: int8 on both sides of zero, int4 between the lowest and the highest of 32, fp8 with a
    scale for each output."""
    tiny.save(tmp_path / "model")
    weights = load_file(tmp_path / "model" / "model.safetensors")
    rounded = {
        name: rounded_by_groups(weight, flag, devices, name) if QUANTIZED.fullmatch(name) else weight
        for name, weight in weights.items()
    }
    (tmp_path / "rounded").mkdir()
    save_file(rounded, tmp_path / "rounded" / "model.safetensors", {"format": "pt"})
    (tmp_path / "rounded" / "config.json").write_bytes((tmp_path / "model" / "config.json").read_bytes())
    judge = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "rounded", dtype=torch.float32, attn_implementation="eager"
    )
    with caplog.at_level(logging.INFO):
        tolerance = IN_WHOLE_NUMBERS if devices == 1 else TOLERANCE
        check(tmp_path / "model", judge, tiny.prompt(), devices, tolerance, quantization=flag)
    assert re.search(r"MiB of matrices stay quantized: as float32 they would take [\d.]+ MiB", caplog.text)


def rounded_by_groups(weight: torch.Tensor, flag: str, devices: int, name: str) -> torch.Tensor:
    """A group lies on one device and in one head."""
    if flag == "fp8":
        scale = weight.abs().amax(1, keepdim=True) * (1 / 448)
        return (weight / scale).to(torch.float8_e4m3fn).float() * scale
    last = SIZES["hidden_size"] // 4 if name.endswith("o_proj.weight") else weight.shape[1]
    last = last // devices if name.endswith(("down_proj.weight", "w2.weight")) else last
    groups = weight.reshape(len(weight), -1, math.gcd({"int8": 128, "int4": 32}[flag], last))
    low, high = groups.amin(-1, keepdim=True).clamp(max=0), groups.amax(-1, keepdim=True).clamp(min=0)
    if flag == "int8":
        low, scale = torch.zeros_like(low), groups.abs().amax(-1, keepdim=True) / 127
    else:
        scale = (high - low) / 15
    return (torch.round((groups - low) / scale) * scale + low).reshape(weight.shape)


def save_mxfp4(folder: Path, width: int = 64) -> tuple[Tiny, Any]:
    """A tiny gpt-oss, and the model of its expanded weights."""
    tiny = Tiny("gpt-oss", "GptOssForCausalLM", {**GPT_OSS, "hidden_size": 64, "intermediate_size": width})
    model, packed = tiny.build(), {}
    for name, weight in model.named_parameters():
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            num, inputs, outputs = weight.shape
            blocks = torch.randint(0, 256, (num, outputs, inputs // 32, 16), dtype=torch.uint8)
            scales = torch.randint(121, 124, blocks.shape[:3], dtype=torch.uint8)
            packed |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
            expanded = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
            weight.data.copy_(expanded)
    model.save_pretrained(folder)
    plain = load_file(folder / "model.safetensors")
    kept = {name: one for name, one in plain.items() if f"{name}_blocks" not in packed}
    save_file({**kept, **packed}, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (folder / "config.json").write_text(json.dumps(config))
    return tiny, model


@pytest.mark.parametrize("devices", [pytest.param(1, marks=pytest.mark.slow), 4])
def test_experts_of_gpt_oss_in_mxfp4(devices: int, tmp_path: Path) -> None:
    tiny, model = save_mxfp4(tmp_path)
    check(tmp_path, model, tiny.prompt(), devices, IN_WHOLE_NUMBERS if devices == 1 else TOLERANCE)


def hidden_on_gpus(folder: Path, num: int) -> tuple[np.ndarray, Weights]:
    """Of a few tokens, by interpreted kernels of so many GPUs; and what these hold."""
    config, dtype = make_config(folder), np.dtype(jnp.bfloat16)
    files = open_files(config)
    planned = plan_model(config, files, model_spec(files.config), Devices("gpu", num, 8, dtype, dtype))
    spec, kernels, checkpoint, plan = planned
    assert checkpoint is not None
    mesh = make_mesh(num)
    weights = kernels.lay_out(load_weights(plan, checkpoint, mesh, dtype))
    positions = jnp.arange(3, dtype=jnp.int32)
    batch = Batch(positions, 0 * positions, positions + 8, jnp.array([[1]], jnp.int32), jnp.int32(0), 0)
    heads = map(spec.heads_of, spec.layers)
    pages: list[KVPages] = [jnp.zeros((2, 8, one.num_kv, 2, one.dim), dtype) for one in heads]
    run = AttentionKernels(reference.paged_attention), split_by_width(kernels.experts, mesh)

    def forward(weights: Weights) -> jax.Array:
        x = decoder.embed(spec, weights, positions + 5)
        *states, _ = decoder.forward(spec, weights, x, positions + 1, pages, batch, *run)
        return decoder.finished(spec, weights, *states, run[1])

    return np.asarray(jax.jit(forward)(weights), np.float32), weights


def check_on_gpus(folder: Path, num: int) -> Weights:
    expected, _ = hidden_on_gpus(folder, 1)
    found, weights = hidden_on_gpus(folder, num)
    assert np.linalg.norm(found - expected) < 2e-2 * np.linalg.norm(expected)
    return weights


@pytest.mark.slow
@pytest.mark.parametrize("num", [2, 4])
def test_several_gpus_multiply_experts_of_gpt_oss(num: int, tmp_path: Path) -> None:
    """Of four, every second group of 32 inputs lies on two."""
    save_mxfp4(tmp_path, width=192)
    ffn = check_on_gpus(tmp_path, num).layers[0].ffn
    assert all(isinstance(one, ShardedMatrix) and one.spec == P(TP) for one in (ffn.gate_up, ffn.down))


# Groups of 64 of which one lies on two GPUs, or on none of four whole; and a KV head for two of these.
ON_GPUS = {"hidden_size": 64, "intermediate_size": 192, "head_dim": 32, "num_hidden_layers": 1}


@pytest.mark.parametrize("num", [2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "tiny",
    [
        Tiny("llama", "LlamaForCausalLM", ON_GPUS),
        pytest.param(Tiny("mixtral", "MixtralForCausalLM", {**ON_GPUS, **MOE}), marks=pytest.mark.slow),
    ],
    ids=lambda tiny: tiny.name,
)
def test_several_gpus_multiply_what_one_does(tiny: Tiny, num: int, tmp_path: Path) -> None:
    """But what has no whole slab of a group on a device: that is expanded."""
    tiny.save(tmp_path / "model")
    quantize(tmp_path / "model", BY_NAME["awq-64"])
    layer = check_on_gpus(tmp_path / "model", num).layers[0]
    held = [layer.qkv, layer.out, layer.ffn.gate_up, *([layer.ffn.down] if num == 2 else [])]
    assert all(isinstance(one, ShardedMatrix) and one.spec == P(TP) for one in held)
    assert isinstance(layer.ffn.down, ShardedMatrix if num == 2 else Dense)


@pytest.mark.parametrize(("capability", "error"), [(8.0, 2e-2), (8.9, 0.1)])
def test_floats_of_8_bits_on_gpus(
    capability: float, error: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where GPUs have none, activations keep their 16 bits."""
    Tiny("llama", "LlamaForCausalLM", ON_GPUS).save(tmp_path / "model")
    expected, _ = hidden_on_gpus(quantize(tmp_path / "model", BY_NAME["fp8-dynamic-rows"]), 1)
    monkeypatch.setattr(gpu_launch, "capability", lambda: capability)
    found, weights = hidden_on_gpus(tmp_path / "model", 1)
    assert np.linalg.norm(found - expected) < error * np.linalg.norm(expected)
    assert isinstance(weights.layers[0].out, QuantizedWords if capability < 8.9 else Float8)


def test_products_of_floats_of_8_bits() -> None:
    """Rows are rounded to 8 bits too, of which 4 are the number's own."""
    rng = np.random.default_rng(0)
    weights, x = rng.standard_normal((2, 24, 64)), rng.standard_normal((3, 64))
    scales = np.abs(weights).max(-1) / 448
    matrix = Float8(
        jnp.asarray(weights / scales[..., None], jnp.float8_e4m3fn), jnp.asarray(scales, jnp.float32)
    )
    expected = np.einsum("td,abd->tab", x, weights)
    got = matrix.matmul(jnp.asarray(x, jnp.bfloat16)).astype(jnp.float32)
    assert np.abs(got - expected).max() < 0.04 * np.abs(expected).max()
    rows = np.asarray(Float8(matrix.codes[0], matrix.scales[0]).rows(jnp.array([5, 1])))
    np.testing.assert_allclose(rows, weights[0, [5, 1]], rtol=1 / 16, atol=1e-2)


def test_where_there_is_no_kernel_the_flag_is_refused(tmp_path: Path) -> None:
    LLAMA.save(tmp_path)
    config = make_config(tmp_path, quantization="fp8")
    kernels = choose_kernels(
        model_spec({"architectures": ["LlamaForCausalLM"], **BASE}),
        Devices("tpu", 1, 16, *[np.dtype("float32")] * 2),
    )
    with pytest.raises(ConfigError, match="--quantization=fp8: there is no kernel for it"):
        rounding(config, open_files(config), kernels)


@pytest.fixture(scope="module")
def awq(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("awq") / "model"
    LLAMA.save(folder)
    quantize(folder, BY_NAME["awq-64"])
    return folder


def opened(config: EngineConfig) -> Checkpoint | None:
    files = open_files(config)
    return open_checkpoint(config, files, model_spec(files.config))


@pytest.mark.parametrize("flag", [None, "awq"])
def test_the_log_says_which_format_was_found(
    flag: str | None, awq: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = make_config(awq, quantization=flag)
    with caplog.at_level(logging.INFO):
        assert opened(config) is not None
    assert "quantized by awq (4 bits with a scale for 64 inputs)" in caplog.text


def test_none_expands(awq: Path) -> None:
    config = make_config(awq, quantization="none")
    spec, checkpoint = model_spec(open_files(config).config), opened(config)

    def plan(keeps: bool) -> WeightPlan:
        return plan_weights(spec, checkpoint, keeps=lambda form, routed: keeps)

    assert isinstance(plan(True).weights.layers[0].qkv, Quantized)
    assert isinstance(plan(True).weights.embed, Dense)
    assert isinstance(plan(False).weights.layers[0].qkv, Dense)
    assert not plan(False).parts


def test_a_flag_that_says_otherwise(awq: Path) -> None:
    config = make_config(awq, quantization="gptq")
    with pytest.raises(ConfigError, match=r"--quantization=gptq, but the model's config.json says awq: "):
        opened(config)
    plain = make_config(awq.with_name("expanded"), quantization="gptq")
    with pytest.raises(ConfigError, match="--quantization=gptq: the model's config names no quantization"):
        opened(plain)


def test_experts_that_an_architecture_does_not_have_apart(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    Tiny("llama4", "Llama4ForCausalLM", LLAMA4).save(folder)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = BY_NAME["awq-64"].config
    (folder / "config.json").write_text(json.dumps(config))
    name = "model.layers.0.feed_forward.experts.0.gate_proj.qweight"
    save_file({name: torch.zeros(8, 1, dtype=torch.int32)}, folder / "model.safetensors")
    with pytest.raises(ModelError, match="llama4_text with experts that awq keeps apart is not supported"):
        opened(make_config(folder))


def test_random_weights_of_a_quantized_config(awq: Path) -> None:
    assert opened(make_config(awq, load_format="dummy")) is None
