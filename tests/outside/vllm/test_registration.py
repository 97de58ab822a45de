"""The entry point: what it registers, what it leaves alone, and which vLLM it takes."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest
import vllm
from vllm import LLM, ModelRegistry

from swiftkv_platform.errors import ModelError
from swiftkv_platform.families import FAMILIES
from swiftkv_platform.vllm import register
from tests.outside.vllm.engines import DEFAULTS

HEAVY = ("ray", "obstore", "sqlalchemy", "alembic", "wandb", "datasets")
OURS = tuple(
    f"swiftkv_platform.{room}" for room in ("model", "engine", "distillation", "control_plane", "storage", "cli")
)


def imported(code: str) -> set[str]:
    """Modules that a fresh interpreter holds after `code`."""
    script = f"import sys\n{code}\nprint('MODULES', *sys.modules)"
    output = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    return set(output.split("MODULES", 1)[1].split())


def test_vllm_finds_the_plugin() -> None:
    (entry,) = entry_points(group="vllm.general_plugins", name="swiftkv")
    assert entry.load() is register


def test_registering_twice_changes_nothing() -> None:
    register()
    once = dict(ModelRegistry.models)
    register()
    assert ModelRegistry.models.keys() == once.keys()
    assert {family.student_class for family in FAMILIES.values()} <= ModelRegistry.models.keys()


def test_registering_imports_no_layers_and_no_services() -> None:
    modules = imported("from vllm.plugins import load_general_plugins; load_general_plugins()")
    assert "swiftkv_platform.configs" in modules
    assert not modules & {*HEAVY, *OURS}


def test_an_unknown_version_refuses_students_when_they_are_loaded(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm, "__version__", "0.99.0")
    register()  # other models are still served
    with pytest.raises(ModelError, match=r"vLLM 0\.99\.0"):
        LLM(model=str(llama), **DEFAULTS)
