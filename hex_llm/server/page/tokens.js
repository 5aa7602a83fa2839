// Token probabilities: read from a reply, drawn as tinted tokens, told by a tooltip.
// A token is [text, logprob, [[text, logprob], …]]: small, as every one of them is stored.

import { h } from "./dom.js";

/** The tokens of one choice of an event, of a chat or of a completion. `decoder` is kept for the whole choice. */
export function tokensOf(logprobs, decoder) {
  if (!logprobs) return [];
  if (logprobs.content) {
    return logprobs.content.map(({ token, bytes, logprob, top_logprobs: top }) => [
      // A character may be spread over tokens: the last of them shows it.
      bytes ? decoder.decode(new Uint8Array(bytes), { stream: true }) : token,
      logprob,
      (top ?? []).map((one) => [one.token, one.logprob]),
    ]);
  }
  return (logprobs.tokens ?? []).map((token, i) => [
    token,
    logprobs.token_logprobs[i] ?? 0,
    Object.entries(logprobs.top_logprobs?.[i] ?? {}),
  ]);
}

/** Makes `container` show the tokens; only new ones are added. */
export function renderTokens(container, tokens) {
  const shown = container.childElementCount;
  container.append(
    ...tokens.slice(shown).map((token) => {
      const element = h("span.token", {}, token[0]);
      element.style.setProperty("--p", Math.exp(token[1]).toFixed(3));
      element.token = token;
      return element;
    }),
  );
}

/** Shows `tip` over the token under the pointer or finger. */
export function explainTokens(thread, tip) {
  const show = ({ target }) => {
    tip.hidden = !target.token;
    if (target.token) place(tip, target);
  };
  thread.addEventListener("pointerover", show);
  thread.addEventListener("pointerleave", () => (tip.hidden = true));
  document.addEventListener("scroll", () => (tip.hidden = true), { capture: true, passive: true });
}

function place(tip, element) {
  const [text, logprob, top] = element.token;
  const others = top.map(([other, value]) => row(other, value, value === logprob && other.trim() === text.trim()));
  tip.replaceChildren(...(top.length ? others : [row(text, logprob, true)]));
  const { left, top: above, bottom } = element.getClientRects()[0] ?? element.getBoundingClientRect();
  const { offsetWidth: width, offsetHeight: height } = tip;
  tip.style.left = `${Math.max(8, Math.min(left, innerWidth - width - 8))}px`;
  tip.style.top = `${above > height + 8 ? above - height - 6 : bottom + 6}px`;
}

function row(text, logprob, chosen) {
  const share = Math.exp(logprob);
  const bar = h("i", {}, h("b"));
  bar.firstChild.style.width = `${(share * 100).toFixed(1)}%`;
  const percent = `${(share * 100).toFixed(share < 0.1 ? 2 : 1)}%`;
  return h(`div${chosen ? ".chosen" : ""}`, {}, h("code", {}, visible(text)), bar, h("span", {}, percent));
}

const visible = (text) => text.replaceAll("\n", "↵").replaceAll("\t", "⇥").replaceAll(" ", "·") || "∅";
