"""What an engine tells of itself."""

from __future__ import annotations

from pathlib import Path

from hex_llm.execution.flops import Work
from hex_llm.ipc.stats import Stats
from tests.engine.driving import drive, make_engine, request
from tests.tiny import FAMILIES


def test_an_engine_tells_what_it_does(tmp_path: Path) -> None:
    tiny = next(one for one in FAMILIES if one.name == "llama3")
    tiny.save(tmp_path)
    engine = make_engine(
        tmp_path, enable_prefix_cache_hbm=True, prefix_cache_unit="block", block_size=8, recompile="warn"
    )
    seen: list[Stats] = []
    prompt = (tiny.prompt(0) * 10)[:40]
    drive(engine, [request("a", prompt), request("b", prompt)], lambda _: seen.append(engine.stats))
    seen.append(engine.stats)
    assert max(one.num_running for one in seen) == 2
    assert (seen[-1].num_running, seen[-1].num_waiting) == (0, 0)
    assert (seen[-1].num_blocks, seen[-1].num_free_blocks) == (64, 64)
    assert min(one.num_free_blocks for one in seen) < 64
    assert [name for one in seen for name, _ in one.waited] == ["a", "b"]
    assert all(0 <= seconds < 60 for one in seen for _, seconds in one.waited)
    assert (seen[-1].num_prefix_queries, seen[-1].num_prefix_hits) == (80, 32)
    # The last token of each is chosen, but never taken in.
    assert sum(one.num_tokens for one in seen) == 40 + 8 + 2 * 15
    assert seen[-1].num_padding > 0
    assert seen[-1].num_cached_blocks == (40 + 15) // 8  # both say the same
    assert seen[-1].num_flops > (40 + 8 + 2 * 15) * Work.of(engine.spec).per_token > 0
    assert all(one.dispatch_s > 0 for one in seen if one.num_tokens)
    assert any(one.wait_s > 0 for one in seen)
