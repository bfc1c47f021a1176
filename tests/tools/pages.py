"""Open every built page and the readme in headless Chromium: check widths, pictures, searches, prints.

python -m tests.tools.pages docs/_build runs/pages
"""

from __future__ import annotations

import argparse
import itertools
import re
import shutil
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from itertools import chain
from pathlib import Path
from typing import Any, Literal

from playwright.sync_api import Browser, ConsoleMessage, Page, sync_playwright

from accel_fn.contrib.runs.plot_page import write_page
from accel_fn.contrib.runs.run_log import read_runs
from tests.contrib.runs import histories
from tests.tools import readme

WIDTHS = (1400, 400)
SCHEMES: tuple[Literal["light", "dark"], ...] = ("light", "dark")
SEARCHES = {
    "gradient accumulation": "memory.html#accumulate-gradient-accumulation",
    "mixed precision": "precision.html#with-amp-mixed-precision",
    "gradient clipping": "optimisation.html#clip-gradient-clipping-by-norm",
    "cosine": "recipes.html#index-0",
    "noise scale": "recipes.html#gradient-noise-scale",
    "gather_for_metrics": "evaluation.html#index-0",
    "gradient checkpointing": "memory.html#index-0",
}
"""Searches of a reader, and the page that the first result must lead to."""
WIDER = """() => {
    const inner = document.documentElement.clientWidth;
    const scrolls = each => /auto|scroll/.test(getComputedStyle(each).overflowX);
    const inside = each =>
        each && each.tagName !== 'ARTICLE' && (scrolls(each) || inside(each.parentElement));
    const wide = [...document.querySelectorAll('article *, figure *')].filter(
        each => each.getBoundingClientRect().right > inner + 1 && !inside(each));
    const page = document.documentElement.scrollWidth > inner ? ['the page scrolls sideways'] : [];
    const name = each => each.tagName + ': ' + each.textContent.trim().slice(0, 60);
    return page.concat(wide.slice(0, 5).map(name));
}"""
"""Elements that reach beyond the window, except inside boxes that scroll."""
CUT = """() => [...document.querySelectorAll('article pre, article .table-wrapper, article dt')].filter(
    each => each.scrollWidth > each.clientWidth + 1).map(each => each.textContent.trim().slice(0, 60))"""
"""Blocks that must be scrolled sideways although a wide window has room for them."""
HIDDEN = """() => [...document.querySelectorAll('article img')].filter(
    each => !each.complete || each.naturalWidth === 0).map(each => each.src)"""
"""Pictures that did not load."""

FIRST_LOOK = """() => {
    const picture = document.querySelector('article img');
    const added = document.querySelector('article .gi');
    const ends = {'the first picture': picture.complete && picture.getBoundingClientRect().bottom,
                  'the first added line': added.getClientRects()[0].bottom};
    return Object.entries(ends).filter(each => !(each[1] && each[1] <= innerHeight)).map(
        each => `${each[0]} ends at ${each[1]} of ${innerHeight} pixels`);
}"""
"""What a reader of the readme must see without scrolling, and does not."""
ON_ONE_SHEET = "cheat-sheet.html"


class Quiet(SimpleHTTPRequestHandler):
    """Serves files without printing a line for each."""

    def log_message(self, *args: Any) -> None:
        pass


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """Serve a folder on a free port of this machine."""
    handler = partial(Quiet, directory=str(folder))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def faults_of(page: Page, address: str, picture: Path | None) -> Iterator[str]:
    """Open a page at each width, light and dark; take screenshots; yield the faults."""
    page.goto(address, wait_until="load")
    for width, scheme in itertools.product(WIDTHS, SCHEMES if picture else SCHEMES[:1]):
        page.set_viewport_size({"width": width, "height": 900})
        page.emulate_media(color_scheme=scheme)
        if picture:
            shot = picture.with_name(f"{picture.name}-{width}-{scheme}.png")
            page.screenshot(path=shot, full_page=True)
        page.evaluate(
            "() => document.querySelectorAll('details').forEach(each => each.open = true)"
        )
        wide = page.evaluate(WIDER)
        if width == WIDTHS[0] and picture:
            wide += page.evaluate(CUT)
        page.evaluate(
            "() => document.querySelectorAll('details').forEach(each => each.open = false)"
        )
        yield from (f"{width} pixels, {scheme}: wider than the window: {each}" for each in wide)
    yield from (f"picture did not load: {each}" for each in page.evaluate(HIDDEN))


