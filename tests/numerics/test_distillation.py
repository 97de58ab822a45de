"""The training step against its definition, and against runs that are resumed or divided differently."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from swiftkv_platform.contract.attempts import AttemptId, StopRequest
from swiftkv_platform.distillation import strategy
from swiftkv_platform.distillation.model import (
    DistillationModel,
    find_hidden_loss_index,
    load_trained_tensors,
    select_trained_parameters,
)
from swiftkv_platform.distillation.partial_reads import CheckpointTensors
from swiftkv_platform.errors import InvalidInputError, LossNotFiniteError
from swiftkv_platform.model import convert
from swiftkv_platform.model.packed_attention import to_tensors
from swiftkv_platform.specs import DistillationSpec
from tests.numerics.distillation_worker import (
    CHECKPOINTS,
    NUM_KEY_VALUE_LAYERS,
    NUM_LAYERS,
    Outcome,
    Run,
    assert_equal_weights,
    run,
    tiny_rows,
    tiny_student,
)
from tests.numerics.test_planning import make_teacher
from tests.support.parameters import pairwise


def _gradients(distillation_model: DistillationModel) -> dict[str, torch.Tensor]:
    return {name: p.grad for name, p in distillation_model.student.named_parameters() if p.grad is not None}


def _naive_losses(student: Any, batch: dict[str, torch.Tensor], temperature: float) -> dict[str, torch.Tensor]:
    """Compute each loss by definition from two full forward passes of the model, as the reference does."""
    inputs = {"input_ids": batch["input_ids"], "position_ids": batch["position_ids"]}
    mask = batch["loss_mask"]
    with torch.no_grad():
        teacher = student.swiftkv(False)(**inputs, use_cache=False).logits[mask]
    student_logits = student.swiftkv(True)(**inputs, use_cache=False).logits[mask]
    log_p = F.log_softmax(teacher / temperature, dim=-1)
    log_q = F.log_softmax(student_logits / temperature, dim=-1)
    context = student.model.make_context(**inputs)
    exit_logits = student.exit_logits(student.model.run_lower_layers(context).detach())[mask]
    exit_log_q = F.log_softmax(exit_logits / temperature, dim=-1)
    targets = batch["input_ids"].roll(-1, dims=1)[mask]
    return {
        "logits_loss": temperature**2 * (log_p.exp() * (log_p - log_q)).sum(),
        "exit_loss": temperature**2 * (log_p.exp() * (log_p - exit_log_q)).sum(),
        "lm_loss": F.cross_entropy(student_logits, targets, reduction="sum"),
    }


@pytest.mark.parametrize(
    ("trainable", "objective", "group_size"), pairwise(["kv", "qkv", "tail", "all"], ["logits", "lm"], [1, 2])
)
def test_the_fork_equals_two_full_forward_passes(trainable: str, objective: str, group_size: int) -> None:
    """Losses and gradients match. Rows are packed, so attention and positions must respect the samples' borders."""
    student = tiny_student(group_size=group_size, early_exit=True)
    spec = DistillationSpec.model_validate({"objective": objective, "trainable": trainable})
    distillation_model = DistillationModel(student, spec, dtype=torch.float32)
    batch = to_tensors(tiny_rows().make_padded_batch([0, 1, 2]))
    sums = distillation_model(**batch)
    sum(weight * sums[name] for name, weight in distillation_model.loss_weights.items()).backward()
    actual = _gradients(distillation_model)
    distillation_model.zero_grad()
    expected_sums = _naive_losses(student, batch, spec.temperature)
    sum(weight * expected_sums[name] for name, weight in distillation_model.loss_weights.items()).backward()
    expected = _gradients(distillation_model)
    assert sums.keys() == distillation_model.loss_weights.keys()
    for name in sums:
        torch.testing.assert_close(sums[name], expected_sums[name], rtol=1e-5, atol=1e-5)
    assert actual.keys() == expected.keys() == select_trained_parameters(student, spec).keys()
    for name in actual:
        scale = expected[name].abs().max()
        assert scale > 0, name
        torch.testing.assert_close(actual[name] / scale, expected[name] / scale, rtol=0, atol=1e-5, msg=name)


