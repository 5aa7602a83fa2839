"""A function that the model calls, its result, and the answer. Start a server first (`make serve`), then
python examples/tools.py [URL]"""

import json
import sys

from openai import OpenAI

TOOL = {
    "type": "function",
    "function": {
        "name": "temperature",
        "description": "The temperature in a city, in degrees Celsius.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
client = OpenAI(
    base_url=f"{sys.argv[1] if len(sys.argv) > 1 else 'http://localhost:7080'}/v1", api_key="none"
)
messages = [{"role": "user", "content": "How warm is it in Paris?"}]
# "required": small models seldom call a function of their own accord.
asked = client.chat.completions.create(
    model="default", messages=messages, tools=[TOOL], tool_choice="required", temperature=0, max_tokens=64
)
call = asked.choices[0].message.tool_calls[0]
print(f"it calls {call.function.name}({call.function.arguments})")
# Not null, which some chat templates cannot render.
messages.append({"role": "assistant", "content": "", "tool_calls": [call.model_dump()]})
messages.append({"role": "tool", "tool_call_id": call.id, "content": json.dumps({"celsius": 21})})
reply = client.chat.completions.create(model="default", messages=messages, temperature=0, max_tokens=64)
print(reply.choices[0].message.content)
