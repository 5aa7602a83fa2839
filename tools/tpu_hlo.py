"""Reads what the TPU compiler made of a program: its instructions, and the bundles they were scheduled into.

The compiler guesses an instruction's cycles before it schedules it, and for what its vector units do it
guesses many times too many. What it scheduled says more: a bundle is what a core begins in one cycle.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from pathlib import Path
from typing import NamedTuple

SUMS, MOVES = ("all-reduce", "reduce-scatter"), ("all-gather", "all-to-all", "collective-permute")
ARRAY = re.compile(r"(\w+)\[([\d,]*)\](\{[^}]*\})?")
COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.-]+) \([^\n]*\{$(.*?)^\}", re.MULTILINE | re.DOTALL)
MEMORY = re.compile(r"S\(\d+\)")
PRODUCT = re.compile(r" = (\S+) (?:convolution|dot)\(%?([\w.-]+), %?([\w.-]+)\)")
OUR_PRODUCT = "product_of_many_rows"
DUMPED = re.compile(r"\d+-(.+)-\d+-final_bundles\.txt")
BUNDLE = re.compile(r"^ *(?:0x)?[0-9a-f]+ *(L[HBE]|P[BF]|CT)?: *((?:> ?)*)\{(.*)$")
LAST_OF_LOOP = re.compile(r"scmp\.\w+\.s32\.totalorder (\(%p\w+\), )?%s\w+, (\d+) /\* loop exit test")
INDEX_OF_STAGES = re.compile(r"%(s\w+) = sphi [^;]*iteration index, stage = 0")
SIZES = {"pred": 1, "s4": 0.5, "u4": 0.5, "bf16": 2, "f16": 2, "s16": 2, "u16": 2}
SIZES |= {"s8": 1, "u8": 1, "f8e4m3fn": 1, "s32": 4, "u32": 4, "f32": 4}


class Instruction(NamedTuple):
    name: str
    result: str  # its type
    opcode: str
    text: str  # all that follows, operands first

    @property
    def estimate(self) -> int | None:
        found = re.search(r'"estimated_cycles":"(\d+)"', self.text)
        return int(found[1]) if found else None

    @property
    def operands(self) -> list[str]:
        return re.findall(r"%([\w.-]+)", self.text.partition(")")[0])


def instructions(hlo: str) -> list[Instruction]:
    """Anchored to lines: those of a kernel are tens of thousands of letters long."""
    found = re.findall(r"^ *(?:ROOT )?%?([\w.-]+) = (.*?) ([\w-]+)\((.*)$", hlo, re.MULTILINE)
    return [Instruction(*one) for one in found]


def entry(hlo: str) -> str:
    return hlo[hlo.find("\nENTRY ") :]


def collectives(hlo: str) -> Counter[str]:
    opcodes = (one.opcode.removesuffix("-start") for one in instructions(hlo))
    return Counter(opcode for opcode in opcodes if opcode in SUMS + MOVES)


def largest_gathered(hlo: str) -> int:
    """Elements of the largest result of an exchange that is no sum."""
    moved = [one for one in instructions(hlo) if one.opcode.removesuffix("-start") in MOVES]
    return max((_elements(dims) for one in moved for _, dims, _ in ARRAY.findall(one.result)), default=0)


def materialised(hlo: str, sizes: set[int]) -> Counter[str]:
    """Instructions of the main computation that write out as many elements as a parameter has: what a
    compiler adds when it wants it in another layout. Copies into vector memory, S(1), are reads ahead."""
    found: Counter[str] = Counter()
    for name, result, opcode, _ in instructions(entry(hlo)):
        array = ARRAY.match(result)
        if opcode not in ("copy", "fusion", "transpose", "reshape") or array is None or "S(1)" in result:
            continue
        if _elements(array[2]) in sizes:
            what = re.sub(r"[.\d]+$", "", name) if opcode == "fusion" else opcode
            found[f"{what} {array[1]}[{array[2]}]"] += 1
    return found


def estimated_cycles(hlo: str) -> int:
    """The compiler's own, of the main computation: of what it has a model for, which is neither copies that
    run beside the rest nor exchanges nor kernels that were handed to it."""
    return sum(one.estimate or 0 for one in instructions(entry(hlo)))


def scheduled_cycles(hlo: str, dumped: dict[str, int | None], bandwidth: float, flops: float) -> int:
    """Of the main computation, by its bundles, but not less than its products take with `flops` operations a
    cycle, and what it reads and writes beyond vector memory with `bandwidth` bytes a cycle. `dumped`: of
    instructions that are alike, wherever their arrays lie, one has bundles. What has none counts as it is
    estimated."""
    main = instructions(entry(hlo))
    types = {one.name: one.result for one in main}
    products = _products(hlo)

    def signatures(one: Instruction) -> list[tuple[object, ...]]:
        lies = one.opcode, one.estimate, one.result, *(types.get(name) for name in one.operands)
        anywhere = (MEMORY.sub("", part) if isinstance(part, str) else part for part in lies)
        return [lies, tuple(anywhere)]

    bundles = {
        signature: dumped[one.name] for one in main if one.name in dumped for signature in signatures(one)
    }
    total = 0.0
    for one in main:
        known = (bundles[signature] for signature in signatures(one) if signature in bundles)
        scheduled, estimate = dumped.get(one.name, next(known, None)), one.estimate
        given = [types.get(name, "") for name in one.operands]
        called = re.search(r"calls=%([\w.-]+)", one.text)
        multiplied = products.get(called[1], 0.0) if called else _by_kernel(one.name, given)
        if scheduled is None or one.opcode.removesuffix("-start") in SUMS + MOVES:
            total += estimate or multiplied / flops
            continue
        # Bundles that are jumped over count too, and what changes a part of what it is given does not move
        # all of it: of both the estimate is the most.
        most = scheduled if estimate is None else estimate
        moved = sum(map(_outside, [one.result, *given]))
        total += max(min(scheduled, most), multiplied / flops, min(moved / bandwidth, most))
    return round(total)


def dumped_bundles(folder: Path) -> dict[str, int | None]:
    """By instruction; what --xla_jf_dump_to left in a folder."""
    named = ((DUMPED.fullmatch(file.name), file) for file in folder.iterdir())
    return {
        found[1]: executed_bundles(file.read_text(), 1 if found[1].startswith(OUR_PRODUCT) else None)
        for found, file in named
        if found
    }


def executed_bundles(listing: str, unknown: int | None = None) -> int | None:
    """Of a listing whose loops are marked by depth. All of a loop counts in each of its rounds, also what
    some of them jump over; `unknown`: the rounds of one of which it does not say how often it runs, None: no
    outcome."""
    lines = [found.groups() for found in map(BUNDLE.match, listing.splitlines()) if found]
    depths = [0 if text.startswith("}") else marks.count(">") for _, marks, text in lines]  # empty: no marks
    begins = [i for i, (label, *_) in enumerate(lines) if label == "LB"]
    times = [1] * len(lines)
    for begin in begins:
        depth = depths[begin]
        before = next((i for i in begins if i > begin and depths[i] <= depth), len(lines))
        # A bundle has the depth of what is in it, which may be of the loop around this one.
        end = max(i for i in range(begin, before) if depths[i] >= depth) + 1
        tests = [(depths[i], test) for i in range(begin, end) for test in LAST_OF_LOOP.finditer(lines[i][2])]
        # That of a loop around another one may be among those of the inner one, on condition.
        own = (int(test[2]) for at, test in tests if at == depth + bool(test[1]))
        rounds = _programs(lines[begin:end], next(own, None))
        rounds = unknown if rounds is None else rounds
        if rounds is None:
            return None
        times[begin:end] = [n * rounds for n in times[begin:end]]
    return sum(times)


def _programs(loop: list[tuple[str, str, str]], rounds: int | None) -> int | None:
    """How often what is in a loop is done. One that reads ahead has a round or two more than programs: then
    what begins with the first round ends before the last."""
    index = INDEX_OF_STAGES.search(loop[0][2])
    if rounds is None or index is None:
        return rounds
    ends = re.compile(rf"scmp\.(?:lt|ge)\.s32\.totalorder %{index[1]}, (\d+)")
    found = [int(end) for *_, text in loop for end in ends.findall(text)]
    return min((end for end in found if rounds - 2 <= end <= rounds), default=rounds)


def _products(hlo: str) -> dict[str, float]:
    """Operations of the product in each computation that has one."""
    found = {}
    for name, body in COMPUTATION.findall(hlo):
        if product := PRODUCT.search(body):
            types = {one.name: one.result for one in instructions(body)}
            sides = [product[1], *(types.get(operand, "") for operand in product.groups()[1:])]
            found[name] = 2 * math.sqrt(math.prod(_elements_of(side) for side in sides))
    return found


def _by_kernel(name: str, given: list[str]) -> float:
    """Operations of a call of kernels/tpu_dense.py, which is given rows [T, K] and a matrix [C, N, K]."""
    if not name.startswith(OUR_PRODUCT):
        return 0.0
    [(_, rows, _), *_], [(_, matrix, _), *_] = (ARRAY.findall(type_) for type_ in given)
    return 2 * _elements(rows) * _elements(matrix) / int(matrix.rpartition(",")[2])


def _elements_of(type_: str) -> int:
    return sum(_elements(dims) for _, dims, _ in ARRAY.findall(type_))


def _outside(type_: str) -> float:
    """Bytes that lie in no memory of their own, S(1) and others."""
    arrays = ARRAY.findall(type_)
    return sum(SIZES.get(kind, 4) * _elements(dims) for kind, dims, lies in arrays if "S(" not in lies)


def _elements(dims: str) -> int:
    return math.prod(int(n) for n in dims.split(",") if n)
