// A chart of a Vega-Lite specification, with rows of its own, in the colours of the page.

import { h, fill } from "./dom.js";
import { t } from "./words.js";

// Draws into `host`. `label`: what a screen reader says of it. `onclick`: given the row that was clicked on.
export async function chart(host, spec, rows, { label, onclick } = {}) {
  const style = getComputedStyle(document.documentElement);
  const colour = (name) => style.getPropertyValue(name).trim();
  const config = {
    background: "transparent", font: style.getPropertyValue("--sans").trim(),
    view: { stroke: null },
    axis: {
      labelColor: colour("--soft"), titleColor: colour("--soft"), gridColor: colour("--line"),
      domainColor: colour("--line"), tickColor: colour("--line"), titleFontWeight: 500,
    },
    legend: { labelColor: colour("--ink"), titleColor: colour("--soft") },
    header: { labelColor: colour("--ink"), titleColor: colour("--soft") },
    title: { color: colour("--ink"), anchor: "start", fontWeight: 600 },
    text: { color: colour("--ink") }, rule: { color: colour("--soft") },
  };
  const whole = { ...spec, data: { values: rows }, config: { ...config, ...spec.config } };
  const canvas = h("div", { class: "chart", role: "img", "aria-label": label });
  fill(host, canvas);
  try {
    const { view } = await window.vegaEmbed(canvas, whole, {
      ast: true, actions: false, renderer: "svg", defaultStyle: false, tooltip: { theme: "custom", disableDefaultStyle: true },
    });
    if (onclick) view.addEventListener("click", (_, item) => item?.datum && onclick(item.datum));
    return view;
  } catch (error) {
    fill(host, h("p", { class: "missing" }, t("chart_failed", { why: error.message })));
    throw error;
  }
}
