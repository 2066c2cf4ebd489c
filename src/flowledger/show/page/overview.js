// The overview: findings first, each with the way to its evidence.

import { fill, h } from "./dom.js";
import { t } from "./words.js";

export function drawOverview(host, { data }) {
  fill(host, h("ul", null, data.findings.map((found) => h("li", null, found.message))));
}
