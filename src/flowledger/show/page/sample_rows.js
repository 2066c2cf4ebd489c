// The rows of a token strip: what is told of each token, in which colours, and how a number is written in a narrow cell.

import { number } from "./forms.js";

// name, word, how its colour goes: `size` (more is warmer, whatever its sign), `sign` (above zero and below).
const NUMBERS = [
  ["rollout_log_prob", "size"], ["old_log_prob", "size"], ["ref_log_prob", "size"], ["new_log_prob", "size"],
];
const GAPS = ["old_rollout", "new_old", "ref_new", "new_rollout"];
const OTHERS = [
  ["kl", "sign"], ["reward", "sign"], ["value", "sign"], ["return", "sign"], ["advantage", "sign"], ["weight", "size"], ["ratio", "one"],
  ["entropy", "size"], ["loss_share", "sign"],
];
const NOISE = 0.01; // nats: what log-probs of one policy differ by between two engines; paler than this is no colour at all

// The rows that have something of this sample: { name, values, colour, most, from }.
export function rowsOf({ columns, gaps }) {
  const made = (name, values, kind, least = 0) => {
    const known = values.filter((value) => value !== null).map((value) => Math.abs(kind === "one" ? value - 1 : value));
    return { name, values, kind, most: Math.max(least, ...known) };
  };
  const there = (list) => list.filter(([name]) => columns[name]).map(([name, kind]) => made(name, columns[name], kind, name === "ratio" ? NOISE : 0));
  return [...there(NUMBERS), ...GAPS.filter((name) => gaps[name]).map((name) => made(name, gaps[name], "sign", NOISE)), ...there(OTHERS)];
}

// { class, alpha } of one value.
export function tint(row, value) {
  if (value === null || !row.most) return null;
  const size = row.kind === "one" ? value - 1 : value;
  const alpha = 0.5 * Math.min(1, Math.abs(size) / row.most);
  return { class: row.kind === "size" ? "sample-warm" : size < 0 ? "sample-below" : "sample-above", alpha: alpha.toFixed(3) };
}

// At most six characters.
export function short(value) {
  const size = Math.abs(value);
  if (size === 0) return "0";
  if (size < 1e-3 || size >= 1e5) {
    const [digits, power] = value.toExponential(size < 1e-9 || value < 0 ? 0 : 1).split("e");
    return `${digits}e${Number(power)}`;
  }
  return number(Number(value.toPrecision(size >= 100 ? 4 : size < 0.1 ? 2 : 3)));
}
