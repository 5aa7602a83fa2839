"""hex_llm: an open LLM server on JAX/XLA for TPU, GPU and CPU."""

from typing import TYPE_CHECKING, Any

from hex_llm.sampling_params import SamplingParams, StructuredOutputs
from hex_llm.types import CompletionOutput, RequestOutput

if TYPE_CHECKING:
    from hex_llm.llm import LLM

__version__ = "0.1.0"
__all__ = ["LLM", "CompletionOutput", "RequestOutput", "SamplingParams", "StructuredOutputs", "__version__"]


def __getattr__(name: str) -> Any:
    """LLM brings jax along, which the API process and the command line must not pay for."""
    if name == "LLM":
        from hex_llm.llm import LLM

        return LLM
    raise AttributeError(f"module 'hex_llm' has no attribute {name!r}")
