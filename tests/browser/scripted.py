"""A backend whose model says what a test wrote, and waits in the middle of it when it is told to."""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections.abc import Iterable

from hex_llm.frontend.outputs import for_engine
from hex_llm.frontend.requests import Generation
from hex_llm.types import FinishReason, Request, TokenLogprobs, Update
from tests.server.fakes import EOS, FIRST_BYTE, FakeBackend, byte_tokenizer

MAX_PAUSE_S = 20  # a server does not end before its replies
RICH = """## How a KV cache helps

Each new token looks at **all** earlier ones. Without a cache their *keys* and *values* would be computed
again and again; with it one step costs `O(n)`.

1. **Prefill** reads the whole prompt at once.
2. **Decode** adds one token per step:
   - read the cache
   - append one row

| Phase | Bound by | Tokens per step |
|---|:---:|---:|
| Prefill | compute | 512 |
| Decode | memory | 1 |

```python
def decode(cache, token):
    cache.append(project(token))  # a line that is longer than any phone is wide, so that it must scroll
    return attend(token, cache)
```

> A cache trades memory for time.

See [the paper](https://example.org/paper), or averyveryveryverylongwordthatnobodywouldeverwriteinasentence.
"""


class ScriptedBackend(FakeBackend):
    """Says `text`. While `go` is not set it stops after `pause_at` tokens."""

    def __init__(self, text: str = RICH, *, pause_at: int | None = None, ready: bool = True) -> None:
        super().__init__(byte_tokenizer(), ready=ready)
        self.text = text
        self.pause_at = pause_at
        self.go = threading.Event()

    def prompt(self, number: int = -1) -> str:
        """What the model was asked."""
        assert self.tokenizer is not None
        codec = self.tokenizer.codec
        return b"".join(codec.token_bytes(i, True) for i in self.asked[number].prompt_ids).decode()

    async def _feed(self, generation: Generation) -> None:
        for i, update in enumerate(self.updates(for_engine(generation.collector.request))):
            until = time.monotonic() + MAX_PAUSE_S
            while i == self.pause_at and not self.go.is_set() and time.monotonic() < until:
                await asyncio.sleep(0.01)
            generation.add(update)
            await asyncio.sleep(0)

    def updates(self, request: Request) -> Iterable[Update]:
        ids = [*(FIRST_BYTE + byte for byte in self.text.encode()), EOS]
        most = request.params.max_tokens or len(ids)
        for i, token_id in enumerate(ids[:most]):
            for index in range(request.params.num_choices):
                update = Update(request.request_id, index, [token_id], num_cached=8)
                if request.params.logprobs is not None:
                    update.logprobs = [self.logprobs(i, token_id, request.params.logprobs)]
                if token_id == EOS:
                    update.finish_reason = FinishReason.STOP
                elif i + 1 == most:
                    update.finish_reason = FinishReason.LENGTH
                yield update

    @staticmethod
    def logprobs(position: int, token_id: int, num_top: int) -> TokenLogprobs:
        """The first token is sure, the tenth nearly impossible, and so on."""
        share = 1 - position % 10 / 10.5
        top = [
            token_id,
            *(FIRST_BYTE + ord(letter) for letter in "aeiou" if FIRST_BYTE + ord(letter) != token_id),
        ]
        shares = [share, *((1 - share) / 2**k + 1e-9 for k in range(1, len(top)))]
        return TokenLogprobs(math.log(share), 1, top[:num_top], [math.log(one) for one in shares[:num_top]])
