"""README.md as GitHub shows it: a column of 1012 pixels, in a stylesheet of GitHub's measures."""

from __future__ import annotations

from markdown_it import MarkdownIt
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import get_lexer_by_name

COLUMN = 1012
STYLE = f"""
body {{ margin: 0; font: 16px/1.5 -apple-system, "Segoe UI", Helvetica, Arial, sans-serif;
        color: #1f2328; background: #fff; }}
article {{ box-sizing: border-box; max-width: {COLUMN}px; margin: 0 auto; padding: 32px; }}
article > :first-child {{ margin-top: 0; }}
h1, h2 {{ margin: 24px 0 16px; padding-bottom: 0.3em; line-height: 1.25;
          border-bottom: 1px solid #d1d9e0; }}
h1 {{ font-size: 2em; }}
h2 {{ font-size: 1.5em; }}
p, ul, pre, table {{ margin: 0 0 16px; }}
ul {{ padding-left: 2em; }}
img {{ max-width: 100%; }}
a {{ color: #0969da; }}
code, pre {{ font: 85%/1.45 ui-monospace, Menlo, Consolas, monospace; background: #f6f8fa; }}
pre {{ padding: 16px; overflow: auto; }}
table {{ display: block; overflow: auto; border-collapse: collapse; }}
th, td {{ padding: 6px 13px; border: 1px solid #d1d9e0; }}
.gi {{ color: #116329; background: #dafbe1; }}
.gd {{ color: #82071e; background: #ffebe9; }}
@media (prefers-color-scheme: dark) {{
  body {{ color: #f0f6fc; background: #0d1117; }}
  code, pre {{ background: #151b23; }}
  a {{ color: #4493f8; }}
  .gi {{ color: #aff5b4; background: #033a16; }}
  .gd {{ color: #ffdcd7; background: #67060c; }}
}}
@media (max-width: 600px) {{ article {{ padding: 16px; }} }}
"""


def render(text: str) -> str:
    """Return a page for the folder of the built documentation, which holds the pictures."""
    markdown = MarkdownIt("gfm-like", {"linkify": False, "highlight": colour})
    body = markdown.render(text.replace("(docs/_static/", "(_static/"))
    head = f'<meta charset="utf-8"><title>README</title><style>{STYLE}</style>'
    return f'<!doctype html><html lang="en">{head}<article>{body}</article></html>'


def colour(code: str, language: str, _: str) -> str:
    """Return a block of code with a class for each kind of text, as `gi` for lines that are added."""
    lexer = get_lexer_by_name(language, stripnl=False)
    return highlight(code, lexer, HtmlFormatter(nowrap=True))
