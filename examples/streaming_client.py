"""A chat that is shown while it is written. Start a server first (`make serve`), then
python examples/streaming_client.py [URL]"""

import sys

from openai import OpenAI

client = OpenAI(
    base_url=f"{sys.argv[1] if len(sys.argv) > 1 else 'http://localhost:7080'}/v1", api_key="none"
)
messages = [{"role": "user", "content": "Tell me a short story about a lighthouse."}]
stream = client.chat.completions.create(model="default", messages=messages, max_tokens=128, stream=True)
for chunk in stream:
    for choice in chunk.choices:
        print(choice.delta.content or "", end="", flush=True)
print()
