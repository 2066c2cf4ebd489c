// Elements by name. Text from a run is only ever a text node: nothing here reads HTML.

// Signs that turn the direction of all that follows: a run could have our own sentences read backwards.
const TURNING = /[\u202A-\u202E\u2066-\u2069]/g;
const SPOKEN = ["aria-label", "title", "placeholder"];
const SVG = "http://www.w3.org/2000/svg";

// h("p", { class: "note", onclick }, "text", child …): attributes, listeners (on…), children; null is left out.
export function h(name, attributes, ...children) {
  return filled(document.createElement(name), attributes, children);
}

// The same for SVG.
export function s(name, attributes, ...children) {
  return filled(document.createElementNS(SVG, name), attributes, children);
}

// Text of a run as it is shown.
export function readable(text) {
  return typeof text === "string" ? text.replace(TURNING, "�") : text;
}

export function fill(element, ...children) {
  element.replaceChildren(...children.flat(Infinity).filter((child) => child !== null && child !== undefined).map(readable));
  return element;
}

function filled(element, attributes, children) {
  for (const [key, value] of Object.entries(attributes ?? {})) {
    if (value === null || value === undefined || value === false) continue;
    if (key.startsWith("on")) element.addEventListener(key.slice(2), value);
    else if (key === "style") Object.assign(element.style, value);
    else if (key === "value" || key === "checked") element[key] = value;
    else element.setAttribute(key, value === true ? "" : SPOKEN.includes(key) ? readable(value) : value);
  }
  for (const child of children.flat(Infinity)) {
    if (child !== null && child !== undefined && child !== false) element.append(readable(child));
  }
  return element;
}
