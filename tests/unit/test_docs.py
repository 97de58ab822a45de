"""The documentation and the shape of the code: the site builds, no import is circular."""

import ast
import os
import re
import subprocess
import sys
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Any

import pytest
import yaml
from PIL import Image

from swiftkv_platform.control_plane.jobs.job import JobStatus
from swiftkv_platform.settings import Settings
from swiftkv_platform.specs import JobSpec
from swiftkv_platform.specs.deployment import DeploymentSpec

DOCS = Path("docs")
MADE_BY_THE_READER = {"infra/.env", "infra/kubernetes/production/values.env", "jobs/recipes/NAME.yaml"}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built site. A link or anchor that leads nowhere is a warning, and warnings are errors."""
    directory = tmp_path_factory.mktemp("site")
    # The proxy does not exist, so that every request to the network fails.
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


def test_pictures_are_of_one_run_and_each_is_shown() -> None:
    """`make pictures` writes its commit into each picture and onto the page that shows them."""
    said = re.search(r"at commit (\w+)", (DOCS / "dashboard.md").read_text())
    assert said is not None
    named = re.findall(r"\]\(pictures/([\w-]+\.png)\)", "".join(page.read_text() for page in DOCS.glob("*.md")))
    pictures = {file.name: file for file in (DOCS / "pictures").iterdir()}
    assert {*named} == pictures.keys()
    for file in pictures.values():
        with Image.open(file) as image:
            assert image.info["Commit"].startswith(said[1]), file
    assert sum(file.stat().st_size for file in pictures.values()) < 1_000_000


def test_commands_for_ray_serve_llm_say_whether_a_test_runs_them() -> None:
    blocks = re.findall(r"```bash\n(.*?)```", (DOCS / "ray-serve-llm.md").read_text(), re.DOTALL)
    commands = [line for block in blocks for line in block.splitlines()]
    marks = [re.search(r" # (run|not run here)\b", line) for line in commands]
    assert [line for line, mark in zip(commands, marks, strict=True) if mark is None] == []
    assert {mark[1] for mark in marks if mark is not None} == {"run", "not run here"}


def test_the_picture_of_a_job_has_every_status() -> None:
    picture = (DOCS / "images" / "job.svg").read_text()
    assert [status for status in JobStatus if f">{status}</text>" not in picture] == []


PAGES = {
    str(page).removeprefix("docs/"): page
    for page in (Path("README.md"), Path("SECURITY.md"), Path("infra/README.md"), *DOCS.glob("*.md"))
}

FIGURES = [
    # Row and column of README's table, then the figure's home page, row, column, and index of the number in the cell.
    ("the same: distilled, 0.4 M", "prefill", "performance.md", "g = 2", "prefill", 0),
    ("the same: distilled, 0.4 M", "KV bytes", "performance.md", "g = 2", "KV bytes", 0),
    (
        "the same in the paper's form, 0.8",
        "perplexity",
        "performance.md",
        "g = 2, the paper's form",
        "perplexity ratio",
        0,
    ),
    ("the same in the paper's form, 0.8", "KL to", "performance.md", "g = 2, the paper's form", "distilled", 0),
    ("the same in the paper's form, 0.8", "top-1", "performance.md", "g = 2, the paper's form", "agreement", 0),
    ("the same in the paper's form, 0.8", "time", "performance.md", "g = 2", "time", 2),
    ("SmolLM2, half skipped, distilled", "perplexity", "quality.md", "the same: perplexity", "the same", 0),
    ("SmolLM2, half skipped, distilled", "KL to", "quality.md", "chats (", "the same", 0),
    ("SmolLM2, half skipped, distilled", "top-1", "quality.md", "the same: agreement", "the same", 0),
    ("SmolLM2, half skipped, distilled", "prefill", "quality.md", "FLOPs of a prompt", "-l15", 0),
    ("SmolLM2, half skipped, `make", "KL to", "quality.md", "distilled:", "[own K and V", 0),
    ("SmolLM2, half skipped, `make", "top-1", "quality.md", "distilled:", "[own K and V", 1),
    ("SmolLM2, half skipped, `make", "perplexity", "quality.md", "distilled:", "[own K and V", 2),
    ("SmolLM2, half skipped, `make", "time", "performance.md", "8,000", "ratio", 0),
    ("the same in the paper's form, 0.2", "KL to", "quality.md", "distilled:", "the paper's form", 0),
    ("the same in the paper's form, 0.2", "top-1", "quality.md", "distilled:", "the paper's form", 1),
    ("the same in the paper's form, 0.2", "perplexity", "quality.md", "distilled:", "the paper's form", 2),
    ("SmolLM2, 27%", "perplexity", "quality.md", "perplexity ratio; agreement", "-l22", 0),
    ("SmolLM2, 27%", "KL to", "quality.md", "KL, all held-out text", "-l22", 0),
    ("SmolLM2, 27%", "top-1", "quality.md", "perplexity ratio; agreement", "-l22", 1),
    ("SmolLM2, 27%", "prefill", "quality.md", "FLOPs of a prompt", "-l22", 0),
]

STATEMENTS = {
    # Patterns that find a figure on any page; where a pattern has two numbers, their quotient is the figure.
    "our dense engine over vLLM": (
        r"dense engine reads prompts ([\d.]+) times",
        r"\| dense \| \d+ ms \| ([\d.]+)x",
        r"\| vLLM, dense \| (\d+) ms .*? \| dense \| (\d+) ms",
    ),
    "SwiftKV over our dense engine": (
        r"makes it ([\d.]+) times",
        r"\| dense \| (\d+) ms .*? \| SwiftKV, g = 2 \| (\d+) ms",
    ),
    # vLLM's time comes after ours in a row, but the pattern captures it first.
    "our engine over vLLM on SmolLM2, least": (
        r"our engine is ([\d.]+) to [\d.]+ times as fast as vLLM",
        r"\| 1024 tokens \|(?=(?:[^|]*\|){4} (\d+) ms)[^|]*\| (\d+) ms",
    ),
    "our engine over vLLM on SmolLM2, most": (
        r"our engine is [\d.]+ to ([\d.]+) times as fast as vLLM",
        r"\| 8000 \|(?=(?:[^|]*\|){3} (\d+) ms) (\d+) ms",
    ),
    "an 8B shape on a GPU, least": (r"an 8B shape ([\d.]+) to", r"\| 2000 \(32 requests\) \| \d+ \| \d+ \(([\d.]+)x\)"),
    "an 8B shape on a GPU, most": (r"an 8B shape [\d.]+ to ([\d.]+)", r"\| 32000 \(2\) \| \d+ \| \d+ \(([\d.]+)x\)"),
    "numbers found in 512 tokens": (r"a student finds ([\d.]+), [\d.]+ and", r"of 512 tokens \| ([\d.]+); [\d.]+% \|"),
    "numbers found in 1,024 tokens": (r"a student finds [\d.]+, ([\d.]+) and", r"\| 1024 \| ([\d.]+); [\d.]+% \|"),
    "numbers found in 2,048 tokens": (
        r"a student finds [\d.]+, [\d.]+ and ([\d.]+)%",
        r"\| 2048 \| ([\d.]+); [\d.]+% \|",
    ),
    "time of SmolLM2 at l = 22": (r"27% skipped, [^|]*\|(?:[^|]*\|){5} ([\d.]+)", r"at l = 22 takes ([\d.]+) of"),
}


def plain(page: str) -> str:
    """Text of a page without bold marks, and without commas in numbers."""
    return re.sub(r"(?<=\d),(?=\d{3})", "", PAGES[page].read_text(encoding="utf-8").replace("**", ""))


def cell(page: str, row: str, column: str) -> list[str]:
    """Numbers of a cell of a page's table. `row` and `column` begin the row's first cell and the column's head."""
    row, head = row.replace(",", ""), []
    for line in plain(page).splitlines():
        cells = [each.strip(" `") for each in line.strip("|").split("|")] if line.startswith("|") else []
        head = head if head and cells else cells
        places = [place for place, name in enumerate(head) if name.startswith(column)]
        if places and cells and cells[0].replace(",", "").startswith(row):
            return re.findall(r"\d+(?:\.\d+)?", cells[places[0]])
    raise AssertionError(f"{page} has no row {row!r} with a column {column!r}")


