// How one value is written for people: the same as `show/words.py` writes it in a terminal.

export const ABSENT = "·";

// At most five characters: 523, 4.0K, 118M, 1.2G (powers of 1024).
export function bytes(value) {
  let size = Math.abs(value);
  const sign = value < 0 ? "-" : "";
  for (const unit of ["", "K", "M", "G", "T"]) {
    if (size < 999.5 || unit === "T") {
      return sign + (!unit || size >= 9.95 ? size.toFixed(0) : size.toFixed(1)) + unit;
    }
    size /= 1024;
  }
}

export function count(value) {
  return (Math.round(value) + 0).toLocaleString("en-US");  // of -0 makes 0
}

const COUNTED = 1e15; // from here on nobody reads the digits of a number one by one

// Four significant digits, thousands apart; with an exponent what is tiny or beyond counting.
export function number(value) {
  const size = Math.abs(value);
  if (size >= COUNTED || (size !== 0 && size < 1e-4)) {
    const [digits, power] = value.toExponential(3).split("e");
    return `${digits.replace(/\.?0+$/, "")}e${Number(power)}`;
  }
  if (Number.isInteger(value) || size >= 9999.5) return count(value);
  return Number(value.toPrecision(4)).toLocaleString("en-US", { maximumFractionDigits: 20 });
}

export function percent(value) {
  return Math.abs(value) >= 0.0995 || value === 0 ? `${(value * 100).toFixed(0)}%` : `${(value * 100).toFixed(1)}%`;
}

export function seconds(value) {
  const size = Math.abs(value);
  if (size >= 9.995) return `${value.toFixed(1)} s`;
  if (size >= 0.9995) return `${value.toFixed(2)} s`;
  return `${Number((value * 1e3).toPrecision(3))} ms`;
}

// `[4, 3]`, or `[4, 2..3]` where a dim varied.
export function shape(dims, smallest) {
  const low = smallest?.length === dims.length ? smallest : dims;
  return `[${dims.map((most, at) => (low[at] === most ? most : `${low[at]}..${most}`)).join(", ")}]`;
}

// A token's text on one line: blanks and control characters shown, not obeyed.
export function visible(text) {
  return text
    .replaceAll("\n", "⏎").replaceAll("\t", "⇥").replaceAll(" ", "␣")
    .replace(/[\p{C}\p{Z}]/gu, "�");
}

const FORMS = {
  bytes, count, number, percent, seconds, shape,
  milliseconds: (value) => seconds(value / 1e3),
  flag: (value) => (value ? "yes" : "no"),
};

// One cell, by the form of its column.
export function written(value, form) {
  if (value === null || value === undefined) return ABSENT;
  if (FORMS[form]) return FORMS[form](value);
  if (Array.isArray(value)) return value.map((each) => written(each)).join(", ");
  if (typeof value === "object") return Object.entries(value).map(([key, each]) => `${key} ${written(each, "number")}`).join(", ");
  return typeof value === "number" ? number(value) : String(value);
}