def note(messages: list[str], message: ConsoleMessage) -> None:
    """Keep a message of the console, except one about the icon that a browser requests by
    itself."""
    place = message.location["url"]
    if not place.endswith("/favicon.ico"):
        messages.append(f"{message.type}: {message.text} ({place})")


def look(browser: Browser, site: str, shots: Path, names: list[str]) -> Iterator[str]:
    """Check every page; pages of source code get no screenshots."""
    for name in names:
        page = browser.new_page()
        console: list[str] = []
        page.on("console", partial(note, console))
        page.on("pageerror", lambda each, to=console: to.append(f"error: {each}"))
        source = name.startswith("_modules")
        picture = None if source else shots / name.replace("/", "-").removesuffix(".html")
        faults = [*faults_of(page, f"{site}/{name}", picture), *console]
        page.close()
        yield from (f"{name}: {each}" for each in faults)


def search(browser: Browser, site: str) -> Iterator[str]:
    """Search as a reader does; yield the searches whose first result leads elsewhere."""
    for query, target in SEARCHES.items():
        page = browser.new_page()
        page.goto(f"{site}/search.html?q={query.replace(' ', '+')}")
        page.wait_for_selector("#search-results ul.search li a")
        first = page.locator("#search-results ul.search li a").first.get_attribute("href") or ""
        address = re.sub(r"\?[^#]*", "", first)
        if address != target:
            yield f"search for {query!r}: first is {address}, expected {target}"
        page.close()


def look_at_readme(browser: Browser, site: str) -> Iterator[str]:
    """Yield what lies below the first screen of the readme, as GitHub shows it, and should not."""
    page = browser.new_page(viewport={"width": WIDTHS[0], "height": 900})
    page.goto(f"{site}/readme.html", wait_until="load")
    yield from (f"readme.html: {each}" for each in page.evaluate(FIRST_LOOK))
    page.close()


def print_sheet(browser: Browser, site: str) -> Iterator[str]:
    """Print the cheat sheet as a reader does; yield a fault if it takes more than a sheet."""
    page = browser.new_page()
    page.goto(f"{site}/{ON_ONE_SHEET}", wait_until="load")
    sheets = len(re.findall(rb"/Type /Page\b", page.pdf(prefer_css_page_size=True)))
    if sheets != 1:
        yield f"{ON_ONE_SHEET}: prints on {sheets} sheets"
    page.close()


def main() -> None:
    """Print all faults, and exit with 1 if there are any."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("built", type=Path)
    parser.add_argument("shots", type=Path)
    parser.add_argument("--only", default="", help="pages whose name contains this")
    args = parser.parse_args()
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    if chromium is None:
        sys.exit("pages: chromium must be installed; on Debian: apt-get install chromium")
    # The page of `accel-fn plot` is checked like those of the documentation.
    histories.with_values(seed=0).write(folder := args.shots / "run")
    write_page(read_runs("plot", [folder])[0], args.built / "plot.html")
    shown = readme.render(Path("README.md").read_text(encoding="utf-8"))
    (args.built / "readme.html").write_text(shown, encoding="utf-8")
    found = (str(path.relative_to(args.built)) for path in args.built.rglob("*.html"))
    names = sorted(found, key=lambda name: (name.startswith("_modules"), name))
    names = [name for name in names if args.only in name]
    with sync_playwright() as playwright, served(args.built) as site:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        faults = 0
        checks = (look_at_readme, print_sheet, search)
        others = (check(browser, site) for check in checks)
        for fault in chain(look(browser, site, args.shots, names), *others):
            print(fault, flush=True)
            faults += 1
        browser.close()
    print(f"{len(names)} pages, {faults} faults; pictures are in {args.shots}")
    sys.exit(faults > 0)


if __name__ == "__main__":
    main()
