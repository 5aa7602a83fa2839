"""An answer that conforms to a JSON schema, token by token. Start a server first (`make serve`), then
python examples/structured_output.py [URL]"""

import json
import sys

from openai import OpenAI

SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "country": {"type": "string"}},
    "required": ["city", "country"],
    "additionalProperties": False,
}
client = OpenAI(
    base_url=f"{sys.argv[1] if len(sys.argv) > 1 else 'http://localhost:7080'}/v1", api_key="none"
)
reply = client.chat.completions.create(
    model="default",
    messages=[{"role": "user", "content": "What is the capital of France, and of which country is it?"}],
    response_format={"type": "json_schema", "json_schema": {"name": "place", "schema": SCHEMA}},
    temperature=0,
    max_tokens=64,
)
print(json.loads(reply.choices[0].message.content or ""))
