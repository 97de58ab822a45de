"""An HTML page that stands alone: style, tables and figures inside it, readable in light and dark. Knows no report."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

_STYLE = """
:root { color-scheme: light dark; --paper: #fdfdfc; --ink: #1c1f23; --faint: #667; --line: #d5d8dc; --good: #1f7a3d;
  --bad: #b3261e; }
@media (prefers-color-scheme: dark) { :root { --paper: #16181b; --ink: #e6e7e9; --faint: #9aa0a8; --line: #3a3f45;
  --good: #6fcf8b; --bad: #ff8a80; } }
body { background: var(--paper); color: var(--ink); font: 16px/1.5 system-ui, sans-serif; max-width: 60rem;
  margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.6rem; margin-bottom: .2rem; } h2 { font-size: 1.2rem; margin-top: 2.2rem; }
p.lead { color: var(--faint); margin-top: 0; }
.scroll { overflow-x: auto; } table { border-collapse: collapse; margin: .6rem 0; font-variant-numeric: tabular-nums; }
caption { text-align: left; color: var(--faint); padding-bottom: .3rem; }
th, td { padding: .3rem .8rem .3rem 0; border-bottom: 1px solid var(--line); text-align: right; }
th:first-child { text-align: left; } tbody th { font-weight: 500; white-space: nowrap; }
.good { color: var(--good); font-weight: 600; } .bad { color: var(--bad); font-weight: 600; }
figure { margin: 1rem 0; } figure svg { width: 100%; height: auto; } figcaption { color: var(--faint); }
pre { overflow-x: auto; font-size: .85rem; } summary { cursor: pointer; }
""".strip()


def page(title: str, lead: str, sections: Iterable[str]) -> str:
    """The document. `title` and `lead` are text; sections are HTML."""
    body = "\n".join(section for section in sections if section)
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>\n{_STYLE}\n</style>\n</head>\n<body>\n<main>\n"
        f'<h1>{escape(title)}</h1>\n<p class="lead">{escape(lead)}</p>\n{body}\n</main>\n</body>\n</html>\n'
    )


def section(title: str, *parts: str) -> str:
    """A heading and what belongs below it; nothing at all without content."""
    content = "\n".join(part for part in parts if part)
    return f"<section>\n<h2>{escape(title)}</h2>\n{content}\n</section>" if content else ""


def table(caption: str, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """A table whose rows begin with their heading. Cells are text, or what `verdict` returns."""
    head = "".join(f'<th scope="col">{escape(column)}</th>' for column in columns)
    body = "\n".join(f"<tr>{_row(row)}</tr>" for row in rows)
    return (
        f'<div class="scroll" tabindex="0"><table>\n<caption>{escape(caption)}</caption>\n'
        f"<thead><tr>{head}</tr></thead>\n<tbody>\n{body}\n</tbody>\n</table></div>"
    )


class Markup(str):
    """Text that is HTML already."""

    __slots__ = ()


def verdict(passed: bool) -> Markup:
    """Said in words, so that nothing depends on colour."""
    return Markup('<span class="good">passed</span>' if passed else '<span class="bad">failed</span>')


def figure(svg: str, caption: str) -> str:
    return f"<figure>\n{svg}\n<figcaption>{escape(caption)}</figcaption>\n</figure>"


def paragraph(text: str) -> str:
    return f"<p>{escape(text)}</p>"


def details(summary: str, content: str) -> str:
    """HTML that is shown when asked for."""
    return f"<details>\n<summary>{escape(summary)}</summary>\n{content}\n</details>"


def document(value: Mapping[str, Any]) -> str:
    """A JSON document to read."""
    return f'<pre tabindex="0">{escape(json.dumps(value, indent=2, ensure_ascii=False))}</pre>'


def _row(row: Sequence[Any]) -> str:
    first, *rest = row
    cells = "".join(f"<td>{_cell(cell)}</td>" for cell in rest)
    return f'<th scope="row">{_cell(first)}</th>{cells}'


def _cell(value: Any) -> str:
    return value if isinstance(value, Markup) else escape(str(value))
