"""Settings that vLLM reads at import: its CPU build in this process, on as many threads as the tests are given."""

from __future__ import annotations

import os

os.environ.setdefault(
    "OMP_NUM_THREADS", "1"
)  # tiny models: with two threads, vLLM 0.32 mostly waits for synchronization
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the tests look into the model runner

from pathlib import Path

import pytest

from tests.outside.vllm.interpreted import SECOND_RUNNER, take_second_runner

if SECOND_RUNNER:
    take_second_runner()

from tests.outside.vllm.engines import KINDS, OWN, SHAPE, make_student

GOLDEN = Path(__file__).parents[4] / "shared" / "golden"


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama student of 5 layers, l = 2, g = 2, with tied embeddings and Llama 3's RoPE."""
    return make_student(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="session", params=["shared", "own"])
def student(request: pytest.FixtureRequest, llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same student, with shared K and V (the paper's form) and with deep tokens that keep their own."""
    return llama if request.param == "shared" else make_student(tmp_path_factory.mktemp("own"), shape=OWN)


@pytest.fixture(params=KINDS.values(), ids=KINDS)
def skipping(request: pytest.FixtureRequest, llama: Path, tmp_path: Path) -> Path:
    """Students of all kinds: with a deep tail or without, with bypassed layers or without."""
    return llama if request.param == SHAPE else make_student(tmp_path / "student", shape=request.param)


@pytest.fixture
def own(tmp_path: Path) -> Path:
    """A student whose deep tokens keep their own K and V."""
    return make_student(tmp_path / "own", shape=OWN)


@pytest.fixture(params=["llama-l4-g1", "llama-l6-g2-bias"])
def golden(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, Path]:
    """A checkpoint directory of the reference implementation, and the file of its expected outputs."""
    source = GOLDEN / request.param
    if not source.is_dir():
        pytest.skip("the reference implementation's outputs are not on this machine")
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).symlink_to(source / name)
    return tmp_path, source / "expected.safetensors"
