// The page's own words, in the language that is switched on.

import { own } from "./own.js";

const spoken = { lang: "en", words: {} };

export function speak(lang, words) {
  spoken.lang = lang === "zh" ? "zh" : "en";
  if (words) spoken.words = words;
  document.documentElement.lang = spoken.lang === "zh" ? "zh-CN" : "en";
}

export function language() {
  return spoken.lang;
}

// A word of words.toml, with {names} filled in; `{n|one is|# are}` is the first where n is one, else the second with n for #. A key that is missing shows itself.
export function t(key, values) {
  const found = own(spoken.words, key)?.[spoken.lang] ?? key;
  return found.replace(/\{(\w+)(?:\|([^|}]*)\|([^}]*))?\}/g, (whole, name, one, many) => {
    const value = own(values ?? {}, name);
    return one === undefined ? value ?? whole : String(value) === "1" ? one : many.replace("#", value);
  });
}

// A column of a finding, whose rows are English: in the language that is switched on, where it is known in it.
export function says(row, column) {
  return (spoken.lang === "zh" ? own(row.zh ?? {}, column) : null) ?? row[column];
}

// A sentence that came in both languages.
export function say(pair) {
  return typeof pair === "string" ? pair : (pair?.[spoken.lang] ?? pair?.en ?? "");
}
