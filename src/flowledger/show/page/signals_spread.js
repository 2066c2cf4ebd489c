// How lengths, rewards, advantages and ratios are spread: in one step, beside the whole run, and over the steps.

import { chart } from "./chart.js";
import { h } from "./dom.js";
import { number } from "./forms.js";
import { insight } from "./lazy.js";
import { dressed, drawn } from "./theme.js";
import { say, t } from "./words.js";

export function distributions({ whole, asked, ask }, steps) {
  if (!whole.distributions.length) return null;
  const step = asked.step ? Number(asked.step) : steps[steps.length - 1];
  return h("figure", null,
    h("h3", null, t("signals_spread", { step })), h("p", { class: "note" }, t("signals_spread_note")),
    h("div", { class: "signals" }, whole.distributions.map((one) => distribution(one, step, whole, ask))));
}

function distribution(one, step, whole, ask) {
  const at = one.steps.indexOf(step);
  const counts = at >= 0 ? one.counts[at] : null;
  const count = counts?.reduce((a, b) => a + b, 0) ?? 0;
  const bars = h("div", { style: { minHeight: "160px" } });
  const course = h("div", { style: { minHeight: "150px" } });
  const rows = binned(one, counts);
  insight(bars, () => chart(bars, dressed(ticked(drawn(whole.charts.histogram, rows), one.ticks)), rows, { label: t("signals_spread_label", { name: one.name, step, count }) }));
  if (one.steps.length > 1) {
    const over = [
      ...one.steps.map((each, place) => ({ kind: "quantiles", step: each, p10: one.quantiles[place][0], p50: one.quantiles[place][1], p90: one.quantiles[place][2] })),
      ...(at >= 0 ? [{ kind: "chosen", step }] : []),
    ];
    insight(course, () => chart(course, dressed(drawn(whole.charts.quantiles, over)), over, {
      label: t("signals_quantiles_label", { name: one.name }), onclick: (row) => row.step !== undefined && ask({ step: String(row.step) }),
    }));
  }
  return h("figure", { class: "signal" },
    h("figcaption", null, h("strong", null, one.name), h("span", { class: "note" }, say(one.what)),
      h("span", { class: "last note" }, !counts ? t("signals_not_counted", { step }) : one.only === null ? t("signals_counted", { count }) : t("signals_counted_same", { count, value: number(one.only) }))),
    bars, one.steps.length > 1 && course);
}

// With these numbers named on its axis.
function ticked(spec, values) {
  if (!values) return spec;
  const named = (x) => ({ ...x, axis: { ...x.axis, values, labelExpr: "format(datum.value, '.6~g')" } });
  return { ...spec, layer: spec.layer.map((layer) => ({ ...layer, encoding: { ...layer.encoding, x: named(layer.encoding.x) } })) };
}

// Shares between the edges, of the run and of the step. The outermost bins may be open: beyond them lies what is left.
function binned(one, counts) {
  const sum = (some) => some.reduce((a, b) => a + b, 0);
  const run = one.counts[0].map((_, bin) => sum(one.counts.map((each) => each[bin])));
  const [all, mine] = [sum(run), counts ? sum(counts) : 0];
  const last = run.length - 1;
  return run.flatMap((number_, bin) => {
    const [begin, end] = [one.edges[bin], one.edges[bin + 1]];
    const between = one.open && bin === 0 ? `≤ ${number(end)}` : one.open && bin === last ? `≥ ${number(begin)}` : `${number(begin)} … ${number(end)}`;
    const place = { begin, end, between, whole: number_ / all };
    const of = counts ? [{ kind: "step", ...place, count: counts[bin], share: mine ? counts[bin] / mine : 0 }] : [];
    return [{ kind: "run", ...place, share: number_ / all }, ...of];
  });
}
