// The conversation: its turns, asking the server for the next one, and keeping all of it over a reload.
//
// A turn is {role: "user", text} or {role: "assistant", raw, choices: [{text, reasoning, tokens, finish}], chosen,
// measured, busy, waiting, stopped, error, name, beside}. `beside` is another adapter's answer, for comparison: the
// conversation goes on from the first. Chats and raw prompts are two lists; each raw prompt stands alone.

import { store, stored } from "./dom.js";
import { requestOf, streamed, withAdapter } from "./request.js";
import { stream } from "./stream.js";
import { tokensOf } from "./tokens.js";
import { viewOf } from "./turns.js";

const SAVE_MS = 1000;
const MEASURABLE_S = 0.02; // what comes in less has come at once, and tells no speed
const NAME = "hex.turns";
const emptyChoice = () => ({ text: "", reasoning: "", tokens: [], finish: null });
const answersOf = (turn) => (turn.beside ? [turn, turn.beside] : [turn]);

export class Chat extends EventTarget {
  /** "change" is sent when it becomes busy or idle, longer or shorter; "growth" while an answer grows. */
  constructor(thread, knobs, model) {
    super();
    Object.assign(this, { thread, knobs, model });
    this.mode = stored("hex.mode", "chat");
    this.all = { chat: [], raw: [], ...stored(NAME, {}) };
    for (const turn of [...this.all.chat, ...this.all.raw].flatMap(answersOf).filter((one) => one.busy)) {
      // The page was left in the middle of it.
      Object.assign(turn, { busy: false, waiting: null, stopped: true });
    }
    addEventListener("pagehide", () => this.save());
    this.insight = knobs.values.logprobs;
    knobs.addEventListener("change", () => {
      if (this.insight === knobs.values.logprobs) return;
      this.insight = knobs.values.logprobs;
      for (const view of this.views) view.update();
    });
    this.draw();
  }

  get turns() {
    return this.all[this.mode];
  }

  get busy() {
    return Boolean(this.controller);
  }

  setMode(mode) {
    this.stop();
    this.mode = mode;
    store("hex.mode", mode);
    this.draw();
  }

  clear() {
    this.cut(0);
  }

  /** Whether the settings could be read: if not, "refused" tells why, and nothing changes. */
  send(text) {
    return this.ask([...this.turns, { role: "user", text }]);
  }

  edit(index, text) {
    this.ask([...this.turns.slice(0, index), { role: "user", text }]);
  }

  retry(index) {
    this.ask(this.turns.slice(0, index));
  }

  stop() {
    this.controller?.abort();
    this.controller = null;
  }

  cut(length) {
    this.stop();
    this.all[this.mode] = this.turns.slice(0, length);
    this.draw();
    this.save();
  }

  save() {
    clearTimeout(this.saving);
    this.saving = null;
    if (store(NAME, this.all)) return;
    // No room: the tokens' alternatives take the most, and can be missed most easily.
    const lean = (turn) => ({
      ...turn,
      choices: turn.choices?.map((choice) => ({ ...choice, tokens: [] })),
      ...(turn.beside && { beside: lean(turn.beside) }),
    });
    store(NAME, { chat: this.all.chat.map(lean), raw: this.all.raw.map(lean) });
  }

  /** Draws all turns anew. */
  draw() {
    this.views = this.turns.map((turn, i) => this.view(turn, i));
    this.thread.replaceChildren(...this.views.map((view) => view.element));
    this.dispatchEvent(new Event("change"));
  }

  view(turn, index) {
    return viewOf(turn, index, this, () => this.insight);
  }

