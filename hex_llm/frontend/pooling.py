"""Embeddings and scores, of what an engine has pooled. Both fronts use it, as outputs.py. No jax."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain

import numpy as np
import numpy.typing as npt

from hex_llm.errors import InvalidRequest
from hex_llm.sampling_params import SamplingParams
from hex_llm.text.chat import encode_chat
from hex_llm.text.tokenizer import Tokenizer
from hex_llm.types import Pooling, RequestOutput

Vector = npt.NDArray[np.float32]
Prompts = Sequence[str | list[int]]

# As Qwen3's rerankers were trained.
JUDGE = (
    "Judge whether the Document meets the requirements based on the Query and the Instruct provided. "
    'Note that the answer can only be "yes" or "no".'
)
TASK = "Given a web search query, retrieve relevant passages that answer the query"


def pooling_params(
    pooling: Pooling,
    truncate_prompt_tokens: int | None = None,
    truncation_side: str = "left",
    *,
    embeds: bool = False,
) -> SamplingParams:
    """One token is always chosen; nobody looks at it."""
    if embeds and pooling.kind == "tokens":
        raise InvalidRequest("this model scores pairs of texts, and makes no embeddings", "model")
    return SamplingParams(
        temperature=0.0,
        max_tokens=1,
        allowed_token_ids=pooling.token_ids or None,
        truncate_prompt_tokens=truncate_prompt_tokens,
        truncation_side=truncation_side,
        pooling=pooling.kind,
    )


def check_dimensions(dimensions: int | None, pooling: Pooling) -> None:
    if dimensions is not None and not 1 <= dimensions <= pooling.size:
        raise InvalidRequest.at("dimensions", f"must be a whole number from 1 to {pooling.size}")


def embedding(output: RequestOutput, pooling: Pooling, dimensions: int | None = None) -> Vector:
    """Its first `dimensions`; of length 1, if the model's are."""
    vector = np.frombuffer(output.pooled, np.float32)[:dimensions]
    return unit(vector) if pooling.normalize else vector


def unit(vector: Vector) -> Vector:
    return vector / np.maximum(np.linalg.norm(vector), np.float32(1e-12))


def scoring(
    pooling: Pooling, tokenizer: Tokenizer | None, pairs: Sequence[tuple[str, str]]
) -> tuple[Prompts, Callable[[Sequence[RequestOutput]], list[float]]]:
    """What must be pooled to score pairs of a query and a document, and how the scores come of that: how
    likely a reranker says yes; of other models, the cosine between both embeddings."""
    if pooling.kind == "tokens":
        if tokenizer is None:
            raise InvalidRequest("this server has no tokenizer (--skip_tokenizer_init)", "model")
        prompts = [encode_chat(tokenizer, _question(*pair), enable_thinking=False)[1] for pair in pairs]
        return prompts, lambda outputs: [_probability_of_yes(one) for one in outputs]
    texts = list(dict.fromkeys(chain(*pairs)))

    def cosines(outputs: Sequence[RequestOutput]) -> list[float]:
        units = {text: unit(embedding(one, pooling)) for text, one in zip(texts, outputs, strict=True)}
        return [float(units[query] @ units[document]) for query, document in pairs]

    return texts, cosines


def _question(query: str, document: str) -> list[dict[str, str]]:
    asked = f"<Instruct>: {TASK}\n<Query>: {query}\n<Document>: {document}"
    return [{"role": "system", "content": JUDGE}, {"role": "user", "content": asked}]


def _probability_of_yes(output: RequestOutput) -> float:
    no, yes = np.frombuffer(output.pooled, np.float32)
    return float(1 / (1 + np.exp(np.float64(no) - yes)))
