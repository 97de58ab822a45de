"""Teachers that are to write a job's data fit one worker, or the job is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from swiftkv_platform.errors import InvalidInputError
from swiftkv_platform.orchestration.estimates import estimate
from swiftkv_platform.planning.phases import refuse_writers_without_room, teacher_bytes
from swiftkv_platform.specs import JobSpec

CONFIG = json.loads((Path(__file__).parents[3] / "benchmarks" / "configs" / "llama-3.1-8b.json").read_text())


def spec(*, written: bool = True, **resources: Any) -> JobSpec:
    prompts = {"name_or_path": "prompts.jsonl", "complete": {"max_tokens": 64}}
    sources = [{"name_or_path": "text.jsonl"}] + [prompts] * written
    return JobSpec.model_validate(
        {
            "name": "written",
            "model": {"dtype": "bfloat16"},
            "data": {"sources": sources, "max_length": 2048},
            "resources": {"num_workers": 8, **resources},
            "sharding": {"strategy": "fsdp2"},
        }
    )


def test_a_teacher_is_as_large_as_its_parameters() -> None:
    assert teacher_bytes(CONFIG, "bfloat16") == 2 * 8_030_261_248
    assert teacher_bytes(CONFIG, "float32") == 4 * 8_030_261_248


@pytest.mark.parametrize(
    ("resources", "given"),
    [
        ({"gpus_per_worker": 1, "accelerator_type": "T4"}, "14.4 GB of its device"),
        ({"memory_per_worker": 10 << 30}, "10.7 GB of host memory (resources.memory_per_worker)"),
        ({"gpus_per_worker": 1, "accelerator_type": "H100", "memory_per_worker": 1 << 30}, "1.1 GB of host memory"),
    ],
)
def test_one_that_does_not_fit_a_worker_is_refused(resources: dict[str, Any], given: str) -> None:
    with pytest.raises(InvalidInputError) as refused:
        refuse_writers_without_room(spec(**resources), CONFIG)
    error = refused.value
    assert (error.field, error.value) == ("data.sources.1.complete", "prompts.jsonl")
    assert "the whole teacher, 16.1 GB in bfloat16" in error.message
    assert given in error.message
    refuse_writers_without_room(spec(written=False, **resources), CONFIG)


@pytest.mark.parametrize(
    "resources",
    [
        {},
        {"gpus_per_worker": 1},
        {"gpus_per_worker": 1, "accelerator_type": "L4"},
        {"memory_per_worker": 20 << 30},
    ],
)
def test_others_are_not(resources: dict[str, Any]) -> None:
    refuse_writers_without_room(spec(**resources), CONFIG)


def test_estimates_refuse_it() -> None:
    with pytest.raises(
        InvalidInputError, match=r"data\.sources\[1\]\.complete has every worker load the whole teacher"
    ):
        estimate(spec(memory_per_worker=10 << 30), CONFIG, ())
