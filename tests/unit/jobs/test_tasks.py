"""The phases before and after training, in this process: no Ray, a checkpoint written by hand."""

import json
import shutil
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from swiftkv_platform.configs import LlamaSwiftKVConfig
from swiftkv_platform.contract.attempts import ADAPTER_LINEAGE, AttemptId
from swiftkv_platform.distillation.model import select_trained_parameters
from swiftkv_platform.errors import ArtifactCorruptError, DataError, InvalidInputError, ModelError, QualityGateError
from swiftkv_platform.evaluation.quality import evaluate
from swiftkv_platform.jobs.attempt.stored import PreparedInputs
from swiftkv_platform.jobs.attempt.tracking import LossCurve
from swiftkv_platform.jobs.values import RunPlan
from swiftkv_platform.jobs.worker.evaluate import evaluate_and_publish, save_trained_student
from swiftkv_platform.jobs.worker.prepare import prepare_run as prepare_in
from swiftkv_platform.jobs.worker.setup import calibrate, load_student
from swiftkv_platform.model.weights.checkpoint import Checkpoint
from swiftkv_platform.specs import JobSpec, PublishSpec
from swiftkv_platform.storage.artifacts import delete_directory, fetch_directory, is_complete, publish_directory
from swiftkv_platform.storage.attempt_store import AttemptStore
from swiftkv_platform.storage.object_store import LocalObjectStore
from tests.support.checkpoints import ROWS, save_fp8
from tests.support.fakes.tokenizers import byte_tokenizer
from tests.support.parameters import WIDE
from tests.support.tiny_models import save_teacher
from tests.unit.jobs.attempts import COPIED, Job, request, said

pytestmark = pytest.mark.slow("trains and measures")

ARTIFACT = AttemptId("job", 1).artifact_prefix
WRONG_LAYER = {"hidden_loss_weight": 1.0, "hidden_loss_layer": 1}


def prepare(job: Job, spec: JobSpec) -> tuple[RunPlan, PreparedInputs]:
    """Prepare the rows and, unless the start is copied, calibrate it in this process."""
    place = job.directory / f"prepared-{len(list(job.directory.iterdir()))}"
    place.mkdir()
    plan, data = prepare_in(spec, place / "rows")
    if spec.swiftkv.initialization == "copied":
        return plan, PreparedInputs(data, None)
    calibrate(spec, spec.model.name_or_path, data.train, place, device="cpu")
    return plan, PreparedInputs(data, dict(Checkpoint.from_directory(place)))


def checkpoint_of(job: Job, spec: JobSpec, noise: float = 0.0, state: dict[str, torch.Tensor] | None = None) -> str:
    """Publish a checkpoint, in the trainer's names, of a student that is `noise` away from its copied start.

    Args:
        state: the optimizer's state.
    """
    trained = select_trained_parameters(load_student(spec, str(job.teacher)), spec.distillation)
    torch.manual_seed(0)
    model = {f"student.{name}": p.detach() + noise * torch.randn(p.shape) for name, p in trained.items()}
    dist.init_process_group("gloo", init_method=f"file://{job.directory}/group", rank=0, world_size=1)
    try:
        saved = {"model": model, "optimizer": state or {}, "progress": {"step": 4}}
        save(saved, storage_writer=FileSystemWriter(job.directory / "checkpoint"))
    finally:
        dist.destroy_process_group()
    lineage = {"step": 4, "tokens": 77, "world_size": 1}
    publish_directory(job.store, job.directory / "checkpoint", "ck", kind="checkpoint", lineage=lineage, metrics={})
    return "ck"


def evaluate_job(job: Job, spec: JobSpec, checkpoint: str, prepared: PreparedInputs, place: str = "artifact") -> Any:
    """Evaluate and publish the checkpoint; fetch the artifact to `place` and return its manifest."""
    manifest = evaluate_and_publish(request(spec=spec), job.store.uri, checkpoint, prepared)
    fetch_directory(job.store, ARTIFACT, job.directory / place)
    return manifest


