// The playground's start: puts the parts together, and everything that is pressed or typed outside of a turn.

import { Chat } from "./chat.js";
import { icon, store, stored } from "./dom.js";
import { Knobs } from "./knobs.js";
import { requestOf } from "./request.js";
import { openSnippets } from "./snippets.js";
import { watch } from "./stats.js";
import { explainTokens } from "./tokens.js";
import { emptyState } from "./turns.js";

const $ = (id) => document.getElementById(id);
const [draft, scroll, panel, root] = [$("draft"), $("scroll"), $("panel"), document.documentElement];
const phone = matchMedia("(max-width: 60rem)");
let model = "";

const knobs = new Knobs($("knobs"));
const chat = new Chat($("thread"), knobs, () => model);

// ---- the conversation

function submit() {
  if (chat.busy) return chat.stop();
  if (!draft.value.trim()) return draft.focus();
  if (chat.send(draft.value)) {
    setDraft("");
    notice("");
    scroll.scrollTop = scroll.scrollHeight;
  }
}

function notice(words) {
  $("notice").hidden = !words;
  $("notice").textContent = words;
}

function setDraft(text) {
  draft.value = text;
  store("hex.draft", text);
  draft.style.height = "auto";
  draft.style.height = `${Math.min(draft.scrollHeight, innerHeight * 0.4)}px`;
}

function showState() {
  const raw = chat.mode === "raw";
  document.body.classList.toggle("raw", raw);
  document.querySelector(`input[name=mode][value=${chat.mode}]`).checked = true;
  draft.placeholder = raw ? "A text to go on from" : "Message";
  const label = chat.busy ? "Stop" : "Send";
  if ($("send").getAttribute("aria-label") !== label) $("send").replaceChildren(icon(label.toLowerCase()));
  $("send").setAttribute("aria-label", label);
  $("send").title = chat.busy ? "Stop (Esc)" : "Send (Enter)";
  $("empty").hidden = chat.turns.length > 0;
  $("empty").replaceChildren(...emptyState(chat.mode, model, (idea) => (setDraft(idea), draft.focus())));
}

function newChat() {
  chat.clear();
  notice("");
  draft.focus();
}

/** Follows a growing answer, unless the reader has scrolled up. */
let following = true;
scroll.addEventListener("scroll", () => {
  following = scroll.scrollHeight - scroll.scrollTop - scroll.clientHeight < 60;
});
chat.addEventListener("growth", () => following && (scroll.scrollTop = scroll.scrollHeight));
chat.addEventListener("change", showState);
chat.addEventListener("refused", ({ detail }) => notice(detail));
chat.addEventListener("failure", ({ detail }) => detail.status === 401 && askForKey());

$("composer").addEventListener("submit", (event) => (event.preventDefault(), submit()));
draft.addEventListener("input", () => setDraft(draft.value));
draft.addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  if (!chat.busy) submit();
});
for (const input of document.querySelectorAll("input[name=mode]")) {
  input.addEventListener("change", () => (chat.setMode(input.value), notice(""), (scroll.scrollTop = scroll.scrollHeight)));
}
$("new").addEventListener("click", newChat);
$("snippets-open").addEventListener("click", () => {
  const last = chat.turns.findLastIndex((turn) => turn.role === "user");
  const text = draft.value.trim() || (last < 0 ? "Hello" : "");
  const turns = text ? [...chat.turns, { role: "user", text }] : chat.turns.slice(0, last + 1);
  try {
    openSnippets($("snippets"), requestOf(chat.mode, turns, knobs, model), Boolean(knobs.values.key));
  } catch (error) {
    notice(error.message);
  }
});

// ---- the panel: a column where there is room, a drawer where there is not

function showPanel(open) {
  root.classList.toggle("panel-open", open);
  panel.inert = !open;
  $("panel-toggle").setAttribute("aria-expanded", String(open));
  if (!phone.matches) store("hex.panel", open);
}

function askForKey() {
  showPanel(true);
  knobs.focus("key");
}

$("panel-toggle").addEventListener("click", () => showPanel(panel.inert));
$("panel-close").addEventListener("click", () => (showPanel(false), $("panel-toggle").focus()));
$("backdrop").addEventListener("click", () => showPanel(false));
$("knobs").addEventListener("submit", (event) => event.preventDefault());
$("reset").addEventListener("click", () => knobs.reset());
phone.addEventListener("change", () => showPanel(!phone.matches));
knobs.addEventListener("change", () => notice(""));

$("theme").addEventListener("click", () => {
  const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = dark ? "light" : "dark";
  localStorage.setItem("hex.theme", root.dataset.theme);
});

// ---- keys

addEventListener("keydown", (event) => {
  if ((event.ctrlKey || event.metaKey) && event.key.toLowerCase() === "k") {
    event.preventDefault();
    newChat();
  } else if (event.key === "Escape" && !$("snippets").open) {
    if (chat.busy) chat.stop();
    else if (phone.matches) showPanel(false);
  }
});

// ---- the server

const STATES = { ready: "ready", loading: "loading", locked: "needs a key", away: "not reachable" };

watch($("stats"), {
  key: () => knobs.values.key,
  onModel: (name, { sampling_defaults }) => {
    knobs.setDefaults(sampling_defaults ?? {});
    if (model === name) return;
    model = name;
    $("model").textContent = name;
    $("model").title = name;
    document.title = `${name} · playground`;
    showState();
  },
  onState: (state, words) => {
    $("status").className = state;
    const text = state === "loading" ? words : STATES[state];
    if ($("status").textContent !== text) $("status").textContent = $("status").title = text;
  },
});

explainTokens($("thread"), $("tip"));
showPanel(!phone.matches && stored("hex.panel", true));
setDraft(stored("hex.draft", ""));
showState();
scroll.scrollTop = scroll.scrollHeight;
