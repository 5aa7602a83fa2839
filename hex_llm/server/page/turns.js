// How a turn of the conversation looks: the user's text, or the model's answers with what was measured.
// Turns are plain data (see chat.js); a view draws one and can draw it again when it has changed.

import { copyButton, h, icon, iconButton } from "./dom.js";
import { render } from "./markdown.js";
import { renderTokens } from "./tokens.js";

/** `actions` is the chat; `insight()` whether tokens are to be shown. */
export function viewOf(turn, index, actions, insight) {
  if (turn.role === "user") return new UserView(turn, index, actions);
  const answer = (one) => new AnswerView(one, index, actions, insight);
  return turn.beside ? new PairView([answer(turn), answer(turn.beside)]) : answer(turn);
}

/** Two answers to one message, side by side. */
class PairView {
  constructor(parts) {
    this.parts = parts;
    this.element = h("div.pair", {}, ...parts.map((part) => part.element));
  }

  update() {
    for (const part of this.parts) part.update();
  }
}

class UserView {
  constructor(turn, index, actions) {
    Object.assign(this, { turn, index, actions });
    this.element = h("article.turn.user", { "aria-label": "You" });
    this.update();
  }

  update() {
    const edit = iconButton("edit", "Edit and send again", () => this.edit());
    const tools = h("div.tools", {}, copyButton(() => this.turn.text, "Copy message"), edit);
    this.element.replaceChildren(h("div.bubble", {}, this.turn.text), tools);
  }

  edit() {
    const area = h("textarea", { "aria-label": "Edit message", rows: "2" });
    area.value = this.turn.text;
    const done = () => area.value.trim() && this.actions.edit(this.index, area.value);
    const cancel = () => this.update();
    area.addEventListener("keydown", (event) => {
      if (event.key === "Escape") cancel();
      else if (event.key === "Enter" && !event.shiftKey && !event.isComposing) done();
      else return;
      event.preventDefault();
      event.stopPropagation();
    });
    const buttons = h(
      "div.buttons",
      {},
      h("button.quiet", { type: "button", onclick: cancel }, "Cancel"),
      h("button.primary", { type: "button", onclick: done }, "Send again"),
    );
    this.element.replaceChildren(h("div.editor", {}, area, buttons));
    area.focus();
  }
}

class AnswerView {
  constructor(turn, index, actions, insight) {
    Object.assign(this, { turn, index, actions, insight });
    this.parts = [this];
    const name = turn.name ? h("h3.name", { title: turn.name }, turn.name) : null;
    this.tabs = h("div.tabs", { role: "tablist", "aria-label": "Answers" });
    this.thoughts = h("div.thoughts");
    this.reasoning = h("details.reasoning", { hidden: true }, h("summary", {}, "Reasoning"), this.thoughts);
    this.body = h("div.body");
    this.error = h("div.error", { role: "alert", hidden: true });
    this.tools = h("div.tools");
    const label = turn.name ? `Answer of ${turn.name}` : "Answer";
    this.element = h("article.turn.answer", { "aria-label": label }, name, this.tabs, this.reasoning, this.body, this.error, this.tools);
    this.update();
  }

  update() {
    const { turn } = this;
    const choice = turn.choices[turn.chosen];
    this.element.setAttribute("aria-busy", Boolean(turn.busy));
    this.updateTabs();
    this.reasoning.hidden = !choice.reasoning;
    render(this.thoughts, choice.reasoning ?? "");
    this.updateBody(choice);
    this.error.hidden = !turn.error;
    this.error.textContent = turn.error ?? "";
    this.updateTools(choice);
  }

  updateTabs() {
    const { choices, chosen } = this.turn;
    this.tabs.hidden = choices.length < 2;
    if (this.tabs.hidden || this.tabs.shown === `${choices.length} ${chosen}`) return;
    this.tabs.shown = `${choices.length} ${chosen}`;
    this.tabs.replaceChildren(
      ...choices.map((_, i) =>
        h("button", { type: "button", role: "tab", "aria-selected": String(i === chosen), onclick: () => this.choose(i) }, `Answer ${i + 1}`),
      ),
    );
  }

  choose(index) {
    this.turn.chosen = index;
    this.update();
    this.actions.save();
  }

  updateBody(choice) {
    const { turn } = this;
    const kind = this.insight() && choice.tokens.length ? "tokens" : turn.raw ? "plain" : "markdown";
    const shown = `${kind} ${turn.chosen}`;
    if (this.body.shown !== shown) {
      // What was drawn for another choice, or in another way, cannot grow into this one.
      const fresh = h(`div.body.${kind}`);
      this.body.replaceWith(fresh);
      this.body = fresh;
      this.body.shown = shown;
    }
    if (kind === "tokens") renderTokens(this.body, choice.tokens);
    else if (kind === "plain") this.body.textContent = choice.text;
    else render(this.body, choice.text);
    this.body.classList.toggle("growing", Boolean(turn.busy));
  }

  updateTools(choice) {
    const { turn } = this;
    const words = summary(turn, choice);
    if (turn.busy) return this.tools.replaceChildren(h("span.meta", {}, words));
    const retry = iconButton("retry", "Retry", () => this.actions.retry(this.index));
    if (turn.error) {
      retry.classList.add("worded");
      retry.append("Retry");
    }
    const copy = choice.text ? copyButton(() => choice.text, "Copy answer") : null;
    this.tools.replaceChildren(...[copy, retry, h("span.meta", {}, words)].filter(Boolean));
  }
}

/** What is to be told below an answer: its speed, its length, why it ended. */
function summary(turn, choice) {
  if (turn.waiting) return `Waiting: ${turn.waiting}`;
  const { first_s: first, per_s: speed, num_tokens: count, num_cached: cached, num_prompt: prompt } = turn.measured ?? {};
  const parts = [
    speed && `${speed < 10 ? speed.toFixed(1) : Math.round(speed)} tokens/s`,
    first != null && `first token after ${first < 1 ? `${Math.round(first * 1000)} ms` : `${first.toFixed(1)} s`}`,
    count && `${count} ${count === 1 ? "token" : "tokens"}`,
    cached && `${cached} of ${prompt} prompt tokens cached`,
    turn.stopped && "stopped",
    choice.finish === "length" && "cut at max tokens",
  ];
  return parts.filter(Boolean).join(" · ");
}

/** Shown where there is no conversation yet. */
export function emptyState(mode, model, onPick) {
  const raw = mode === "raw";
  const ideas = raw
    ? ["Once upon a time", "def fibonacci(n):\n    ", "The three laws of thermodynamics are:\n1."]
    : ["Explain how a KV cache makes decoding fast.", "Write a Python function that merges two sorted lists.", "Compare TPUs and GPUs in a small table."];
  const buttons = ideas.map((idea) => h("button.idea", { type: "button", onclick: () => onPick(idea) }, h("span", {}, idea.trim()), icon("send")));
  const words = raw
    ? "The text goes to the model as it is, without a chat template; it writes what comes next."
    : "Set how it answers in the panel, see how sure it is of each token, and take the request away as code.";
  return [h("h2", {}, raw ? "Give it a beginning" : `Talk to ${model || "the model"}`), h("p", {}, words), h("div.ideas", {}, buttons)];
}
