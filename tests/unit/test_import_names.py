"""Import names: what `import swiftkv_platform` gives, and folders of a user called `jobs` and `serve`."""

from __future__ import annotations

import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import swiftkv_platform

ROOT = Path(__file__).parents[2]


def python(code: str, directory: Path) -> str:
    """Run a script in `directory` and return what it prints."""
    (directory / "script.py").write_text(code)
    run = subprocess.run([sys.executable, "script.py"], cwd=directory, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return run.stdout.strip()


@pytest.mark.parametrize("name", ["jobs", "serve", "specs"])
def test_a_folder_of_the_user_neither_shadows_ours_nor_is_shadowed(name: str, tmp_path: Path) -> None:
    (tmp_path / name).mkdir()
    (tmp_path / name / "__init__.py").write_text("OWNER = 'user'\n")
    code = f"import {name}, swiftkv_platform.{name}, swiftkv_platform.jobs.values, swiftkv_platform.serve.args"
    assert python(f"{code}\nprint({name}.OWNER)", tmp_path) == "user"


def build(project: Path, target: str, directory: Path) -> Path:
    command = [sys.executable, "-m", "hatchling", "build", "--target", target, "--directory", str(directory)]
    subprocess.run(command, cwd=project, check=True, capture_output=True)
    [built] = directory.iterdir()
    return built


@pytest.mark.parametrize("source", ["checkout", "sdist"])
def test_a_wheel_takes_one_name(source: str, tmp_path: Path) -> None:
    project = ROOT
    if source == "sdist":
        with tarfile.open(build(ROOT, "sdist", tmp_path / "sdists")) as sources:
            sources.extractall(tmp_path, filter="data")
        [project] = tmp_path.glob("swiftkv_platform-*")
    names = zipfile.ZipFile(build(project, "wheel", tmp_path / "wheels")).namelist()
    assert {name.split("/")[0] for name in names if ".dist-info/" not in name} == {"swiftkv_platform"}
    assert {"swiftkv_platform/jobs/distill.py", "swiftkv_platform/serve/app.py"} <= set(names)
    assert "swiftkv_platform/jobs/recipes/builtin-python-5m.yaml" in names


def test_the_package_names_what_scripts_use(tmp_path: Path) -> None:
    code = """
import sys
from swiftkv_platform import Client, JobSpec, __version__
assert "torch" not in sys.modules
from swiftkv_platform import LLMEngine, convert
print(Client.__name__, JobSpec.__name__, LLMEngine.__name__, convert.__name__, __version__)
"""
    assert python(code, tmp_path) == "Client JobSpec LLMEngine convert 0.1.0"


def test_a_name_that_is_not_there_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="'swiftkv_platform' has no attribute 'Engine'"):
        swiftkv_platform.Engine  # noqa: B018