def agree(one: str, other: str) -> bool:
    """Whether two numbers are equal when rounded to the digits of the shorter one."""
    digits = min(len(text.partition(".")[2]) for text in (one, other))
    return abs(float(one) - float(other)) <= 0.5001 * 10.0**-digits


def test_no_figure_stands_in_two_places_with_two_values() -> None:
    found = {
        f"{row}: {column} ({number})": [cell("README.md", row, column)[-1], cell(page, home, of)[number]]
        for row, column, page, home, of, number in FIGURES
    }
    text = " ".join(" ".join(plain(page).split()) for page in PAGES)
    for name, patterns in STATEMENTS.items():
        stated = [match.groups() for pattern in patterns for match in re.finditer(pattern, text)]
        found[name] = [one[0] if len(one) == 1 else f"{int(one[0]) / int(one[1]):.4f}" for one in stated]
        assert len(stated) >= len(patterns), name
    assert {name: values for name, values in found.items() if not all(agree(values[0], one) for one in values)} == {}


QUALITY = re.compile(r"\bKL\b|\bagreement\b|\bperplexity\b|\bneedles\b|\bIFEval\b")
CAPTION = re.compile(r"Samples: .+\. Seeds: .+\. Interval[ :].+\.")


def tables_of_quality(text: str) -> dict[str, str]:
    """Tables with three or more figures of model quality: the paragraph below each, by its first line."""
    blocks = [block.strip("\n") for block in re.split(r"\n\s*\n", text)]
    found = {}
    for before, table, below in zip(["", *blocks], blocks, [*blocks[1:], ""], strict=False):
        figures = re.findall(r"(?<![\d.])\d+\.\d+|\d%|\de-\d", table)
        about = f"{before.splitlines()[-1] if before else ''} {table}"
        if re.match(r"\|(?! field )", table) and len(figures) >= 3 and QUALITY.search(about):
            found[table.splitlines()[0]] = " ".join(below.split())
    return found


