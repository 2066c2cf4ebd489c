// The page's data: in the file itself, or asked for where the page is live.

const held = { document: null };

export function open() {
  held.document = JSON.parse(document.getElementById("data").textContent);
  return held.document;
}

export function about() {
  return held.document.about;
}

// Keys of the choices that a view has here: { step: "0", rank: "3" }, the first is shown first.
export function choices(view) {
  const here = held.document.views[view];
  return (here.choices ?? Object.keys(here.at)).map((key) => Object.fromEntries(new URLSearchParams(key)));
}

// The part of a view that is asked for: { data, choice, exact }. `exact` is false where the file does not hold it.
export async function part(view, asked) {
  const here = held.document.views[view];
  if (held.document.live) await fetched(view, here, asked);
  const wanted = named(asked);
  const best = nearest(here, wanted);
  const choice = Object.fromEntries(new URLSearchParams(best));
  const exact = Object.entries(wanted).every(([name, value]) => choice[name] === value || (choice[name] === undefined && chooses(name, value)));
  return { data: here.at[best], choice, exact };
}

// What a live page has learnt since: new data of a view, and what there is to choose from. All else that is held is old by then.
export function news(parts) {
  for (const view of Object.values(held.document.views)) view.old = new Set(Object.keys(view.at));
  for (const [name, { choices: keys, at }] of Object.entries(parts)) take(Object.assign(held.document.views[name], { choices: keys }), at);
}

// What a live page has learnt of the run itself.
export function learn(told) {
  Object.assign(held.document.about, told);
}

function take(view, parts) {
  Object.assign(view.at, parts);
  Object.keys(parts).forEach((key) => view.old?.delete(key));
}

const CHOOSES = ["rank", "sample", "step"];
const WHOLE = /^(0|[1-9]\d{0,14})$/; // a rank and a step are counted from 0

const chooses = (name, value) => name === "sample" || WHOLE.test(value);

function named(asked) {
  return Object.fromEntries(CHOOSES.filter((name) => asked?.[name]).map((name) => [name, asked[name]]));
}

// What to ask a server for, as a query: nothing, which is the first choice, where a word of the link can be no choice.
export function query(asked) {
  const words = Object.entries(named(asked));
  return words.every(([name, value]) => chooses(name, value)) ? words : [];
}

// The choice that agrees in most of what is asked for, the first where several do.
function nearest(here, wanted) {
  const keys = Object.keys(here.at);
  const ordered = [here.first, ...keys.filter((key) => key !== here.first)];
  const agree = (key) => {
    const choice = new URLSearchParams(key);
    return Object.entries(wanted).filter(([name, value]) => choice.get(name) === value).length;
  };
  return ordered.reduce((best, key) => (agree(key) > agree(best) ? key : best));
}

async function fetched(view, here, asked) {
  const key = new URLSearchParams(query(asked)).toString() || here.first;
  if (await has(view, here, key) || key === here.first) return;
  await has(view, here, here.first);  // what the server does not give is not there: the first is shown in its place
}

// Whether a part is held, and no old one, by now.
async function has(view, here, key) {
  if (Object.hasOwn(here.at, key) && !here.old?.has(key)) return true;
  try {
    const answer = await fetch(`view/${view}?${key}`, { headers: { Accept: "application/json" } });
    if (answer.ok) take(here, await answer.json());
    return answer.ok;
  } catch { /* the server is away: what is held is shown */ }
  return false;
}
