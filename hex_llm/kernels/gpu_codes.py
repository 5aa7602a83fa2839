"""Numbers of 4 and 8 bits as floats of 16, two at a time, in inline assembly: what the compiler makes of a
conversion takes longer than the product that it is for. Codes lie in words of 16 bits, and two words in a
register: the same shift gives the j-th code of both.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental.pallas import triton as plgpu

CENTRE = {4: 8, 8: 0}  # what is taken from a code of so many bits before it is scaled
# By type: its name in assembly, the bits of 1, and of a power of two whose last 7 bits count ones.
MAGIC = {
    jnp.dtype(jnp.bfloat16): ("bf16x2", 0x3F80, 0x4300),
    jnp.dtype(jnp.float16): ("f16x2", 0x3C00, 0x6400),
}
SIGN = 0x8000
# Of the j-th float of 4 bits (e2m1) in its word: the lowest bit of its size, and its sign. So two of the four
# need one shift at most.
E2M1_PLACES = ((6, 15), (0, 9), (3, 14), (10, 13))
E2M1_EXPONENT = -126  # of two, by which such a float is too small


def whole_numbers(j: int, bits: int, dtype: Any) -> str:
    """Two words in $1 become two numbers in f. A code of 4 bits becomes the last of a power of two, which is
    then taken from it together with CENTRE. Of 8 bits, the last seven do, and what is taken is 128 more if
    the first is set: put into the power of two, that bit counts 128 there too."""
    kind, one, power = MAGIC[dtype]
    shifted = f"shr.b32 w, $1, {bits * j};" if j else "mov.b32 w, $1;"
    low = f"lop3.b32 f, w, {twice(0x0F if bits == 4 else 0x7F)}, {twice(power)}, 0xEA;"  # (w & a) | b
    taken = (
        f"lop3.b32 w, w, {twice(0x80)}, {twice(SIGN | power)}, 0xEA;"
        if bits == 8
        else f"mov.b32 w, {twice(SIGN | power | CENTRE[4])};"
    )
    # Not a subtraction: of bfloat16 that is for newer GPUs alone.
    summed = f"mov.b32 one, {twice(one)}; fma.rn.{kind} f, f, one, w;"
    return f".reg .b32 w, f, one; {shifted} {low} {taken} {summed}"


def tiny_floats(j: int) -> str:
    """The same for floats of 4 bits (e2m1) to bfloat16, far too small: their bits move to where the lowest
    exponents of a bfloat16 lie. What they are then multiplied by makes up for it."""
    size, sign = (to - at for to, at in zip((6, 15), E2M1_PLACES[j], strict=True))
    joined = f"{_shifted('f', size)} and.b32 f, f, {twice(0x81C0)};"
    if sign != size:
        joined = f"{_shifted('f', size)} and.b32 f, f, {twice(0x01C0)}; {_shifted('w', sign)}"
        joined += f" lop3.b32 f, w, {twice(SIGN)}, f, 0xEA;"
    return f".reg .b32 w, f; {joined}"


def _shifted(to: str, left: int) -> str:
    if not left:
        return f"mov.b32 {to}, $1;"
    return f"shl.b32 {to}, $1, {left};" if left > 0 else f"shr.b32 {to}, $1, {-left};"


def floats(j: int) -> str:
    """The same for float8_e4m3fn to bfloat16: exponent and fraction move to where the last ones of a bfloat16
    lie, and a power of two makes up for the exponents' offsets. There is no NaN."""
    shifted = "mov.b32 w, $1;" if j else "shl.b32 w, $1, 8;"
    moved = f"shr.b32 f, w, 4; and.b32 f, f, {twice(0x07F0)}; lop3.b32 f, w, {twice(SIGN)}, f, 0xEA;"
    factor = f"mov.b32 one, {twice(0x7B80)}; mov.b32 w, {twice(SIGN)};"  # 2**120, -0
    return f".reg .b32 w, f, one; {shifted} {moved} {factor} fma.rn.bf16x2 f, f, one, w;"


def twice(half: int) -> str:
    return hex(half << 16 | half)


def assembled(body: str, dtype: Any, *args: Array) -> Array:
    """Of two numbers of 16 bits at a time."""
    [out] = plgpu.elementwise_inline_asm(
        f"{{ {body} }}",
        args=args,
        constraints=",".join(["=r", *["r"] * len(args)]),
        pack=2,
        result_shape_dtypes=[jax.ShapeDtypeStruct(args[0].shape, dtype)],
    )
    return out
