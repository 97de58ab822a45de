"""Estimates of whole jobs: steps, time and its source, memory, and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest

from swiftkv_platform.control_plane.jobs.estimates import JobEstimate, add_time_and_cost, estimate, find_speed
from swiftkv_platform.errors import InvalidInputError
from swiftkv_platform.planning.job import check_row_generation_memory, compute_teacher_bytes
from swiftkv_platform.specs import JobSpec

CONFIG = json.loads((Path(__file__).parents[3] / "benchmarks" / "configs" / "llama-3.1-8b.json").read_text())
TEACHER = 2 * 8_030_261_248
TRAINED = 402_657_280
"""Number of trained parameters: q, k and v projections of 16 layers, and a norm."""
GPUS = {"num_workers": 16, "gpus_per_worker": 1, "accelerator_type": "H100"}

GIVEN = {"learning_rate": 3e-4}
SEARCHED = {**GIVEN, "rate_search": True}


def job(**sections: Any) -> JobSpec:
    fixed: dict[str, Any] = {"name": "planned", "model": {"name_or_path": "org/teacher"}, "resources": GPUS}
    fixed["swiftkv"] = {"decode_key_value": "shared"}
    fixed["training"] = {"gradient_checkpointing": True, "batch_size": 32, "max_steps": 1000}
    return JobSpec.model_validate({**fixed, **sections})


def plan(spec: JobSpec, *, num_tokens: int | None = None) -> JobEstimate:
    return estimate(spec, CONFIG, (), num_tokens=num_tokens)


def test_the_origin_of_the_speed_is_told() -> None:
    def time_of(spec: JobSpec, configured: float | None = None) -> tuple[float | None, str | None]:
        found = add_time_and_cost(plan(spec), spec, find_speed(spec, (), configured))
        return found.seconds, found.speed_source

    total = plan(job()).total_flops
    assert time_of(job()) == (pytest.approx(total / (16 * 0.4 * 989e12)), "assumed: 40% of a peak of 989 TFLOPs")
    assert time_of(job(), 1e12) == (pytest.approx(total / 16e12), "configured")
    assert time_of(job(resources={"num_workers": 16})) == (None, None)
    known = time_of(job(resources={"num_workers": 16, "peak_flops_per_second": 1e12}))
    assert known[0] == pytest.approx(total / (16 * 4e11))


def test_epochs_and_the_tokens_of_the_data_decide_the_steps() -> None:
    """Two epochs of 320 million tokens are 2,442 steps of 32 rows of 8,192 tokens."""
    epochs = job(training={"batch_size": 32, "num_epochs": 2})
    assert plan(epochs).max_tokens is None
    assert plan(epochs, num_tokens=320_000_000).max_tokens == 2442 * 32 * 8192
    assert plan(epochs, num_tokens=10).max_tokens == 32 * 8192


def test_trained_weights_are_remembered_while_rates_are_tried() -> None:
    """Without GPUs each process holds its shard of them besides; with GPUs they are in host memory."""
    on_cpus, on_gpus = (
        [plan(job(resources=resources, optimizer=each)).memory_per_worker for each in (GIVEN, SEARCHED)]
        for resources in ({"num_workers": 16}, GPUS)
    )
    assert on_cpus[1] - on_cpus[0] == 4 * TRAINED // 16
    assert on_gpus[0] == on_gpus[1]


@pytest.mark.parametrize(
    ("sections", "needed"),
    [
        # The first worker of ZeRO assembles a checkpoint in host memory.
        ({"sharding": {"strategy": "deepspeed", "zero_stage": 3}}, 12 * TRAINED),
        # Workers of FSDP2 read one piece at a time; the largest are the embedding, the head and two norms.
        ({"sharding": {"strategy": "fsdp2"}}, 2 * 2 * (128_256 + 1) * 4096),
        ({"sharding": {"strategy": "ddp"}}, TEACHER + 2 * TRAINED),
    ],
)
def test_too_little_host_memory_is_refused(sections: dict[str, Any], needed: int) -> None:
    few: dict[str, Any] = {**GPUS, "num_workers": 2}
    plan(job(**sections, resources={**few, "memory_per_worker": needed}))
    with pytest.raises(InvalidInputError, match="of host memory per worker") as refused:
        plan(job(**sections, resources={**few, "memory_per_worker": needed - 1}))
    assert (refused.value.field, refused.value.value) == ("resources.memory_per_worker", needed - 1)
    assert f"{needed} plus the memory of the process itself" in refused.value.message


def test_too_small_a_device_is_refused() -> None:
    """A single GPU of 24 GB fits no training step."""
    message = r"training with 1 workers needs .* use resources\.num_workers \d+$"
    with pytest.raises(InvalidInputError, match=message) as refused:
        plan(job(resources={**GPUS, "num_workers": 1, "accelerator_type": "L4"}))
    assert refused.value.field == "resources.num_workers"


def writing(*, written: bool = True, **resources: Any) -> JobSpec:
    """A job with a source of prompts that the teacher answers, unless `written` is false."""
    prompts = {"name_or_path": "prompts.jsonl", "complete": {"max_tokens": 64}}
    sources = [{"name_or_path": "text.jsonl"}] + [prompts] * written
    sections = {"data": {"sources": sources, "max_length": 2048}, "sharding": {"strategy": "fsdp2"}}
    return job(**sections, model={"dtype": "bfloat16"}, resources={"num_workers": 8, **resources})


def test_a_teacher_that_is_to_write_fits_a_worker_or_is_refused() -> None:
    assert [compute_teacher_bytes(CONFIG, dtype) for dtype in ("bfloat16", "float32")] == [TEACHER, 2 * TEACHER]
    gpu = {"gpus_per_worker": 1, "accelerator_type": "H100"}
    refused: list[tuple[dict[str, Any], str]] = [
        (gpu | {"accelerator_type": "T4"}, "14.4 GB of GPU memory"),
        ({"memory_per_worker": 10 << 30}, "10.7 GB of host memory (resources.memory_per_worker)"),
        (gpu | {"memory_per_worker": 1 << 30}, "1.1 GB of host memory"),
    ]
    for resources, given in refused:
        with pytest.raises(InvalidInputError) as caught:
            check_row_generation_memory(writing(**resources), CONFIG)
        error = caught.value
        assert (error.field, error.value) == ("data.sources.1.complete", "prompts.jsonl")
        assert "the whole teacher, 16.1 GB in bfloat16" in error.message
        assert given in error.message
        check_row_generation_memory(writing(written=False, **resources), CONFIG)
    fitting: list[dict[str, Any]] = [{}, {"gpus_per_worker": 1}, gpu | {"accelerator_type": "L4"}]
    for resources in (*fitting, {"memory_per_worker": 20 << 30}):
        check_row_generation_memory(writing(**resources), CONFIG)
    message = r"data\.sources\[1\]\.complete makes every worker load the whole teacher"
    with pytest.raises(InvalidInputError, match=message):
        estimate(writing(memory_per_worker=10 << 30), CONFIG, ())
