"""Count the words of prose that a user reads: README.md and docs, without code, API and contributors' pages.

python -m tests.tools.words
"""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
AIM = 36_000
NUM_SHOWN = 10
PART = re.compile(r":caption: For contributors\n:hidden:\n\n(.*?)```", re.DOTALL)


def user_pages() -> list[Path]:
    """Return the readme and the pages outside of `api`, `changes` and the part For contributors."""
    docs = ROOT / "docs"
    [part] = PART.findall((docs / "index.md").read_text(encoding="utf-8"))
    found = [page for page in docs.glob("*.md") if page.stem not in part.split()]
    return [ROOT / "README.md", *sorted(found)]


def without_code(text: str) -> str:
    """Return a page without its blocks of code."""
    return re.sub(r"^( *)(`{3,}).*?^\1\2 *$", "", text, flags=re.DOTALL | re.MULTILINE)


def num_words(text: str) -> int:
    """Count words outside of blocks of code; a link counts by its text."""
    text = re.sub(r"<!--.*?-->", "", without_code(text), flags=re.DOTALL)
    text = re.sub(r"\]\([^)]*\)", "]", text)
    return sum(bool(re.search(r"\w", word)) for word in text.split())


def main() -> None:
    """Print the count and the longest pages."""
    counts = {page.name: num_words(page.read_text(encoding="utf-8")) for page in user_pages()}
    total = sum(counts.values())
    longest = sorted(counts, key=counts.__getitem__, reverse=True)[:NUM_SHOWN]
    print(f"{total:,} words of prose for users on {len(counts)} pages, the aim is {AIM:,}")
    print(*(f"{counts[name]:6,} {name}" for name in longest), sep="\n")


if __name__ == "__main__":
    main()
