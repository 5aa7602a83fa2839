"""`bench serve` and `compare` against real servers without a model."""

from __future__ import annotations

import json
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from hex_llm.cli import main
from tests.server.fakes import FakeBackend, byte_tokenizer
from tests.server.live import live

SMALL = ["--num-prompts=12", "--random-input-len=30", "--random-output-len=20", "--disable-tqdm"]
# Those of `vllm bench serve` 0.32 with --save-result, without --save-detailed.
VLLM_KEYS = """
date endpoint_type backend label model_id tokenizer_id num_prompts request_rate burstiness max_concurrency
duration completed failed total_input_tokens total_output_tokens request_throughput request_goodput
output_throughput total_token_throughput latencies queue_times max_output_tokens_per_s
max_concurrent_requests rtfx mean_ttft_ms median_ttft_ms std_ttft_ms p99_ttft_ms mean_tpot_ms median_tpot_ms
std_tpot_ms p99_tpot_ms mean_itl_ms median_itl_ms std_itl_ms p99_itl_ms
"""
TITLES = """
Successful requests:|Failed requests:|Maximum request concurrency:|Request rate configured (RPS):
Benchmark duration (s):|Total input tokens:|Total generated tokens:|Request throughput (req/s):
Request goodput (req/s):|Output token throughput (tok/s):|Peak output token throughput (tok/s):
Peak concurrent requests:|Total token throughput (tok/s):|Mean TTFT (ms):|Median TTFT (ms):|P50 TTFT (ms):
P99.5 TTFT (ms):|Mean TPOT (ms):|Median TPOT (ms):|P50 TPOT (ms):|P99.5 TPOT (ms):|Mean ITL (ms):
Median ITL (ms):|P50 ITL (ms):|P99.5 ITL (ms):|Mean E2EL (ms):|Median E2EL (ms):|P50 E2EL (ms):
P99.5 E2EL (ms):
"""


def bench(url: str, *argv: str) -> int:
    return main(["bench", "serve", f"--base-url={url}", *SMALL, *argv])


def saved(folder: Path, url: str, *argv: str) -> dict[str, Any]:
    assert bench(url, "--save-result", f"--result-dir={folder}", "--result-filename=r.json", *argv) == 0
    return json.loads((folder / "r.json").read_text())


@pytest.mark.parametrize("backend", ["vllm", "openai", "openai-chat", "tgi", "vertex"])
def test_each_dialect_counts_every_token(backend: str, url: str, tmp_path: Path) -> None:
    """A chat's prompt also has the template's tokens, but no first token."""
    result = saved(tmp_path, url, f"--backend={backend}", "--save-detailed", "--temperature=0")
    assert (result["completed"], result["failed"]) == (12, 0)
    assert result["output_lens"] == [20] * 12
    num_template = len("<user><assistant>") - 1 if backend == "openai-chat" else 0
    assert result["input_lens"] == [30 + num_template] * 12
    assert all(
        0 < ttft <= latency for ttft, latency in zip(result["ttfts"], result["latencies"], strict=True)
    )
    assert all(len(text) > 0 for text in result["generated_texts"])
    assert result["errors"] == [""] * 12


