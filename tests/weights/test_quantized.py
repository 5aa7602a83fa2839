"""Every quantized format against its own software, bit for bit; whole, by slices, and damaged."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from hex_llm.errors import ModelError
from hex_llm.weights.quantization import METHODS, quantization_of
from hex_llm.weights.quantized import dequantized, mxfp4
from hex_llm.weights.safetensors import SafeTensor, open_safetensors
from tests.weights.grouped import assert_parts_give_the_same
from tests.weights.packers import FORMATS, Format, Parts, bnb_4bit

SHAPE = (96, 128)
NAME = "model.layers.0.self_attn.q_proj"
BY_NAME = {form.name: form for form in FORMATS}


def matrix(shape: tuple[int, int] = SHAPE) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1)) * 0.3


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Format], Path]:
    @cache
    def made(name: str) -> Path:
        path = tmp_path_factory.mktemp(name)
        write(path, BY_NAME[name].pack(matrix())[0])
        return path

    return lambda form: made(form.name)


def write(folder: Path, parts: Parts) -> None:
    tensors = {f"{NAME}.{name}": part.contiguous() for name, part in parts.items()}
    save_file(tensors | {"lm_head.weight": torch.ones(4, 2)}, folder / "model.safetensors")


def opened(folder: Path, config: dict[str, Any]) -> Any:
    quantization = quantization_of({"quantization_config": config})
    assert quantization is not None
    return dequantized(open_safetensors(folder), quantization)


def whole(tensor: Any) -> np.ndarray:
    return tensor.read((slice(None),) * len(tensor.shape))


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
def test_values_are_the_judges(form: Format, folder: Any) -> None:
    _, values = form.pack(matrix())
    tensors = opened(folder(form), form.config)
    ours = tensors[f"{NAME}.weight"]
    assert ours.shape == SHAPE
    assert whole(ours).dtype == np.float32
    np.testing.assert_array_equal(whole(ours), values.float().numpy())
    assert torch.nn.functional.mse_loss(values, matrix()) < 0.01, "the packer makes something else"
    np.testing.assert_array_equal(whole(tensors["lm_head.weight"]), np.ones((4, 2)))
    with pytest.raises(ModelError, match="is quantized"):
        ours.read((slice(None),) * 2, np.dtype(np.int32))


def cuts(size: int) -> st.SearchStrategy[slice]:
    ends = st.lists(st.integers(0, size), min_size=2, max_size=2)
    return ends.map(lambda two: slice(min(two), max(two)))


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
def test_slices_are_parts_of_the_whole(form: Format, folder: Any) -> None:
    tensor = opened(folder(form), form.config)[f"{NAME}.weight"]
    expected = whole(tensor)

    @settings(max_examples=40, deadline=None)
    @given(rows=cuts(SHAPE[0]), columns=cuts(SHAPE[1]))
    def check(rows: slice, columns: slice) -> None:
        np.testing.assert_array_equal(tensor.read((rows, columns)), expected[rows, columns])

    check()


@pytest.mark.parametrize("name", ["awq-32", "gptq-4-32", "bnb-nf4-64-double", "fp8-blocks"])
def test_a_slice_reads_little_more_than_its_share(
    name: str, folder: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensor = opened(folder(BY_NAME[name]), BY_NAME[name].config)[f"{NAME}.weight"]
    read: list[int] = []
    fill = SafeTensor._fill

    def counted(self: SafeTensor, view: memoryview, start: int) -> None:
        read.append(len(view))
        fill(self, view, start)

    monkeypatch.setattr(SafeTensor, "_fill", counted)
    whole(tensor)
    everything, read[:] = sum(read), []
    tensor.read((slice(32, 64), slice(32, 64)))
    assert sum(read) < everything / 6


@pytest.mark.parametrize("shape", [(96, 32), (6, 64)])
def test_blocks_of_several_rows(shape: tuple[int, int], tmp_path: Path) -> None:
    form = bnb_4bit("nf4", nested=True, size=128)
    parts, values = form.pack(matrix(shape))
    write(tmp_path, parts)
    tensor = opened(tmp_path, form.config)[f"{NAME}.weight"]
    np.testing.assert_array_equal(whole(tensor), values.numpy())
    np.testing.assert_array_equal(tensor.read((slice(3, 5), slice(7, 30))), values[3:5, 7:30])


def test_inputs_that_do_not_fill_their_words(tmp_path: Path) -> None:
    name = "pack-quantized-4-int-channel-asymmetric"
    parts, values = BY_NAME[name].pack(matrix((13, 21)))
    write(tmp_path, parts)
    tensor = opened(tmp_path, BY_NAME[name].config)[f"{NAME}.weight"]
    np.testing.assert_array_equal(whole(tensor), values.numpy())
    np.testing.assert_array_equal(tensor.read((slice(9, 13), slice(17, 21))), values[9:13, 17:21])


def test_blocks_that_the_last_rows_do_not_fill(tmp_path: Path) -> None:
    codes = torch.randn(40, 24).to(torch.float8_e4m3fn)
    scales = torch.rand(2, 2)
    write(tmp_path, {"weight": codes, "weight_scale_inv": scales})
    values = codes.float() * scales.repeat_interleave(32, 0)[:40].repeat_interleave(16, 1)[:, :24]
    tensor = opened(tmp_path, BY_NAME["fp8-blocks"].config)[f"{NAME}.weight"]
    np.testing.assert_array_equal(whole(tensor), values.numpy())


def test_two_schemes_in_one_checkpoint(tmp_path: Path) -> None:
    """Each matrix has the scheme that its tensors fit."""
    one = BY_NAME["pack-quantized-4-int-group-32"]
    other = BY_NAME["pack-quantized-8-int-channel"]
    forms = {"a": one, "b": other}
    packed = {name: form.pack(matrix()) for name, form in forms.items()}
    save_file(
        {f"{name}.{part}": value.contiguous() for name in packed for part, value in packed[name][0].items()},
        tmp_path / "model.safetensors",
    )
    groups = {"x": one.config["config_groups"]["group_0"], "y": other.config["config_groups"]["group_0"]}
    tensors = opened(tmp_path, one.config | {"config_groups": groups})
    for name, (_, values) in packed.items():
        np.testing.assert_array_equal(whole(tensors[f"{name}.weight"]), values.numpy())


def test_mxfp4(tmp_path: Path) -> None:
    random = torch.Generator().manual_seed(0)
    blocks = torch.randint(0, 256, (3, 8, 2, 16), dtype=torch.uint8, generator=random)
    scales = torch.randint(110, 140, (3, 8, 2), dtype=torch.uint8, generator=random)
    save_file({"w_blocks": blocks, "w_scales": scales}, tmp_path / "model.safetensors")
    tensors = open_safetensors(tmp_path)
    ours = mxfp4("w", tensors["w_blocks"], tensors["w_scales"])
    theirs = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32).transpose(1, 2).reshape(24, 64)
    np.testing.assert_array_equal(whole(ours), theirs.numpy())
    np.testing.assert_array_equal(ours.read((slice(5, 20), slice(31, 40))), theirs[5:20, 31:40])
    with pytest.raises(ModelError, match="does not fit"):
        mxfp4("w", tensors["w_blocks"], tensors["w_blocks"])


# ---- what is refused


def refusal(of: Callable[[], object]) -> str:
    with pytest.raises(ModelError) as caught:
        of()
    message = str(caught.value)
    assert message.isprintable()
    assert len(message) < 300
    return message


def without(*names: str) -> Callable[[Parts], Parts]:
    return lambda parts: {name: part for name, part in parts.items() if name not in names}


def changed(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Parts], Parts]:
    return lambda parts: {**parts, name: change(parts[name])}


def state(**changes: Any) -> Callable[[Parts], Parts]:
    def change(stored: torch.Tensor) -> torch.Tensor:
        return torch.tensor(list(json.dumps(json.loads(bytes(stored)) | changes).encode()), dtype=torch.uint8)

    return changed("weight.quant_state.bitsandbytes__nf4", change)


NF4, CT = "bnb-nf4-64-double", "pack-quantized-4-int-group-32-asymmetric"
DAMAGE: list[tuple[str, Callable[[Parts], Parts], str]] = [
    ("awq-32", without("scales"), f"lacks '{NAME}.scales'"),
    ("awq-32", without("qzeros"), f"lacks '{NAME}.qzeros'"),
    ("awq-32", changed("qzeros", lambda t: t[:-1]), f"'{NAME}.qzeros' has shape [3, 12]"),
    ("awq-32", changed("qzeros", lambda t: t.float()), "holds F32 in the shape [4, 12], but it must be"),
    ("awq-32", changed("scales", lambda t: t.int()), "scales must be floats"),
    ("awq-32", changed("qweight", lambda t: t[:100]), "group_size=32 does not divide its 100 inputs"),
    ("awq-32", changed("qweight", lambda t: t.flatten()), "must be a matrix of I32"),
    ("gptq-4-32", without("scales"), f"lacks '{NAME}.scales'"),
    ("gptq-4-32", without("qzeros"), f"lacks '{NAME}.qzeros'"),
    ("gptq-4-32", changed("g_idx", lambda t: t[:-1]), "g_idx' has shape [127]"),
    ("gptq-4-32", changed("g_idx", lambda t: t + 1), "names a group that does not exist"),
    ("gptq-4-32", changed("g_idx", lambda t: t - 1), "names a group that does not exist"),
    ("gptq-8-32-act", changed("qzeros", lambda t: t[:, :-1]), "qzeros' has shape [4, 23]"),
    ("bnb-int8", without("SCB"), f"lacks '{NAME}.SCB'"),
    ("bnb-int8", changed("weight_format", lambda t: t + 2), "is not that of plain rows"),
    (NF4, without("weight.absmax"), f"lacks '{NAME}.weight.absmax'"),
    (NF4, without("weight.nested_absmax"), f"lacks '{NAME}.weight.nested_absmax'"),
    (NF4, without("weight.quant_map"), f"lacks '{NAME}.weight.quant_map'"),
    (NF4, without("weight.quant_state.bitsandbytes__nf4"), "lacks"),
    (NF4, changed("weight", lambda t: t[:-1]), "not 6144 numbers of U8"),
    (NF4, state(blocksize=48), "blocks of 48 do not fit its 128 inputs"),
    (NF4, state(blocksize=0), "makes no sense"),
    (NF4, state(shape=[96, 128, 1]), "makes no sense"),
    (NF4, state(shape="?"), "makes no sense"),
    (NF4, state(nested_offset=[1]), "makes no sense"),
    (NF4, state(more="x" * 5000), "makes no sense"),
    ("fbgemm-fp8", without("weight_scale"), f"lacks '{NAME}.weight_scale'"),
    ("fp8-static", changed("weight_scale", lambda t: t.repeat(3)), "weight_scale' has shape [3]"),
    ("fp8-blocks", changed("weight_scale_inv", lambda t: t[:, :-1]), "weight_scale_inv' has shape [3, 7]"),
    (CT, without("weight_scale"), f"lacks '{NAME}.weight_scale'"),
    (CT, without("weight_zero_point"), f"lacks '{NAME}.weight_zero_point'"),
    (CT, without("weight_shape"), f"lacks '{NAME}.weight_shape'"),
    (CT, changed("weight_shape", lambda t: t * 0), "is no shape"),
    (CT, changed("weight_zero_point", lambda t: t[:-1]), "weight_zero_point' has shape [11, 4]"),
    (CT, changed("weight_packed", lambda t: t[:-1]), "weight_packed' has shape [95, 16]"),
    ("fp8-static", lambda parts: {"experts": parts["weight"].clone(), **parts}, "experts' holds F8_E4M3"),
    ("awq-32", lambda parts: {"weight": matrix()}, "quantized by awq, but none is"),
]


@pytest.mark.parametrize(("name", "damage", "said"), DAMAGE, ids=[f"{n}: {s}" for n, _, s in DAMAGE])
def test_damage_is_named(name: str, damage: Callable[[Parts], Parts], said: str, tmp_path: Path) -> None:
    write(tmp_path, damage(BY_NAME[name].pack(matrix())[0]))
    assert said in refusal(lambda: whole(opened(tmp_path, BY_NAME[name].config)[f"{NAME}.weight"]))


def of(name: str, **changes: Any) -> dict[str, Any]:
    return {**BY_NAME[name].config, **changes}


def compressed(form: str = "pack-quantized", **weights: Any) -> dict[str, Any]:
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
    }


DEEP: Any = []
for _ in range(900):
    DEEP = [DEEP]
REFUSED: list[tuple[Any, str]] = [
    ({"quant_method": "aqlm"}, "quant_method='aqlm' is not supported; supported are awq, gptq"),
    ({"quant_method": "hqq"}, "quant_method='hqq' is not supported"),
    ({"quant_method": DEEP}, "quant_method="),
    ({"bits": 4}, "quant_method=None"),
    (DEEP, "quantization_config must be an object"),
    ("awq", "quantization_config must be an object"),
    (of("awq-32", bits=8), "bits=8 is not supported; supported are 4"),
    (of("awq-32", bits=4.0), "bits=4.0"),
    (of("awq-32", version="gemv"), "version='gemv' is not supported; supported are gemm"),
    (of("awq-32", group_size=0), "group_size=0"),
    (of("awq-32", group_size="128"), "group_size='128'"),
    (of("awq-32", zero_point="no"), "zero_point='no' must be true or false"),
    (of("gptq-4-32", bits=3), "bits=3 is not supported; supported are 4, 8"),
    (of("gptq-4-32", checkpoint_format="marlin"), "checkpoint_format='marlin'"),
    (of("gptq-4-32", is_marlin_format=True), "is_marlin_format=True"),
    (of(NF4, bnb_4bit_quant_type="int4"), "bnb_4bit_quant_type='int4'"),
    (of(NF4, bnb_4bit_quant_storage="bfloat16"), "bnb_4bit_quant_storage='bfloat16'"),
    (of("fp8-static", activation_scheme="block"), "activation_scheme='block'"),
    (of("fp8-blocks", weight_block_size=[128]), "weight_block_size=[128]"),
    (of("fp8-blocks", weight_block_size=[0, 128]), "weight_block_size=0"),
    (of("fp8-blocks", weight_block_size="128"), "weight_block_size='128'"),
    (compressed("marlin-24", num_bits=4), "format='marlin-24'"),
    (compressed("nvfp4-pack-quantized", num_bits=4), "format='nvfp4-pack-quantized'"),
    (compressed(num_bits=3, strategy="group"), "num_bits=3 is not supported; supported are 4, 8"),
    (compressed(num_bits=4, strategy="tensor_group"), "strategy='tensor_group'"),
    (compressed(num_bits=4, type="float", strategy="group"), "type='float'"),
    (compressed(num_bits=4, strategy="group", group_size=-2), "group_size=-2"),
    ({**compressed(), "config_groups": {}}, "config_groups must say"),
    ({**compressed(), "quantization_status": "frozen"}, "quantization_status='frozen'"),
    ({**compressed(), "sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config.format="),
    ({**compressed(), "transform_config": {"config_groups": {"u": {}}}}, "transform_config is not supported"),
]


@pytest.mark.parametrize(("config", "said"), REFUSED, ids=[said for _, said in REFUSED])
def test_configs_that_are_refused(config: Any, said: str) -> None:
    assert said in refusal(lambda: quantization_of({"quantization_config": config}))


def test_configs_that_do_not_name_their_method() -> None:
    assert quantization_of({}) is None
    assert quantization_of({"quantization_config": None}) is None
    early = quantization_of({"quantization_config": {"load_in_8bit": True}})
    assert str(early) == "bitsandbytes (8 bits with a scale for each output)"
    old = compressed(num_bits=4, strategy="group", group_size=128)
    del old["quant_method"]
    assert str(quantization_of({"compression_config": old})) == (
        "compressed-tensors (4 bits with a scale for 128 inputs)"
    )


VALUES = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.lists(st.integers())
)
KEYS = sorted({key for form in FORMATS for key in form.config} - {"quant_method"})


@settings(max_examples=200, deadline=1000)
@given(method=st.sampled_from(list(METHODS)), values=st.dictionaries(st.sampled_from(KEYS), VALUES))
def test_any_config_is_read_or_refused(method: str, values: dict[str, Any]) -> None:
    message = ""
    try:
        found = quantization_of({"quantization_config": {**values, "quant_method": method}})
    except ModelError as error:
        message = str(error)
    else:
        assert found is not None
        assert found.method in str(found)
    assert len(message) < 300
    assert message.isprintable()


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
def test_parts_for_products(form: Format, folder: Callable[[Format], Path]) -> None:
    """Numbers in groups that are in order have them; tables and act-order are expanded."""
    tensor = opened(folder(form), form.config)[f"{NAME}.weight"]
    if tensor.form is None:
        assert any(mark in form.name for mark in ("nf4", "fp4", "act"))
        return
    assert not any(mark in form.name for mark in ("nf4", "fp4", "act"))
    assert tensor.form.is_float == any(mark in form.name for mark in ("fp8", "float"))
    for rows in (slice(None), slice(5, 40), slice(95, 96)):
        assert_parts_give_the_same(tensor, (rows, slice(None)), tensor.form.group or tensor.shape[1])
        assert_parts_give_the_same(tensor, (rows, slice(32, 112)), 16)
