// The settings: what there is to set, their inputs in the panel, and the request fields that they become.
// What is not set is not sent, so the server's own defaults count; placeholders tell them.

import { h, iconButton, store, stored } from "./dom.js";

const lines = (text) => text.split("\n").filter((line) => line !== "");
const ids = (text) => text.split(/[\s,]+/).filter(Boolean).map((id) => whole(id));

function whole(text) {
  if (!/^-?\d+$/.test(text)) throw new Error(`“${text}” is no whole number`);
  return Number(text);
}

function number(text) {
  if (!text.trim() || !Number.isFinite(Number(text))) throw new Error(`“${text}” is no number`);
  return Number(text);
}

function json(text) {
  try {
    return JSON.parse(text);
  } catch (error) {
    throw new Error(`no valid JSON: ${error.message}`);
  }
}

function object(text) {
  const value = json(text);
  if (value === null || typeof value !== "object" || Array.isArray(value)) throw new Error("must be a JSON object");
  return value;
}

function bias(text) {
  const pairs = lines(text).map((line) => /^\s*(\d+)\s*[:=\s]\s*(-?[\d.]+)\s*$/.exec(line) ?? line);
  const wrong = pairs.find((pair) => typeof pair === "string");
  if (wrong) throw new Error(`“${wrong}” is not like “1234: -5”`);
  return Object.fromEntries(pairs.map(([, id, value]) => [id, number(value)]));
}

const FORMATS = {
  json_object: ["Any JSON object", "", () => ({ response_format: { type: "json_object" } })],
  json_schema: ["JSON schema", '{"type": "object", "properties": {"name": {"type": "string"}}}', (text) => ({
    response_format: { type: "json_schema", json_schema: { name: "answer", schema: object(text) } },
  })],
  regex: ["Regular expression", "(yes|no), because .{10,80}\\.", (text) => ({ structured_outputs: { regex: text } })],
  choice: ["One of these lines", "yes\nno\nperhaps", (text) => ({ structured_outputs: { choice: lines(text) } })],
  grammar: ["Grammar", 'start: "yes" | "no"', (text) => ({ structured_outputs: { grammar: text } })],
};

const slider = (name, label, initial, min, max, step, hint) => ({ name, label, initial, min, max, step, hint, read: number });
const count = (name, label, initial, hint, min = 0) => ({ name, label, initial, min, step: 1, hint, read: whole });
const area = (name, label, initial, hint, read) => ({ name, label, initial, hint, read, area: true });
const check = (name, label, hint, value = true) => ({ name, label, hint, check: true, read: () => value });

/** Sections of knobs. One without `read` is no request field by itself. */
export const SECTIONS = [
  ["Instructions", [
    { name: "system", label: "System prompt", area: true, initial: "You are a helpful assistant.", hint: "Before the conversation; not for raw prompts." },
  ]],
  ["Sampling", [
    slider("temperature", "Temperature", "1", 0, 2, 0.05, "Higher is more varied; 0 takes the likeliest."),
    slider("top_p", "Top p", "1", 0, 1, 0.01, "The likeliest tokens with this total share."),
    count("top_k", "Top k", "all", "Only so many of the likeliest tokens."),
    slider("min_p", "Min p", "0", 0, 1, 0.01, "At least this likely, next to the likeliest."),
    slider("typical_p", "Typical p", "1", 0, 1, 0.01, "The most typical tokens with this total share."),
    count("seed", "Seed", "random", "Same seed and settings: same answer.", null),
    count("n", "Answers", "1", "How many answers to make at once.", 1),
  ]],
  ["Length and end", [
    count("max_tokens", "Max tokens", "model’s limit", "Unset: up to the model’s limit; 16 for raw prompts.", 1),
    count("min_tokens", "Min tokens", "0", "No end before so many tokens."),
    area("stop", "Stop at", "one text per line", "The answer ends before any of these.", lines),
    area("stop_token_ids", "Stop token ids", "1, 2", "The answer ends at any of these tokens.", ids),
    check("include_stop_str_in_output", "Show stop text", "Leaves the text that ended the answer in it."),
    check("ignore_eos", "Ignore end token", "Goes on until max tokens."),
  ]],
  ["Penalties and bias", [
    slider("presence_penalty", "Presence", "0", -2, 2, 0.1, "Against tokens that the answer already has."),
    slider("frequency_penalty", "Frequency", "0", -2, 2, 0.1, "The same, for each time that it has them."),
    slider("repetition_penalty", "Repetition", "1", 0.5, 2, 0.05, "Above 1: against all earlier tokens."),
    area("logit_bias", "Logit bias", "1234: -5", "Token id and what its logit gets, one per line.", bias),
    area("bad_words", "Bad words", "one per line", "Texts that are never written.", lines),
    area("allowed_token_ids", "Allowed token ids", "all", "No other tokens are written.", ids),
  ]],
  ["Format", [
    { name: "format", label: "The answer must be", hint: "The server holds the model to it.", options: FORMATS },
    { name: "format_text", label: "", area: true, hint: "" },
    check("skip_special_tokens", "Show special tokens", "Such as the end token, as text.", false),
  ]],
  ["Adapter", [
    area("dynamic_lora", "LoRA adapter", "none", "Its name, gs://…, or its id on the hub, where the server takes them.", (text) => text.trim()),
    { name: "compare_lora", label: "Compare with", area: true, initial: "nothing", hint: "A second adapter, or “none”: both answer, side by side; the chat goes on from the first." },
  ]],
  ["Insight", [
    { name: "logprobs", label: "Token probabilities", check: true, hint: "Tints every token; hover for its alternatives." },
  ]],
  ["Connection", [
    { name: "key", label: "API key", secret: true, initial: "none", hint: "Forgotten when this tab is closed." },
    count("priority", "Priority", "0", "Lower is served earlier.", null),
    count("truncate_prompt_tokens", "Truncate prompt", "no", "Keep only its last so many tokens; -1: what fits.", -1),
    area("extra", "Other fields", '{"user": "me"}', "Any more request fields, as a JSON object.", object),
  ]],
];
const KNOBS = SECTIONS.flatMap(([, knobs]) => knobs);

