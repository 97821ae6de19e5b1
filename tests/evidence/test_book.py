"""The book as readers get it: built whole, then opened in a browser as wide as a laptop and as narrow as a phone."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from book.building import build
from labkit.paths import repo_root

pytestmark = pytest.mark.evidence

QUICK = os.environ.get("EVIDENCE") == "quick"
WIDTHS = {"laptop": 1280, "phone": 390}
# WCAG 2.1, success criterion 1.4.3, level AA, for text of ordinary size.
LEAST_CONTRAST = 4.5

CONTRASTS = """() => {
  const channel = c => (c /= 255) <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4;
  const luminance = ([r, g, b]) => 0.2126 * channel(r) + 0.7152 * channel(g) + 0.0722 * channel(b);
  const canvas = document.createElement('canvas').getContext('2d', { willReadFrequently: true });
  const rgba = colour => {
    canvas.clearRect(0, 0, 1, 1); canvas.fillStyle = colour; canvas.fillRect(0, 0, 1, 1);
    return [...canvas.getImageData(0, 0, 1, 1).data];
  };
  const behind = element => {
    for (let one = element; one; one = one.parentElement) {
      const colour = rgba(getComputedStyle(one).backgroundColor);
      if (colour[3] > 128) return colour;
    }
    return [255, 255, 255, 255];
  };
  const poor = new Map();
  const walker = document.createTreeWalker(document.querySelector('article'), NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const element = walker.currentNode.parentElement;
    if (!walker.currentNode.data.trim() || !element.getClientRects().length) continue;
    if (element.closest('svg, script, style, title, annotation')) continue;
    const style = getComputedStyle(element);
    if (style.visibility === 'hidden' || style.opacity === '0') continue;
    const [a, b] = [luminance(rgba(style.color)), luminance(behind(element))].sort((x, y) => y - x);
    const contrast = (a + 0.05) / (b + 0.05);
    const what = element.tagName + '.' + element.className + ': ' + walker.currentNode.data.trim().slice(0, 30);
    if (contrast < LEAST) poor.set(element.tagName + element.className, what + ' ' + contrast.toFixed(1));
  }
  return [...poor.values()];
}""".replace("LEAST", str(LEAST_CONTRAST))


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The whole book, built from this tree; a fault of a page or a link that leads nowhere ends the build."""
    return build(repo_root(), tmp_path_factory.mktemp("book")).front.parent


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """A Chromium without a window."""
    program = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if program is None:
        pytest.skip("not verified here: no Chromium; install it with: sudo apt-get install chromium")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield browser
        browser.close()


def pages_to_open(site: Path) -> list[str]:
    """All that was written to be read, and a few of the pages that show code."""
    written = [path for path in site.glob("*.html") if path.name not in ("genindex.html", "search.html")]
    written += [*site.glob("labs/*/*.html"), *site.glob("notebooks/*.html"), *site.glob("benchmarks/results/*.html")]
    names = [path.relative_to(site).as_posix() for path in sorted(written)]
    return [*names, "solutions/engine/scheduler.py.html", "solutions/engine/index.html", "course.toml.html"]


@pytest.mark.parametrize(
    ("device", "scheme"),
    [("laptop", "dark"), ("phone", "light"), *([] if QUICK else [("laptop", "light"), ("phone", "dark")])],
)
def test_every_page_opens_without_faults(site: Path, browser: Any, device: str, scheme: str) -> None:
    context = browser.new_context(viewport={"width": WIDTHS[device], "height": 900}, color_scheme=scheme)
    page = context.new_page()
    faults: list[str] = []
    page.on("pageerror", lambda error: faults.append(f"{page.url}: {error}"))
    page.on("console", lambda said: faults.append(f"{page.url}: {said.text}") if said.type == "error" else None)
    page.on(
        "request", lambda asked: faults.append(f"asks the network for {asked.url}") if "http" in asked.url else None
    )
    opened = pages_to_open(site)
    for name in opened:
        page.goto((site / name).as_uri())
        width = page.evaluate("document.scrollingElement.scrollWidth")
        if width > WIDTHS[device]:
            faults.append(f"{name}: {width} pixels wide")
        faults += [f"{name}: hard to read: {text}" for text in page.evaluate(CONTRASTS)]
    context.close()
    assert len(opened) > 12
    assert not faults, "\n".join(faults[:30])


def test_the_search_finds_a_mechanism(site: Path, browser: Any) -> None:
    page = browser.new_page()
    page.goto((site / "search.html").as_uri() + "?q=preemption")
    # Results come one after another.
    page.wait_for_selector('#search-results li a[href*="labs/07_kv_cache/README.html"]', timeout=60_000)
    page.close()