def test_a_lower_layer_runs_once_and_remembers_no_gradient() -> None:
    student = tiny_student()
    distillation_model = DistillationModel(student, DistillationSpec(), dtype=torch.float32)
    outputs: list[torch.Tensor] = []
    student.model.layers[0].register_forward_hook(lambda _module, _inputs, output: outputs.append(output))
    distillation_model(**to_tensors(tiny_rows().make_padded_batch([0])))["logits_loss"].backward()
    assert len(outputs) == 1
    assert not outputs[0].requires_grad
    assert all(p.grad is None for layer in student.model.layers[:NUM_KEY_VALUE_LAYERS] for p in layer.parameters())


@pytest.mark.parametrize("layer", [-2, NUM_LAYERS])
def test_hidden_loss_compares_the_layer_it_names(layer: int) -> None:
    student = tiny_student()
    spec = DistillationSpec(hidden_loss_weight=1.0, hidden_loss_layer=layer)
    batch = to_tensors(tiny_rows().make_padded_batch([0, 1]))
    actual = DistillationModel(student, spec, dtype=torch.float32)(**batch)["hidden_loss"]
    states = []
    for enabled in (True, False):
        output = student.swiftkv(enabled)(
            input_ids=batch["input_ids"], position_ids=batch["position_ids"], use_cache=False, output_hidden_states=True
        )
        states.append(output.hidden_states[layer][batch["loss_mask"]])
    torch.testing.assert_close(actual, (states[0] - states[1]).square().mean(-1).sum(), rtol=1e-5, atol=1e-5)


def test_a_hidden_layer_below_the_fork_is_refused() -> None:
    for layer in (-4, 2, 6):
        with pytest.raises(InvalidInputError, match=r"hidden_loss_layer.*-3\.\.-1"):
            find_hidden_loss_index(tiny_student().config, DistillationSpec(hidden_loss_layer=layer))


def test_gradient_checkpointing_changes_memory_and_nothing_else() -> None:
    batch = to_tensors(tiny_rows().make_padded_batch([0, 1]))
    gradients = []
    for checkpointing in (False, True):
        distillation_model = DistillationModel(
            tiny_student(), DistillationSpec(), dtype=torch.float32, gradient_checkpointing=checkpointing
        )
        calls: list[object] = []
        distillation_model.student.model.layers[-1].mlp.register_forward_pre_hook(
            lambda *_, calls=calls: calls.append(None)
        )
        distillation_model(**batch)["logits_loss"].backward()
        gradients.append(_gradients(distillation_model))
        assert len(calls) == (3 if checkpointing else 2)  # teacher, student, and recomputation in the backward pass
    for name in gradients[0]:
        torch.testing.assert_close(gradients[1][name], gradients[0][name], msg=name)


@pytest.mark.parametrize("family", ["llama", "deepseek_v2", "olmo2"])
def test_a_prompt_within_the_tail_is_answered_by_the_teacher_whatever_kv_has_trained(family: str) -> None:
    student = convert(make_teacher(family), num_key_value_layers=2, decode_key_value="own", deep_tail=6).eval()
    spec = DistillationSpec(trainable="kv")
    with torch.no_grad():
        for parameter in select_trained_parameters(student, spec).values():
            parameter.add_(torch.randn(parameter.shape), alpha=0.1)
    for length, is_equal in ((6, True), (7, False)):
        prompt = torch.arange(1, 1 + length)[None]
        with torch.no_grad():
            expected, actual = (student.swiftkv(mode)(prompt, logits_to_keep=1).logits for mode in (False, True))
        assert torch.allclose(actual, expected, atol=1e-5) == is_equal


def test_training_varies_the_tail_and_held_out_text_has_the_served_one() -> None:
    def measure(row: torch.Tensor, deep_tail: int, *, vary: bool, held_out_only: bool = False) -> float:
        student = convert(make_teacher("llama"), num_key_value_layers=2, decode_key_value="own", deep_tail=deep_tail)
        spec = DistillationSpec(vary_deep_tail=vary)
        distillation_model = DistillationModel(student, spec, dtype=torch.float32)
        positions, counted = torch.arange(16)[None], torch.arange(16)[None] >= 12
        [loss] = distillation_model(row, positions, counted, held_out_only=held_out_only).values()
        return float(loss)

    rows = [torch.arange(1, 17)[None] + torch.eye(16, dtype=torch.long)[0] * number for number in range(4)]
    found = set()
    for row in rows:
        expected = {tail: measure(row, tail, vary=False) for tail in (1, 2, 4, 8)}
        [tail] = [tail for tail, loss in expected.items() if loss == measure(row, 8, vary=True)]
        found.add(tail)
        held_out = [measure(row, 8, vary=vary, held_out_only=True) for vary in (True, False)]
        assert held_out[0] == held_out[1]
    assert found == {1, 2, 4, 8}


