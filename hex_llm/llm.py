"""LLM: the offline front. `LLM(model=..., **flags).generate(prompts, params)`."""

from __future__ import annotations

from collections.abc import Sequence as ListLike
from functools import partial
from pathlib import Path
from typing import Any

from tqdm import tqdm

from hex_llm.admission import make_request
from hex_llm.engine.loading import load_engine
from hex_llm.errors import ConfigError, InvalidRequest
from hex_llm.flag_fields import MAX_INT
from hex_llm.flags import engine_config_from_kwargs
from hex_llm.frontend.outputs import OutputCollector, for_engine, raise_failure
from hex_llm.frontend.pooling import check_dimensions, embedding, pooling_params
from hex_llm.heap import kept
from hex_llm.sampling_params import SamplingParams
from hex_llm.text.chat import encode_chat
from hex_llm.text.tokenizer import Tokenizer
from hex_llm.types import EmbeddingOutput, EmbeddingRequestOutput, RequestOutput, Update
from hex_llm.weights.adapter_source import AdapterNames, local_or_remote

Adapters = str | Path | ListLike[str | Path | None] | None
Params = SamplingParams | ListLike[SamplingParams] | None


class LLM:
    """A model in this process. Flags are keyword arguments under their own names; no model: the default one.

    Shapes are compiled when they first occur; `warmup=True` compiles them all at the start.

        llm = LLM("Qwen/Qwen2.5-1.5B-Instruct", max_model_len=4096)
        [output] = llm.chat([{"role": "user", "content": "Hello!"}], SamplingParams(max_tokens=64))
        print(output.outputs[0].text)
    """

    def __init__(self, model: str | Path | None = None, **flags: Any) -> None:
        named = {} if model is None else {"model": str(model)}
        # Whoever calls has all prompts in his own memory already: there is nobody to turn away.
        defaults = {"warmup": False, "max_concurrent_requests": MAX_INT, "allow_priority": True}
        anywhere = {"allowed_lora_sources": "gs://,hf://,/"}  # likewise
        together = {"target_step_ms": MAX_INT}  # nor does anybody read tokens as they come
        self.config = engine_config_from_kwargs(**{**defaults, **anywhere, **together, **named, **flags})
        if (num_replicas := self.config.data_parallel_size) > 1:
            raise ConfigError(
                f"--data_parallel_size={num_replicas}: LLM has one replica, in this process; "
                "the server has several"
            )
        if self.config.coordinator_address is not None:
            raise ConfigError("--coordinator_address: LLM has one host; the server has several")
        self._adapters = AdapterNames(self.config)
        self.engine, self.tokenizer = load_engine(self.config, progress=True)

    def generate(
        self,
        prompts: str | ListLike[str] | None = None,
        sampling_params: Params = None,
        *,
        prompt_token_ids: ListLike[ListLike[int]] | None = None,
        priority: ListLike[int] | None = None,
        cache_salt: str = "",
        lora_request: Adapters = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """One output for each prompt, in order; `prompts` are texts, `prompt_token_ids` need no tokenizer.

        `lora_request`: an adapter's folder, its id on the hub or its name (--lora_modules), for all prompts;
        or a list with one for each, None for the model itself.
        """
        texts: list[str | None]
        ids: list[ListLike[int]]
        if (prompts is None) == (prompt_token_ids is None):
            raise InvalidRequest("give either prompts or prompt_token_ids", "prompts")
        if prompt_token_ids is not None:
            texts, ids = [None] * len(prompt_token_ids), list(prompt_token_ids)
        else:
            assert prompts is not None
            texts = [prompts] if isinstance(prompts, str) else list(prompts)
            ids = [self._tokenizer().encode(str(text)) for text in texts]
        order = [0] * len(ids) if priority is None else priority
        collectors = self._collectors(texts, ids, sampling_params, order, cache_salt, lora_request)
        return self._run(collectors, use_tqdm)

    def chat(
        self,
        messages: ListLike[Any],
        sampling_params: Params = None,
        *,
        lora_request: Adapters = None,
        use_tqdm: bool = True,
        **options: Any,
    ) -> list[RequestOutput]:
        """One conversation, or a list of them; `options` go to the chat template."""
        talks = [messages] if messages and isinstance(messages[0], dict) else messages
        tokenizer = self._tokenizer()
        prompts = [encode_chat(tokenizer, talk, **options) for talk in talks]
        texts, ids = [text for text, _ in prompts], [ids for _, ids in prompts]
        collectors = self._collectors(texts, ids, sampling_params, [0] * len(ids), adapters=lora_request)
        return self._run(collectors, use_tqdm)

    def embed(
        self,
        prompts: str | ListLike[str] | None = None,
        *,
        prompt_token_ids: ListLike[ListLike[int]] | None = None,
        dimensions: int | None = None,
        use_tqdm: bool = True,
    ) -> list[EmbeddingRequestOutput]:
        """One embedding for each prompt, in order; of its first `dimensions`."""
        how = self.engine.limits.pooling
        check_dimensions(dimensions, how)
        params = pooling_params(how, embeds=True)
        outputs = self.generate(prompts, params, prompt_token_ids=prompt_token_ids, use_tqdm=use_tqdm)
        for output in outputs:
            raise_failure(output.outputs[0])
        return [
            EmbeddingRequestOutput(
                one.request_id,
                one.prompt_token_ids,
                EmbeddingOutput(embedding(one, how, dimensions).tolist()),
            )
            for one in outputs
        ]

    def _collectors(
        self,
        texts: ListLike[str | None],
        ids: ListLike[ListLike[int]],
        params: Params,
        priority: ListLike[int],
        cache_salt: str = "",
        adapters: Adapters = None,
    ) -> list[OutputCollector]:
        """One for each prompt; nothing has begun yet, so a bad one leaves nothing behind."""
        each = params if isinstance(params, ListLike) else [params or SamplingParams()] * len(ids)
        own = [adapters] * len(ids) if isinstance(adapters, str | Path | None) else adapters
        for name, values in (("sampling_params", each), ("priority", priority), ("lora_request", own)):
            if len(values) != len(ids):
                raise InvalidRequest(f"{len(values)} {name} for {len(ids)} prompts", name)
        make = partial(
            make_request, limits=self.engine.limits, tokenizer=self.tokenizer, cache_salt=cache_salt
        )
        refs = [None if one is None else self._adapters.resolve(local_or_remote(str(one))) for one in own]
        requests = [
            make(f"llm-{i}", ids[i], each[i], priority=priority[i], adapter=refs[i]) for i in range(len(ids))
        ]
        pairs = zip(requests, texts, strict=True)
        return [OutputCollector(request, self.tokenizer, text) for request, text in pairs]

    def _run(self, collectors: list[OutputCollector], use_tqdm: bool) -> list[RequestOutput]:
        by_id = {collector.request.request_id: collector for collector in collectors}
        try:
            for collector in collectors:
                self.engine.add(for_engine(collector.request))
            with kept(), tqdm(total=len(collectors), desc="Prompts", disable=not use_tqdm) as bar:
                while self.engine.has_work:
                    bar.update(sum(self._take(by_id[u.request_id], u) for u in self.engine.step()))
        finally:  # an error, or the user's Ctrl-C, must not leave requests to the next call
            for request_id in by_id:
                self.engine.abort(request_id)
            while self.engine.has_work:
                self.engine.step()
            self.engine.check_idle()
        return [collector.output() for collector in collectors]

    def _take(self, collector: OutputCollector, update: Update) -> bool:
        """Whether the request has ended with this update."""
        was_finished = collector.finished
        if collector.add(update):
            self.engine.stop(update.request_id, update.index)
        return collector.finished and not was_finished

    def _tokenizer(self) -> Tokenizer:
        if self.tokenizer is None:
            raise ConfigError("skip_tokenizer_init=True: give prompt_token_ids instead of texts")
        return self.tokenizer
