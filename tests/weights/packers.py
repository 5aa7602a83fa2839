"""Matrices quantized in every format that is loaded, with what the format's own software makes of them.

bitsandbytes, compressed-tensors and transformers pack or unpack here. The packers of AWQ and GPTQ bring too
much with them to be installed for this: these two are packed by what their formats say, and AWQ is unpacked
by compressed-tensors' converter. What is packed here was once compared by hand: with what autoawq 0.2.9 packs
and unpacks, and with what gptqmodel 7.7.0's `TorchLinear` unpacks, it is equal bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import bitsandbytes.functional as bnb
import torch
from compressed_tensors.compressors.base import BaseCompressor
from compressed_tensors.entrypoints.convert.converters.autoawq import AutoAWQConverter
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from transformers.integrations.finegrained_fp8 import Fp8Dequantize

Parts = dict[str, torch.Tensor]  # by the end of their names
E4M3 = torch.float8_e4m3fn


@dataclass(frozen=True)
class Format:
    name: str
    config: dict[str, Any]  # quantization_config
    pack: Callable[[torch.Tensor], tuple[Parts, torch.Tensor]]  # parts, and the judge's values in float32


# ---- 4 and 8 bits in words of 32


def rounded(
    weight: torch.Tensor, bits: int, groups: torch.Tensor, symmetric: bool = False
) -> tuple[torch.Tensor, ...]:
    """Codes [N, K], scales and zero points [N, G] of a matrix whose inputs are in these groups."""
    top = 2**bits - 1
    num = int(groups.max()) + 1
    low = torch.stack([weight[:, groups == g].amin(1) for g in range(num)], 1).clamp(max=-1e-3)
    high = torch.stack([weight[:, groups == g].amax(1) for g in range(num)], 1).clamp(min=1e-3)
    if symmetric:
        high = torch.maximum(high, -low)
        low = -high
    scales = ((high - low) / top).half()
    zeros = (-low / scales).round().clamp(1, top).int()
    zeros = torch.full_like(zeros, 2 ** (bits - 1)) if symmetric else zeros
    codes = (weight / scales[:, groups] + zeros[:, groups]).round().clamp(0, top).int()
    return codes, scales, zeros


def words(numbers: torch.Tensor, bits: int, order: list[int] | None = None) -> torch.Tensor:
    """Along the last axis; `order` lists the numbers of a word from its lowest bits up."""
    num = 32 // bits
    apart = numbers.long().reshape(*numbers.shape[:-1], -1, num)[..., order or list(range(num))]
    return (apart << torch.arange(0, 32, bits)).sum(-1).to(torch.int32)


AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]


def in_order(inputs: int, size: int) -> torch.Tensor:
    return torch.arange(inputs) // (inputs if size == -1 else size)


def awq(size: int, zero_point: bool = True) -> Format:
    config = {
        "quant_method": "awq",
        "bits": 4,
        "group_size": size,
        "zero_point": zero_point,
        "version": "gemm",
    }

    def pack(weight: torch.Tensor) -> tuple[Parts, torch.Tensor]:
        codes, scales, zeros = rounded(weight, 4, in_order(weight.shape[1], size), not zero_point)
        parts = {
            "qweight": words(codes.T, 4, AWQ_ORDER),
            "qzeros": words(zeros.T, 4, AWQ_ORDER),
            "scales": scales.T.contiguous(),
        }
        if not zero_point:
            del parts["qzeros"]
        converter = AutoAWQConverter(
            group_size=weight.shape[1] if size == -1 else size, zero_point=zero_point
        )
        full = parts | {"scales": parts["scales"].float()}
        theirs = converter.process({f"m.{name}": part for name, part in full.items()})
        scheme = converter._build_quant_config().config_groups["config_group_0"]
        theirs = {name.removeprefix("m."): part for name, part in theirs.items()}
        return parts, BaseCompressor.get_value_from_registry("pack-quantized").decompress(theirs, scheme)[
            "weight"
        ]

    return Format(f"awq-{size}" + "-symmetric" * (not zero_point), config, pack)


def gptq(
    bits: int, size: int, *, act_order: bool = False, version: str = "gptq", g_idx: bool = True
) -> Format:
    config = {"quant_method": "gptq", "bits": bits, "group_size": size, "desc_act": act_order, "sym": False}
    config |= {} if version == "gptq" else {"checkpoint_format": version}

    def pack(weight: torch.Tensor) -> tuple[Parts, torch.Tensor]:
        groups = in_order(weight.shape[1], size)
        if act_order:
            groups = groups[torch.randperm(len(groups), generator=torch.Generator().manual_seed(5))]
        codes, scales, zeros = rounded(weight, bits, groups)
        parts = {
            "qweight": words(codes, bits).T.contiguous(),
            "qzeros": words(zeros.T - int(version == "gptq"), bits),
            "scales": scales.T.contiguous(),
        }
        if g_idx:
            parts["g_idx"] = groups.int()
        return parts, (codes - zeros[:, groups]).float() * scales.float()[:, groups]

    name = f"gptq-{bits}-{size}" + "-act" * act_order + "-v2" * (version != "gptq") + "-old" * (not g_idx)
    return Format(name, config, pack)


# ---- bitsandbytes


def bnb_int8() -> Format:
    def pack(weight: torch.Tensor) -> tuple[Parts, torch.Tensor]:
        codes, stats, _ = bnb.int8_vectorwise_quant(weight.half())
        parts = {"weight": codes, "SCB": stats, "weight_format": torch.tensor(0, dtype=torch.uint8)}
        return parts, bnb.int8_vectorwise_dequant(codes, stats)

    return Format("bnb-int8", {"quant_method": "bitsandbytes", "load_in_8bit": True}, pack)


def bnb_4bit(kind: str, *, nested: bool, size: int = 64) -> Format:
    config = {"load_in_4bit": True, "bnb_4bit_quant_type": kind, "bnb_4bit_use_double_quant": nested}

    def pack(weight: torch.Tensor) -> tuple[Parts, torch.Tensor]:
        codes, state = bnb.quantize_4bit(weight, blocksize=size, quant_type=kind, compress_statistics=nested)
        parts = {f"weight.{name}": part for name, part in state.as_dict(packed=True).items()}
        # As one row: on x86-64 bitsandbytes 0.50 expands blocks wrongly that go on in the next row.
        state.shape = torch.Size([1, weight.numel()])
        return parts | {"weight": codes}, bnb.dequantize_4bit(codes, state).reshape(weight.shape)

    name = f"bnb-{kind}-{size}" + "-double" * nested
    return Format(name, {"quant_method": "bitsandbytes", **config}, pack)


# ---- floats of 8 bits


def fp8(name: str, config: dict[str, Any], block: tuple[int | None, int | None], part: str) -> Format:
    def pack(weight: torch.Tensor) -> tuple[Parts, torch.Tensor]:
        rows, columns = (n or m for n, m in zip(block, weight.shape, strict=True))
        grid = weight.unflatten(0, (-1, rows)).unflatten(2, (-1, columns))
        scales = grid.abs().amax((1, 3)) / 448
        codes = (grid / scales[:, None, :, None]).flatten(2).flatten(0, 1).to(E4M3)
        values = Fp8Dequantize(None)._dequantize_one(codes, scales, torch.float32)
        stored = scales.reshape([]) if block == (None, None) else scales
        return {"weight": codes, part: stored, "input_scale": torch.tensor(0.5)}, values

    return Format(name, config, pack)


# ---- compressed-tensors


def compressed(form: str, *, asymmetric: bool = False, act_order: bool = False, **weights: Any) -> Format:
    args = QuantizationArgs(**weights, symmetric=not asymmetric)
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    config = {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": scheme.model_dump(mode="json")},
    }
    top = 448 if args.type == "float" else 2 ** (args.num_bits - 1) - 1
    compressor = BaseCompressor.get_value_from_registry(form)

    def pack(weight: torch.Tensor) -> tuple[Parts, torch.Tensor]:
        blocks = {"tensor": weight.shape, "channel": (1, weight.shape[1]), "group": (1, args.group_size)}
        rows, columns = args.block_structure if args.strategy == "block" else blocks[args.strategy]
        # Those who order inputs by their weight for the result (actorder) store the group of each.
        moved = torch.randperm(weight.shape[1], generator=torch.Generator().manual_seed(5))
        sorted_weight = weight[:, moved] if act_order else weight
        grid = sorted_weight.unflatten(0, (-1, rows)).unflatten(2, (-1, columns))
        scales = (grid.abs().amax((1, 3)) / top).bfloat16().float()
        parts = {"weight": sorted_weight, "weight_scale": scales[0] if args.strategy == "tensor" else scales}
        if asymmetric:
            generator = torch.Generator().manual_seed(7)
            parts["weight_zero_point"] = torch.randint(-3, 4, scales.shape, generator=generator).to(
                torch.int8
            )
        parts = compressor.compress(parts, scheme)
        values = compressor.decompress(dict(parts), scheme)["weight"]
        return ordered(parts, values, moved, columns) if act_order else (stored(parts), values)

    def ordered(
        parts: Parts, values: torch.Tensor, moved: torch.Tensor, size: int
    ) -> tuple[Parts, torch.Tensor]:
        """As they lie in the model: the sorted matrix, repacked with its inputs where they were."""
        back = torch.argsort(moved)
        codes = compressor.decompress(
            {**parts, "weight_scale": torch.ones_like(parts["weight_scale"])}, scheme
        )["weight"]
        packed = words((codes[:, back] + 2 ** (args.num_bits - 1)).int(), args.num_bits)
        groups = (torch.arange(len(moved)) // size)[back]
        return stored(parts) | {"weight_packed": packed, "weight_g_idx": groups.int()}, values[:, back]

    def stored(parts: Parts) -> Parts:
        return parts | {"weight_scale": parts["weight_scale"].bfloat16()}

    strategy = "-".join(str(v) for v in weights.values())
    return Format(f"{form}-{strategy}" + "-asymmetric" * asymmetric + "-act" * act_order, config, pack)


STATIC = {"quant_method": "fp8", "activation_scheme": "static"}
BLOCKS = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [32, 16]}
INT4 = {"num_bits": 4, "type": "int"}
INT8 = {"num_bits": 8, "type": "int"}
FLOAT = {"num_bits": 8, "type": "float"}
FORMATS = [
    awq(32),
    awq(64),
    awq(-1),
    awq(32, zero_point=False),
    gptq(4, 32),
    gptq(4, 32, act_order=True),
    gptq(4, 64, version="gptq_v2"),
    gptq(4, -1, g_idx=False),
    gptq(8, 32, act_order=True),
    gptq(8, 32, g_idx=False, version="gptq_v2"),
    bnb_int8(),
    bnb_4bit("nf4", nested=False),
    bnb_4bit("nf4", nested=True),
    bnb_4bit("fp4", nested=True),
    bnb_4bit("nf4", nested=True, size=256),
    fp8(
        "fbgemm-fp8", {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}, (1, None), "weight_scale"
    ),
    fp8("fp8-static", STATIC, (None, None), "weight_scale"),
    fp8("fp8-dynamic-rows", STATIC | {"activation_scheme": "dynamic"}, (1, None), "weight_scale"),
    fp8("fp8-blocks", BLOCKS, (32, 16), "weight_scale_inv"),
    compressed("pack-quantized", **INT4, strategy="group", group_size=32),
    compressed("pack-quantized", **INT4, strategy="group", group_size=32, asymmetric=True),
    compressed("pack-quantized", **INT4, strategy="group", group_size=32, act_order=True),
    compressed("pack-quantized", **INT4, strategy="channel", asymmetric=True),
    compressed("pack-quantized", **INT8, strategy="channel"),
    compressed("pack-quantized", **INT8, strategy="group", group_size=64, asymmetric=True),
    compressed("int-quantized", **INT8, strategy="channel"),
    compressed("int-quantized", **INT8, strategy="channel", asymmetric=True),
    compressed("naive-quantized", **INT8, strategy="group", group_size=32),
    compressed("naive-quantized", **FLOAT, strategy="tensor"),
    compressed("float-quantized", **FLOAT, strategy="tensor"),
    compressed("float-quantized", **FLOAT, strategy="channel"),
    compressed("float-quantized", **FLOAT, strategy="block", block_structure=[32, 16]),
]
