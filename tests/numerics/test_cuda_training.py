"""A training step (without its backward pass) and evaluation on fake GPU tensors: no operator mixes devices."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import LlamaConfig

from swiftkv_platform.distillation.model import DistillationModel
from swiftkv_platform.distillation.strategy import build_optimizers
from swiftkv_platform.errors import InvalidInputError
from swiftkv_platform.evaluation.quality import evaluate
from swiftkv_platform.model.causal_lm import get_student_classes
from swiftkv_platform.model.packed_attention import to_tensors
from swiftkv_platform.specs import DistillationSpec
from swiftkv_platform.specs.training import OptimizerSpec
from swiftkv_platform.student_shape import StudentShape
from tests.numerics.test_evaluation import TEACHER, make_rows
from tests.support.fakes.cuda import DEVICE, DeviceLog, fake_cuda
from tests.support.parameters import in_turn
from tests.unit.engine.test_cuda import model_of

HAS_GPU = torch.cuda.is_available()


@pytest.fixture
def log() -> Iterator[DeviceLog]:
    with fake_cuda() as device_log:
        yield device_log


def make_student(dtype: torch.dtype, **changes: Any) -> Any:
    classes = get_student_classes("llama")
    shape = {"num_key_value_layers": 2, "key_value_group_size": 2, "early_exit": True} | changes
    config = classes.make_config(LlamaConfig(**TEACHER), StudentShape(**shape))
    with torch.device(DEVICE):
        return classes.causal_lm._from_config(config, dtype=dtype)


def packed_batch(multiple: int = 1) -> dict[str, Any]:
    arrays, lengths = make_rows([20, 9, 30]).make_padding_free_batch([0, 1], multiple=multiple)
    return {name: tensor.to(DEVICE) for name, tensor in to_tensors(arrays).items()} | {"sample_lengths": lengths}


@pytest.mark.parametrize(("dtype", "objective"), in_turn([torch.float32, torch.bfloat16], ["lm", "logits"]))
def test_an_optimizer_step(objective: str, dtype: torch.dtype, log: DeviceLog) -> None:
    spec = DistillationSpec.model_validate({"objective": objective, "hidden_loss_weight": 1.0})
    distillation_model = DistillationModel(make_student(dtype), spec, dtype=dtype)
    trained = [
        (name, parameter) for name, parameter in distillation_model.named_parameters() if parameter.requires_grad
    ]
    optimizers = build_optimizers(trained, OptimizerSpec())
    batch = packed_batch()
    log.clear()
    with torch.autocast("cuda", dtype, enabled=dtype != torch.float32):
        sums = distillation_model(**batch)
    loss = torch.stack([weight * sums[name] for name, weight in distillation_model.loss_weights.items()]).sum()
    assert loss.requires_grad
    if HAS_GPU:
        loss.backward()
    else:  # torch's autograd engine needs a device stream, which cannot be faked
        for _, parameter in trained:
            parameter.grad = torch.zeros_like(parameter)
    assert all(parameter.grad is not None and parameter.grad.device == DEVICE for _, parameter in trained)
    torch.nn.utils.clip_grad_norm_([parameter for _, parameter in trained], 1.0)
    for optimizer in optimizers:
        optimizer.step()
    assert not [wait for wait in log.waits if "host" in wait or "to cpu" in wait], log.waits
    assert log.waits.count("aten.nonzero") == 1, "counted positions are looked up once for all losses"
    assert "aten.index by a mask" not in log.waits
    # Two layers below l, the teacher's two above it, and the student's.
    assert log.kernels["torch_attn._varlen_attn"] == (6 if dtype == torch.bfloat16 else 0)


@pytest.mark.parametrize("attention", ["sdpa", "varlen_attn"])
def test_span_indices_go_to_the_device_once(attention: Any, log: DeviceLog) -> None:
    """The indices of conversation spans are the same in every layer; copying them in each would make the host wait."""
    copies, shape = [], {"swiftkv_decode_key_value": "own", "key_value_group_size": 1}
    for num_layers in (1, 2):
        student = make_student(torch.bfloat16, **shape | {"num_key_value_layers": 4 - num_layers})
        distillation_model = DistillationModel(student, DistillationSpec(), dtype=torch.bfloat16, attention=attention)
        batch = packed_batch()
        log.clear()
        with torch.autocast("cuda", torch.bfloat16):
            distillation_model(**batch)
        copies.append((log.copies, len([wait for wait in log.waits if "to cuda" in wait])))
    assert copies[0] == copies[1]
    assert copies[0][1] == 0, log.waits


@pytest.mark.parametrize("family", ["qwen2-mixed", "deepseek_v2"])
def test_every_kind_of_attention_takes_the_operator(family: str, log: DeviceLog) -> None:
    """Sliding windows, grouped heads, and values narrower than keys."""
    model = model_of(family, student=True)
    distillation_model = DistillationModel(model, DistillationSpec(), dtype=torch.bfloat16, attention="varlen_attn")
    batch = packed_batch(multiple=8)
    log.clear()
    with torch.autocast("cuda", torch.bfloat16):
        distillation_model(**batch)
    num_layers, first = model.config.num_hidden_layers, model.config.num_key_value_layers
    assert log.kernels["torch_attn._varlen_attn"] == 2 * num_layers - first
    assert not [wait for wait in log.waits if "host" in wait or "to cpu" in wait], log.waits


def test_a_gpu_without_flash_attention_is_named(log: DeviceLog) -> None:
    distillation_model = DistillationModel(
        make_student(torch.float32), DistillationSpec(), dtype=torch.float32, attention="varlen_attn"
    )
    batch = packed_batch()
    with pytest.raises(InvalidInputError, match=r"attn_implementation is varlen_attn, but .*float32") as error:
        distillation_model(**batch)
    assert error.value.field == "training.attn_implementation"


def test_evaluation(log: DeviceLog) -> None:
    model, rows = make_student(torch.bfloat16), make_rows([20, 9, 30, 14])
    totals = evaluate(model, rows, max_tokens=1000, batch_size=2)
    assert totals.num_positions
    assert not [wait for wait in log.waits if "host" in wait], log.waits
