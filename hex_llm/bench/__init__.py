"""`hex-llm bench`: what a server, or the engine by itself, does under a load.

Commands, flags, definitions, the block of results and the keys of the JSON are those of `vllm bench`. `serve`
and `compare` are clients of any server and know nothing of the engine:

    arguments -> datasets -> load (backends over client) -> results, plot

`latency` and `throughput` (`offline`) run an `LLM` in this process.
"""
