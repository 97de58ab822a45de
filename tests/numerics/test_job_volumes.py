"""The planned bytes of a job's teacher, start, checkpoint and artifact are those that it writes."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor
from torch.utils._pytree import tree_leaves
from transformers import AutoConfig

from swiftkv_platform.distillation.fork import Fork
from swiftkv_platform.distillation.trainer import parallelize
from swiftkv_platform.jobs.worker.setup import compute_dtype, load_student, open_lazy
from swiftkv_platform.model.calibration_stream import calibrate_streamed
from swiftkv_platform.model.lazy_student import save_lazy
from swiftkv_platform.model.workers import Workers
from swiftkv_platform.planning import LayerMap, read_architecture
from swiftkv_platform.planning.volumes import Inputs, Volumes, volumes
from swiftkv_platform.specs import JobSpec
from tests.checkpoints import ROWS, save, save_fp8
from tests.parameters import in_turn
from tests.tiny_models import family_teacher

CPU = torch.device("cpu")


pytestmark = pytest.mark.usefixtures("process_group")


def job(path: Path, **sections: Any) -> JobSpec:
    fixed = {
        "name": "bytes",
        "model": {"name_or_path": str(path), "dtype": "bfloat16"},
        "sharding": {"strategy": "ddp"},
    }
    swiftkv = {"num_key_value_layers": 2, "key_value_group_size": 2} | sections.pop("swiftkv", {})
    return JobSpec.model_validate({**fixed, "swiftkv": swiftkv, **sections})


def planned(spec: JobSpec, path: Path) -> Volumes:
    config = AutoConfig.from_pretrained(path).to_dict()
    model = read_architecture(config)
    layer_map = LayerMap(len(model.layers), 2, spec.swiftkv.key_value_group_size)
    return volumes(spec, config, model, layer_map, Inputs())


def written(directory: Path) -> int:
    """Return the bytes of the tensors in a directory."""
    total = 0
    for path in directory.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            total += sum(file.get_tensor(name).nbytes for name in file.keys())  # noqa: SIM118  # no mapping
    return total


def start(spec: JobSpec, path: Path) -> int:
    lazy = open_lazy(spec, str(path))
    batches = [{"input_ids": torch.arange(32).view(1, 32)}]
    found = calibrate_streamed(lazy, batches, workers=Workers())
    return sum(tensor.to(lazy.model.dtype).nbytes for _, tensor in found)


def artifact(spec: JobSpec, path: Path, directory: Path) -> int:
    directory.mkdir()
    save_lazy(open_lazy(spec, str(path)), directory, teacher=spec.distillation.trainable == "qkv")
    return written(directory)


def checkpoint(spec: JobSpec, path: Path) -> int:
    fork = Fork(load_student(spec, str(path)), spec.distillation, dtype=compute_dtype(spec))
    parallel = parallelize(fork, spec, dtype=compute_dtype(spec), device=CPU, weights=None)
    return sum(leaf.nbytes for leaf in tree_leaves(parallel.state()) if isinstance(leaf, Tensor) and leaf.ndim)


SECTIONS: dict[str, dict[str, Any]] = {
    "qkv": {},
    "exit": {"swiftkv": {"early_exit": True}},
    "output": {"swiftkv": {"own_output_projection": True}},
    "tail": {"distillation": {"trainable": "tail"}},
    "output-tail": {"swiftkv": {"own_output_projection": True}, "distillation": {"trainable": "tail"}},
    "muon": {"optimizer": {"name": "muon"}},
}


@pytest.mark.parametrize(("what", "family"), in_turn(SECTIONS, ["llama", "qwen3", "deepseek_v2"]))
def test_a_job_writes_what_is_planned(family: str, what: str, tmp_path: Path) -> None:
    path = save(family_teacher(family), tmp_path / "teacher")
    spec = job(path, **SECTIONS[what])
    own = planned(spec, path)
    assert own.teacher == written(path)
    assert own.artifact == artifact(spec, path, tmp_path / "artifact")
    assert own.start == start(spec, path)
    # Norms and the exit head have AdamW's two moments beside Muon's one of the matrices.
    assert own.checkpoint == pytest.approx(checkpoint(spec, path), rel=0.05)


def test_other_teachers_and_starts(tmp_path: Path) -> None:
    save_fp8(tmp_path / "quantised", ROWS)
    own = planned(job(tmp_path / "quantised"), tmp_path / "quantised")
    assert own.teacher == pytest.approx(written(tmp_path / "quantised"), rel=0.1), "scales come on top"
    path = save(family_teacher("llama"), tmp_path / "teacher")
    spec = job(path, swiftkv={"initialization": "copied"})
    assert planned(spec, path) == replace(planned(job(path), path), start=0), "a copied start is not written"