def test_seed_002_to_the_letter(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    command = f"""--backend vllm --model meta-llama/Llama-3.3-70B-Instruct --dataset-name random --ignore-eos
        --num-prompts 6 --random-input-len=100 --random-output-len=10 --max-concurrency=2 --seed 100
        --base-url {url}"""
    assert main(["bench", "serve", *command.split()]) == 0
    block = capsys.readouterr().out
    assert "Total input tokens:                      600       \n" in block
    assert "Total generated tokens:                  60        \n" in block
    assert "Maximum request concurrency:             2         \n" in block
    assert "Peak concurrent requests:                6.00      \n" in block


def test_the_block_is_vllms_line_by_line(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--max_concurrency=4", "--request_rate=500", "--percentile-metrics=ttft,tpot,itl,e2el"]
    assert bench(url, *flags, "--metric-percentiles=50,99.5", "--goodput", "ttft:5000", "tpot:100") == 0
    first, *lines, last = capsys.readouterr().out.splitlines()
    assert first == "============ Serving Benchmark Result ============"
    assert last == "=" * 50
    ours = lines.index("----------------------Server----------------------")
    assert "-----Time per Output Token (excl. 1st token)------" in lines[:ours]
    rows = [line for line in lines[:ours] if not line.startswith("-")]
    assert [line[:40].rstrip() for line in rows] == TITLES.strip().replace("\n", "|").split("|")
    assert all(len(line) == 51 and line[40] == " " for line in rows)


def test_the_file_has_vllms_keys_and_what_the_server_knows(url: str, tmp_path: Path) -> None:
    result = saved(tmp_path, url, "--metadata", "tp=4", "version=1", "--label=mine")
    assert set(VLLM_KEYS.split()) | {"tp", "version", "server"} == set(result)
    assert (result["request_rate"], result["tp"], result["label"]) == ("inf", "4", "mine")
    assert result["server"]["late_compiles"] == 0


@pytest.mark.slow
def test_files_are_named_and_appended_to(url: str, tmp_path: Path) -> None:
    assert bench(url, "--save-result", f"--result-dir={tmp_path}", "--max-concurrency=3", "--label=x") == 0
    (path,) = tmp_path.iterdir()
    assert path.name.startswith("x-infqps-concurrency3-fake-")
    for rates in ("100", "200,300"):
        assert bench(url, "--append-result", f"--result-filename={path}", f"--request-rate={rates}") == 0
    lines = path.read_text().splitlines()
    assert [json.loads(line)["request_rate"] for line in lines] == ["inf", 100, 200, 300]


def test_settings_reach_the_server() -> None:
    backend = FakeBackend(byte_tokenizer())
    with live(backend) as url:
        flags = ["--temperature=0.5", "--top-k=7", '--extra-body={"min_tokens": 3}', "--header", "x-a=b"]
        assert bench(url, *flags, "--num-warmups=3", "--ready-check-timeout-sec=5") == 0
    assert len(backend.asked) == 12 + 3 + 1
    params = backend.asked[-1].params
    assert (params.temperature, params.top_k, params.min_tokens, params.ignore_eos) == (0.5, 7, 3, True)


@pytest.mark.parametrize(
    "backend_name",
    ["vllm", "openai-chat", *(pytest.param(n, marks=pytest.mark.slow) for n in ("tgi", "vertex"))],
)
def test_a_turn_continues_the_answer_before(backend_name: str) -> None:
    backend = FakeBackend(byte_tokenizer())
    turns = ["--dataset-name=multi-turn", "--num-prompts=4", "--multi-turn-num-conversations=1"]
    with live(backend) as url:
        assert bench(url, f"--backend={backend_name}", *turns, "--length-scale=0.1") == 0
    assert len(backend.asked) == 4
    for before, request in pairwise(backend.asked):
        num_before, num_answered = len(before.prompt_ids), before.params.max_tokens or 0
        assert request.prompt_ids[:num_before] == before.prompt_ids
        answer = request.prompt_ids[num_before : num_before + num_answered]
        assert answer == before.prompt_ids[::-1][:num_answered]


def test_a_mixture(url: str, tmp_path: Path) -> None:
    flags = ["--dataset-name=mixture", "--length-scale=0.02", "--request-rate=1000"]
    assert saved(tmp_path, url, *flags)["completed"] == 12


# ---- two servers, and a picture


@pytest.mark.slow
def test_compare(url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "compared.json"
    more = ["--rounds=2", "--request-rate=400,800", "--save-result", f"--result-filename={path}"]
    assert main(["bench", "compare", url, url, *SMALL, *more]) == 0
    out = capsys.readouterr().out
    assert out.count("B / A") == 2
    assert "median_ttft_ms" in out
    first, second = map(json.loads, path.read_text().splitlines())
    assert len(first["rounds"]) == 2
    assert second["rounds"][0][0]["request_rate"] == 800
    assert {"output_throughput", "p99_itl_ms"} <= {one["metric"] for one in first["compared"]}


@pytest.mark.slow
def test_a_plot(url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "plot.png"
    assert bench(url, f"--plot={path}", "--request-rate=200,400,inf") == 0
    assert path.read_bytes().startswith(b"\x89PNG")
    assert main(["bench", "compare", url, url, *SMALL, "--rounds=1", f"--plot={path}"]) == 0
    assert bench(url, f"--plot={tmp_path}/none/x.png") == 1
    assert "error: --plot" in capsys.readouterr().err


def test_a_plot_without_matplotlib(
    url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setattr("hex_llm.bench.results.find_spec", lambda name: None)
    assert bench(url, "--plot=x.png") == 2
    assert capsys.readouterr().err == 'error: --plot: needs matplotlib; pip install "hex-llm[bench]"\n'


# ---- what is wrong


@contextmanager
def raw_server(answer: bytes) -> Iterator[str]:
    """Says the same to everybody and hangs up."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def run() -> None:
            while True:
                try:
                    client, _ = listener.accept()
                except OSError:
                    return
                with client:
                    client.recv(1 << 16)
                    client.sendall(answer)

        threading.Thread(target=run, daemon=True).start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        listener.shutdown(socket.SHUT_RDWR)


def error_of(capsys: pytest.CaptureFixture[str]) -> str:
    """The one line of an error; the lines before it tell of progress."""
    *_, last = capsys.readouterr().err.splitlines()
    assert last.startswith("error: ")
    return last.removeprefix("error: ")


def test_an_unreachable_server(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    assert bench(f"http://127.0.0.1:{port}") == 1
    assert error_of(capsys).startswith(f"http://127.0.0.1:{port} is unreachable: ")
    assert bench(f"http://127.0.0.1:{port}", "--model=m", "--ready-check-timeout-sec=1") == 1
    assert error_of(capsys).startswith(f"http://127.0.0.1:{port} is unreachable: ")
    assert bench("localhost:8000") == 2
    assert error_of(capsys).startswith("localhost:8000: no URL of a server")


NOT_FOUND = b"HTTP/1.1 404 Not Found\r\ncontent-length: 4\r\n\r\nnope"
CLOSED = "the server closed the connection before the end of its answer"
EMPTY = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}"
HALF = b'HTTP/1.1 200 OK\r\ncontent-length: 999\r\n\r\ndata: {"choices": [{"text": "a"}]}\n\n'
NO_JSON = b"HTTP/1.1 200 OK\r\ncontent-length: 11\r\n\r\ndata: what\n"
FAILED = b'HTTP/1.1 200 OK\r\ncontent-length: 27\r\n\r\ndata: {"error": "exploded"}\n'


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (NOT_FOUND, "all 12 requests failed; the first: HTTP 404: nope"),
        (EMPTY, "all 12 requests failed; the first: the answer holds no token"),
        (
            HALF,
            f"all 12 requests failed; the first: {CLOSED}",
        ),
        (NO_JSON, "all 12 requests failed; the first: the stream holds what"),
        (FAILED, "all 12 requests failed; the first: exploded"),
    ],
)
def test_a_wrong_server(answer: bytes, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with raw_server(answer) as url:
        assert bench(url, "--model=m") == 1
    assert error_of(capsys) == message


def test_a_server_that_is_never_ready(capsys: pytest.CaptureFixture[str]) -> None:
    with raw_server(NOT_FOUND) as url:
        assert bench(url, "--model=m", "--ready-check-timeout-sec=1") == 1
    assert error_of(capsys) == "no answer within 1 s; the last try: HTTP 404: nope"


def test_a_server_without_a_model_or_http(capsys: pytest.CaptureFixture[str]) -> None:
    with raw_server(EMPTY) as url:
        assert bench(url) == 1
    assert error_of(capsys) == f"{url}/v1/models names no model; name one with --model"
    with raw_server(b"220 smtp ready\r\n") as url:
        assert bench(url, "--model=m") == 1
    assert error_of(capsys) == r"all 12 requests failed; the first: no HTTP: '220 smtp ready\r\n'"


def test_requests_that_fail_among_others_are_named(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--random-input-len=4000", "--random-range-ratio=0.1"]
    assert bench(url, *flags) == 0
    out, err = capsys.readouterr()
    failed = int(next(line for line in out.splitlines() if line.startswith("Failed requests:")).split()[-1])
    assert 0 < failed < 12
    assert "failed: HTTP 400: " in err
    assert main(["bench", "compare", url, url, *SMALL, *flags, "--rounds=1"]) == 0
    told = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("failed requests"))
    assert told.split()[-2:] == [str(failed)] * 2


@pytest.mark.parametrize(
    ("argv", "code", "message"),
    [
        (["--request-rat=3"], 2, "--request-rat: unknown flag; did you mean --request_rate?"),
        (["--num-prompts=x"], 2, "--num-prompts: invalid count value: 'x'"),
        (["--random-prefix-len=-1"], 2, "--random-prefix-len: must be at least 0, not -1"),
        (["--backend=grpc"], 2, "--backend: invalid choice: 'grpc' "),
        (["--request-rate=0"], 2, "--request-rate: must be more than 0, not 0"),
        (["--goodput", "itl:3"], 2, "--goodput: must be ttft, tpot, e2el, a colon and milliseconds"),
        (["--percentile-metrics=itl,x"], 2, "--percentile-metrics: x is none of ttft, "),
        (["--metric-percentiles=101"], 2, "--metric-percentiles: must be from 0 to 100"),
        (["--random-range-ratio=1"], 2, "--random-range-ratio: must be at least 0 and below 1"),
        (['--random-range-ratio={"input": 0.1}'], 2, "--random-range-ratio: must be at least 0 and below 1"),
        (["--random-range-ratio={"], 2, "--random-range-ratio: invalid range_ratio value: '{'"),
        (["--mix=chat:1,tea:2"], 2, "--mix: tea is no dataset that can be mixed"),
        (["--header", "x"], 2, "--header: must be KEY=VALUE"),
        (["--extra-body=[]"], 2, "--extra-body: must be a JSON object"),
        (["--backend=tgi", "--ignore-eos"], 2, "--ignore-eos: --backend tgi has no such parameter"),
        (["--ramp-up-strategy=linear"], 2, "--ramp-up-strategy: needs "),
        (
            ["--ramp-up-strategy=linear", "--request-rate=3"],
            2,
            "--request-rate and --ramp-up-strategy contradict",
        ),
        (["--plot=x", "--percentile-metrics=itl"], 2, "--plot: needs ttft and tpot among"),
        (["--tokenizer=/no/such/folder", "--dataset-name=sonnet"], 1, ""),
        (["--skip-tokenizer-init", "--backend=tgi"], 1, "--dataset-name random: needs a tokenizer; "),
        (["--num-prompts=0"], 1, "--num-prompts 0: there is nothing to send"),
        (["--save-result", "--result-dir=/dev/null"], 1, "/dev/null/"),
    ],
)
def test_bad_input_is_one_line(
    argv: list[str], code: int, message: str, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench(url, *argv) == code
    assert error_of(capsys).startswith(message)


def test_a_connection_that_is_closed_after_an_answer_is_replaced(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The server says that it keeps connections, and closes each."""
    body = b'data: {"choices": [{"text": "a"}]}\n\ndata: [DONE]\n\n'
    with raw_server(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)) as url:
        assert bench(url, "--model=m", "--max-concurrency=1", "--skip-tokenizer-init") == 0
    assert "Successful requests:                     12        \n" in capsys.readouterr().out