def test_every_table_of_quality_says_samples_seeds_and_interval() -> None:
    table = "| | KL |\n|---|---|\n| a | 0.1 |\n| b | 0.2 |\n| c | 0.3 |\n"
    bare, said = (
        tables_of_quality(table + below) for below in ("\nOne seed.\n", "\nSamples: 9. Seeds: 1. Interval: none.\n")
    )
    assert [[bool(CAPTION.match(below)) for below in each.values()] for each in (bare, said)] == [[False], [True]]
    found = {page: tables_of_quality(PAGES[page].read_text(encoding="utf-8")) for page in PAGES}
    assert {page for page, tables in found.items() if tables} == {
        "README.md",
        "model.md",
        "performance.md",
        "quality.md",
    }
    assert {page: len(found[page]) for page in ("performance.md", "quality.md")} == {
        "performance.md": 4,
        "quality.md": 4,
    }
    assert [head for each in found.values() for head, below in each.items() if not CAPTION.match(below)] == []


UNITS = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "hours": 3600, "days": 86400}
DEFAULT = re.compile(r"`([A-Za-z_.-]+)` \((\d[\d.]*)(?: (KiB|MiB|GiB|hours|days|s))?[;,)]")
"""Pattern of a name followed by its default, as in `max_rollbacks` (3)."""


def test_a_default_is_the_same_on_every_page_and_in_the_code() -> None:
    accepted: dict[str, set[float]] = {}
    objects = [JobSpec.model_json_schema(), DeploymentSpec.model_json_schema()]
    schemas = [each for document in objects for each in (document, *document["$defs"].values())]
    fields = [
        (name, field.get("default")) for schema in schemas for name, field in schema.get("properties", {}).items()
    ]
    fields += [(f"SWIFTKV_{name.upper()}", field.default) for name, field in Settings.model_fields.items()]
    for name, default in fields:
        if isinstance(default, int | float):
            accepted.setdefault(name, set()).add(float(default))
    differing = []
    stated = [(page, *found) for page in PAGES for found in DEFAULT.findall(plain(page))]
    assert len(stated) > 10
    for page, name, number, unit in stated:
        value = float(number) * UNITS.get(unit, 1)
        if value not in accepted.setdefault(name, {value}):
            differing.append(f"{page}: {name} is {value}, elsewhere {accepted[name]}")
    assert differing == []


ROOT = Path(__file__).parents[2]
PACKAGES = ("swiftkv_platform", "jobs", "serve")


def modules() -> dict[str, Path]:
    """Files of the packages, by dotted name."""
    found = {}
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*.py"):
            parts = path.relative_to(ROOT).with_suffix("").parts
            if package != "swiftkv_platform":  # swiftkv_platform has a link to it
                parts = ("swiftkv_platform", *parts)
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


@cache
def parsed(path: Path) -> list[ast.AST]:
    """Nodes of a file."""
    return list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))


def imports(path: Path, names: dict[str, Path]) -> set[str]:
    """Our modules that a file imports anywhere, imports for type checkers included."""
    found = set()
    for node in parsed(path):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                found.add(full if full in names else node.module)
    return found & names.keys()


def circle(graph: dict[str, set[str]]) -> list[str]:
    """Modules that import each other, with the first one again at the end; empty if there is no circle."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        found: list[str] = error.args[1]
        return found
    return []


def test_no_files_import_each_other_in_a_circle() -> None:
    assert set(circle({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}})) == {"a", "b", "c"}, "a circle is found"
    names = modules()
    assert circle({name: imports(path, names) - {name} for name, path in names.items()}) == []


FRAGMENT = re.compile(r"(Of|Whose|By which|As|What|Which|Who|That|How)\s")
"""Matches the beginning of a docstring that does not stand alone."""


VAGUE = re.compile(r"\b(nobody|somebody|so many)\b", re.IGNORECASE)
"""Matches words that should be a name or a number."""


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
    """Docstrings are read in tooltips and references, away from the name that they would continue."""
    assert [place for place, text in docstrings() if FRAGMENT.match(text)] == []
    pages = [(page.name, page.read_text(encoding="utf-8")) for page in (ROOT / "docs").rglob("*.md")]
    assert [place for place, text in (*docstrings(), *pages) if VAGUE.search(text)] == []
