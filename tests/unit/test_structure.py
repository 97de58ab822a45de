"""The shape of the code: no circles of files, trails in the documentation that lead on, docstrings that stand alone."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = ("swiftkv_platform", "jobs", "serve")
MOST_FILES_TO_THE_OPTIMIZER = 12


def modules() -> dict[str, Path]:
    """Files of the packages, by dotted name."""
    found = {}
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*.py"):
            parts = path.relative_to(ROOT).with_suffix("").parts
            if package != "swiftkv_platform":  # a link below it leads there
                parts = ("swiftkv_platform", *parts)
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


@cache
def parsed(path: Path) -> list[ast.AST]:
    """Nodes of a file."""
    return list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))


def imports(path: Path, names: dict[str, Path]) -> set[str]:
    """Modules of ours that a file imports, wherever in the file, those for type checkers included."""
    found = set()
    for node in parsed(path):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                found.add(full if full in names else node.module)
    return found & names.keys()


def circles(graph: dict[str, set[str]]) -> list[set[str]]:
    """Strongly connected components of more than one file (Tarjan)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found = []

    def visit(name: str) -> None:
        index[name] = low[name] = len(index)
        stack.append(name)
        for other in graph[name]:
            if other not in index:
                visit(other)
                low[name] = min(low[name], low[other])
            elif other in stack:
                low[name] = min(low[name], index[other])
        if low[name] == index[name]:
            component = set(stack[stack.index(name) :])
            del stack[stack.index(name) :]
            if len(component) > 1:
                found.append(component)

    for name in graph:
        if name not in index:
            visit(name)
    return found


def test_no_files_import_each_other_in_a_circle() -> None:
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}) == [{"a", "b", "c"}], "one would be found"
    names = modules()
    assert circles({name: imports(path, names) for name, path in names.items()}) == []


def trail(heading: str) -> list[str]:
    """Files in the first column of the table below a heading of docs/architecture.md."""
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    section = text.split(f"## {heading}\n", 1)[1].split("\n## ", 1)[0]
    return re.findall(r"^\| `([^`]+\.py)` \|", section, re.MULTILINE)


def test_each_file_of_the_trail_leads_to_the_next() -> None:
    """From a submitted attempt on: the entrypoint's command is the one step that no import shows."""
    for heading in ("From POST /jobs to an optimizer step", "From POST /generate to a token"):
        assert len(trail(heading)) >= 5
        assert [file for file in trail(heading) if not (ROOT / file).is_file()] == []
    names = modules()
    by_path = {str(path.relative_to(ROOT)): name for name, path in names.items()}
    files = trail("From POST /jobs to an optimizer step")
    assert len(files) <= MOST_FILES_TO_THE_OPTIMIZER
    walk = files[files.index("jobs/distill.py") :]
    within_reach: set[str] = {by_path[walk[0]]}
    for file in walk:
        assert by_path[file] in within_reach, file
        imported = imports(names[by_path[file]], names)
        packages = [name for name in imported if names[name].name == "__init__.py"]
        within_reach |= imported.union(*(imports(names[name], names) for name in packages))


FRAGMENT = re.compile(r"(Of|Whose|By which|As|What|Which|Who|That|How)\s")
"""Beginning of a docstring that does not stand alone."""


VAGUE = re.compile(r"\b(nobody|somebody|so many)\b", re.IGNORECASE)
"""Words for which there is a name or a number."""


@cache
def docstrings() -> list[tuple[str, str]]:
    """Place and text of every docstring."""
    paths = [path for room in (*PACKAGES, "benchmarks", "tests") for path in sorted((ROOT / room).rglob("*.py"))]
    return [
        (f"{path.relative_to(ROOT)}:{node.lineno}", node.value.value)
        for path in paths
        for node in parsed(path)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
    ]


def test_docstrings_stand_alone_and_say_who_and_how_many() -> None:
    """A docstring is read in a tooltip or a reference, far from the name that it would continue."""
    assert [place for place, text in docstrings() if FRAGMENT.match(text)] == []
    pages = [(page.name, page.read_text(encoding="utf-8")) for page in (ROOT / "docs").rglob("*.md")]
    assert [place for place, text in (*docstrings(), *pages) if VAGUE.search(text)] == []
