// A choice of one among several, with its label.

import { h } from "./dom.js";

export function pick(label, id, options, value, onchoose) {
  return h("label", null, label, h("select", { "data-focus": id, onchange: (event) => onchoose(event.target.value) },
    options.map(([key, text]) => h("option", { value: key, selected: String(key) === String(value) }, text))));
}
