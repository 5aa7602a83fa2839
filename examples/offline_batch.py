"""Many prompts at once, without a server: python examples/offline_batch.py [MODEL]"""

import sys

from hex_llm import LLM, SamplingParams

llm = LLM(sys.argv[1] if len(sys.argv) > 1 else None, max_model_len=512, max_decode_seqs=8)
questions = ["What is the capital of France?", "Name three colours.", "How many legs has a spider?"]
chats = [[{"role": "user", "content": question}] for question in questions]
for question, output in zip(
    questions, llm.chat(chats, SamplingParams(temperature=0, max_tokens=32)), strict=True
):
    print(f"{question} -> {output.outputs[0].text}")