def test_the_plan_counts_steps_and_trained_parameters(job: Job) -> None:
    """Heads are shared as the spec says, and calibration changes only projections."""
    spec = job.spec(training={"num_epochs": 3, "batch_size": 4}, swiftkv={"sharing": "mqa"})
    plan, prepared = prepare(job, spec)
    calibrated, copied = prepared.calibrated, dict(load_student(spec, str(job.teacher)).swiftkv_parameters())
    assert plan.total_steps == -(-3 * len(prepared.data.train) // 4)
    assert plan.num_trained_parameters == sum(tensor.numel() for tensor in calibrated.values())
    assert plan.statistics["train"]["rows"] == len(prepared.data.train)
    assert json.dumps(plan.statistics)
    assert calibrated["model.layers.3.self_attn.k_proj_swiftkv.weight"].shape == (8, 64)
    assert calibrated.keys() == copied.keys()
    changed = {name for name, tensor in calibrated.items() if not tensor.equal(copied[name])}
    assert all("proj" in name for name in changed)
    assert any("k_proj" in name for name in changed)


def test_padding_does_not_change_the_calibration(job: Job) -> None:
    """Rows of one sample each, mostly padding, calibrate like the same rows with less of it."""
    starts = []
    for max_length in (96, 48):
        _, prepared = prepare(job, job.spec(data={"max_length": max_length, "packing": False}))
        assert prepared.data.train.packing_efficiency < 0.9
        starts.append(prepared.calibrated)
    torch.testing.assert_close(*starts)


def test_the_artifact_is_the_trained_student_with_its_teacher(job: Job) -> None:
    spec = job.spec()
    _, prepared = prepare(job, spec)
    manifest = evaluate_job(job, spec, checkpoint_of(job, spec, noise=0.1), prepared)
    artifact = job.directory / "artifact"
    student, teacher = (AutoModelForCausalLM.from_pretrained(path) for path in (artifact, job.teacher))
    prompt = AutoTokenizer.from_pretrained(artifact)("def add_7(", return_tensors="pt")["input_ids"]
    with torch.no_grad():
        rewired = load_student(spec, str(job.teacher))(prompt).logits
        assert not torch.allclose(student(prompt).logits, rewired, atol=1e-3)
        torch.testing.assert_close(student.swiftkv(False)(prompt).logits, teacher(prompt).logits)
    assert manifest.lineage["teacher"] == str(job.teacher)
    assert manifest.lineage["data_fingerprint"] == prepared.data.fingerprint
    assert JobSpec.model_validate(manifest.lineage["spec"]) == spec
    assert json.loads((artifact / "evaluation.json").read_text()) == manifest.metrics
    assert manifest.metrics["continuations"]["num_prompts"] > 1
    assert prepared.data.fingerprint in (artifact / "evaluation.html").read_text()
    told = [event.data for event in said(job.store, "progress") if event.data["phase"] == "publish"]
    assert [(each["part"], each["done"], each["total"]) for each in told] == [
        ("bytes", done, manifest.size) for done in (0, manifest.size)
    ]


def test_an_evaluation_reads_what_was_trained_and_the_curve_alone(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the optimizer's state nor events are read. The start is copied, so no calibrated student is measured."""
    spec = job.spec(**COPIED)
    _, prepared = prepare(job, spec)
    checkpoint = checkpoint_of(job, spec, state={"moments": torch.zeros(1 << 20)})
    drawn = LossCurve(job.store, AttemptId("job", 1))
    drawn.add_point({"step": 4, "tokens": 77, "loss": 0.125})
    drawn.save()
    read: Counter[str] = Counter()
    stream = LocalObjectStore.stream

    def counted(self: LocalObjectStore, key: str, *arguments: Any, **ranges: Any) -> Iterator[bytes]:
        for chunk in stream(self, key, *arguments, **ranges):
            read[key] += len(chunk)
            yield chunk

    monkeypatch.setattr(LocalObjectStore, "stream", counted)
    monkeypatch.setattr(AttemptStore, "read_events", lambda *_, **__: pytest.fail("events are read"))
    metrics = evaluate_job(job, spec, checkpoint, prepared).metrics
    trained = select_trained_parameters(load_student(spec, str(job.teacher)), spec.distillation)
    trained_bytes = sum(4 * parameter.numel() for parameter in trained.values())
    pieces = sum(size for key, size in read.items() if key.endswith(".distcp"))
    assert 2 * trained_bytes < pieces < 2 * trained_bytes + (1 << 20), "once to measure, once to publish"
    assert "4 steps; final loss 0.1250" in (job.directory / "artifact" / "evaluation.html").read_text()
    assert (metrics["calibrated"], metrics["distilled"], metrics["tokens_trained"]) == (None, metrics["rewired"], 77)
    assert metrics["training"] == {"step": 4, "reason": "last_step", "held_out_kl": None, "start_kl": None}


def test_a_piece_that_was_damaged_is_not_measured(job: Job) -> None:
    spec = job.spec(**COPIED)
    checkpoint = checkpoint_of(job, spec)
    (info,) = [info for info in job.store.list(checkpoint) if info.key.endswith(".distcp")]
    data = bytearray(job.store.get_bytes(info.key))
    data[len(data) // 2] ^= 1
    job.store.put_bytes(info.key, bytes(data))
    with pytest.raises(ArtifactCorruptError, match="is damaged: "):
        evaluate_job(job, spec, checkpoint, prepare(job, spec)[1])


def test_trained_layers_are_measured_against_the_teacher_they_came_from_and_published_without_it(job: Job) -> None:
    spec = job.spec(distillation={"trainable": "all"})
    _, prepared = prepare(job, spec)
    manifest = evaluate_job(job, spec, checkpoint_of(job, spec, noise=0.05), prepared)
    untrained, limit = load_student(spec, str(job.teacher)), spec.evaluation.max_tokens
    expected = evaluate(untrained, prepared.data.held_out, max_tokens=limit, batch_size=8).teacher
    assert manifest.metrics["teacher"]["perplexity"] == pytest.approx(expected.perplexity)
    with pytest.raises(ModelError, match="without"):
        AutoModelForCausalLM.from_pretrained(job.directory / "artifact").swiftkv(False)


def test_the_gate_keeps_a_bad_student_from_being_published(job: Job) -> None:
    spec = job.spec(evaluation={"max_kl": 1e-9}, **COPIED)
    with pytest.raises(QualityGateError, match="max_kl"):
        evaluate_job(job, spec, checkpoint_of(job, spec), prepare(job, spec)[1])
    assert not is_complete(job.store, ARTIFACT)
    report = json.loads(job.store.get_bytes("jobs/job/attempts/1/evaluation.json"))
    assert [(gate["field"], gate["passed"]) for gate in report["gates"]] == [("evaluation.max_kl", False)]
    assert b">failed<" in job.store.get_bytes("jobs/job/attempts/1/evaluation.html")


def test_a_local_run_saves_the_student_that_a_gate_refuses(job: Job) -> None:
    """It saves the files of the artifact, apart from report and card, also over those of an earlier attempt."""
    spec = job.spec(**COPIED)
    checkpoint = checkpoint_of(job, spec, noise=0.1)
    evaluate_job(job, spec, checkpoint, prepare(job, spec)[1])
    saved = job.directory / "model"
    saved.mkdir()
    (saved / "old").touch()
    save_trained_student(request(spec=spec), job.store.uri, checkpoint, saved)
    artifact = {path.name: path for path in (job.directory / "artifact").iterdir()}
    assert artifact.keys() - {path.name for path in saved.iterdir()} == {
        *("evaluation.json", "evaluation.html", "README.md", "manifest.json")
    }
    assert all(path.read_bytes() == artifact[path.name].read_bytes() for path in saved.iterdir())


@pytest.mark.parametrize(
    ("file", "values"),
    [
        ("config.json", {"output_attentions": True}),
        ("config.json", {"output_hidden_states": True}),
        ("config.json", {"return_dict": False, "torchscript": True}),
        ("config.json", {"use_return_dict": False}),
        ("config.json", {"temperature": 0.7, "max_length": 20, "num_beams": 4}),
        ("generation_config.json", {"temperature": 0.7, "do_sample": False, "top_p": 0.9, "top_k": 5}),
        ("generation_config.json", {"early_stopping": True, "length_penalty": 2.0}),
        ("generation_config.json", {"pad_token_id": -1}),
        ("generation_config.json", {"output_scores": True}),
    ],
)
@pytest.mark.parametrize("adapter", [False, True])
def test_a_teachers_files_are_written_again(job: Job, file: str, values: dict[str, Any], adapter: bool) -> None:
    """Defaults of generation stay as they are. What only says what a call of the model returns is left out."""
    own = job.directory / "own"
    shutil.copytree(job.teacher, own)
    before = json.loads((own / file).read_text()) if (own / file).is_file() else {}
    (own / file).write_text(json.dumps(before | values))
    job.teacher = own
    spec = job.spec(**COPIED, publish={"adapter": adapter})
    prepare(job, spec)
    save_trained_student(request(spec=spec), job.store.uri, checkpoint_of(job, spec), job.directory / "model")
    found = json.loads((job.directory / "model" / file).read_text())
    kept = {name: found[name] for name in values.keys() & found.keys() if found[name] == values[name]}
    assert kept == ({} if file == "config.json" else values)


def test_what_cannot_be_written_is_refused_before_training(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise ValueError("The `some_field` attribute is 3, which is not supported")

    for writer in (LlamaSwiftKVConfig, PreTrainedTokenizerFast):
        with monkeypatch.context() as patch:
            patch.setattr(writer, "save_pretrained", refuse)
            with pytest.raises(ModelError, match=r"cannot write .* `some_field` attribute is 3") as raised:
                prepare(job, job.spec(**COPIED))
        assert (raised.value.field, raised.value.value) == ("model.name_or_path", str(job.teacher))


@pytest.mark.parametrize("trainable", ["kv", pytest.param("qkv", marks=WIDE), "tail"])
def test_a_published_adapter_is_the_whole_artifact_with_its_teacher(job: Job, trainable: str) -> None:
    spec = job.spec(**COPIED, distillation={"trainable": trainable})
    _, prepared = prepare(job, spec)
    checkpoint = checkpoint_of(job, spec, noise=0.1)
    whole = evaluate_job(job, spec, checkpoint, prepared, "whole")
    delete_directory(job.store, ARTIFACT)
    adapting = spec.model_copy(update={"publish": PublishSpec(adapter=True)})
    manifest = evaluate_job(job, adapting, checkpoint, prepared, "adapter")
    assert manifest.size < whole.size
    assert len(manifest.lineage[ADAPTER_LINEAGE]) == 64
    assert ADAPTER_LINEAGE not in whole.lineage
    models = (AutoModelForCausalLM.from_pretrained(job.directory / name) for name in ("whole", "adapter"))
    with torch.no_grad():
        assert torch.equal(*(model(torch.arange(20)[None]).logits for model in models))


@pytest.mark.parametrize(
    ("sections", "error", "field"),
    [
        ({"swiftkv": {"num_key_value_layers": 7}}, InvalidInputError, "swiftkv.num_key_value_layers"),
        ({"swiftkv": {"num_key_value_layers": 6}}, InvalidInputError, "swiftkv.num_key_value_layers"),
        ({"distillation": WRONG_LAYER}, InvalidInputError, "distillation.hidden_loss_layer"),
        ({"model": {"name_or_path": "/nowhere"}}, ModelError, "model.name_or_path"),
        ({"data": {"sources": [{"name_or_path": "/nowhere.jsonl"}]}}, DataError, "data.sources[0].name_or_path"),
        ({"evaluation": {"tasks": ["builtin:gsm8k"]}}, InvalidInputError, "evaluation.tasks"),
    ],
)
def test_bad_input_shows_before_any_worker_starts(
    job: Job, sections: dict[str, Any], error: type[Exception], field: str
) -> None:
    with pytest.raises(error) as raised:
        prepare(job, job.spec(**sections))
    assert raised.value.field == field


def test_a_teacher_with_another_tokenizer_or_without_one_is_named(job: Job) -> None:
    job.teacher = save_teacher(job.directory / "teacher", vocab_size=200, bos_token_id=1, eos_token_id=2)
    with pytest.raises(ModelError, match=r"has ids up to 257 .*vocab_size is 200"):
        prepare(job, job.spec())
    for file in job.teacher.glob("*token*"):
        file.unlink()
    with pytest.raises(ModelError, match="tokenizer"):
        prepare(job, job.spec())


def test_an_adapter_of_a_teacher_in_fp8_is_refused_before_training(job: Job) -> None:
    job.teacher = job.directory / "teacher"
    save_fp8(job.teacher, ROWS)
    byte_tokenizer().save_pretrained(job.teacher)
    with pytest.raises(ModelError, match=r"publish\.adapter is true, and .* is stored quantized"):
        prepare(job, job.spec(publish={"adapter": True}))
