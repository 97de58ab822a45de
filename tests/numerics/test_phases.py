"""Calibration, training, evaluation and publishing by several workers, none of which holds the whole model: the results
equal those of one process. The soak runs every kind of teacher and start on four workers, and a Llama of 1.5 GB on
eight, with a bound on memory that the whole model exceeds."""

from __future__ import annotations

import json
import os
import shutil
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch.multiprocessing import ProcessExitedException
from transformers import AutoModelForCausalLM, DeepseekV2Config, LlamaConfig

from swiftkv_platform.contract.attempts import AttemptId, Parent
from swiftkv_platform.contract.row_results import load_rows
from swiftkv_platform.model.weights.checkpoint import Checkpoint
from swiftkv_platform.model.weights.writing import write_model_shards
from swiftkv_platform.planning.machines import has_fast_bfloat16
from swiftkv_platform.storage.artifacts import fetch_directory
from swiftkv_platform.storage.attempt_store import AttemptStore
from swiftkv_platform.storage.object_store import open_store
from tests.numerics.distillation_worker import group_of_one
from tests.numerics.phases_worker import (
    Case,
    Outcome,
    count_flops,
    in_this_process,
    run_evaluation,
    run_phases,
    run_spawned,
    run_training,
    share_workspace,
)
from tests.support.checkpoints import ROWS, save, save_fp8
from tests.support.fakes.tokenizers import byte_tokenizer
from tests.support.tiny_models import family_teacher

SOAK = "SWIFTKV_SOAK" in os.environ
pytestmark = [pytest.mark.slow("processes that train and evaluate"), pytest.mark.timeout(1800)]
in_soak = pytest.mark.soak("more jobs, or many processes")

WORKERS = 4 if SOAK else 2
CASES = ("sharded", "whole", "deepseek_v2", "fbgemm", "tail") if SOAK else ("sharded",)
QUESTIONS = [
    {"text": f"The grass of {n} is", "choices": [" green", " loud", f" seven{n}"], "answer": 0}
    for n in range(24 if SOAK else 6)
]


