// The page's own words, in the language that is switched on.

const spoken = { lang: "en", words: {} };

export function speak(lang, words) {
  spoken.lang = lang;
  if (words) spoken.words = words;
  document.documentElement.lang = lang === "zh" ? "zh-CN" : "en";
}

export function language() {
  return spoken.lang;
}

// A word of words.toml, with {names} filled in. A key that is missing shows itself.
export function t(key, values) {
  const found = spoken.words[key]?.[spoken.lang] ?? key;
  return found.replace(/\{(\w+)\}/g, (whole, name) => values?.[name] ?? whole);
}

// A sentence that came in both languages.
export function say(pair) {
  return typeof pair === "string" ? pair : (pair?.[spoken.lang] ?? pair?.en ?? "");
}