export class Knobs extends EventTarget {
  /** `values` has the text of every knob that is set, or true. "change" is sent after each change. */
  constructor(container) {
    super();
    this.values = stored("hex.knobs", {});
    this.defaults = {};
    this.container = container;
    this.draw();
  }

  /** By name: what the server takes where a request says nothing. */
  setDefaults(defaults) {
    if (JSON.stringify(defaults) === JSON.stringify(this.defaults)) return;
    this.defaults = defaults;
    this.draw();
  }

  /** The request fields; an Error that names the knob where one cannot be read. */
  fields() {
    let found = {};
    for (const knob of KNOBS) {
      const value = this.values[knob.name];
      if (value === undefined || !(knob.read || knob.options)) continue;
      try {
        const read = knob.options ? FORMATS[value][2](this.values.format_text ?? "") : { [knob.name]: knob.read(value) };
        found = { ...found, ...(knob.name === "extra" ? read.extra : read) };
      } catch (error) {
        throw new Error(`${knob.label}: ${error.message}.`);
      }
    }
    return found;
  }

  set(name, value) {
    if (value === "" || value === false || value === undefined) delete this.values[name];
    else this.values[name] = value;
    store("hex.knobs", this.values);
    this.dispatchEvent(new Event("change"));
  }

  reset() {
    const { key } = this.values;
    this.values = {};
    this.set("key", key);
    this.draw();
  }

  focus(name) {
    const input = this.container.querySelector(`[name=${name}]`);
    input.closest("details").open = true;
    input.focus();
  }

  draw() {
    const open = new Set(stored("hex.open", ["Instructions", "Sampling", "Insight"]));
    this.container.replaceChildren(
      ...SECTIONS.map(([title, knobs]) => {
        const remember = (event) => {
          open[event.target.open ? "add" : "delete"](title);
          store("hex.open", [...open]);
        };
        const rows = knobs.map((knob) => this.row({ ...knob, initial: this.defaults[knob.name] ?? knob.initial }));
        return h("details", { open: open.has(title), ontoggle: remember }, h("summary", {}, title), ...rows);
      }),
    );
  }

  row(knob) {
    if (knob.name === "format_text") return this.formatText(knob);
    const id = `knob-${knob.name}`;
    const hint = h("p.hint", { id: `${id}-hint` }, knob.hint);
    const input = this.input(knob, { id, name: knob.name, "aria-describedby": `${id}-hint` });
    const label = h("label", { for: id }, knob.label);
    if (knob.check) return h("div.knob.check", {}, label, input, hint);
    const unset = iconButton("close", `Unset ${knob.label}`, () => (this.set(knob.name, ""), sync()));
    const range = knob.max === undefined ? null : this.range(knob, input);
    const row = h(`div.knob${knob.area || knob.secret || knob.options ? ".wide" : ""}`, {}, label, unset, input, range, hint);
    const sync = () => {
      const value = this.values[knob.name];
      row.classList.toggle("set", value !== undefined);
      if (input.value !== (value ?? "")) input.value = value ?? "";
      if (range) range.value = value ?? knob.initial;
    };
    input.addEventListener("input", () => (this.set(knob.name, input.value), sync()));
    range?.addEventListener("input", () => (this.set(knob.name, range.value), sync()));
    sync();
    return row;
  }

  input(knob, attributes) {
    const { initial: placeholder, min, max, step } = knob;
    if (knob.options) {
      const options = Object.entries(FORMATS).map(([value, [label]]) => h("option", { value }, label));
      return h("select", attributes, h("option", { value: "" }, "Anything"), ...options);
    }
    if (knob.area) return h("textarea", { ...attributes, rows: knob.name === "system" ? 3 : 2, placeholder, spellcheck: "false" });
    if (knob.secret) return h("input", { ...attributes, type: "password", autocomplete: "off", placeholder });
    if (!knob.check) return h("input", { ...attributes, type: "number", inputmode: "decimal", placeholder, min, max, step: knob.max ? "any" : step });
    const box = h("input", { ...attributes, type: "checkbox", role: "switch", onchange: () => this.set(knob.name, box.checked) });
    box.checked = Boolean(this.values[knob.name]);
    return box;
  }

  range({ label, min, max, step, initial }) {
    return h("input", { type: "range", min, max, step, value: initial, "aria-label": `${label}, slider`, tabindex: "-1" });
  }

  /** The text that the chosen format needs. */
  formatText(knob) {
    const input = h("textarea", { name: knob.name, rows: 4, "aria-label": "Schema, expression, lines or grammar", spellcheck: "false" });
    input.value = this.values.format_text ?? "";
    input.addEventListener("input", () => this.set(knob.name, input.value));
    const row = h("div.knob.wide", {}, input);
    const sync = () => {
      const [, example] = FORMATS[this.values.format] ?? ["", ""];
      row.hidden = !example;
      input.placeholder = example;
    };
    this.addEventListener("change", sync);
    sync();
    return row;
  }
}
