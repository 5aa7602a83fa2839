"""LLM: the offline front. `LLM(model=..., **flags).generate(prompts, params)`."""

from __future__ import annotations

from collections.abc import Sequence as ListLike
from pathlib import Path
from typing import Any

from tqdm import tqdm

from hex_llm.config import EngineConfig
from hex_llm.engine.engine import Engine
from hex_llm.engine.runner import keep_compiled
from hex_llm.errors import ConfigError, InvalidRequest
from hex_llm.flags import engine_config_from_kwargs
from hex_llm.scheduling.sequence import Sequence
from hex_llm.text.chat import encode_chat
from hex_llm.text.tokenizer import Tokenizer
from hex_llm.types import CompletionOutput, RequestOutput, SamplingParams
from hex_llm.weights.model_files import ModelFiles, open_model, open_tokenizer
from hex_llm.weights.source import fetch

Params = SamplingParams | ListLike[SamplingParams] | None


class LLM:
    """A model in this process. Flags are keyword arguments under their own names; no model: the default one.

    Shapes are compiled when they first occur; `warmup=True` compiles them all at the start.
    """

    def __init__(self, model: str | Path | None = None, **flags: Any) -> None:
        named = {} if model is None else {"model": str(model)}
        self.config = engine_config_from_kwargs(**{"warmup": False, **named, **flags})
        path = _fetch(self.config, self.config.model, config_only=self.config.load_format == "dummy")
        files = open_model(
            path,
            trust_remote_code=self.config.trust_remote_code,
            config_only=self.config.load_format == "dummy",
        )
        self.tokenizer = None if self.config.skip_tokenizer_init else _open_tokenizer(self.config, files)
        keep_compiled(self.config.cache_dir)
        self.engine = Engine(self.config, files, progress=True)
        if self.config.warmup:
            self.engine.warm_up(progress=True)

    def generate(
        self,
        prompts: str | ListLike[str] | None = None,
        sampling_params: Params = None,
        *,
        prompt_token_ids: ListLike[ListLike[int]] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """One output for each prompt, in order; `prompts` are texts, `prompt_token_ids` need no tokenizer."""
        texts: list[str | None]
        if (prompts is None) == (prompt_token_ids is None):
            raise InvalidRequest("give either prompts or prompt_token_ids", "prompts")
        if prompt_token_ids is not None:
            texts, ids = [None] * len(prompt_token_ids), [list(p) for p in prompt_token_ids]
        else:
            assert prompts is not None
            texts = [prompts] if isinstance(prompts, str) else list(prompts)
            ids = [self._tokenizer().encode(str(text)) for text in texts]
        return self._run(texts, ids, sampling_params, use_tqdm)

    def chat(
        self,
        messages: ListLike[Any],
        sampling_params: Params = None,
        *,
        use_tqdm: bool = True,
        **options: Any,
    ) -> list[RequestOutput]:
        """One conversation, or a list of them; `options` go to the chat template."""
        talks = [messages] if messages and isinstance(messages[0], dict) else messages
        tokenizer = self._tokenizer()
        prompts = [encode_chat(tokenizer, talk, **options) for talk in talks]
        texts, ids = [text for text, _ in prompts], [ids for _, ids in prompts]
        return self._run(texts, ids, sampling_params, use_tqdm)

    def _run(
        self, texts: ListLike[str | None], ids: list[list[int]], params: Params, use_tqdm: bool
    ) -> list[RequestOutput]:
        sequences = self._add(ids, params)
        with tqdm(total=len(sequences), desc="Prompts", disable=not use_tqdm) as bar:
            while touched := self.engine.step():
                bar.update(sum(s.finish_reason is not None for s in touched))
        return [self._output(sequence, text) for sequence, text in zip(sequences, texts, strict=True)]

    def _add(self, ids: list[list[int]], params: Params) -> list[Sequence]:
        """All of the requests, or none of them."""
        each = params if isinstance(params, ListLike) else [params or SamplingParams()] * len(ids)
        if len(each) != len(ids):
            raise InvalidRequest(f"{len(each)} sampling_params for {len(ids)} prompts", "sampling_params")
        sequences = [
            self.engine.prepare(f"llm-{i}", prompt, own)
            for i, (prompt, own) in enumerate(zip(ids, each, strict=True))
        ]
        for sequence in sequences:
            self.engine.add(sequence)
        return sequences

    def _output(self, sequence: Sequence, prompt: str | None) -> RequestOutput:
        ids, params = sequence.output_ids, sequence.params
        text = ""
        if self.tokenizer is not None:
            text = self.tokenizer.decode(ids, skip_special_tokens=params.skip_special_tokens)
        output = CompletionOutput(0, ids, text, sequence.finish_reason)
        return RequestOutput(sequence.request_id, sequence.prompt_ids, [output], prompt)

    def _tokenizer(self) -> Tokenizer:
        if self.tokenizer is None:
            raise ConfigError("skip_tokenizer_init=True: give prompt_token_ids instead of texts")
        return self.tokenizer


def _fetch(config: EngineConfig, name: str | None, **only: bool) -> Path:
    return fetch(name, revision=config.revision, token=config.hf_token, cache_dir=config.cache_dir, **only)


def _open_tokenizer(config: EngineConfig, files: ModelFiles) -> Tokenizer:
    if config.tokenizer is None:
        return files.open_tokenizer(config.tokenizer_mode)
    return open_tokenizer(_fetch(config, config.tokenizer, tokenizer_only=True), config.tokenizer_mode)