@pytest.mark.parametrize("trainable", ["tail", "all"])
def test_trained_layers_keep_the_teacher(trainable: Any) -> None:
    """The layers >= l are trained, or all layers, while the teacher that they are compared with stays unchanged."""
    student = tiny_student()
    distillation_model = DistillationModel(student, DistillationSpec(trainable=trainable), dtype=torch.float32)
    batch = to_tensors(tiny_rows().make_padded_batch([0, 1]))
    with torch.no_grad():
        inputs = {"input_ids": batch["input_ids"], "position_ids": batch["position_ids"]}
        teacher = student.swiftkv(False)(**inputs, use_cache=False).logits
        student.swiftkv(True)
    distillation_model(**batch)["logits_loss"].backward()
    upper = student.model.layers[NUM_KEY_VALUE_LAYERS]
    assert upper.mlp.down_proj.weight.grad is not None
    assert upper.self_attn.o_proj.weight.grad is not None
    lower = student.model.layers[0].mlp.down_proj.weight.grad
    assert (lower is not None) == (trainable == "all")
    assert student.model.embed_tokens.weight.grad is None
    with torch.no_grad():
        for parameter in distillation_model.parameters():
            if parameter.grad is not None:
                parameter.sub_(parameter.grad.sign(), alpha=0.1)
        kept = distillation_model.teacher_copy
        context = student.model.make_context(**inputs)
        hidden = kept.run_teacher_upper(kept.run_lower_layers(context), context)
    torch.testing.assert_close(student.lm_head(hidden), teacher)


def test_buffers_stay_on_the_device_that_computes() -> None:
    """CPU offload keeps parameters elsewhere; here the meta device plays the part of host memory."""
    module = torch.nn.BatchNorm1d(3)
    strategy.allocate_shards(module, torch.device("meta"))
    assert module.weight.is_meta
    assert module.running_var is not None
    assert module.running_var.equal(torch.ones(3))


def train(tmp_path: Path, name: str = "s", strategy: str = "ddp", **changes: Any) -> Outcome:
    spec = {"sharding": {"strategy": strategy}} | changes.pop("spec", {})
    return run(Run(store=str(tmp_path / name), spec=spec, **changes))


