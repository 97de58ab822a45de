"""The documentation and the shape of the code: the site builds, trails lead on, docstrings stand alone, no circles."""

import ast
import os
import re
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from swiftkv_platform.orchestration.job import JobStatus
from swiftkv_platform.specs import JobSpec

DOCS = Path("docs")
MADE_BY_THE_READER = {"infra/.env", "infra/kubernetes/production/values.env", "jobs/recipes/NAME.yaml"}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built site. A link or anchor that leads nowhere is a warning, and warnings are errors."""
    directory = tmp_path_factory.mktemp("site")
    # A request to the network is refused by a proxy that does not exist.
    environment = {**os.environ, "HTTPS_PROXY": "http://127.0.0.1:9", "HTTP_PROXY": "http://127.0.0.1:9"}
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(directory)]
    built = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    return directory


def test_the_site_has_every_page_and_loads_nothing_from_elsewhere(site: Path) -> None:
    for page in DOCS.glob("*.md"):
        assert (site / "index.html" if page.stem == "index" else site / page.stem / "index.html").exists(), page
    for page in site.rglob("*.html"):
        text = page.read_text()
        assert 'src="http' not in text, page
        assert '<link rel="stylesheet" href="http' not in text, page


def test_the_reference_names_routes_commands_and_fields(site: Path) -> None:
    def text(page: str) -> str:
        return (site / "reference" / page / "index.html").read_text()

    for route in ("POST /jobs", "GET /jobs/{job_id}/events", "POST /deployments"):
        assert f"<code>{route}</code>" in text("control-plane")
    assert "<code>POST /generate</code>" in text("serving")
    for field in JobSpec.model_fields:
        assert f"<code>{field}</code>" in text("job-spec")
    for command in ("jobs submit", "plan", "keys create"):
        assert f"<code>swiftkv {command}</code>" in text("cli")
    assert "SWIFTKV_DATABASE_URL" in text("settings")


def pages_of(section: Any) -> list[str]:
    """Pages of a section of the navigation, which may be one page."""
    return [section] if isinstance(section, str) else [page for each in section for page in each.values()]


def test_a_newcomer_reads_every_page_in_order() -> None:
    nav = yaml.safe_load(Path("mkdocs.yml").read_text())["nav"]
    pages = {name: pages_of(section) for each in nav for name, section in each.items()}
    read = ["Home", "Start", "Concepts", "Train", "Evaluate", "Serve", "Operate", "Reference", "Changelog"]
    assert list(pages) == read
    serving = ["serving.md", "engine.md", "vllm.md", "ray-serve-llm.md"]
    assert pages["Serve"][: len(serving)] == serving
    listed = [page for each in pages.values() for page in each]
    assert sorted(page for page in listed if (DOCS / page).exists()) == sorted(page.name for page in DOCS.glob("*.md"))


def test_pages_name_files_and_programs_that_exist() -> None:
    roots = [Path(name) for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md", "infra/README.md")]
    missing = []
    for page in (*roots, *DOCS.glob("*.md")):
        text = page.read_text()
        named = re.findall(r"(?<![\w/.{])(?:benchmarks|infra|jobs|serve|swiftkv_platform|tests)/[\w./-]*\w", text)
        programs = re.findall(r"python -m ((?:benchmarks|swiftkv_platform)[\w.]*\w)", text)
        named += [program.replace(".", "/") for program in programs]
        found = {path for path in named if Path(path).exists() or Path(f"{path}.py").exists()}
        missing += [f"{page}: {path}" for path in named if path not in found | MADE_BY_THE_READER]
    assert missing == []


def test_commands_for_ray_serve_llm_say_whether_a_test_runs_them() -> None:
    blocks = re.findall(r"```bash\n(.*?)```", (DOCS / "ray-serve-llm.md").read_text(), re.DOTALL)
    commands = [line for block in blocks for line in block.splitlines()]
    marks = [re.search(r" # (run|not run here)\b", line) for line in commands]
    assert [line for line, mark in zip(commands, marks, strict=True) if mark is None] == []
    assert {mark[1] for mark in marks if mark is not None} == {"run", "not run here"}


def test_the_picture_of_a_job_has_every_status() -> None:
    picture = (DOCS / "images" / "job.svg").read_text()
    assert [status for status in JobStatus if f">{status}</text>" not in picture] == []


ROOT = Path(__file__).parents[2]
PACKAGES = ("swiftkv_platform", "jobs", "serve")
MOST_FILES_TO_THE_OPTIMIZER = 20


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