def save_tasks(directory: Path) -> list[dict[str, Any]]:
    """Write a log-likelihood task and a generation task over one file."""
    directory.mkdir()
    (directory / "questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in QUESTIONS))
    common = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": "questions.jsonl"}}}
    common |= {"test_split": "test", "doc_to_text": "{{text}}"}
    choose = {"output_type": "multiple_choice", "doc_to_choice": "{{choices}}", "doc_to_target": "{{answer}}"}
    write = {"output_type": "generate_until", "doc_to_target": "{{choices[0]}}"}
    write["generation_kwargs"] = {"until": ["\n"], "max_gen_toks": 4}
    for name, task, metric in (("choose", choose, "acc"), ("write", write, "exact_match")):
        metrics = [{"metric": metric, "aggregation": "mean", "higher_is_better": True}]
        document = common | task | {"task": name, "metric_list": metrics}
        (directory / f"{name}.yaml").write_text(yaml.safe_dump(document))
    return [{"name": str(directory / f"{name}.yaml")} for name in ("choose", "write")]


def save_rows(path: Path) -> list[dict[str, Any]]:
    """Write own rows, and return two tasks over them: generated answers, and the teacher's as references."""
    rows = [{"prompt": each["text"]} | {"completion": str(n)} for n, each in enumerate(QUESTIONS)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    prompts = path.with_name("prompts.jsonl")
    prompts.write_text("".join(json.dumps({"prompt": row["prompt"]}) + "\n" for row in rows))
    return [
        {"name": "numbers", "source": {"name_or_path": str(path)}, "metric": "numeric", "max_tokens": 4},
        {"name": "likely", "source": {"name_or_path": str(prompts)}, "metric": "likelihood", "max_tokens": 4},
    ]


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Case]:
    path = tmp_path_factory.mktemp("phases")
    llama = save(family_teacher("llama"), path / "llama")
    latent = save(family_teacher("deepseek_v2"), path / "deepseek_v2", max_shard_size="100KB")
    save_fp8(path / "fbgemm", ROWS)
    byte_tokenizer().save_pretrained(path / "fbgemm")
    tasks = {"evaluation": {"tasks": save_tasks(path / "tasks"), "rows": save_rows(path / "rows.jsonl")}}
    whole = Case(str(path / "at-whole"), str(llama), sharded=False, prefill_rounds=1, spec=tasks)
    return {
        "whole": whole,
        "sharded": replace(whole, directory=str(path / "at-sharded"), sharded=True),
        "deepseek_v2": Case(str(path / "at-deepseek"), str(latent)),
        "fbgemm": Case(str(path / "at-fbgemm"), str(path / "fbgemm")),
        "tail": Case(str(path / "at-tail"), str(llama), spec={"distillation": {"trainable": "tail"}}),
    }


@pytest.fixture(scope="module")
def together(cases: dict[str, Case], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Outcome]:
    path = tmp_path_factory.mktemp("together")
    return dict(zip(CASES, run_spawned(run_phases, [cases[name] for name in CASES], WORKERS, path), strict=True))


@pytest.fixture(scope="module")
def alone(cases: dict[str, Case], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Outcome]:
    path = tmp_path_factory.mktemp("alone")
    names = ["whole", *CASES[2:]]  # one process has nothing to shard
    if SOAK:
        outcomes = run_spawned(run_phases, [apart(cases[name]) for name in names], 1, path)
    else:
        with group_of_one(path), in_this_process():
            outcomes = [run_phases(apart(cases[name])) for name in names]
    found = dict(zip(names, outcomes, strict=True))
    return found | {"sharded": found["whole"]}


def apart(case: Case) -> Case:
    """Return the case with a directory of its own, to be run by one process."""
    return replace(case, directory=f"{case.directory}-alone")


def assert_close(actual: Any, expected: Any, where: str) -> None:
    """Compare floats to 4 digits and everything else exactly, at any depth."""
    if isinstance(expected, dict):
        assert actual.keys() == expected.keys(), where
        for key, value in expected.items():
            assert_close(actual[key], value, f"{where}.{key}")
    elif isinstance(expected, list):
        assert len(actual) == len(expected), where
        for place, value in enumerate(expected):
            assert_close(actual[place], value, f"{where}[{place}]")
    elif isinstance(expected, float):
        assert actual == pytest.approx(expected, rel=1e-4, abs=1e-4), where
    else:
        assert actual == expected, where


def assert_same_report(actual: dict[str, Any], expected: dict[str, Any]) -> None:
    for stage in ("teacher", "rewired", "calibrated", "distilled", "continuations"):
        assert_close(actual[stage], expected[stage], stage)
    assert actual["num_positions"] == expected["num_positions"]
    assert actual["prefill_flops_ratio"] == pytest.approx(expected["prefill_flops_ratio"])
    assert_close(actual["tasks"], expected["tasks"], "tasks")


def start_apart(case: Case, other: Case) -> float:
    """Return the largest distance of a calibrated parameter from the other case's, relative to its norm."""
    ours, expected = (Checkpoint.from_directory(Path(which.directory) / "start") for which in (case, other))
    assert ours.keys() == expected.keys()
    return max(float((ours[name] - tensor).norm() / tensor.norm()) for name, tensor in expected.items())


@pytest.mark.parametrize("name", CASES)
def test_workers_do_what_one_process_does(name: str, cases: Any, together: Any, alone: Any, tmp_path: Path) -> None:
    """Start, losses and report equal those of one process, and the artifact loads as a model."""
    actual, expected = together[name], alone[name]
    for mine, other in zip(actual.losses, expected.losses, strict=True):
        assert mine == pytest.approx(other, rel=1e-4, abs=1e-5)
    assert_same_report(actual.manifest.metrics, expected.manifest.metrics)
    if name != "deepseek_v2":  # the basis of its latents is arbitrary
        assert start_apart(cases[name], apart(cases["whole" if name == "sharded" else name])) <= 1e-5
    assert actual.manifest.metrics["tokens_trained"]
    fetch_directory(open_store(f"{cases[name].directory}/store"), AttemptId("j", 1).artifact_prefix, tmp_path / "model")
    student = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    prompt = torch.arange(12)[None]
    with torch.no_grad():
        assert student(prompt).logits.isfinite().all()
        if name == "sharded":
            teacher = AutoModelForCausalLM.from_pretrained(cases[name].teacher)
            torch.testing.assert_close(student.swiftkv(False)(prompt).logits, teacher(prompt).logits)


@pytest.mark.parametrize(("kind", "num_workers"), [("checkpoint", 1), ("model", 1), ("model", 2)])
def test_the_report_measures_the_parent_on_the_same_text(
    kind: Any, num_workers: int, cases: dict[str, Case], alone: dict[str, Outcome], tmp_path: Path
) -> None:
    """A student that equals its parent is as far from the teacher as it."""
    trained, attempt = Path(apart(cases["whole"]).directory), AttemptId("j", 1)
    shutil.copytree(trained, tmp_path / "at")
    stored = tmp_path / "at" / "store"
    shutil.rmtree(stored / attempt.prefix / "evaluation", ignore_errors=True)
    shutil.move(stored / attempt.artifact_prefix, stored / "model")
    newest = AttemptStore(open_store(str(stored))).find_newest_checkpoint("j")
    key = "model" if kind == "model" else str(newest)
    parent = Parent(name="mdl_x" if kind == "model" else "job_x:3", kind=kind, key=key, job_id="job_x", sha256="0" * 64)
    section = {"min_kl_reduction": 0.0, "max_kl": None, "max_drop": None, "continuations": 0}
    section["rows"] = cases["whole"].spec["evaluation"]["rows"]
    spec = {"evaluation": section, "training": {"from": parent.name}}
    case = Case(str(tmp_path / "at"), cases["whole"].teacher, prefill_rounds=1, spec=spec)
    case = replace(case, parent=parent, sharded=num_workers > 1)
    if num_workers == 1:
        with group_of_one(tmp_path), in_this_process():
            outcome = run_evaluation(case)
    else:
        (outcome,) = run_spawned(run_evaluation, [case], num_workers, tmp_path / "group")
    assert outcome.manifest is not None
    report = outcome.manifest.metrics
    assert_close(report["parent"], report["distilled"], "parent")
    assert report["parent"]["kl"] < report["rewired"]["kl"]
    assert [(task["task"], task["student"]) for task in report["parent_tasks"]] == [
        (task["task"], task["student"]) for task in report["tasks"]
    ]
    names = [[task["row_results"] for task in report[which]] for which in ("parent_tasks", "tasks")]
    store = open_store(str(stored))
    rows = [[load_rows(store.get_bytes(attempt.row_results_key(name))) for name in each] for each in names]
    assert rows[0] == rows[1]
    assert not set(names[0]) & set(names[1])
    [gate] = report["gates"]
    assert (gate["field"], gate["value"]) == ("evaluation.min_kl_reduction", pytest.approx(0.0, abs=1e-6))


def test_results_of_rows_are_stored_with_the_attempt(
    cases: dict[str, Case], together: dict[str, Outcome], alone: dict[str, Outcome]
) -> None:
    """Those of two workers with a sharded model are those of one process."""
    assert together["sharded"].manifest is not None
    assert alone["whole"].manifest is not None
    attempt, found = AttemptId("j", 1), []
    for case, outcome in ((cases["sharded"], together["sharded"]), (apart(cases["whole"]), alone["whole"])):
        store, tasks = open_store(f"{case.directory}/store"), outcome.manifest.metrics["tasks"]
        assert [task["task"] for task in tasks] == ["choose", "write", "numbers", "likely"]
        found.append([load_rows(store.get_bytes(attempt.row_results_key(task["row_results"]))) for task in tasks])
        for task, rows in zip(tasks, found[-1], strict=True):
            assert len(rows) == task["num_samples"] == len(QUESTIONS)
            assert sum(row.student.score for row in rows) / len(rows) == pytest.approx(task["student"])
        assert not any(name.startswith("rows/") for name in outcome.manifest.files), "no part of the model"
    for mine, theirs in zip(*found, strict=True):
        assert [row.key for row in mine] == [row.key for row in theirs]
        assert [row.teacher.answer for row in mine] == [row.teacher.answer for row in theirs]
    assert [row.expected for row in found[0][3]] == [row.expected for row in found[1][3]], "the teacher's answers"


def test_workers_of_a_machine_share_a_directory(tmp_path: Path) -> None:
    case = Case(str(tmp_path / "shared"), "")
    (found,) = run_spawned(share_workspace, [case], 2, tmp_path / "group")
    assert [is_downloader for _, is_downloader, _ in found] == [True, False]
    assert [num_local_workers for _, _, num_local_workers in found] == [2, 2]
    (path,) = {path for path, _, _ in found}
    assert not Path(path).exists()


@in_soak
def test_workers_divide_the_arithmetic(cases: dict[str, Case], tmp_path: Path) -> None:
    case = replace(cases["whole"], num_samples=400)
    spec = {**case.spec["evaluation"], "max_tokens": 2048, "continuations": 32}
    case = replace(case, spec={"evaluation": spec})
    (one,) = run_spawned(count_flops, [case], 1, tmp_path / "one")
    (four,) = run_spawned(count_flops, [case], WORKERS, tmp_path / "four")
    assert max(four) <= 0.3 * one[0]
    assert sum(four) == pytest.approx(one[0], rel=0.05)


@in_soak
def test_a_killed_evaluation_repeats_nothing(
    cases: dict[str, Case], together: dict[str, Outcome], tmp_path: Path
) -> None:
    case = replace(cases["whole"], directory=str(tmp_path / "at"))
    trained, attempt = Path(cases["whole"].directory), AttemptId("j", 1)
    shutil.copytree(trained / "start", tmp_path / "at" / "start")
    shutil.copytree(*(path / "store" / attempt.checkpoints_prefix for path in (trained, tmp_path / "at")))
    with pytest.raises(ProcessExitedException):
        run_spawned(run_evaluation, [replace(case, killed_after="task-000")], 2, tmp_path / "killed")
    (outcome,) = run_spawned(run_evaluation, [case], 2, tmp_path / "again")
    assert_same_report(outcome.manifest.metrics, together["whole"].manifest.metrics)
    told = [stored.event for stored in AttemptStore(open_store(f"{case.directory}/store")).read_events(attempt, {})]
    ended = Counter(event.data["part"] for event in told if event.type == "progress" and event.data["total"] == 1)
    # The part that was stored before the kill is not run again; its end was never reported.
    parts = ("rewired", "calibrated", "distilled", "continuations", "task-001", "task-002", "task-003", "prefill")
    assert ended == dict.fromkeys(parts, 1)
    store = open_store(f"{case.directory}/store")
    kept = {task["task"]: task["row_results"] for task in outcome.manifest.metrics["tasks"]}
    assert all(
        len(load_rows(store.get_bytes(attempt.row_results_key(name)))) == len(QUESTIONS) for name in kept.values()
    )


def test_a_large_student_takes_several_files(tmp_path: Path) -> None:
    tensors = {f"t{n}": torch.full((8,), float(n)) for n in range(5)}
    write_model_shards(tmp_path, tensors.items(), max_shard_bytes=64)
    assert sorted(path.name for path in tmp_path.glob("*.safetensors")) == [
        f"model-0000{n}-of-00003.safetensors" for n in (1, 2, 3)
    ]
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["weight_map"]["t4"] == "model-00003-of-00003.safetensors"
    assert index["metadata"]["total_size"] == 5 * 32


# Run the marked tests alone on a quiet machine: `SWIFTKV_SOAK=1 pytest tests/numerics/test_phases.py -k anonymous -s`.
# `SWIFTKV_PHASES_LAYERS` and `SWIFTKV_PHASES_WORKERS` make them smaller.

LAYERS = int(os.environ.get("SWIFTKV_PHASES_LAYERS", "15"))
LARGE_WORKERS = int(os.environ.get("SWIFTKV_PHASES_WORKERS", "8"))
FULL_SIZE = LAYERS >= 15
"""Whether to check the memory bound; with a smaller model the process itself dominates, and only results are
compared."""
FILE_BYTES = 200 << 20
"""Largest size of a published weight file; large models use ten times that."""
OWN_BYTES = 384 << 20
"""Memory of a worker besides weights: libraries at first use, buffers, freed tensors below 8 MiB that the C library
keeps, the report."""


@dataclass(frozen=True)
class Large:
    """A teacher on disk, and the bytes of its weights in the dtype that it computes in."""

    path: Path
    model_bytes: int
    layer_bytes: int
    """Bytes of the largest layer."""
    root_bytes: int
    """Bytes outside the layers: embedding, head and norm."""

    @classmethod
    def save(cls, path: Path, config: Any, *, fp8: bool = False) -> Large:
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        sizes = [sum(parameter.nbytes for parameter in part.parameters()) for part in (model, *model.model.layers)]
        if fp8:
            save_fp8(path, ROWS, model)
            byte_tokenizer().save_pretrained(path)
        else:
            save(model, path, max_shard_size="200MB")
        return cls(path, sizes[0], max(sizes[1:]), sizes[0] - sum(sizes[1:]))


def llama(path: Path) -> Large:
    return Large.save(path, LlamaConfig(**LARGE_SHAPE, num_hidden_layers=LAYERS, num_key_value_heads=4))


def fp8(path: Path) -> Large:
    config = LlamaConfig(**LARGE_SHAPE | HALF_AS_WIDE, num_hidden_layers=LAYERS, num_key_value_heads=4)
    return Large.save(path, config, fp8=True)


def deepseek_v2(path: Path) -> Large:
    latent = {"kv_lora_rank": 128, "qk_nope_head_dim": 64, "qk_rope_head_dim": 32, "v_head_dim": 64}
    experts = {"n_routed_experts": 8, "n_shared_experts": 1, "first_k_dense_replace": 1, "num_experts_per_tok": 2}
    shape = LARGE_SHAPE | HALF_AS_WIDE | latent | experts | {"q_lora_rank": None, "moe_intermediate_size": 352}
    return Large.save(path, DeepseekV2Config(**shape, num_hidden_layers=LAYERS, num_key_value_heads=16))


def train_and_evaluate(case: Case, num_workers: int, directory: Path) -> Outcome:
    """Calibrate and train, then evaluate and publish in separate processes, as a job does."""
    (trained,) = run_spawned(run_training, [case], num_workers, directory)
    (measured,) = run_spawned(run_evaluation, [case], num_workers, directory.with_name(f"{directory.name}-evaluate"))
    grown = [mine | later for mine, later in zip(trained.grown_bytes, measured.grown_bytes, strict=True)]
    return replace(measured, losses=trained.losses, grown_bytes=grown)


LARGE_SHAPE: dict[str, Any] = {
    "vocab_size": 16384,
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_attention_heads": 16,
    "max_position_embeddings": 128,  # short prompts: a shard runs no faster than the whole model
    "dtype": torch.bfloat16,
}
HALF_AS_WIDE = {"vocab_size": 4096, "hidden_size": 1024, "intermediate_size": 2816}
LARGE = {"llama": llama, "fp8": fp8, "deepseek_v2": deepseek_v2}


@pytest.mark.soak("eight processes and gigabytes")
@pytest.mark.skipif(not has_fast_bfloat16(), reason="a CPU without AVX-512 takes hours for it in bfloat16")
@pytest.mark.parametrize("name", LARGE)
def test_no_workers_anonymous_memory_reaches_the_model(name: str, tmp_path: Path) -> None:
    large = LARGE[name](tmp_path / "teacher")
    layers = json.loads((large.path / "config.json").read_text())["num_hidden_layers"]
    case = Case(
        str(tmp_path / "at"),
        str(large.path),
        spec={
            "model": {"dtype": "bfloat16"},
            "swiftkv": {"num_key_value_layers": layers // 2 + 1, "key_value_group_size": 1},
            "training": {"batch_size": 8, "max_steps": 2},
            "resources": {"num_workers": LARGE_WORKERS},
            "evaluation": {"continuations": 0, "max_tokens": 256},
        },
        prefill_rounds=1,
        max_file_bytes=FILE_BYTES,
    )
    outcome = train_and_evaluate(case, LARGE_WORKERS, tmp_path / "group")
    # A worker's shard; what FSDP2 has gathered (two layers, since the next is prefetched, plus embedding and head),
    # each copied out of a buffer of the same size; and what gloo is gathering into a tensor of its own. float32 masters
    # and moments of the worker's share of trained weights, some 60 MiB, are in OWN_BYTES.
    gathered = 2 * (2 * large.layer_bytes + large.root_bytes) + max(large.layer_bytes, large.root_bytes)
    # When the first worker publishes, it holds one weight file and gathers nothing.
    bound = large.model_bytes // LARGE_WORKERS + max(gathered, FILE_BYTES) + OWN_BYTES
    print(f"\n{name}: {large.model_bytes >> 20} MiB, a layer {large.layer_bytes >> 20}, bound {bound >> 20} a worker")
    for rank, grown in enumerate(outcome.grown_bytes):
        print(f"worker {rank}:", {phase: f"{peak >> 20} MiB" for phase, peak in grown.items()})
    one = replace(case, directory=f"{case.directory}-alone", sharded=False)
    alone = train_and_evaluate(one, 1, tmp_path / "alone")
    print("one process:", {phase: f"{peak >> 20} MiB" for phase, peak in alone.grown_bytes[0].items()})
    apart = start_apart(case, one)
    losses = list(zip(outcome.losses, alone.losses, strict=True))
    print(f"start apart by {apart:.1e}, losses {losses}")
    assert apart <= 1e-5
    for mine, other in losses:
        assert mine == pytest.approx(other, rel=1e-4)
    assert_same_report(outcome.manifest.metrics, alone.manifest.metrics)
    if FULL_SIZE:
        assert max(grown["calibrate"] for grown in outcome.grown_bytes) < large.model_bytes
    if FULL_SIZE and name == "llama":
        assert max(max(grown.values()) for grown in outcome.grown_bytes) < bound < large.model_bytes
