// The shape ledger, to be searched, sorted and narrowed.

import { fill } from "./dom.js";
import { shape } from "./forms.js";
import { search, table } from "./table.js";
import { t } from "./words.js";

export function drawShapes(host, { data, asked, set }) {
  const columns = [
    { name: "stage", title: t("stage") }, { name: "tensor_name", title: t("tensor") },
    { name: "logical_shape", title: t("logical_shape"), form: "shape" },
    { name: "local_shape", title: t("local_shape"), form: "shape" },
  ];
  const state = { find: asked.find, sort: asked.sort, down: asked.down === "1" };
  const made = () => table(columns, data.rows, { label: t("shapes"), state });
  fill(host, search(asked.find, (find) => set({ find }, { quietly: true })), made());
}