  /** Answers `turns`, which become the conversation. As `send`. */
  ask(turns) {
    const requests = [];
    try {
      requests.push(requestOf(this.mode, turns, this.knobs, this.model()));
    } catch (error) {
      this.dispatchEvent(new CustomEvent("refused", { detail: error.message }));
      return false;
    }
    this.stop();
    const other = this.knobs.values.compare_lora?.trim();
    if (other) requests.push(withAdapter(requests[0], other));
    const answers = requests.map(({ body }) => ({
      role: "assistant", raw: this.mode === "raw", choices: [emptyChoice()], chosen: 0, busy: true,
      ...(other && { name: body.dynamic_lora ?? "no adapter" }),
    }));
    if (other) answers[0].beside = answers[1];
    this.all[this.mode] = [...turns, answers[0]];
    this.controller = new AbortController();
    this.draw();
    this.answerAll(answers, this.views.at(-1), requests, this.controller);
    return true;
  }

  async answerAll(answers, view, requests, controller) {
    await Promise.all(requests.map((request, i) => this.answer(answers[i], view.parts[i], request, controller)));
    if (this.controller === controller) this.controller = null;
    this.dispatchEvent(new Event("change"));
    this.save();
  }

  async answer(turn, view, { path, body }, controller) {
    const clock = new Clock();
    const decoders = [];
    const grown = () => this.grown(view);
    const onWait = (words) => {
      turn.waiting = words;
      clock.start();
      grown();
    };
    try {
      const key = this.knobs.values.key;
      for await (const event of stream(path, { key, body: streamed(body), signal: controller.signal, onWait })) {
        turn.waiting = null;
        for (const choice of event.choices ?? []) take(turn, choice, decoders);
        clock.tick(event);
        turn.measured = clock.measured();
        grown();
      }
    } catch (error) {
      if (error.name === "AbortError") turn.stopped = true;
      else turn.error = inWords(error);
      this.dispatchEvent(new CustomEvent("failure", { detail: error }));
    }
    Object.assign(turn, { busy: false, waiting: null });
    view.update();
  }

  /** Draws at most once a frame, and saves now and then. */
  grown(view) {
    this.saving ??= setTimeout(() => this.save(), SAVE_MS);
    if (view.pending) return;
    view.pending = true;
    requestAnimationFrame(() => {
      view.pending = false;
      view.update();
      this.dispatchEvent(new Event("growth"));
    });
  }
}

/** Adds what an event says about one choice. */
function take(turn, { index = 0, delta, text, logprobs, finish_reason: finish }, decoders) {
  while (turn.choices.length <= index) turn.choices.push(emptyChoice());
  const choice = turn.choices[index];
  decoders[index] ??= new TextDecoder();
  choice.text += text ?? delta?.content ?? "";
  choice.reasoning += delta?.reasoning_content ?? "";
  choice.tokens.push(...tokensOf(logprobs, decoders[index]));
  choice.finish = finish ?? choice.finish;
}

/** Measures an answer as its reader sees it. */
class Clock {
  constructor() {
    this.numEvents = 0;
    this.start();
  }

  start() {
    this.started = performance.now();
  }

  tick({ choices = [], usage }) {
    if (usage) this.usage = usage;
    if (!choices.some(({ delta, text }) => text || delta?.content || delta?.reasoning_content)) return;
    this.last = performance.now();
    this.first ??= this.last;
    this.numEvents++;
  }

  measured() {
    if (this.first === undefined) return null;
    // Until the server tells, an event counts as a token, which it mostly is.
    const count = this.usage?.completion_tokens ?? this.numEvents;
    const seconds = (this.last - this.first) / 1000;
    return {
      first_s: (this.first - this.started) / 1000,
      per_s: seconds > MEASURABLE_S && count > 1 ? (count - 1) / seconds : null,
      num_tokens: count,
      num_prompt: this.usage?.prompt_tokens,
      num_cached: this.usage?.prompt_tokens_details?.cached_tokens,
    };
  }
}

function inWords(error) {
  if (error.status === 401) return "This server wants an API key. Enter it in the settings under Connection, then retry.";
  if (error.status === 429) return `The server is busy: ${error.message}. Retry in a moment.`;
  if (error.status === 400) return `The server refused the request: ${error.message}`;
  return error.message;
}
