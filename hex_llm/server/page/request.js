// What is asked for, as a request: the path and the body of a conversation or a raw prompt.

const NUM_TOP = 5; // alternatives of each token

/** `turns` end with the user's; see chat.js for their shape. Throws an Error that names an unreadable knob. */
export function requestOf(mode, turns, knobs, model) {
  const fields = knobs.fields();
  const insight = knobs.values.logprobs;
  if (mode === "raw") {
    const prompt = turns.at(-1)?.text ?? "";
    return { path: "v1/completions", body: { model, prompt, ...fields, ...(insight ? { logprobs: NUM_TOP } : {}) } };
  }
  const system = knobs.values.system ? [{ role: "system", content: knobs.values.system }] : [];
  const messages = [...system, ...turns.map(messageOf).filter(Boolean)];
  const logprobs = insight ? { logprobs: true, top_logprobs: NUM_TOP } : {};
  return { path: "v1/chat/completions", body: { model, messages, ...fields, ...logprobs } };
}

/** The same request for another adapter; “none”: for the model itself. */
export function withAdapter({ path, body: { dynamic_lora: _, ...body } }, name) {
  return { path, body: name === "none" ? body : { ...body, dynamic_lora: name } };
}

export const streamed = (body) => ({ ...body, stream: true, stream_options: { include_usage: true } });

function messageOf(turn) {
  if (turn.role === "user") return { role: "user", content: turn.text };
  const { text } = turn.choices[turn.chosen];
  // An answer that failed before its first word is no part of the conversation.
  return text && { role: "assistant", content: text };
}
