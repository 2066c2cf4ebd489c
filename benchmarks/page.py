"""How fast the page is: as a file of a run, and live beside one of 1,024 ranks.

    python benchmarks/page.py [--quick] [--ranks 1024] [--steps 1000] [--chromium PATH] [--json]

*The file*: a synthetic ledger of 200 steps on 8 ranks, written by the ledger's own writer at the row counts of a recorded run:
every table, tensors and storages on watched steps, tokens of one group. Seconds until `flowledger show RUN --html FILE`, a
process of its own, has built the page (the median of several, the least and the most) and until it has ended, the page's bytes,
and seconds until its first view is drawn in Chromium. `additions_s` tells how fast the machine was: the same sum each time.

*Live*: a synthetic ledger of 1,024 ranks and 1,000 steps at level `steps`, 17 rows a rank and step and a driver with 60
metrics. The server is started on it as `watch --serve` starts it, in a process of its own.
Seconds from the call to the first view drawn, milliseconds from a step's rows on disk to the change in the page, and the peak of
the server's resident memory. The time between two looks is taken off: a look begins by the clock that the page is told.

There is no peer here: TensorBoard and its like show numbers that were logged, not rows of ranks, and none is installed. What is
measured beside it is how long the same machine takes to read the same bytes and do nothing else.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import page_rows
import psutil

TARGETS = {
    "build_s": 3.0, "mb": 5.0, "interactive_s": 1.0, "live_first_paint_s": 2.0, "live_increment_ms": 100.0,
    "live_memory_mb": 500.0,
}  # fmt: skip


BUILDS = 9
ADDITIONS = 10_000_000


class Chromium:
    """A browser, and what it says of the time."""

    def __init__(self, executable: str) -> None:
        from playwright.sync_api import sync_playwright

        self._started = sync_playwright().start()
        self._browser = self._started.chromium.launch(executable_path=executable, args=["--no-sandbox"])
        self.page = self._browser.new_page()
        self.page.add_init_script(WATCH)

    def drawn(self, url: str) -> float:
        """Seconds from the call for a page to its first view."""
        self.page.goto("about:blank")
        self.page.goto(url)
        self.page.locator(VIEW).wait_for()
        return float(self.page.evaluate("() => window.drawn_at")) / 1e3

    def close(self) -> None:
        self._browser.close()
        self._started.stop()


VIEW = "main > section[data-drawn]"
# Notes, by the browser's clock, when the first view was drawn, when the page said of a step that it had come, and when its view showed it.
WATCH = """
window.came = {}; window.shown = {}; window.drawn_at = null;
const now = () => performance.timeOrigin + performance.now();
new MutationObserver(() => {
  if (window.drawn_at === null && document.querySelector("main > section[data-drawn]")) window.drawn_at = performance.now();
  const live = document.getElementById("live");
  if (live?.dataset.step && !(live.dataset.step in window.came)) window.came[live.dataset.step] = { at: now(), looked: Number(live.dataset.looked) };
  const view = document.querySelector("main > section:not([hidden]) > .body");
  if (view && view !== window.view && view.style.visibility !== "hidden") {
    window.view = view;
    if (live?.dataset.step) window.shown[live.dataset.step] ??= now();
  }
}).observe(document, { childList: true, subtree: true, attributes: true, attributeFilter: ["data-step", "data-drawn", "style"] });
"""


def report(work: Path, chromium: Chromium, ranks: int, steps: int) -> dict[str, float]:
    """The page of a run as one file."""
    rows = page_rows.small(work / "report", ranks, steps)
    file = work / "report.html"
    _build(work)  # leaves the bytecode that an installed package has
    built, whole, cpu, additions = zip(*(_build(work) for _ in range(BUILDS)), strict=True)
    drawn = min(chromium.drawn(file.as_uri()) for _ in range(3))
    return {
        "rows": rows, "build_s": statistics.median(built), "build_least_s": min(built), "build_most_s": max(built),
        "command_s": statistics.median(whole), "command_cpu_s": statistics.median(cpu), "additions_s": statistics.median(additions),
        "mb": file.stat().st_size / 1e6, "interactive_s": drawn,
    }  # fmt: skip


def _build(work: Path) -> tuple[float, float, float, float]:
    """Seconds of the page; of the command that asks for it, from its start to its end; the same of all its cores; and of as many additions
    before it as tell how fast the machine is just now."""
    began = time.perf_counter()
    sum(range(ADDITIONS))
    additions = time.perf_counter() - began
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    command = [sys.executable, "-c", COMMAND, "show", str(work / "report"), "--html", str(work / "report.html")]
    before, began = os.times(), time.perf_counter()
    told = subprocess.run(
        command, env=kept | {"PYTHONPYCACHEPREFIX": str(work / "bytecode")}, check=True, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL
    )  # fmt: skip
    whole, after = time.perf_counter() - began, os.times()
    cpu = after.children_user + after.children_system - before.children_user - before.children_system
    return float(told.stderr), whole, cpu, additions


# `flowledger`, which says how long its page took.
COMMAND = """
import sys, time
from flowledger.cli import main, page
write = page.write_html
def timed(*given, **named):
    began = time.perf_counter()
    size = write(*given, **named)
    print(time.perf_counter() - began, file=sys.stderr)
    return size
