"""The specs that ship with the package."""

from __future__ import annotations

from pathlib import Path

import pytest

import jobs
from swiftkv_platform.specs import load_spec

RECIPES = sorted((Path(jobs.__path__[0]) / "recipes").glob("*.yaml"))


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_is_a_valid_spec(path: Path) -> None:
    spec = load_spec(path)
    assert spec.name


def test_the_demo_has_its_recipe() -> None:
    assert "builtin-python-5m" in {path.stem for path in RECIPES}
