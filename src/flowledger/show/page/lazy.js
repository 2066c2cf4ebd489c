// What is drawn when somebody comes to look at it: a page of many charts opens at once, and draws the others while nobody waits.

const SOON_MS = 400; // the page is there, and what is in sight is drawn
const waiting = new Set();
let idles = false;

// `draw` is called once: when `host` is in sight or about to be, when the page is printed, or when the browser has nothing to do.
export function insight(host, draw) {
  const now = () => {
    if (!waiting.delete(now)) return;
    watch.disconnect();
    if (host.isConnected) draw();
  };
  const watch = new IntersectionObserver((seen) => { if (seen.some((one) => one.isIntersecting)) now(); }, { rootMargin: "400px" });
  watch.observe(host);
  waiting.add(now);
  if (!idles) {
    idles = true;
    setTimeout(idly, SOON_MS);
  }
  return host;
}

function idly() {
  const act = () => {
    const [first] = waiting;
    first?.();
    if (waiting.size) idly();
    else idles = false;
  };
  if (window.requestIdleCallback) window.requestIdleCallback(act);
  else setTimeout(act, 50);
}

const all = () => { for (const now of [...waiting]) now(); };
window.addEventListener("beforeprint", all);
window.matchMedia("print").addEventListener("change", (print) => { if (print.matches) all(); });
