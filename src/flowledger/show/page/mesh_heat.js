// How much each rank did: the numbers of one kind and stage, how warm each is, and a sentence on their spread.

import { bytes, count, seconds } from "./forms.js";
import { own } from "./own.js";
import { t } from "./words.js";

export const HEATS = ["tokens", "seconds", "waited", "peak"];
export const FORM = { tokens: count, seconds, waited: seconds, peak: (value) => `${bytes(value)}B` };

// { name, stage, numbers, most, says } of what a link asks for, or of the first kind that is known; null where none is.
export function heatOf(data, asked) {
  const known = HEATS.filter((name) => data.heat[name]);
  const name = known.includes(asked.heat) ? asked.heat : asked.heat && HEATS.includes(asked.heat) ? null : known[0];
  if (!name) return null;
  const stages = data.heat[name];
  const usual = ["", "update_actor"].find((one) => own(stages, one)) ?? Object.keys(stages)[0];
  const stage = own(stages, asked.stage) ? asked.stage : usual;
  const numbers = stages[stage];
  const there = numbers.map((value, rank) => [value, rank]).filter(([value]) => value !== null);
  const most = there.reduce((a, b) => (b[0] > a[0] ? b : a), there[0] ?? [0, 0]);
  const least = there.reduce((a, b) => (b[0] < a[0] ? b : a), there[0] ?? [0, 0]);
  const mean = there.reduce((sum, [value]) => sum + value, 0) / (there.length || 1);
  const form = FORM[name];
  const what = stage ? `${t(`mesh_heat_${name}`)} · ${stage}` : t(`mesh_heat_${name}`);
  const says = there.length < 2 ? what : most[0] === least[0] ? t("mesh_even", { what, most: form(most[0]) }) : t("mesh_spread", {
    what, most: form(most[0]), at: most[1], least: form(least[0]), where: least[1], mean: form(mean),
    ratio: mean ? (most[0] / mean).toFixed(2) : "1.00",
  });
  return { name, stage, numbers, most: most[0], says };
}

// Of the ranks of a cell: the mean, and the most with its rank.
export function ofRanks(heat, ranks) {
  const there = ranks.map((rank) => [heat.numbers[rank], rank]).filter(([value]) => value !== null && value !== undefined);
  if (!there.length) return null;
  const most = there.reduce((a, b) => (b[0] > a[0] ? b : a));
  return { mean: there.reduce((sum, [value]) => sum + value, 0) / there.length, most: most[0], at: most[1] };
}

// 0 to 1: how warm a number is beside the greatest.
export function warmth(heat, value) {
  return heat.most > 0 && value !== null && value !== undefined ? Math.max(0, value / heat.most) : 0;
}
