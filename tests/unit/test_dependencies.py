"""Uses of an installation without extras: the vLLM plugin, the client and the command line."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from collections.abc import Mapping
from importlib.metadata import packages_distributions, requires
from pathlib import Path

import grimp
import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
SERVICES = {
    "aiohttp",
    "alembic",
    "fastapi",
    "obstore",
    "psycopg",
    "ray",
    "sqlalchemy",
    "starlette",
    "torch",
    "uvicorn",
}
"""Distributions that no light installation brings."""


def closure(requirements: list[str]) -> set[str]:
    """The distributions that an installation of `requirements` brings, as the metadata of those installed here say."""
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


def upstream(*packages: str) -> set[str]:
    """Packages outside of ours that a package's modules import, anywhere in a file and over any number of files."""
    graph = grimp.build_graph("swiftkv_platform", include_external_packages=True, exclude_type_checking_imports=True)
    todo = [module for module in graph.modules if module.startswith(packages)]
    seen: set[str] = set()
    while todo:
        module = todo.pop()
        if module and module not in seen:
            seen.add(module)
            if module.startswith("swiftkv_platform"):
                todo += [*graph.find_modules_directly_imported_by(module), module.rpartition(".")[0]]
    return {module for module in seen if not module.startswith("swiftkv_platform")} - sys.stdlib_module_names


@pytest.fixture(scope="module")
def owners() -> Mapping[str, set[str]]:
    """The distributions that hold a top-level module."""
    return {name: {canonicalize_name(each) for each in found} for name, found in packages_distributions().items()}


@pytest.mark.parametrize("extra", [None, "vllm"])
def test_a_light_installation_brings_no_service(extra: str | None) -> None:
    requirements = PROJECT["dependencies"] + (PROJECT["optional-dependencies"][extra] if extra else [])
    assert closure(requirements) & SERVICES == set()
    assert SERVICES - closure(PROJECT["optional-dependencies"]["platform"]) == {"psycopg", "torch"}


def test_the_plugin_imports_what_vllm_and_its_extra_bring(owners: Mapping[str, set[str]]) -> None:
    modules = upstream("swiftkv_platform.vllm", "swiftkv_platform.configs")
    assert {"vllm", "torch", "transformers", "pydantic"} <= modules
    light = closure(PROJECT["dependencies"] + PROJECT["optional-dependencies"]["vllm"])
    assert {name for name in modules if not owners.get(name, set()) & light} == {"vllm", "torch"}


def test_the_client_imports_what_is_always_installed(owners: Mapping[str, set[str]]) -> None:
    modules = upstream("swiftkv_platform.client")
    assert "httpx" in modules
    light = closure(PROJECT["dependencies"])
    assert {name for name in modules if not owners.get(name, set()) & light} == set()


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
