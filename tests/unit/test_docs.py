"""The documentation: the site builds, and its pages name files and programs that exist."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from swiftkv_platform.specs import JobSpec

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
        assert (site / page.stem / "index.html").exists(), page
    for name in ("", "security", "installation", "contributing", "changelog"):  # files outside docs/
        assert (site / name / "index.html").exists(), name
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


def test_charts_show_figures_of_their_pages() -> None:
    charts = {
        path.name: re.findall(r'class="figure"[^>]*>([\d.]+)', path.read_text()) for path in DOCS.glob("images/*.svg")
    }
    assert sum(bool(figures) for figures in charts.values()) >= 2
    for page in DOCS.glob("*.md"):
        text = page.read_text()
        for name in re.findall(r"\(images/([\w-]+\.svg)\)", text):
            assert [figure for figure in charts[name] if figure not in text] == [], f"{page}: {name}"
