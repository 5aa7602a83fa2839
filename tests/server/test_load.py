"""A real server under load: real sockets, a real worker process, many clients; only the engine is a stand-in.

What is measured here is that nothing is lost. How fast the server is, tools/bench_http.py tells.
"""

from __future__ import annotations

import time
import warnings
from pathlib import Path

import pytest

from hex_llm.bench.client import allow_files
from tools.http_load import idle_connections, loaded_server, make_streams, read_all

TOKENS_PER_S = 20_000
SPARE_FILES = 200  # of a process, for other things than connections


@pytest.mark.parametrize(
    ("num_streams", "num_tokens"), [(64, 250), pytest.param(256, 1000, marks=pytest.mark.slow)]
)
def test_no_token_of_many_streams_is_lost_or_moved(tmp_path: Path, num_streams: int, num_tokens: int) -> None:
    """The engine does not wait for its front end: one that did not keep up would still be sending long after
    the last token came. Not a measurement, so it gets as long again as the tokens take, and some seconds."""
    streams = make_streams(num_streams, num_tokens)
    takes_s = num_streams * num_tokens / TOKENS_PER_S
    with loaded_server(tmp_path / "journal", tokens_per_s=TOKENS_PER_S, num_streams=num_streams) as (
        address,
        _,
    ):
        started = time.monotonic()
        read_all(address, streams)
        took_s = time.monotonic() - started
    for stream in streams:
        stream.check()
    assert took_s < 2 * takes_s + 10


@pytest.mark.slow
def test_no_token_is_lost_between_many_replicas_and_front_ends(tmp_path: Path) -> None:
    """As fast as this machine can: what it reaches is printed, not asked for."""
    num_streams, num_tokens = 128, 500
    streams = make_streams(num_streams, num_tokens)
    rate = {"tokens_per_s": 100_000.0, "num_streams": num_streams}
    with loaded_server(tmp_path / "journal", **rate, num_replicas=8, num_fronts=4) as (address, _):  # type: ignore[arg-type]
        started = time.monotonic()
        read_all(address, streams)
        print(f"{num_streams * num_tokens / (time.monotonic() - started):,.0f} tokens/s")
    for stream in streams:
        stream.check()


@pytest.mark.parametrize("num_idle", [300, pytest.param(5000, marks=pytest.mark.slow)])
def test_idle_connections_do_not_disturb_a_stream(tmp_path: Path, num_idle: int) -> None:
    able = allow_files(num_idle + SPARE_FILES)
    if able < num_idle + SPARE_FILES:
        warnings.warn(f"{able} open files are allowed here, too few for {num_idle} connections", stacklevel=1)
        num_idle = able - SPARE_FILES
    (before, during) = make_streams(2, 300)
    with loaded_server(tmp_path / "journal", tokens_per_s=500, num_streams=1) as (address, _):
        read_all(address, [before])
        with idle_connections(address, num_idle) as idle:
            read_all(address, [during])
            for one in idle:  # none was thrown out meanwhile
                one.setblocking(False)
                with pytest.raises(BlockingIOError):
                    one.recv(1)
    before.check()
    times = during.check()
    # It came piece by piece, not after the idle ones were served.
    assert len(set(times)) > 20
    assert times[-1] - times[0] > 0.3
