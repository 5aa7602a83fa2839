// Small helpers to make elements. Text only ever becomes a text node, so nothing that a model says is markup.

/** An element: `h("p.note", {title: "…", onclick: f}, "text", child)`. Null children are left out. */
export function h(tag, attributes = {}, ...children) {
  const [name, ...classes] = tag.split(".");
  const element = document.createElement(name);
  if (classes.length) element.className = classes.join(" ");
  for (const [key, value] of Object.entries(attributes)) {
    if (key.startsWith("on")) element.addEventListener(key.slice(2), value);
    else if (value === true) element.setAttribute(key, "");
    else if (value !== false && value != null) element.setAttribute(key, value);
  }
  element.append(...children.flat().filter((child) => child != null));
  return element;
}

const SVG = "http://www.w3.org/2000/svg";

export function svg(tag, attributes = {}, ...children) {
  const element = document.createElementNS(SVG, tag);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  element.append(...children);
  return element;
}

export const icon = (name) => svg("svg", { "aria-hidden": "true" }, svg("use", { href: `#i-${name}` }));

export function iconButton(name, label, onclick) {
  return h("button.icon", { type: "button", "aria-label": label, title: label, onclick }, icon(name));
}

/** A button that copies `text()` and says so for a moment. */
export function copyButton(text, label = "Copy") {
  const button = iconButton("copy", label, async () => {
    await copyText(text());
    button.replaceChildren(icon("check"));
    setTimeout(() => button.replaceChildren(icon("copy")), 1200);
  });
  return button;
}

export async function copyText(text) {
  if (navigator.clipboard) return navigator.clipboard.writeText(text);
  // Plain http from another machine has no clipboard API.
  const area = h("textarea.offscreen", { "aria-hidden": "true" });
  area.value = text;
  (document.querySelector("dialog[open]") ?? document.body).append(area);
  area.select();
  document.execCommand("copy");
  area.remove();
}

/** What sessionStorage has under `name`, or `otherwise`, also where it cannot be read. */
export function stored(name, otherwise) {
  try {
    return JSON.parse(sessionStorage.getItem(name)) ?? otherwise;
  } catch {
    return otherwise;
  }
}

/** Whether there was room for it. */
export function store(name, value) {
  try {
    sessionStorage.setItem(name, JSON.stringify(value));
    return true;
  } catch {
    return false;
  }
}
