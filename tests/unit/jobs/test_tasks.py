"""The phases before and after training, in this process: no Ray, a checkpoint written by hand."""

from __future__ import annotations

import json
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save
from transformers import AutoModelForCausalLM, AutoTokenizer

from swiftkv_platform.contract.attempt_id import AttemptId
from swiftkv_platform.contract.attempts import ADAPTER_LINEAGE, AttemptRequest
from swiftkv_platform.data.prepared import PreparedData
from swiftkv_platform.distillation.fork import trained_parameters
from swiftkv_platform.errors import ArtifactCorruptError, DataError, InvalidInputError, ModelError, QualityGateError
from swiftkv_platform.evaluation.quality import evaluate
from swiftkv_platform.jobs.attempt.curve import Curve
from swiftkv_platform.jobs.attempt.preparation import Prepared
from swiftkv_platform.jobs.values import Plan
from swiftkv_platform.jobs.worker.calibrate import calibrate
from swiftkv_platform.jobs.worker.evaluate import evaluate_and_publish
from swiftkv_platform.jobs.worker.prepare import load_student
from swiftkv_platform.jobs.worker.prepare import prepare as prepare_in
from swiftkv_platform.model.checkpoint import StoredTensors
from swiftkv_platform.specs import JobSpec, PublishSpec
from swiftkv_platform.storage.addresses import open_store
from swiftkv_platform.storage.artifacts import delete_directory, fetch_directory, is_complete, publish_directory
from swiftkv_platform.storage.attempt_store import AttemptStore
from swiftkv_platform.storage.local_store import LocalObjectStore
from swiftkv_platform.storage.object_store import ObjectStore
from tests.checkpoints import ROWS, save_fp8
from tests.fakes.tokenizers import byte_tokenizer
from tests.tiny_models import save_teacher


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    path = tmp_path / "functions.jsonl"
    rows = ({"text": f"def add_{i}(x):\n    return x + {i}\n"} for i in range(120))
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def store(tmp_path: Path) -> ObjectStore:
    return open_store(str(tmp_path / "store"))


def _spec(teacher: Path, corpus: Path, **sections: Any) -> JobSpec:
    return JobSpec.model_validate(
        {
            "name": "tiny",
            "model": {"name_or_path": str(teacher), "dtype": "float32"},
            "data": {"sources": [{"name_or_path": str(corpus)}], "max_length": 96, "validation_fraction": 0.2},
            "training": {"max_steps": 4, "batch_size": 4},
            "tracking": {"wandb": {"mode": "disabled"}},
            "swiftkv": {"key_value_group_size": 2, "calibration_tokens": 1024},
            **sections,
        }
    )


def prepare(spec: JobSpec) -> tuple[Plan, Prepared]:
    with tempfile.TemporaryDirectory() as directory:
        plan, data = prepare_in(spec, Path(directory) / "rows")
        return plan, Prepared(data, start(spec, data))


def start(spec: JobSpec, data: PreparedData) -> dict[str, torch.Tensor] | None:
    """The calibrated start, by this process alone."""
    if spec.swiftkv.initialization == "copied":
        return None
    with tempfile.TemporaryDirectory() as directory:
        calibrate(spec, spec.model.name_or_path, data.train, Path(directory), device="cpu")
        return dict(StoredTensors(Path(directory)))


def _checkpoint(
    store: ObjectStore,
    spec: JobSpec,
    teacher: Path,
    tmp_path: Path,
    noise: float = 0.0,
    state: dict[str, torch.Tensor] | None = None,
) -> str:
    """A checkpoint of a student that has moved by `noise` from its copied start, in the trainer's own names.

    Args:
        state: of an optimizer, beside it.
    """
    trained = trained_parameters(load_student(spec, str(teacher)), spec.distillation)
    generator = torch.Generator().manual_seed(0)
    model = {
        f"student.{name}": p.detach() + noise * torch.randn(p.shape, generator=generator) for name, p in trained.items()
    }
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    try:
        saved = {"model": model, "optimizer": state or {}, "progress": {"step": 4}}
        save(saved, storage_writer=FileSystemWriter(tmp_path / "checkpoint"))
    finally:
        dist.destroy_process_group()
    lineage = {"step": 4, "tokens": 77, "world_size": 1}
    publish_directory(store, tmp_path / "checkpoint", "ck", kind="checkpoint", lineage=lineage, metrics={})
    return "ck"


