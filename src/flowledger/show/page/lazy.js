// What is drawn when somebody comes to look at it: a page of many charts opens at once.

// `draw` is called once, when `host` is in sight, or about to be, or printed.
export function insight(host, draw) {
  let waits = true;
  const now = () => {
    if (!waits) return;
    waits = false;
    watch.disconnect();
    window.removeEventListener("beforeprint", now);
    if (host.isConnected) draw();
  };
  const watch = new IntersectionObserver((seen) => { if (seen.some((one) => one.isIntersecting)) now(); }, { rootMargin: "400px" });
  watch.observe(host);
  window.addEventListener("beforeprint", now);
  return host;
}
