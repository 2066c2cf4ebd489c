// Which sample: a list to search and sort, and the ones beside the chosen.

import { fill, h } from "./dom.js";
import { ABSENT } from "./forms.js";
import { unpacked } from "./packed.js";
import { part } from "./store.js";
import { search, table } from "./table.js";
import { t } from "./words.js";

const kept = { list: null, find: "", open: false }; // the list comes with the first sample only; what was searched for stays

export async function drawPicker({ data, about, set, choices }, goes) {
  kept.list = data.list ?? (await part("sample", {})).data?.list ?? kept.list;
  if (!kept.list) return null;
  const rows = unpacked(kept.list).map((row) => ({ ...row, here: goes(row.sample_id) ? "✓" : null }));
  const chosen = data.sample?.sample_id;
  const told = h("p", { class: "note", role: "status" });
  const columns = [
    { name: "sample_id", title: t("sample") }, { name: "step", title: t("step"), form: "count" }, { name: "group_id", title: t("sample_group_id") },
    { name: "reward", title: t("mesh_reward"), form: "number" }, { name: "advantage", title: t("mesh_advantage"), form: "number" },
    { name: "length", title: t("sample_length"), form: "count" }, { name: "finish_reason", title: t("mesh_finish_reason") },
    { name: "dropped_reason", title: t("sample_dropped") },
    { name: "tokens", title: t("sample_kept"), form: "count", cell: (row) => (row.tokens ? String(row.tokens) : ABSENT) }, { name: "here", title: t("sample_here") },
  ];
  const choose = (row) => {
    if (goes(row.sample_id)) set({ sample: row.sample_id, token: null });
    else told.textContent = t("sample_elsewhere", { run: about.run, sample: row.sample_id });
  };
  const list = h("div", { class: "sample-list" });
  const refresh = () => fill(list, table(columns, rows, {
    label: t("sample_pick"), state: { find: kept.find }, onrow: choose, mark: (row) => (row.sample_id === chosen ? "chosen" : null),
  }));
  refresh();
  const beside = (way) => {
    const held = choices.map((choice) => choice.sample);
    const next = held[held.indexOf(chosen) + way];
    return h("button", { type: "button", disabled: next === undefined, onclick: () => set({ sample: next, token: null }) }, t(way < 0 ? "sample_previous" : "sample_next"));
  };
  return h("div", { class: "controls sample-picker" },
    choices.length > 1 ? [beside(-1), beside(1)] : null,
    h("details", { open: kept.open, ontoggle: (event) => { kept.open = event.target.open; } },
      h("summary", null, t("sample_pick_of", { count: kept.list.all })),
      search(kept.find, (find) => { kept.find = find; refresh(); }), told, list,
      h("p", { class: "note" }, kept.list.all > rows.length ? t("sample_list_part", { shown: rows.length, all: kept.list.all }) : "",
        ` ${t("sample_others", { run: about.run })}`)));
}
