// A choice among a few, as a field with its name.

import { h } from "./dom.js";

// options: [[value, what is written]]; `onpick` is given the value.
export function pick(name, options, value, onpick) {
  const made = options.map(([each, written]) => h("option", { value: String(each), selected: String(each) === String(value) }, written));
  return h("label", null, name, h("select", { onchange: (event) => onpick(event.target.value) }, made));
}
