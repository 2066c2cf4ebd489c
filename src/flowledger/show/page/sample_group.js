// The group of a sample: rewards and advantages of all that answered the same prompt, side by side.

import { h, s } from "./dom.js";
import { ABSENT, count, number } from "./forms.js";
import { t } from "./words.js";

const WIDE = 150;

export function drawGroup({ sample, group }, goes, run) {
  const rewards = span(group.map((one) => one.reward)), advantages = span(group.map((one) => one.advantage));
  const head = ["sample", "mesh_reward", "mesh_advantage", "mesh_response_length", "mesh_finish_reason", "sample_trained", "sample_dropped"];
  const line = (one) => {
    const own = one.sample_id === sample.sample_id;
    const way = goes(one.sample_id);
    return h("tr", { class: own ? "chosen" : null, "aria-current": own ? "true" : null },
      h("th", { scope: "row" }, own ? `▸ ${one.sample_id}` : way ? h("a", way, one.sample_id)
        : h("span", { title: t("sample_elsewhere", { run, sample: one.sample_id }) }, one.sample_id)),
      h("td", null, bar(one.reward, rewards)), h("td", null, bar(one.advantage, advantages)),
      h("td", { class: "numeric" }, one.response_length === null ? ABSENT : count(one.response_length)),
      h("td", null, one.finish_reason ?? ABSENT), h("td", { class: "numeric" }, one.trained ? `${one.trained}×` : ABSENT),
      h("td", null, one.dropped_reason ?? ABSENT));
  };
  return h("div", { class: "scroll" }, h("table", { class: "sample-group" },
    h("thead", null, h("tr", null, head.map((key) => h("th", { scope: "col" }, t(key))))), h("tbody", null, group.map(line))));
}

// From the least to the greatest, zero included.
function span(values) {
  const known = values.filter((value) => value !== null);
  return [Math.min(0, ...known), Math.max(0, ...known)];
}

function bar(value, [low, high]) {
  if (value === null) return ABSENT;
  const place = (one) => (high > low ? ((one - low) / (high - low)) * (WIDE - 8) + 4 : WIDE / 2);
  const [from, to] = [place(0), place(value)].sort((a, b) => a - b);
  return h("span", { class: "sample-measure" },
    s("svg", { width: WIDE, height: 14, "aria-hidden": "true" },
      s("line", { x1: place(0), x2: place(0), y1: 0, y2: 14, class: "sample-zero" }),
      s("rect", { x: from, y: 5, width: Math.max(0, to - from), height: 4, class: value < 0 ? "sample-below" : "sample-above" }),
      s("circle", { cx: place(value), cy: 7, r: 4, class: value < 0 ? "sample-below" : "sample-above" })),
    h("span", null, number(value)));
}
