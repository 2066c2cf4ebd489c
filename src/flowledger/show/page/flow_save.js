// A drawing as a file of its own: what the page's style says of each element is written into it.

import { s } from "./dom.js";

// What children take over from what they stand in, and what each has for itself.
const INHERITED = [
  "fill", "fill-opacity", "stroke", "stroke-width", "stroke-opacity", "stroke-dasharray", "stroke-linecap", "stroke-linejoin", "font-family",
  "font-size", "font-weight", "text-anchor", "paint-order",
];

export function saved(svg, name) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([alone(svg)], { type: "image/svg+xml" }));
  link.download = name.replace(/[^\w.-]+/g, "_");
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10000);
}

// The text of an SVG that needs nothing else.
function alone(svg) {
  const copy = svg.cloneNode(true);
  written(svg, copy, {});
  copy.querySelectorAll(".target").forEach((element) => element.remove());
  for (const element of [copy, ...copy.querySelectorAll("*")]) {
    for (const name of ["class", "tabindex", "role", "aria-pressed", "style"]) element.removeAttribute(name);
  }
  copy.prepend(s("rect", { width: "100%", height: "100%", fill: getComputedStyle(document.documentElement).getPropertyValue("--paper").trim() }));
  return `<?xml version="1.0" encoding="UTF-8"?>\n${new XMLSerializer().serializeToString(copy)}`;
}

function written(seen, made, above) {
  const style = getComputedStyle(seen);
  const own = Object.fromEntries(INHERITED.map((name) => [name, style.getPropertyValue(name)]));
  for (const [name, value] of Object.entries(own)) {
    if (value.startsWith("url(")) continue;
    if (value !== above[name]) made.setAttribute(name, value);
    else made.removeAttribute(name);
  }
  if (style.opacity !== "1") made.setAttribute("opacity", style.opacity);
  [...seen.children].forEach((child, at) => written(child, made.children[at], own));
}
