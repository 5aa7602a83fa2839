// The present request as code: curl, the openai package, and a Vertex endpoint. The key is never part of it.

import { copyText } from "./dom.js";

// What openai's create() takes by name; all else travels in extra_body.
const OPENAI = new Set(
  ("model messages prompt temperature top_p n stop max_tokens presence_penalty frequency_penalty logit_bias seed user " +
    "logprobs top_logprobs response_format stream stream_options").split(" "),
);

const WRITERS = { curl, openai, vertex };

export function openSnippets(dialog, { path, body }, hasKey) {
  const code = dialog.querySelector("#snippet");
  const show = () => {
    const chosen = dialog.querySelector("input:checked").value;
    code.textContent = WRITERS[chosen](path, body, hasKey);
  };
  for (const input of dialog.querySelectorAll("input")) input.onchange = show;
  const button = dialog.querySelector("#snippet-copy");
  button.onclick = async () => {
    await copyText(code.textContent);
    button.textContent = "Copied";
    setTimeout(() => (button.textContent = "Copy"), 1200);
  };
  dialog.querySelector("#snippets-close").onclick = () => dialog.close();
  dialog.onclick = (event) => {
    if (event.target === dialog) dialog.close(); // a click beside it
  };
  show();
  dialog.showModal();
}

const base = () => new URL(".", location.href).href.replace(/\/$/, "");

function curl(path, body, hasKey) {
  const data = JSON.stringify({ ...body, stream: true }, null, 2).replaceAll("'", "'\\''");
  const key = hasKey ? `  -H "Authorization: Bearer $API_KEY" \\\n` : "";
  return `curl -N ${base()}/${path} \\\n  -H 'Content-Type: application/json' \\\n${key}  -d '${data}'`;
}

function openai(path, body, hasKey) {
  const own = Object.entries({ ...body, model: body.model || "any" }).filter(([name]) => OPENAI.has(name));
  const extra = Object.fromEntries(Object.entries(body).filter(([name]) => !OPENAI.has(name)));
  const fields = [...own, ["stream", true], ...(Object.keys(extra).length ? [["extra_body", extra]] : [])];
  const given = fields.map(([name, value]) => `    ${name}=${python(value, "    ")},\n`).join("");
  const chat = path.includes("chat");
  const text = chat ? 'chunk.choices[0].delta.content or ""' : "chunk.choices[0].text";
  return `${hasKey ? "import os\n\n" : ""}from openai import OpenAI

client = OpenAI(base_url="${base()}/v1", api_key=${hasKey ? 'os.environ["API_KEY"]' : '"none"'})
stream = client.${chat ? "chat." : ""}completions.create(
${given})
for chunk in stream:
    if chunk.choices:
        print(${text}, end="", flush=True)
`;
}

function vertex(path, { model, ...body }) {
  const chat = path.includes("chat");
  const instance = chat ? { "@requestFormat": "chatCompletions", ...body } : body;
  const answer = chat ? 'response.predictions["choices"][0]["message"]["content"]' : "response.predictions[0]";
  return `from google.cloud import aiplatform

aiplatform.init(project="PROJECT", location="REGION")
endpoint = aiplatform.Endpoint("ENDPOINT_ID")
response = endpoint.predict(
    instances=[
        ${python(instance, "        ")}
    ],
    use_dedicated_endpoint=True,
)
print(${answer})
`;
}

/** A JSON value as Python writes it. JSON's texts are Python's, too. */
function python(value, indent) {
  if (value === null) return "None";
  if (typeof value === "boolean") return value ? "True" : "False";
  if (typeof value !== "object") return JSON.stringify(value);
  const inner = indent + "    ";
  const items = Array.isArray(value)
    ? value.map((item) => inner + python(item, inner))
    : Object.entries(value).map(([name, item]) => `${inner}${JSON.stringify(name)}: ${python(item, inner)}`);
  const [open, close] = Array.isArray(value) ? "[]" : "{}";
  return items.length ? `${open}\n${items.join(",\n")},\n${indent}${close}` : open + close;
}
