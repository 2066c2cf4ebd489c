"""Draws the pictures of the page that the documents show, in Chromium: `python docs/images/draw_page.py RUN`.

RUN is a run of examples/ppo.yaml at level tokens: `flowledger run examples/ppo.yaml steps=4 record.level=tokens -o RUN`.
"""

import shutil
import sys
import tempfile
from pathlib import Path

from playwright.sync_api import sync_playwright

from flowledger.cli.page import write_html

IMAGES = Path(__file__).resolve().parent
# Name of the picture -> what is opened, and how high the window is.
PICTURES = {"page-flow": ("#flow", 1010), "page-memory": ("#memory", 700)}


def main(run: Path) -> None:
    """Each picture, in the light look and in English."""
    chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))))
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        page_file = Path(folder) / "page.html"
        write_html(run, page_file, plan=None, lang="en")
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        for name, (link, height) in PICTURES.items():
            page = browser.new_page(viewport={"width": 1280, "height": height})
            page.goto(page_file.as_uri() + link)
            page.wait_for_selector("main > section:not([hidden])[data-drawn]")
            page.wait_for_timeout(1000)  # charts are drawn a moment later
            page.screenshot(path=IMAGES / f"{name}.png")
        browser.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
