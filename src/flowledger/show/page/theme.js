// A chart's specification in the colours of the page and in its language: `var(--grad)` and { en, zh } are what they stand for.

import { say } from "./words.js";

// In the colours of the page and in its language: `var(--grad)` and { en, zh } are replaced by what they stand for.
export function dressed(spec) {
  const style = getComputedStyle(document.documentElement);
  const made = (value) => {
    if (Array.isArray(value)) return value.map(made);
    if (value && typeof value === "object") {
      if (Object.keys(value).sort().join() === "en,zh") return say(value);
      return Object.fromEntries(Object.entries(value).map(([key, each]) => [key, made(each)]));
    }
    const named = typeof value === "string" && /^var\((--[\w-]+)\)$/.exec(value);
    return (named && style.getPropertyValue(named[1]).trim()) || value;
  };
  return made(spec);
}

// Without layers that have no rows. A layer is drawn of the rows whose `kind` is its name, or what of its name stands before a dash.
export function drawn(spec, rows) {
  const there = new Set(rows.map((row) => row.kind));
  return { ...spec, layer: spec.layer.filter((layer) => there.has(layer.name.split("-")[0])) };
}