@pytest.fixture(scope="module")
def reference(process_group: None, tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """Four steps of one worker, one row at a time."""
    return train(tmp_path_factory.mktemp("reference"), early_exit=True)


@pytest.fixture(scope="module")
def whole(process_group: None, tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """The same run without an exit head."""
    return train(tmp_path_factory.mktemp("whole"))


def test_training_learns_and_leaves_the_frozen_alone(reference: Outcome) -> None:
    assert reference.frozen_changed == []
    assert reference.steps[-1].losses["loss"] < 0.9 * reference.steps[0].losses["loss"]
    assert any("exit_head" in name for name in reference.trained)


@pytest.mark.parametrize(("strategy", "micro_batch_size"), [("ddp", 2), ("fsdp2", 4)])
def test_micro_batches_change_nothing(reference: Outcome, tmp_path: Path, strategy: str, micro_batch_size: int) -> None:
    """Whole tensors are compared, because Adam turns rounding noise of a near-zero gradient into a full step."""
    training = {"training": {"micro_batch_size": micro_batch_size}}
    outcome = train(tmp_path, strategy=strategy, early_exit=True, spec=training)
    assert [(m.step, m.tokens) for m in outcome.steps] == [(m.step, m.tokens) for m in reference.steps]
    for mine, other in zip(outcome.steps, reference.steps, strict=True):
        assert mine.losses == pytest.approx(other.losses, rel=1e-5)
        assert mine.grad_norm == pytest.approx(other.grad_norm, rel=1e-5)
    assert outcome.trained.keys() == reference.trained.keys()
    for name, tensor in reference.trained.items():
        assert (outcome.trained[name] - tensor).norm() < 1e-3 * tensor.norm(), name


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_a_loss_of_weight_zero_still_reaches_every_trained_parameter(tmp_path: Path, strategy: str) -> None:
    """Without the logits loss, the last layer's gradient is zero, not missing."""
    hidden = {"distillation": {"logits_loss_weight": 0.0, "hidden_loss_weight": 1.0}}
    outcome = train(tmp_path, spec={"sharding": {"strategy": strategy, "cpu_offload": True}, **hidden})
    first, *_, last = (metrics.losses for metrics in outcome.steps)
    assert first["loss"] == pytest.approx(first["hidden_loss"])
    assert first["logits_loss"] > 0
    assert last["loss"] < first["loss"]


def test_a_worker_alone_uses_no_threads_of_gloo(
    whole: Outcome, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gloo's threads would keep OpenMP teams, which oversubscribe the cores at every step."""

    class Forbidden:
        def __init__(self, *_args: Any, **_options: Any) -> None:
            raise AssertionError("one worker has no others to reduce gradients with, or to tell its plans")

    monkeypatch.setattr(strategy, "DistributedDataParallel", Forbidden)
    for name in ("gather_object", "scatter_object_list"):
        monkeypatch.setattr(torch.distributed, name, Forbidden)
    train(tmp_path, stop_after=3)
    resumed = train(tmp_path)
    assert [m.step for m in resumed.steps] == [3, 4]  # the newest checkpoint is of step 2
    assert_equal_weights(resumed, whole)


@pytest.mark.parametrize("stop_request", [StopRequest.LEAVE, StopRequest.STOP, StopRequest.PAUSE])
def test_a_run_told_to_end_saves_and_loses_no_step(whole: Outcome, tmp_path: Path, stop_request: StopRequest) -> None:
    seldom = {"checkpoint": {"every_steps": 100}}
    first = train(tmp_path, spec=seldom, stop_requests={1: StopRequest.SAVE, 3: stop_request})
    saved = sorted(path.name[:13] for path in (tmp_path / "s" / CHECKPOINTS).iterdir())
    second = train(tmp_path, spec=seldom)
    assert saved == ["step-00000001", "step-00000003"]
    assert [m.step for m in first.steps] == [1, 2, 3]
    assert [m.step for m in second.steps] == [4]
    assert_equal_weights(second, whole)


@pytest.mark.usefixtures("process_group")
def test_checkpoints_are_rotated_and_hold_whole_tensors_by_the_students_names(tmp_path: Path) -> None:
    """The saved tensors load into a student by name."""
    spec = {"training": {"max_steps": 5}, "checkpoint": {"every_steps": 1, "keep": 2}}
    outcome = train(tmp_path, spec=spec)
    directories = sorted((tmp_path / "s" / CHECKPOINTS).iterdir())
    assert [directory.name[:16] for directory in directories] == ["step-00000004-w1", "step-00000005-w1"]
    tensors = dict(CheckpointTensors(directories[-1]))
    assert tensors.keys() == outcome.trained.keys()
    student = tiny_student().float()
    load_trained_tensors(student, tensors)
    for name, tensor in outcome.trained.items():
        assert student.get_parameter(name).equal(tensor), name
    again = train(tmp_path, spec=spec, attempt=2, resume_from=f"{CHECKPOINTS}/{directories[-1].name}")
    assert again.steps == []
    assert not (tmp_path / "s" / AttemptId("j", 2).checkpoints_prefix).exists()


@pytest.mark.usefixtures("process_group")
def test_a_loss_that_is_not_finite_stops_the_run_and_keeps_the_last_checkpoint(tmp_path: Path) -> None:
    changes = {"optimizer": {"learning_rate": 1e30, "warmup_ratio": 0.0}, "checkpoint": {"every_steps": 1}}
    with pytest.raises(LossNotFiniteError, match="learning_rate"):
        train(tmp_path, spec=changes)
    assert list((tmp_path / "s" / CHECKPOINTS).glob("step-*/manifest.json"))
