// The live view of the server: what GET /stats says each second while the page is seen, as small curves.

import { h, svg } from "./dom.js";
import { call } from "./stream.js";

const PERIOD_MS = 1000;
const KEPT = 60;
const percent = (share) => `${Math.round(share * 100)}%`;
const TILES = [
  ["Running", "running", String, 4],
  ["Queued", "waiting", String, 4],
  ["KV cache", "kv_usage", percent, 1],
  ["Tokens/s", "tokens_per_s", (value) => (value < 10 ? value.toFixed(1) : Math.round(value)), 10],
];

/**
 * Polls for as long as the page lives. `onState(state, words)`: "ready", "loading" (503), "locked" (401), "away".
 * A server without /stats gives only its model's name.
 */
export function watch(container, { key, onModel, onState }) {
  const tiles = TILES.map((tile) => new Tile(...tile));
  const foot = h("p.hint");
  container.append(h("div.tiles", {}, tiles.map((tile) => tile.element)), foot);
  let refusedKey = null;

  async function poll() {
    const stats = await (await call("stats", { key: key() })).json();
    onModel(stats.model, stats);
    onState("ready", "");
    container.hidden = false;
    for (const tile of tiles) tile.add(stats);
    const hits = stats.prefix_hit_rate == null ? "" : ` · ${percent(stats.prefix_hit_rate)} of prompts from the cache`;
    const at = (one) => (one.host ? `${one.running} on host ${one.host}` : one.running);
    const replicas = stats.engines?.length > 1 ? `${stats.engines.filter((one) => one.state === "serving").length} of ${stats.engines.length} replicas serve (running: ${stats.engines.map(at).join(", ")}) · ` : "";
    const roles = stats.prefilling ? `${stats.prefilling} prefilling, ${stats.running - stats.prefilling} decoding · ` : "";
    foot.textContent = `${replicas}${roles}context of ${stats.max_model_len?.toLocaleString("en") ?? "?"} tokens${hits}`;
  }

  async function modelOnly() {
    const { data } = await (await call("v1/models", { key: key() })).json();
    onModel(data[0].id, data[0]);
    onState("ready", "");
  }

  (async () => {
    let ask = poll;
    for (;;) {
      try {
        // A key that was refused would be refused again.
        if (!document.hidden && refusedKey !== (key() ?? "")) {
          await ask();
          if (ask === modelOnly) return;
        }
      } catch (error) {
        if (error.status === 404 && ask === poll) ask = modelOnly;
        if (error.status === 401) refusedKey = key() ?? "";
        onState({ 401: "locked", 503: "loading", 404: "ready" }[error.status] ?? "away", error.message);
      }
      await new Promise((resolve) => setTimeout(resolve, PERIOD_MS));
    }
  })();
}

class Tile {
  constructor(label, field, show, least) {
    Object.assign(this, { field, show, least, past: Array(KEPT).fill(0) });
    this.value = h("strong", {}, "–");
    this.area = svg("path", { class: "area" });
    this.line = svg("path", { class: "line" });
    const curve = svg("svg", { viewBox: `0 0 ${KEPT - 1} 20`, preserveAspectRatio: "none", "aria-hidden": "true" }, this.area, this.line);
    this.element = h("div.tile", {}, h("span", {}, label), this.value, curve);
  }

  add(stats) {
    const value = stats[this.field] ?? 0;
    this.value.textContent = this.show(value);
    this.past = [...this.past.slice(1), value];
    // A scale that is never smaller than `least`: noise near zero shall look like zero.
    const most = Math.max(this.least, ...this.past);
    const points = this.past.map((one, i) => `${i} ${(19 - (18 * one) / most).toFixed(2)}`);
    this.line.setAttribute("d", `M${points.join("L")}`);
    this.area.setAttribute("d", `M0 20L${points.join("L")}L${KEPT - 1} 20Z`);
  }
}
