"""The plugin's entry point: what it registers, what it leaves alone, and the versions of vLLM that it accepts."""

from __future__ import annotations

import logging
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest
import vllm
from vllm import ModelRegistry

from swiftkv_platform.errors import ModelError
from swiftkv_platform.families import FAMILIES
from swiftkv_platform.vllm import register
from swiftkv_platform.vllm.versions import TESTED_VERSIONS
from tests.outside.vllm.engines import configure

HEAVY = ("ray", "obstore", "sqlalchemy", "alembic", "wandb", "datasets")
OURS = tuple(
    f"swiftkv_platform.{room}" for room in ("model", "engine", "distillation", "control_plane", "storage", "cli")
)


def imported(code: str) -> set[str]:
    """Return the modules that a fresh interpreter has imported after running `code`."""
    script = f"import sys\n{code}\nprint('MODULES', *sys.modules)"
    output = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    return set(output.split("MODULES", 1)[1].split())


def test_vllm_finds_the_plugin() -> None:
    (entry,) = entry_points(group="vllm.general_plugins", name="swiftkv")
    assert entry.load() is register


def test_a_replica_is_imported_beside_the_libraries_that_vllm_asks_for() -> None:
    assert "swiftkv_platform.serve.http" in imported("import swiftkv_platform.serve.app")


def test_registering_twice_changes_nothing() -> None:
    register()
    once = dict(ModelRegistry.models)
    register()
    assert ModelRegistry.models.keys() == once.keys()
    assert {family.student_class_name for family in FAMILIES.values()} <= ModelRegistry.models.keys()


def test_registering_imports_no_layers_and_no_services() -> None:
    modules = imported("from vllm.plugins import load_general_plugins; load_general_plugins()")
    assert "swiftkv_platform.configs" in modules
    assert not modules & {*HEAVY, *OURS}


def test_a_newer_version_serves_with_a_warning_if_it_has_what_the_plugin_uses(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    logged: list[logging.LogRecord] = []
    monkeypatch.setattr(vllm, "__version__", "0.99.0")
    monkeypatch.setattr(logging.getLogger("vllm.swiftkv"), "filters", [lambda record: logged.append(record) or True])
    for _ in range(2):
        configure(llama)
    (warned,) = [record.getMessage() for record in logged if "not been tested" in record.getMessage()]
    assert f"vLLM 0.99.0, only with {', '.join(TESTED_VERSIONS)}" in warned


SCHEDULER = "vllm.v1.core.sched.scheduler.Scheduler"
BUILDER = "vllm.v1.worker.gpu.attn_utils.build_attn_metadata"


def _do_nothing(self: Any) -> None:
    pass


@pytest.mark.parametrize(
    ("name", "changed", "message"),
    [
        (f"{SCHEDULER}._free_request_blocks", None, f"{SCHEDULER}._free_request_blocks no longer exists"),
        (f"{SCHEDULER}.add_request", lambda self, request, client: None, r"add_request now requires client"),
        (
            "vllm.model_executor.models.llama.LlamaMLP.__init__",
            lambda self: None,
            "LlamaMLP.__init__ no longer takes hid",
        ),
        ("vllm.config.CacheConfig.__annotations__", {}, "CacheConfig has no kv_sharing_fast_prefill"),
        (BUILDER, _do_nothing, "build_attn_metadata no longer uses is_prefilling, seq_lens_cpu_upper_bound"),
        ("vllm.v1.request.Request.__init__", _do_nothing, "__init__ no longer uses _block_hasher, block_hashes"),
    ],
)
def test_a_newer_version_that_changed_what_the_plugin_uses_is_refused(
    name: str, changed: Any, message: str, llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if changed is None:
        monkeypatch.delattr(name)
    else:
        monkeypatch.setattr(name, changed)
    monkeypatch.setattr(vllm, "__version__", "0.99.1")
    register()  # other models are still served
    refusal = rf"not been tested with vLLM 0\.99\.1, and there .*{message}.*Use vLLM {TESTED_VERSIONS[-1]}"
    with pytest.raises(ModelError, match=refusal):
        configure(llama)
