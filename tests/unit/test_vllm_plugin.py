"""The parts of the vLLM plugin that need no vLLM: versions, families, windows. The rest is in tests/outside."""

import os
import select
import subprocess
import sys
from pathlib import Path

import pytest

from swiftkv_platform.configs import get_layer_windows
from swiftkv_platform.errors import ModelError
from swiftkv_platform.families import FAMILIES
from swiftkv_platform.model.causal_lm import STUDENT_CLASSES
from swiftkv_platform.model.context import FULL, get_layer_types
from swiftkv_platform.vllm import register
from swiftkv_platform.vllm.versions import is_tested
from tests.support.tiny_models import FAMILY_CONFIGS

FOLLOWER = """
import time
from swiftkv_platform.vllm import exit_with_frontend
exit_with_frontend()
print("following", flush=True)
time.sleep(600)
"""

FRONTEND = f"""
import subprocess, sys
from swiftkv_platform.vllm import export_frontend_pid, exit_with_frontend
export_frontend_pid()
exit_with_frontend()
child = subprocess.Popen([sys.executable, "-c", {FOLLOWER!r}], stdout=subprocess.PIPE)
child.stdout.readline()
print(child.pid, flush=True)
child.wait()
"""


def test_a_process_of_vllms_ends_with_a_frontend_that_is_killed() -> None:
    with subprocess.Popen([sys.executable, "-c", FRONTEND], stdout=subprocess.PIPE, text=True) as frontend:
        assert frontend.stdout is not None
        follower = os.pidfd_open(int(frontend.stdout.readline()))
        assert not select.select([follower], [], [], 0.5)[0], "the follower runs as long as its frontend"
        frontend.kill()
        select.select([follower], [], [])
    os.close(follower)


def test_importing_the_entry_point_imports_no_framework() -> None:
    script = "import sys, swiftkv_platform.vllm; print(*sys.modules)"
    output = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    assert not set(output.split()) & {"torch", "transformers", "pydantic", "ray", "obstore", "sqlalchemy", "fastapi"}


def test_patches_of_arctic_inference_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "arctic_inference").mkdir()
    (tmp_path / "arctic_inference" / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("ARCTIC_INFERENCE_ENABLED", "1")
    with pytest.raises(ModelError, match=r"Unset the variable .* VLLM_PLUGINS=arctic_inference"):
        register()


def test_versions_are_tested_or_newer_or_refused() -> None:
    for version in ("0.32.0", "0.32.1+cpu", "0.33.1rc1"):
        assert is_tested(version)
    for version in ("0.34.0", "0.320.0", "1.32.0", "dev"):
        assert not is_tested(version)
    for version in ("0.31.0", "0.29.2", "0.3.0"):
        with pytest.raises(ModelError, match=rf"vLLM {version} is older .* vLLM 0\.32 to 0\.33"):
            is_tested(version)


def test_every_family_has_the_class_and_the_windows_of_transformers() -> None:
    for family in FAMILIES.values():
        assert family.student_class_name == STUDENT_CLASSES[family.model_type].causal_lm.__name__
    for config in FAMILY_CONFIGS.values():
        windows = get_layer_windows(config)
        assert [window is None for window in windows] == [kind == FULL for kind in get_layer_types(config)]
        assert set(windows) <= {None, getattr(config, "sliding_window", None)}
