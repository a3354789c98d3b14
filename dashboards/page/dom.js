// The document, changed only where something has changed: what stays keeps its focus, and costs nothing.

export const $ = (id) => document.getElementById(id);

export function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== null && value !== undefined && value !== false) element.setAttribute(name, value);
  }
  element.append(...children);
  return element;
}

export function say(element, text) {
  const value = String(text);
  if (element.textContent !== value) element.textContent = value;
}

export function show(element, whether) {
  if (element.hidden === whether) element.hidden = !whether;
}

export function classed(element, name) {
  if (element.className !== name) element.className = name;
}

// One child for each item, in this order, made once for each key and then only updated.
export function keyed(parent, items, keyOf, makeOne, update) {
  const known = (parent.keyed ??= new Map());
  const wanted = new Set();
  let place = parent.firstElementChild;
  for (const item of items) {
    const key = keyOf(item);
    wanted.add(key);
    let child = known.get(key);
    if (!child) known.set(key, (child = makeOne(item)));
    update(child, item);
    if (child === place) place = place.nextElementSibling;
    else parent.insertBefore(child, place);
  }
  for (const [key, child] of known) {
    if (!wanted.has(key)) {
      child.remove();
      known.delete(key);
    }
  }
}

export function row(cells) {
  return make("tr", {}, ...Array.from({ length: cells }, () => make("td")));
}

export function swatch(kind) {
  return make("span", { class: `swatch c-${kind}`, "aria-hidden": "true" });
}
