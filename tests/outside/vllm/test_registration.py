"""The entry point: what it registers, what it leaves alone, and which vLLM it takes."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest
import vllm
from vllm import LLM, ModelRegistry

from swiftkv_platform.configs import CONFIGS
from swiftkv_platform.errors import ModelError
from swiftkv_platform.model.masks import FULL, layer_types
from swiftkv_platform.vllm import register
from swiftkv_platform.vllm.families import FAMILIES, architecture
from swiftkv_platform.vllm.versions import check_version
from swiftkv_platform.vllm.windows import layer_windows
from tests.outside.vllm.engines import DEFAULTS
from tests.tiny_models import FAMILY_CONFIGS

HEAVY = ("ray", "boto3", "sqlalchemy", "alembic", "wandb", "datasets")
OURS = tuple(
    f"swiftkv_platform.{room}"
    for room in ("model", "engine", "distillation", "database", "orchestration", "storage", "cluster", "api", "cli")
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
    assert {architecture(name) for name in CONFIGS} <= ModelRegistry.models.keys()


def test_importing_the_entry_point_imports_no_framework() -> None:
    modules = imported("import swiftkv_platform.vllm")
    assert not modules & {"torch", "transformers", "vllm", "fastapi", *HEAVY}


def test_registering_imports_no_layers_and_no_services() -> None:
    modules = imported("from vllm.plugins import load_general_plugins; load_general_plugins()")
    assert "swiftkv_platform.configs" in modules
    assert not modules & {*HEAVY, *OURS}


@pytest.mark.parametrize("version", ["0.29.0", "0.29.1+cpu", "0.30.0", "0.30.1rc1"])
def test_known_versions_pass(version: str) -> None:
    check_version(version)


@pytest.mark.parametrize("version", ["0.28.2", "0.31.0", "0.300.0", "1.29.0", "dev"])
def test_unknown_versions_are_named(version: str) -> None:
    with pytest.raises(ModelError, match=r"0\.29\.\* or 0\.30\.\*") as caught:
        check_version(version)
    assert version in caught.value.message


def test_an_unknown_version_refuses_students_when_they_are_loaded(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm, "__version__", "0.99.0")
    register()  # other models are still served
    with pytest.raises(ModelError, match=r"vLLM 0\.99\.0"):
        LLM(model=str(llama), **DEFAULTS)


@pytest.mark.parametrize("name", [name for name in FAMILY_CONFIGS if name.split("-")[0] in FAMILIES])
def test_windows_are_those_of_transformers(name: str) -> None:
    config = FAMILY_CONFIGS[name]
    windows = layer_windows(config)
    assert [window is None for window in windows] == [kind == FULL for kind in layer_types(config)]
    assert set(windows) <= {None, config.sliding_window if hasattr(config, "sliding_window") else None}