page.write_html = timed
main()
"""


def live(work: Path, chromium: Chromium, ranks: int, steps: int, increments: int) -> dict[str, float]:
    """The live page beside a run of many ranks."""
    from flowledger.cli.serve import Asked, server
    from flowledger.show.page.address import Address, bind

    cluster = page_rows.Cluster(work / "large", ranks)
    size = sum(cluster.take(min(20, steps - at)) for at in range(0, steps, 20))
    began = time.perf_counter()
    for part in cluster.parts:
        for file in part.glob("*.jsonl"):
            file.read_bytes()
    only_read = time.perf_counter() - began
    with server(bind(Address()), Asked(run=str(cluster.run.path), plan=None, lang="en")) as (url, *_):
        process = psutil.Process().children()[-1]
        began = time.time()
        chromium.page.goto(url)
        chromium.page.locator(VIEW).wait_for()
        cold = time.time() - began
        chromium.page.locator(f"#live[data-read='1'][data-step='{steps - 1}']").wait_for(timeout=1_200_000)
        caught_up = time.time() - began
        warm = min(chromium.drawn(url) for _ in range(3))
        chromium.page.locator(f"#live[data-step='{steps - 1}']").wait_for()
        said, shown = zip(*(_increment(cluster, chromium) for _ in range(increments)), strict=True)
        memory = _peak(process.pid)
    return {
        "live_ranks": ranks, "live_steps": steps, "live_mb_on_disk": size / 1e6, "live_only_read_s": only_read, "live_cold_paint_s": cold,
        "live_caught_up_s": caught_up, "live_first_paint_s": warm, "live_increment_ms": statistics.median(said), "live_view_ms": statistics.median(shown),
        "live_memory_mb": memory,
    }  # fmt: skip


def _increment(cluster: page_rows.Cluster, chromium: Chromium) -> tuple[float, float]:
    """Milliseconds from the rows of a step on disk to the page's head saying so, and to the view that shows it."""
    time.sleep(2.0)  # a view that was slow to make rests for a while
    step = cluster.step
    cluster.take(1)
    written = time.time()
    chromium.page.locator(f"#live[data-step='{step}']").wait_for()
    for _ in range(600):
        chromium.page.wait_for_timeout(50)
        came, shown = chromium.page.evaluate(f"() => [window.came['{step}'], window.shown['{step}']]")
        if shown is not None:
            break
    began = max(written, came["looked"]) * 1e3
    return came["at"] - began, shown - began


def _peak(pid: int) -> float:
    """The most memory that a process has had, in MB."""
    told = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    return int(told.partition("VmHWM:")[2].split()[0]) / 1e3


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="64 ranks and 40 steps live, 20 steps in the file")
    parser.add_argument("--ranks", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--increments", type=int, default=5)
    parser.add_argument("--only", choices=("file", "live"))
    parser.add_argument(
        "--chromium",
        default=next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None),
    )
    parser.add_argument("--json", action="store_true", help="the figures alone")
    asked = parser.parse_args()
    if asked.chromium is None:
        parser.error("no Chromium here; install one (Debian: apt-get install chromium), or name it with --chromium")
    ranks, steps, of_file = (64, 40, 20) if asked.quick else (asked.ranks, asked.steps, 200)
    chromium = Chromium(asked.chromium)
    figures: dict[str, float] = {}
    try:
        with tempfile.TemporaryDirectory(prefix="flowledger-page-") as folder:
            if asked.only != "live":
                figures |= report(Path(folder), chromium, 8, of_file)
            if asked.only != "file":
                figures |= live(Path(folder), chromium, ranks, steps, asked.increments)
    finally:
        chromium.close()
    missed = [name for name, most in TARGETS.items() if name in figures and not figures[name] < most]
    if not asked.json:
        for name, value in figures.items():
            target = f"   target < {TARGETS[name]:g}{'   MISSED' if name in missed else ''}" if name in TARGETS else ""
            print(f"{name:22} {value:12.3f}{target}")
    print(json.dumps({**{name: round(value, 3) for name, value in figures.items()}, "missed": missed}))
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
