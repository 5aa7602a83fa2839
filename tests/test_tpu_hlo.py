"""What is read from programs that a TPU compiler made."""

from __future__ import annotations

from pathlib import Path

from tools import tpu_hlo

HLO = """
%fused_computation { ROOT %copy.9 = bf16[64,32]{1,0} copy(%p), backend_config={"estimated_cycles":"5"} }

%fused_computation.1 (p.1: bf16[64,32], p.2: bf16[16,32]) -> bf16[64,16] {
  %p.1 = bf16[64,32]{1,0} parameter(0)
  %p.2 = bf16[16,32]{1,0} parameter(1)
  ROOT %convolution.1 = bf16[64,16]{1,0} convolution(%p.1, %p.2), dim_labels=bf_oi->bf
}

ENTRY %main (a: bf16[64,32]) -> bf16[64,32] {
  %a = bf16[64,32]{1,0:T(8,128)(2,1)} parameter(0)
  %copy.1 = bf16[2,32,32]{2,1,0:T(8,128)(2,1)} copy(%a), backend_config={"estimated_cycles":"30"}
  %copy.2 = bf16[64,32]{1,0:T(8,128)(2,1)S(1)} copy(%a)
  %bitcast_copy_fusion.3 = bf16[2048]{0:T(1024)} fusion(%a), kind=kLoop, calls=%fused_computation
  %all-gather-start.1 = (bf16[4,32]{1,0}, bf16[16,32]{1,0}) all-gather-start(%x), dimensions={0}
  %all-reduce.4 = (f32[8]{0}, f32[8]{0}) all-reduce(%y, %z), to_apply=%add
  %kernel.1 = f32[8]{0} custom-call(%y), backend_config="KERNEL"
  %fusion.5 = f32[8]{0} fusion(%y), backend_config={"window_config":{"estimated_cycles":"12"}}
  %all-gather-done.1 = bf16[16,32]{1,0} all-gather-done(%all-gather-start.1)
}
""".replace("KERNEL", "TUzvUgFN" * 20_000)  # must not take a time that grows with its square

BUNDLES = """LB: loop body
= control target key end

     0   :  { %s1_s0 = smov 0 } /* entry bundle */
   0x1 LB: > { %s2_s1 = sphi %s1_s0, %s3_s1 }
   0x2   : > { %v1_v0 = vld [vmem:[%s2_s1] sm:$0xff] }
   0x3   :  {}
   0x4 LB: >> { %s9_s4 = sphi %s8_s4, %s7_s4 }
   0x5   : > { %v3_v2 = vadd.f32 %v2_v1, %v1_v0 }
   0x6   : >> { %p2_p1 = scmp.ge.s32.totalorder %s9_s4, 3 /* loop exit test */ }
   0x6 PF: > { %s3_s1 = sadd.s32 1, %s2_s1 }
   0x7   : > { %p1_p0 = scmp.ge.s32.totalorder %s3_s1, 10 /* loop exit test */ }
   0x8   :  { %4 = sbr.rel (!%p1_p0) target = $region3 } /* exit bundle */
"""


def test_reading_a_compiled_program() -> None:
    assert tpu_hlo.collectives(HLO) == {"all-gather": 1, "all-reduce": 1}
    assert tpu_hlo.largest_gathered(HLO) == 512
    assert tpu_hlo.estimated_cycles(HLO) == 42
    found = tpu_hlo.materialised(HLO, {2048})
    assert found == {"copy bf16[2,32,32]": 1, "bitcast_copy_fusion bf16[2048]": 1}


def test_bundles_of_loops(tmp_path: Path) -> None:
    """They have empty ones, and some of the loop around them."""
    assert tpu_hlo.executed_bundles(BUNDLES) == 1 + 10 * (3 + 3 * 3 + 2) + 1
    assert tpu_hlo.executed_bundles(BUNDLES.replace(", 10 /*", ", %s5_s5 /*")) is None
    test = "%p1_p0 = scmp.ge.s32.totalorder %s3_s1, 10 /* loop exit test */"
    among_others = BUNDLES.replace(test, "").replace(
        ", 3 /* loop exit test */", f", 3 /* loop exit test */ ;; {test.replace('%s3', '(%p2_p1), %s3')}"
    )
    assert tpu_hlo.executed_bundles(among_others) == tpu_hlo.executed_bundles(BUNDLES)
    (tmp_path / "17-fusion.2-01-final_bundles.txt").write_text(BUNDLES)
    (tmp_path / "17-fusion.2-00-schedule-analysis_final_bundles.txt").write_text("")
    assert tpu_hlo.dumped_bundles(tmp_path) == {"fusion.2": 142}


STEP = """
%product (p.1: bf16[64,32], p.2: bf16[16,32]) -> bf16[64,16] {
  %p.1 = bf16[64,32]{1,0} parameter(0)
  %p.2 = bf16[16,32]{1,0} parameter(1)
  ROOT %convolution.1 = bf16[64,16]{1,0} convolution(%p.1, %p.2), dim_labels=bf_oi->bf
}

ENTRY %main (a: bf16[64,32], w: bf16[16,32]) -> bf16[64,16] {
  %a = bf16[64,32]{1,0:S(1)} parameter(0)
  %w = bf16[16,32]{1,0} parameter(1)
  %fusion.1 = bf16[64,16]{1,0:S(1)} fusion(%a, %w), calls=%product, config={"estimated_cycles":"900"}
  %fusion.2 = bf16[64,16]{1,0:S(1)} fusion(%a, %w), calls=%product, config={"estimated_cycles":"900"}
  %copy.1 = bf16[64,16]{1,0} copy(%fusion.1), config={"estimated_cycles":"600"}
  %write.1 = bf16[64,16]{1,0} fusion(%copy.1), calls=%other, config={"estimated_cycles":"7"}
  %kernel.1 = bf16[64,16]{1,0} custom-call(%copy.1)
  %other.1 = f32[8]{0} copy(%fusion.2), config={"estimated_cycles":"40"}
}
"""


def test_cycles_that_were_scheduled() -> None:
    """Each instruction is held up by the slowest of what it needs."""
    dumped: dict[str, int | None] = {"fusion.1": 100, "copy.1": 50, "write.1": 20, "kernel.1": None}
    product, copied = 2 * 64 * 32 * 16 / 128, 64 * 16 * 2 / 4
    jumped_over, without_bundles = 7, 40
    expected = 2 * product + copied + jumped_over + without_bundles
    assert tpu_hlo.scheduled_cycles(STEP, dumped, bandwidth=4, flops=128) == expected
    weights, kernel = 16 * 32 * 2 / 4, 30
    expected = 2 * weights + copied + jumped_over + kernel + without_bundles
    assert tpu_hlo.scheduled_cycles(STEP, dumped | {"kernel.1": 30}, bandwidth=4, flops=1e9) == expected


def test_our_own_products_take_their_operations() -> None:
    """As long as their bundles at least, of which a v5e's do not wait for its units."""
    step = """
ENTRY %main (a: bf16[64,32], w: bf16[2,16,32]) -> bf16[1,64,16] {
  %a = bf16[64,32]{1,0} parameter(0)
  %w = bf16[2,16,32]{2,1,0} parameter(1)
  %product_of_many_rows.1 = bf16[1,64,16]{2,1,0} custom-call(%a, %w)
}
"""
    operations = 2 * 64 * 32 * 32
    for bundles, cycles in ((5, operations / 4), (operations, operations), (None, operations / 4)):
        dumped = {"product_of_many_rows.1": bundles}
        assert tpu_hlo.scheduled_cycles(step, dumped, bandwidth=1e9, flops=4) == cycles
