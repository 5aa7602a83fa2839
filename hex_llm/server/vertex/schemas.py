"""The bodies that Vertex AI's routes take."""

from __future__ import annotations

from typing import Any

from hex_llm.server.common.body import (
    Whole,
)
from hex_llm.server.common.sampling_fields import Prompt, Sampling


class GenerateRequest(Sampling):
    """One instance of a Vertex prediction."""

    prompt: Prompt
    logprobs: Whole | None = None
    echo: bool | None = None
    raw_response: bool = False

    def sampled(self) -> dict[str, Any]:
        sent = super().sampled()
        # A raw response tells each output's cumulative log-probability.
        return {"logprobs": 0, **sent} if self.raw_response else sent
