"""One of several hosts, as a process: `python -m tests.parallel.one_host FLAGS REQUESTS`, both as JSON. The
leader prints what each request brought."""

from __future__ import annotations

import json
import logging
import sys

from hex_llm.config import EngineConfig
from hex_llm.engine.loading import load_engine
from hex_llm.engine.worker import end_without_host
from hex_llm.errors import HexError
from hex_llm.parallel.links import END, Follower
from hex_llm.sampling_params import SamplingParams
from tests.engine.stepping import drive, request


def main(flags: str, requests: str) -> None:
    logging.basicConfig(level=logging.WARNING)
    try:
        engine, _ = load_engine(EngineConfig(**json.loads(flags)))
    except HexError as error:
        raise SystemExit(f"{type(error).__name__}: {error}") from error
    hosts = engine.hosts
    assert hosts is not None
    hosts.on_loss(end_without_host)
    if isinstance(hosts, Follower):
        while (frame := hosts.socket.recv()) != END:
            engine.follow(frame)
    else:
        asked = [request(name, ids, SamplingParams(**params)) for name, ids, params in json.loads(requests)]
        told = drive(engine, asked, between=lambda i: print("step", i, file=sys.stderr, flush=True))
        tokens = {f"{name}.{i}": [u.token_ids for u in updates] for (name, i), updates in told.items()}
        print(json.dumps(tokens))
    hosts.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
