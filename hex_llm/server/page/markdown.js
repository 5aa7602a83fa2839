// Markdown to elements: the part of it that models write. No HTML is ever parsed, so nothing needs escaping:
// what is not markdown is text. Only http, https and mailto become links; pictures become links too.

import { copyButton, h } from "./dom.js";

const MAX_DEPTH = 12; // of quotes and lists in each other
const FENCE = /^ {0,3}(`{3,}|~{3,})\s*([^\s`]*)[^`]*$/;
const HEADING = /^ {0,3}(#{1,6})\s+(.*?)\s*#*$/;
const RULE = /^ {0,3}([-*_])( *\1){2,}\s*$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^( *)([-*+]|\d{1,9}[.)])(?: +(.*))?$/;
const DIVIDER = /^ *\|?( *:?-+:? *\|)+ *(:?-+:?)? *$/;

/**
 * Makes `container` show `text`. Called again with a longer text, it only replaces the blocks that changed: so a
 * long answer stays cheap while it grows, and what was selected in it stays selected.
 */
export function render(container, text) {
  const wanted = blocks(text.split("\n"), 0);
  const shown = container.blocks ?? [];
  let same = 0;
  while (same < wanted.length && shown[same]?.key === wanted[same].key) same++;
  while (container.childNodes.length > same) container.lastChild.remove();
  container.append(...wanted.slice(same).map((block) => block.make()));
  container.blocks = wanted;
}

// ---- blocks: each is {key, make}; the key is its source, so equal keys make equal elements

function blocks(lines, depth) {
  const found = [];
  let at = 0;
  while (at < lines.length) {
    const reader = readers.find(([starts]) => starts(lines, at, depth))[1];
    const [end, block] = reader(lines, at, depth);
    if (block) found.push({ key: lines.slice(at, end).join("\n"), make: block });
    at = end;
  }
  return found;
}

const elements = (lines, depth) => blocks(lines, depth).map((block) => block.make());
const isTable = (lines, at) => lines[at].includes("|") && DIVIDER.test(lines[at + 1] ?? "");

// The first whose test is true reads on from there: [the line behind it, what makes it].
const readers = [
  [(lines, at) => !lines[at].trim(), (lines, at) => [at + 1, null]],
  [(lines, at) => FENCE.test(lines[at]), readFence],
  [(lines, at) => HEADING.test(lines[at]), readHeading],
  [(lines, at) => RULE.test(lines[at]), (lines, at) => [at + 1, () => h("hr")]],
  [(lines, at, depth) => depth < MAX_DEPTH && QUOTE.test(lines[at]), readQuote],
  [(lines, at, depth) => depth < MAX_DEPTH && ITEM.test(lines[at]), readList],
  [isTable, readTable],
  [() => true, readParagraph],
];

function readFence(lines, at) {
  const [, fence, language] = FENCE.exec(lines[at]);
  let end = at + 1;
  while (end < lines.length && !(lines[end].trim().startsWith(fence) && !lines[end].trim().replaceAll(fence[0], ""))) end++;
  const code = lines.slice(at + 1, end).join("\n");
  return [end + 1, () => codeBlock(code, language)];
}

export function codeBlock(code, language) {
  const head = h("div.code-head", {}, h("span", {}, language || "text"), copyButton(() => code, "Copy code"));
  return h("div.code", {}, head, h("pre", { tabindex: "0" }, h("code", {}, code)));
}

function readHeading(lines, at) {
  const [, marks, title] = HEADING.exec(lines[at]);
  // The page's own headings are h1 and h2.
  return [at + 1, () => h(`h${Math.min(marks.length + 2, 6)}`, {}, inline(title))];
}

function readQuote(lines, at, depth) {
  let end = at;
  while (end < lines.length && QUOTE.test(lines[end])) end++;
  const inner = lines.slice(at, end).map((line) => line.replace(QUOTE, ""));
  return [end, () => h("blockquote", {}, elements(inner, depth + 1))];
}

function readList(lines, at, depth) {
  const [, indent, mark] = ITEM.exec(lines[at]);
  const ordered = /\d/.test(mark);
  const items = [];
  let end = at;
  for (; end < lines.length; end++) {
    const line = lines[end];
    const item = ITEM.exec(line);
    const begins = item && item[1].length <= indent.length + 1;
    if (begins && /\d/.test(item[2]) !== ordered) break;
    if (begins) items.push([item[3] ?? ""]);
    else if (!line.trim() && !belongs(lines[end + 1], indent)) break;
    else if (line.trim() && !belongs(line, indent) && !lines[end - 1].trim()) break;
    else items.at(-1).push(line.slice(Math.min(line.search(/\S|$/), indent.length + mark.length + 1)));
  }
  const start = ordered ? { start: parseInt(mark, 10) } : {};
  return [end, () => h(ordered ? "ol" : "ul", start, items.map((item) => h("li", {}, itemContent(item, depth))))];
}

/** Whether a line behind an empty one still belongs to a list: a next item, or something indented. */
const belongs = (line, indent) => line !== undefined && (ITEM.test(line) || line.search(/\S/) > indent.length);

function itemContent(lines, depth) {
  const content = elements(lines, depth + 1);
  // A paragraph alone needs no paragraph's margins.
  return content[0]?.tagName === "P" ? [...content[0].childNodes, ...content.slice(1)] : content;
}

function readTable(lines, at) {
  let end = at + 2;
  while (end < lines.length && lines[end].includes("|")) end++;
  const aligns = cells(lines[at + 1]).map((mark) => (mark.endsWith(":") ? (mark.startsWith(":") ? "center" : "right") : ""));
  const row = (tag, line) => h("tr", {}, cells(line).map((cell, i) => h(tag, { class: aligns[i] || null }, inline(cell))));
  const body = lines.slice(at + 2, end);
  const make = () => h("table", {}, h("thead", {}, row("th", lines[at])), h("tbody", {}, body.map((line) => row("td", line))));
  return [end, () => h("div.table", { tabindex: "0" }, make())];
}

function cells(line) {
  const inner = line.trim().replace(/^\|/, "").replace(/(?<!\\)\|$/, "");
  return inner.split(/(?<!\\)\|/).map((cell) => cell.trim().replaceAll("\\|", "|"));
}

function readParagraph(lines, at, depth) {
  let end = at + 1;
  while (end < lines.length && readers.find(([starts]) => starts(lines, end, depth))[1] === readParagraph) end++;
  const text = lines.slice(at, end).map((line) => line.trim()).join("\n");
  return [end, () => h("p", {}, inline(text))];
}

// ---- inside a line

// Each part stops at the next mark of its kind, so that no text makes the search slow.
const INLINE = new RegExp(
  [
    /(?<ticks>`{1,2})(?<code>[^`\n]+)\k<ticks>(?!`)/,
    /\\(?<escaped>[!-/:-@[-`{-~])/,
    /\*\*\*(?<both>[^*\s][^*]*)(?<!\s)\*\*\*/,
    /\*\*(?<strong>(?=\S)(?:[^*]|\*(?!\*))+)(?<!\s)\*\*/,
    /\*(?<em>[^*\s][^*]*)(?<!\s)\*/,
    /(?<!\w)__(?<strong2>[^_\s][^_]*)__(?!\w)/,
    /(?<!\w)_(?<em2>[^_\s][^_]*)_(?!\w)/,
    /~~(?<del>[^~]+)~~/,
    /!?\[(?<label>[^[\]]*)\]\((?<target>[^()\s]+)(?: "[^"]*")?\)/,
    /(?<url>https?:\/\/[^\s<>()[\]"`*]*[^\s<>()[\]"`*.,;:!?'])/,
  ].map((part) => part.source).join("|"),
  "g",
);

function inline(text) {
  const nodes = [];
  let at = 0;
  for (const match of text.matchAll(INLINE)) {
    nodes.push(...plain(text.slice(at, match.index)), span(match.groups, match[0]));
    at = match.index + match[0].length;
  }
  return [...nodes, ...plain(text.slice(at))];
}

function span(found, source) {
  if (found.code) return h("code", {}, found.code.trim() || found.code);
  if (found.escaped) return found.escaped;
  if (found.both) return h("strong", {}, h("em", {}, inline(found.both)));
  if (found.strong ?? found.strong2) return h("strong", {}, inline(found.strong ?? found.strong2));
  if (found.em ?? found.em2) return h("em", {}, inline(found.em ?? found.em2));
  if (found.del) return h("del", {}, inline(found.del));
  const target = found.url ?? found.target;
  if (!/^(https?:|mailto:)/i.test(target)) return source;
  return h("a", { href: target, rel: "noopener noreferrer", target: "_blank" }, found.url ?? (found.label || target));
}

/** A single line end is one in chats, too. */
const plain = (text) => text.split("\n").flatMap((line, i) => (i ? [h("br"), line] : [line]));
