"""The learning rate as a function of the step, and which parameters decay."""

import pytest
import torch
from pydantic import ValidationError
from torch import nn

from swiftkv_platform.distillation.steering import get_learning_rate
from swiftkv_platform.distillation.strategy import build_adamw, build_optimizers, set_learning_rate
from swiftkv_platform.specs import JobSpec, OptimizerSpec

TOTAL = 100


def _rates(**spec: object) -> list[float]:
    built = OptimizerSpec.model_validate({"learning_rate": 1e-3, "warmup_ratio": 0.1, **spec})
    return [get_learning_rate(built, step, TOTAL) for step in range(TOTAL)]


def test_rates_of_schedules() -> None:
    """Every schedule warms up linearly to the full rate."""
    rates = _rates()
    assert rates[:10] == pytest.approx([1e-3 * (step + 1) / 10 for step in range(10)])
    assert max(rates) == pytest.approx(1e-3)
    assert _rates(schedule="cosine", warmup_ratio=0.0)[TOTAL // 2] == pytest.approx(0.5e-3), "half of the rate half way"
    assert _rates(schedule="constant")[10:] == [1e-3] * 90
    assert _rates(warmup_ratio=0.0, schedule="constant") == [1e-3] * TOTAL
    assert get_learning_rate(OptimizerSpec(learning_rate=1e-3), 0, 1) == 1e-3, "a single step has the full rate"


@pytest.mark.parametrize("schedule", ["cosine", "linear"])
def test_schedules_fall_towards_zero_without_reaching_it(schedule: str) -> None:
    rates = _rates(schedule=schedule)[10:]
    assert rates == sorted(rates, reverse=True)
    assert rates[0] == pytest.approx(1e-3)
    assert 0.0 < rates[-1] < 0.02e-3


def test_weight_decay_spares_norms_and_biases_and_the_rate_set_is_used() -> None:
    module = nn.Sequential(nn.Linear(4, 4, bias=True), nn.RMSNorm(4))
    optimizer = build_adamw(module.parameters(), OptimizerSpec(weight_decay=0.1))
    decay = {id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    expected = {"0.weight": 0.1, "0.bias": 0.0, "1.weight": 0.0}
    assert {name: decay[id(p)] for name, p in module.named_parameters()} == expected
    parameter = nn.Parameter(torch.ones(2, 2))
    optimizer = build_adamw([parameter], OptimizerSpec(weight_decay=0.0))
    set_learning_rate([optimizer], 0.25)
    parameter.grad = torch.ones(2, 2)
    optimizer.step()
    assert parameter[0, 0].item() == pytest.approx(0.75, abs=1e-3)  # Adam's first step has the size of its rate


def test_muon_takes_the_matrices_and_leaves_vectors_and_the_exit_head_to_adamw() -> None:
    module = nn.ModuleDict({"q": nn.Linear(4, 4, bias=True), "exit_head": nn.Linear(4, 9, bias=False)})
    muon, adamw = build_optimizers(module.named_parameters(), OptimizerSpec(name="muon"))
    assert [p.shape for group in muon.param_groups for p in group["params"]] == [(4, 4)]
    assert [p.shape for group in adamw.param_groups for p in group["params"]] == [(9, 4), (4,)]
    with pytest.raises(ValidationError, match=r"optimizer.name 'muon'.*ddp or fsdp2, or optimizer.name adamw"):
        JobSpec.model_validate({"name": "n", "optimizer": {"name": "muon"}, "sharding": {"strategy": "deepspeed"}})


def test_muon_moves_every_direction_of_a_matrix_alike() -> None:
    """The direction with a tenth of the gradient moves at least half as far as the other."""
    parameter = nn.Parameter(torch.zeros(2, 2))
    optimizers = build_optimizers([("q", parameter)], OptimizerSpec(name="muon", weight_decay=0.0))
    set_learning_rate(optimizers, 1.0)
    parameter.grad = torch.diag(torch.tensor([1.0, 0.1]))
    for optimizer in optimizers:
        optimizer.step()
    step = -parameter.detach()
    assert step[1, 1] / step[0, 0] > 0.5
    # Scaled to the root mean square of Adam's step, 0.2; the iterations leave singular values between 0.7 and 1.2.
    assert step.square().mean().sqrt().item() == pytest.approx(0.2, rel=0.35)
