"""Installations without extras, import names, and what is missing on a machine."""

import subprocess
import sys
import tarfile
import tomllib
import zipfile
from collections.abc import Mapping
from importlib.metadata import packages_distributions, requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import swiftkv_platform
from tests.support.parameters import WIDE

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
SERVICES = {
    *("aiohttp", "alembic", "fastapi", "obstore", "psycopg", "ray", "sqlalchemy"),
    *("starlette", "torch", "uvicorn"),
}
"""Distributions that a light installation must not bring."""


def closure(requirements: list[str]) -> set[str]:
    """Distributions that installing `requirements` brings, by the metadata of those installed here."""
    found: set[tuple[str, str]] = set()
    todo = [Requirement(text) for text in requirements]
    while todo:
        requirement = todo.pop()
        name = canonicalize_name(requirement.name)
        for extra in ("", *requirement.extras):
            if (name, extra) not in found:
                found.add((name, extra))
                further = [Requirement(text) for text in requires(name) or ()]
                todo += [each for each in further if each.marker is None or each.marker.evaluate({"extra": extra})]
    return {name for name, _ in found}


@pytest.fixture(scope="module")
def owners() -> Mapping[str, set[str]]:
    """Distributions by the top-level modules that they provide."""
    return {name: {canonicalize_name(each) for each in found} for name, found in packages_distributions().items()}


def test_a_light_installation_brings_no_service() -> None:
    assert closure(PROJECT["dependencies"] + PROJECT["optional-dependencies"]["vllm"]) & SERVICES == set()
    assert SERVICES - closure(PROJECT["optional-dependencies"]["platform"]) == {"psycopg", "torch"}


PROGRAM = """
import sys

class Refusal:
    def find_spec(self, name, path=None, target=None):
        if name in {refused!r}:
            raise ModuleNotFoundError("refused: " + name, name=name)

sys.meta_path.insert(0, Refusal())
from swiftkv_platform.cli import main
main()
"""


def test_the_command_line_starts_with_what_is_always_installed(tmp_path: Path, owners: Mapping[str, set[str]]) -> None:
    light = closure(PROJECT["dependencies"])
    refused = {name for name, holders in owners.items() if not holders & light} - {"swiftkv_platform"}
    assert {"ray", "sqlalchemy", "torch"} <= refused
    for arguments in (["--help"], ["plan", "builtin:python-5m", "--num-key-value-layers", "6", "--json"]):
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM.format(refused=sorted(refused)), *arguments],
            cwd=tmp_path,
            env={"PYTHONPATH": str(ROOT), "HOME": str(tmp_path)},
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout


def python(code: str, directory: Path) -> str:
    """Run a script in `directory` and return what it prints."""
    (directory / "script.py").write_text(code)
    run = subprocess.run([sys.executable, "script.py"], cwd=directory, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return run.stdout.strip()


def build(project: Path, target: str, directory: Path) -> Path:
    command = [sys.executable, "-m", "hatchling", "build", "--target", target, "--directory", str(directory)]
    subprocess.run(command, cwd=project, check=True, capture_output=True)
    [built] = directory.iterdir()
    return built


@pytest.mark.parametrize("source", [pytest.param("checkout", marks=WIDE), "sdist"])
def test_a_wheel_takes_one_name(source: str, tmp_path: Path) -> None:
    project = ROOT
    if source == "sdist":
        with tarfile.open(build(ROOT, "sdist", tmp_path / "sdists")) as sources:
            sources.extractall(tmp_path)
        [project] = tmp_path.glob("swiftkv_platform-*")
    names = zipfile.ZipFile(build(project, "wheel", tmp_path / "wheels")).namelist()
    assert {name.split("/")[0] for name in names if ".dist-info/" not in name} == {"swiftkv_platform"}
    assert {"swiftkv_platform/jobs/distill.py", "swiftkv_platform/serve/app.py"} <= set(names)
    assert "swiftkv_platform/jobs/recipes/builtin-python-5m.yaml" in names


def test_folders_of_the_user_neither_shadow_ours_nor_are_shadowed(tmp_path: Path) -> None:
    names = ("jobs", "serve", "specs")
    for name in names:
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("OWNER = 'user'\n")
    ours = ", ".join(f"swiftkv_platform.{name}" for name in (*names, "jobs.values", "serve.args"))
    code = f"import jobs, serve, specs, {ours}\nprint(jobs.OWNER, serve.OWNER, specs.OWNER)"
    assert python(code, tmp_path) == "user user user"


def test_the_package_names_what_scripts_use(tmp_path: Path) -> None:
    code = """
import sys
from swiftkv_platform import Client, JobSpec, __version__
assert "torch" not in sys.modules
print(Client.__name__, JobSpec.__name__, __version__)
"""
    assert python(code, tmp_path) == "Client JobSpec 0.1.0"
    assert (swiftkv_platform.LLMEngine.__name__, swiftkv_platform.convert.__name__) == ("LLMEngine", "convert")
    with pytest.raises(AttributeError, match="'swiftkv_platform' has no attribute 'Engine'"):
        swiftkv_platform.Engine  # noqa: B018
