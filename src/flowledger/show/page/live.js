// What a live page hears: increments of the run, pushed by the server that made it.

import { replace } from "./store.js";
import { t } from "./words.js";

// `onnews` is told which views have new data.
export function listen(onnews) {
  const told = document.getElementById("live");
  const stream = new EventSource("events");
  stream.addEventListener("open", () => { told.textContent = ` · ${t("live_on")}`; });
  stream.addEventListener("error", () => { told.textContent = ` · ${t("live_off")}`; });
  stream.addEventListener("views", (event) => {
    const news = JSON.parse(event.data);
    for (const [view, parts] of Object.entries(news)) {
      for (const [key, data] of Object.entries(parts)) replace(view, key, data);
    }
    onnews(new Set(Object.keys(news)));
  });
}
