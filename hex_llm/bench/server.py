"""Questions to a server beside the load: is it there, which model, its tokenizer, what it has counted."""

from __future__ import annotations

import json
import socket
from collections import defaultdict
from collections.abc import Mapping
from http.client import HTTPException
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit
from urllib.request import HTTPSHandler, ProxyHandler, Request, build_opener

from hex_llm.bench.client import tls_context
from hex_llm.errors import ConfigError, HexError, one_line

TIMEOUT_S = 30


class Server:
    """One question at a time, each over a connection of its own."""

    def __init__(self, base_url: str, headers: Mapping[str, str], *, insecure: bool = False) -> None:
        if urlsplit(base_url).scheme not in ("http", "https") or not urlsplit(base_url).hostname:
            raise ConfigError(f"{one_line(base_url)}: no URL of a server; it begins with http:// or https://")
        self.base_url, self.headers, self.insecure = base_url.rstrip("/"), dict(headers), insecure
        tls = [HTTPSHandler(context=tls_context(insecure))] if base_url.startswith("https:") else []
        # The load goes straight to the server, so what is asked beside it uses no proxy either.
        self._opener = build_opener(ProxyHandler({}), *tls)

    def ask(self, path: str, body: Any = None) -> bytes:
        """The answer to a GET or, with a body, to a POST; raises HexError with one line."""
        url, data = self.base_url + path, None if body is None else json.dumps(body).encode()
        request = Request(url, data, {**self.headers, "content-type": "application/json"})
        try:
            with self._opener.open(request, timeout=TIMEOUT_S) as response:
                answer: bytes = response.read()
                return answer
        except HTTPError as error:
            raise HexError(f"{url}: HTTP {error.code} {error.reason}") from error
        except URLError as error:
            raise HexError(
                f"{self.base_url} is unreachable: {error.reason}; is the server running?"
            ) from error
        except (OSError, HTTPException) as error:
            raise HexError(
                f"{url}: no HTTP answer: {type(error).__name__}: {one_line(str(error))}"
            ) from error

    def first_model(self) -> str:
        try:
            return str(json.loads(self.ask("/v1/models"))["data"][0]["id"])
        except (ValueError, KeyError, IndexError, TypeError) as error:
            raise HexError(f"{self.base_url}/v1/models names no model; name one with --model") from error

    def check_reachable(self) -> None:
        """Raises HexError where nobody listens."""
        url = urlsplit(self.base_url)
        try:
            port = url.port or (443 if url.scheme == "https" else 80)
            socket.create_connection((url.hostname, port), timeout=TIMEOUT_S).close()
        except (OSError, ValueError) as error:
            raise HexError(f"{self.base_url} is unreachable: {error}; is the server running?") from error

    def is_reachable(self) -> bool:
        try:
            self.check_reachable()
        except HexError:
            return False
        return True

    def counters(self) -> dict[str, float]:
        """The numbers of /metrics, added up over their labels; none where there is no such page."""
        totals: defaultdict[str, float] = defaultdict(float)
        try:
            lines = self.ask("/metrics").decode("utf-8", "replace").splitlines()
            for line in lines:
                if line and not line.startswith("#"):
                    name, _, value = line.rpartition(" ")
                    totals[name.partition("{")[0]] += float(value)
        except (HexError, ValueError):
            return {}
        return totals


def server_side(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, float]:
    """What the server has counted between two looks at its counters, as far as it counts these things."""

    def grown(name: str) -> float | None:
        return after[name] - before.get(name, 0) if name in after else None

    def count(name: str) -> int | None:
        return None if (growth := grown(name)) is None else int(growth)

    def share(part: float | None, whole: float | None) -> float | None:
        return None if part is None or not whole else part / whole

    padding, tokens = count("hex_llm:padding_tokens_total"), grown("vllm:iteration_tokens_total_sum")
    hits, queries = grown("vllm:prefix_cache_hits_total"), grown("vllm:prefix_cache_queries_total")
    queued_s, num_queued = (grown(f"vllm:request_queue_time_seconds_{part}") for part in ("sum", "count"))
    queue_time = share(queued_s, num_queued)
    facts = {
        "engine_steps": count("hex_llm:engine_steps_total"),
        "padding_tokens": padding,
        "padding_share": None if padding is None else share(padding, padding + (tokens or 0)),
        "late_compiles": count("hex_llm:late_compiles_total"),
        "preemptions": count("vllm:num_preemptions_total"),
        "prefix_cache_hit_rate": share(hits, queries),
        "mean_queue_time_ms": None if queue_time is None else queue_time * 1000,
    }
    return {name: value for name, value in facts.items() if value is not None}