def _evaluate(spec: JobSpec, store: ObjectStore, checkpoint: str, prepared: Prepared, destination: Path) -> Any:
    request = AttemptRequest(job_id="job", attempt=1, spec=spec, run_id="run")
    manifest = evaluate_and_publish(request, store.uri, checkpoint, prepared)
    fetch_directory(store, AttemptId("job", 1).artifact_prefix, destination)
    return manifest


def test_the_plan_counts_steps_and_trained_parameters(tiny_teacher: Path, corpus: Path) -> None:
    spec = _spec(tiny_teacher, corpus, training={"num_epochs": 3, "batch_size": 4})
    plan, prepared = prepare(spec)

    assert plan.total_steps == -(-3 * len(prepared.data.train) // 4)
    assert prepared.calibrated is not None
    assert plan.num_trained_parameters == sum(tensor.numel() for tensor in prepared.calibrated.values())
    assert plan.statistics["train"]["rows"] == len(prepared.data.train)
    json.dumps(plan.statistics)


def test_calibration_moves_the_start_away_from_the_copies(tiny_teacher: Path, corpus: Path) -> None:
    spec = _spec(tiny_teacher, corpus)
    _, prepared = prepare(spec)
    copied = dict(load_student(spec, str(tiny_teacher)).swiftkv_parameters())

    assert prepared.calibrated is not None
    assert prepared.calibrated.keys() == copied.keys()
    changed = {name for name, tensor in prepared.calibrated.items() if not tensor.equal(copied[name])}
    assert all("proj" in name for name in changed)
    assert any("k_proj" in name for name in changed)


@pytest.mark.slow  # calibrates twice
def test_padding_does_not_change_the_calibration(tiny_teacher: Path, corpus: Path) -> None:
    """Rows of one sample each, mostly padding, calibrate like the same rows without it: not at all by the padding."""
    unpacked = {"sources": [{"name_or_path": str(corpus)}], "max_length": 96, "packing": False}
    shorter = unpacked | {"max_length": 48}
    starts = []
    for data in (unpacked, shorter):
        _, prepared = prepare(_spec(tiny_teacher, corpus, data=data))
        assert prepared.data.train.packing_efficiency < 0.9
        starts.append(prepared.calibrated)
    assert starts[0] is not None
    assert starts[1] is not None
    for name, tensor in starts[0].items():
        torch.testing.assert_close(starts[1][name], tensor, msg=name)


def test_a_job_may_share_heads(tiny_teacher: Path, corpus: Path) -> None:
    spec = _spec(tiny_teacher, corpus, swiftkv={"sharing": "mqa", "calibration_tokens": 1024})
    _, prepared = prepare(spec)
    assert prepared.calibrated is not None
    assert prepared.calibrated["model.layers.3.self_attn.k_proj_swiftkv.weight"].shape == (8, 64)


def test_a_tokenizer_of_another_model_is_refused(corpus: Path, tmp_path: Path) -> None:
    save_teacher(tmp_path / "teacher", vocab_size=200, bos_token_id=1, eos_token_id=2)
    with pytest.raises(ModelError, match="makes ids up to 257, the model's vocab_size is 200"):
        prepare(_spec(tmp_path / "teacher", corpus))


@pytest.mark.slow  # prepares, trains and evaluates
def test_a_job_may_start_from_the_copies(tiny_teacher: Path, corpus: Path, store: ObjectStore, tmp_path: Path) -> None:
    spec = _spec(tiny_teacher, corpus, swiftkv={"initialization": "copied"})
    _, prepared = prepare(spec)
    checkpoint = _checkpoint(store, spec, tiny_teacher, tmp_path)

    manifest = _evaluate(spec, store, checkpoint, prepared, tmp_path / "artifact")

    assert prepared.calibrated is None
    assert manifest.metrics["calibrated"] is None
    assert manifest.metrics["distilled"] == manifest.metrics["rewired"]
    assert manifest.metrics["tokens_trained"] == 77
    assert manifest.metrics["training"] == {
        "step": 4,
        "reason": "last_step",
        "held_out_kl": None,
        "start_kl": None,
    }


@pytest.mark.slow  # prepares, trains and evaluates
def test_the_artifact_is_the_trained_student_with_its_teacher(
    tiny_teacher: Path, corpus: Path, store: ObjectStore, tmp_path: Path
) -> None:
    spec = _spec(tiny_teacher, corpus)
    _, prepared = prepare(spec)
    checkpoint = _checkpoint(store, spec, tiny_teacher, tmp_path, noise=0.1)
    manifest = _evaluate(spec, store, checkpoint, prepared, tmp_path / "artifact")

    student = AutoModelForCausalLM.from_pretrained(tmp_path / "artifact")
    teacher = AutoModelForCausalLM.from_pretrained(tiny_teacher)
    prompt = AutoTokenizer.from_pretrained(tmp_path / "artifact")("def add_7(", return_tensors="pt")["input_ids"]
    with torch.no_grad():
        rewired = load_student(spec, str(tiny_teacher))(prompt).logits
        assert not torch.allclose(student(prompt).logits, rewired, atol=1e-3)
        torch.testing.assert_close(student.swiftkv(False)(prompt).logits, teacher(prompt).logits)
    assert manifest.lineage["teacher"] == str(tiny_teacher)
    assert manifest.lineage["data_fingerprint"] == prepared.data.fingerprint
    assert JobSpec.model_validate(manifest.lineage["spec"]) == spec
    assert json.loads((tmp_path / "artifact" / "evaluation.json").read_text()) == manifest.metrics
    assert manifest.metrics["continuations"]["num_prompts"] > 1
    assert prepared.data.fingerprint in (tmp_path / "artifact" / "evaluation.html").read_text()


@pytest.mark.slow  # prepares, trains and evaluates
def test_an_evaluation_reads_what_was_trained_and_the_curve_alone(
    tiny_teacher: Path, corpus: Path, store: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither the optimizer's state nor the attempt's events."""
    spec = _spec(tiny_teacher, corpus, swiftkv={"initialization": "copied"})
    _, prepared = prepare(spec)
    checkpoint = _checkpoint(store, spec, tiny_teacher, tmp_path, state={"moments": torch.zeros(1 << 20)})
    drawn = Curve(store, AttemptId("job", 1))
    drawn.add({"step": 4, "tokens": 77, "loss": 0.125})
    drawn.save()
    read: Counter[str] = Counter()
    stream = LocalObjectStore.stream

    def counted(self: LocalObjectStore, key: str, *arguments: Any, **ranges: Any) -> Iterator[bytes]:
        for chunk in stream(self, key, *arguments, **ranges):
            read[key] += len(chunk)
            yield chunk

    monkeypatch.setattr(LocalObjectStore, "stream", counted)
    monkeypatch.setattr(AttemptStore, "read_events", lambda *_, **__: pytest.fail("events are read"))
    _evaluate(spec, store, checkpoint, prepared, tmp_path / "artifact")

    trained = sum(
        4 * p.numel() for p in trained_parameters(load_student(spec, str(tiny_teacher)), spec.distillation).values()
    )
    pieces = sum(size for key, size in read.items() if key.endswith(".distcp"))
    assert 2 * trained < pieces < 2 * trained + (1 << 20), "to measure, and to publish"
    assert "4 steps; the last at 0.1250" in (tmp_path / "artifact" / "evaluation.html").read_text()


@pytest.mark.slow  # prepares, trains and evaluates
def test_a_piece_that_was_damaged_is_not_measured(
    tiny_teacher: Path, corpus: Path, store: ObjectStore, tmp_path: Path
) -> None:
    spec = _spec(tiny_teacher, corpus, swiftkv={"initialization": "copied"})
    _, prepared = prepare(spec)
    checkpoint = _checkpoint(store, spec, tiny_teacher, tmp_path)
    (info,) = [info for info in store.list(checkpoint) if info.key.endswith(".distcp")]
    data = bytearray(store.get_bytes(info.key))
    data[len(data) // 2] ^= 1
    store.put_bytes(info.key, bytes(data))
    with pytest.raises(ArtifactCorruptError, match="does not hold"):
        _evaluate(spec, store, checkpoint, prepared, tmp_path / "artifact")


@pytest.mark.slow  # prepares, trains and evaluates
@pytest.mark.parametrize("trainable", ["tail", "all"])
def test_trained_layers_are_measured_against_the_teacher_they_came_from_and_published_without_it(
    trainable: str, tiny_teacher: Path, corpus: Path, store: ObjectStore, tmp_path: Path
) -> None:
    spec = _spec(tiny_teacher, corpus, distillation={"trainable": trainable})
    _, prepared = prepare(spec)
    checkpoint = _checkpoint(store, spec, tiny_teacher, tmp_path, noise=0.05)
    manifest = _evaluate(spec, store, checkpoint, prepared, tmp_path / "artifact")

    untrained = load_student(spec, str(tiny_teacher))
    expected = evaluate(untrained, prepared.data.held_out, max_tokens=spec.evaluation.max_tokens, batch_size=8).teacher
    assert manifest.metrics["teacher"]["perplexity"] == pytest.approx(expected.perplexity)
    student = AutoModelForCausalLM.from_pretrained(tmp_path / "artifact")
    with pytest.raises(ModelError, match="without"):
        student.swiftkv(False)


@pytest.mark.slow  # prepares, trains and evaluates
def test_the_gate_keeps_a_bad_student_from_being_published(
    tiny_teacher: Path, corpus: Path, store: ObjectStore, tmp_path: Path
) -> None:
    spec = _spec(tiny_teacher, corpus, evaluation={"max_kl": 1e-9})
    _, prepared = prepare(spec)
    checkpoint = _checkpoint(store, spec, tiny_teacher, tmp_path)

    with pytest.raises(QualityGateError, match="max_kl"):
        _evaluate(spec, store, checkpoint, prepared, tmp_path / "artifact")
    assert not is_complete(store, AttemptId("job", 1).artifact_prefix)
    report = json.loads(store.get_bytes("jobs/job/attempts/1/evaluation.json"))
    assert [(gate["field"], gate["passed"]) for gate in report["gates"]] == [("evaluation.max_kl", False)]
    assert b">failed<" in store.get_bytes("jobs/job/attempts/1/evaluation.html")


@pytest.mark.parametrize(
    ("sections", "error", "field"),
    [
        ({"swiftkv": {"num_key_value_layers": 7}}, InvalidInputError, "swiftkv.num_key_value_layers"),
        ({"swiftkv": {"num_key_value_layers": 6}}, InvalidInputError, "swiftkv.num_key_value_layers"),
        (
            {"distillation": {"hidden_loss_weight": 1.0, "hidden_loss_layer": 1}},
            InvalidInputError,
            "distillation.hidden_loss_layer",
        ),
        ({"model": {"name_or_path": "/nowhere"}}, ModelError, "model.name_or_path"),
        ({"data": {"sources": [{"name_or_path": "/nowhere.jsonl"}]}}, DataError, "data.sources[0].name_or_path"),
        ({"evaluation": {"tasks": ["builtin:gsm8k"]}}, InvalidInputError, "evaluation.tasks"),
    ],
)
def test_bad_input_shows_before_any_worker_starts(
    tiny_teacher: Path, corpus: Path, sections: dict[str, Any], error: type[Exception], field: str
) -> None:
    with pytest.raises(error) as raised:
        prepare(_spec(tiny_teacher, corpus, **sections))
    assert getattr(raised.value, "field", None) == field


def test_a_teacher_without_a_tokenizer_is_named(tiny_teacher: Path, corpus: Path, tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    bare.mkdir()
    for name in ("config.json", "model.safetensors"):
        (bare / name).write_bytes((tiny_teacher / name).read_bytes())
    with pytest.raises(ModelError, match="tokenizer"):
        prepare(_spec(bare, corpus))


@pytest.mark.slow  # prepares, trains and evaluates
@pytest.mark.parametrize("trainable", ["qkv", "tail"])
def test_a_published_adapter_is_the_whole_artifact_with_its_teacher(
    trainable: str, tiny_teacher: Path, corpus: Path, store: ObjectStore, tmp_path: Path
) -> None:
    spec = _spec(tiny_teacher, corpus, swiftkv={"initialization": "copied"}, distillation={"trainable": trainable})
    _, prepared = prepare(spec)
    checkpoint = _checkpoint(store, spec, tiny_teacher, tmp_path, noise=0.1)
    whole = _evaluate(spec, store, checkpoint, prepared, tmp_path / "whole")
    adapting = spec.model_copy(update={"publish": PublishSpec(adapter=True)})
    delete_directory(store, AttemptId("job", 1).artifact_prefix)
    manifest = _evaluate(adapting, store, checkpoint, prepared, tmp_path / "adapter")

    assert manifest.size < whole.size
    assert len(manifest.lineage[ADAPTER_LINEAGE]) == 64
    assert ADAPTER_LINEAGE not in whole.lineage
    prompt = torch.arange(20)[None]
    with torch.no_grad():
        logits = [AutoModelForCausalLM.from_pretrained(tmp_path / name)(prompt).logits for name in ("whole", "adapter")]
    assert torch.equal(*logits)


def test_an_adapter_of_a_teacher_in_fp8_is_refused_before_training(corpus: Path, tmp_path: Path) -> None:
    save_fp8(tmp_path / "teacher", ROWS)
    byte_tokenizer().save_pretrained(tmp_path / "teacher")
    with pytest.raises(ModelError, match=r"publish\.adapter is true, and .* is stored in FP8"):
        prepare(_spec(tmp_path / "teacher", corpus, publish={"adapter": True}))
