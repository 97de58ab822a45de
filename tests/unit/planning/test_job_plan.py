"""Plans of whole jobs: memory, disk, bytes moved and time of each phase, and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest

from swiftkv_platform.control_plane.jobs.estimates import JobEstimate, estimate
from swiftkv_platform.data.checks import SourceEstimate
from swiftkv_platform.errors import InvalidInputError
from swiftkv_platform.planning.machines import Machines
from swiftkv_platform.planning.phase_plans import PhasePlan
from swiftkv_platform.planning.phases import refuse_writers_without_room, teacher_bytes
from swiftkv_platform.specs import JobSpec

CONFIG = json.loads((Path(__file__).parents[3] / "benchmarks" / "configs" / "llama-3.1-8b.json").read_text())
TEACHER = 2 * 8_030_261_248
TRAINED = 402_657_280
"""Number of trained parameters: q, k and v projections of 16 layers, and a norm."""
TEXT = 4_000_000
SOURCES = (SourceEstimate("text.jsonl", num_files=1, num_bytes=TEXT, formats=("text",)),)
GPUS = {"num_workers": 16, "gpus_per_worker": 1, "accelerator_type": "H100"}

GIVEN = {"learning_rate": 3e-4}
SEARCHED = {**GIVEN, "rate_search": True}
UNMEASURED = {"gradient_checkpointing": True, "batch_size": 32, "max_steps": 1000, "validation": None}


def job(**sections: Any) -> JobSpec:
    fixed: dict[str, Any] = {"name": "planned", "model": {"name_or_path": "org/teacher"}, "resources": GPUS}
    fixed["swiftkv"] = {"decode_key_value": "shared"}
    fixed["training"] = {"gradient_checkpointing": True, "batch_size": 32, "max_steps": 1000}
    fixed["checkpoint"] = {"every_steps": 300, "keep": 2}
    return JobSpec.model_validate({**fixed, **sections})


def plan(
    spec: JobSpec, *, sources: tuple[SourceEstimate, ...] = SOURCES, num_tokens: int | None = None, **machines: Any
) -> JobEstimate:
    return estimate(spec, CONFIG, sources, Machines(**machines), num_tokens=num_tokens)


def phases(spec: JobSpec, **arguments: Any) -> dict[str, PhasePlan]:
    return {phase.phase: phase for phase in plan(spec, **arguments).phases}


def test_teachers_are_fetched_by_every_node_once(tmp_path: Path) -> None:
    """16 workers on two nodes; rows of five bytes a token, a token of four bytes of text. A directory is not fetched; a
    job that starts from copies brings rows to its nodes before it trains."""
    found, rows, start = phases(job()), 5 * TEXT // 4, 2 * TRAINED
    assert found["prepare"].downloaded_bytes == TEACHER
    assert found["prepare"].uploaded_bytes == rows
    assert found["calibrate"].downloaded_bytes == 2 * (TEACHER + rows + start)
    assert found["train"].downloaded_bytes == 0
    assert found["evaluate"].downloaded_bytes == 2 * (rows + start + 4 * TRAINED)
    assert found["publish"].downloaded_bytes == 4 * TRAINED
    assert found["train"].node_disk.cache == TEACHER + rows
    stored = phases(job(model={"name_or_path": "s3://bucket/teacher"}))
    again = stored["evaluate"].downloaded_bytes - found["evaluate"].downloaded_bytes
    assert again == 2 * TEACHER, "a stored teacher is fetched again to be measured"
    assert list(found) == ["prepare", "calibrate", "train", "evaluate", "publish"]
    local = phases(
        job(model={"name_or_path": str(tmp_path)}, swiftkv={"initialization": "copied", "decode_key_value": "shared"})
    )
    assert list(local) == ["prepare", "train", "evaluate", "publish"]
    assert local["prepare"].downloaded_bytes == 0
    assert local["train"].downloaded_bytes == 2 * 5 * TEXT // 4
    assert local["publish"].node_disk.artifact == TEACHER + 2 * TRAINED


def test_workers_that_divide_a_model_bring_no_more_than_their_parts_of_what_was_trained() -> None:
    """16 GB do not fit half of an L4; of 16 workers on two nodes each reads a sixteenth, and nothing goes to disk."""
    whole, divided = (phases(job(resources={**GPUS, "accelerator_type": name})) for name in ("H100", "L4"))
    assert whole["evaluate"].node_disk.checkpoints == 4 * TRAINED
    assert divided["evaluate"].node_disk.checkpoints == 0
    assert divided["publish"].node_disk.checkpoints == 0
    spared = whole["evaluate"].downloaded_bytes - divided["evaluate"].downloaded_bytes
    assert spared == 4 * TRAINED, "each of two nodes reads half"


def test_a_node_holds_a_whole_checkpoint_only_where_every_worker_loads_all_of_it() -> None:
    """With ddp every worker loads all of it, with fsdp2 its part: 32 workers on four nodes."""
    many = {**GPUS, "num_workers": 32}
    found = {name: phases(job(resources=many, sharding={"strategy": name}))["train"] for name in ("ddp", "fsdp2")}
    assert found["ddp"].node_disk.checkpoints == 12 * TRAINED
    assert found["fsdp2"].node_disk.checkpoints == 2 * (12 * TRAINED // 4), "one is uploaded while another is written"
    assert any("every node fetches" in left for left in found["ddp"].left_out)
    assert any("every worker fetches its part" in left for left in found["fsdp2"].left_out)


def test_checkpoints_are_counted() -> None:
    found = phases(job(training=UNMEASURED))["train"]
    assert found.uploaded_bytes == 4 * 12 * TRAINED, "after 300, 600, 900 and 1,000 steps"
    assert found.store.checkpoints == 3 * 12 * TRAINED, "two are kept while another comes"
    assert phases(job(training=UNMEASURED, optimizer={"name": "muon"}))["train"].store.checkpoints == 3 * 8 * TRAINED
    measured = phases(job())
    assert measured["train"].uploaded_bytes == 21 * 12 * TRAINED, "the start, and every 50 steps"
    assert measured["train"].store.checkpoints == 4 * 12 * TRAINED, "two and the best are kept while another comes"
    assert measured["publish"].store.checkpoints == 3 * 12 * TRAINED
    sparse = phases(job(checkpoint={"every_steps": 300, "keep": 2, "best_every_steps": 500}))["train"]
    assert sparse.uploaded_bytes == 6 * 12 * TRAINED, "the start, 300, 500, 600, 900 and 1,000"


def test_checkpoints_are_waited_for_where_steps_are_shorter() -> None:
    """Each of two nodes writes its half of 21 checkpoints to disk. Training waits for the upload of the last and, of
    the others, for what short steps do not hide."""
    half = 6 * TRAINED
    slow, fast = (phases(job(), flops_per_second=speed)["train"].seconds_of for speed in (1e12, 1e18))
    assert slow.upload == pytest.approx(half / 500e6)
    assert fast.upload == pytest.approx(21 * half / 500e6 - fast.compute)
    unsaved = phases(job(training=UNMEASURED), flops_per_second=1e12)["train"].seconds_of
    assert slow.read - unsaved.read == pytest.approx((21 - 4) * half / 1e9)


def test_measurements_and_trials_take_time() -> None:
    """In 1,000 steps 21 measurements of two rows by two of 16 workers, and at most four trials of 37 steps."""
    given, searched, unmeasured = (
        phases(job(**sections), flops_per_second=1e14)["train"].seconds_of
        for sections in ({"optimizer": GIVEN}, {"optimizer": SEARCHED}, {"training": UNMEASURED})
    )
    assert (unmeasured.steering, given.compute) == (0.0, unmeasured.compute)
    measurement = given.steering / 21
    step = given.compute / 1000
    assert 0.15 < measurement / step < 0.3, "one row forward; a step takes two forward and backward"
    assert searched.steering - given.steering == pytest.approx(4 * 37 * step + 4 * measurement)


def test_trained_weights_are_remembered_while_rates_are_tried() -> None:
    """Without GPUs each process holds its shard of them besides; with GPUs they are in host memory, free by then."""
    on_cpus = {"num_workers": 16}
    given, tried = (
        phases(job(resources=on_cpus, optimizer=optimizer))["train"].host_bytes for optimizer in (GIVEN, SEARCHED)
    )
    assert tried - given == 4 * TRAINED // 16
    on_gpu, whole = (phases(job(optimizer=each, sharding={"strategy": "ddp"}))["train"] for each in (SEARCHED, GIVEN))
    assert (on_gpu.device_bytes, on_gpu.host_bytes) == (whole.device_bytes, whole.host_bytes)
    divided = {"resources": {**GPUS, "num_workers": 2}, "sharding": {"strategy": "fsdp2"}}
    assert phases(job(**divided, optimizer=SEARCHED))["train"].host_bytes == max(
        phases(job(**divided, optimizer=GIVEN))["train"].host_bytes, 4 * TRAINED // 2
    )


def test_epochs_and_the_size_of_the_data_decide_the_steps() -> None:
    """Two epochs of a million tokens are 8 steps of 32 rows of 8,192 tokens; of 320 million, 2,442 steps."""
    epochs = job(training={**UNMEASURED, "max_steps": None, "num_epochs": 2})
    assert phases(epochs)["train"].uploaded_bytes == 12 * TRAINED
    assert phases(epochs, num_tokens=320_000_000)["train"].uploaded_bytes == 9 * 12 * TRAINED
    unknown = phases(epochs, sources=(SourceEstimate("org/data"),))
    assert (unknown["train"].seconds, unknown["prepare"].seconds) == (None, None)
    assert "steps, which depend on data and epochs" in unknown["train"].left_out
    assert all("of unknown size" in " ".join(phase.left_out) for phase in unknown.values())


def test_time_is_the_sum_of_its_parts_at_the_rates_given() -> None:
    rates = {"hub_bytes_per_second": 1e8, "store_bytes_per_second": 2e8, "disk_bytes_per_second": 5e8}
    found = phases(job(), flops_per_second=1e14, **rates)
    for phase in found.values():
        parts = phase.seconds_of
        assert phase.seconds == pytest.approx(
            parts.download + parts.read + parts.compute + parts.steering + parts.upload
        )
    assert found["prepare"].seconds_of.download == pytest.approx(TEACHER / 1e8)
    assert found["prepare"].seconds_of.compute == pytest.approx(TEXT / 0.5e6)
    assert found["publish"].seconds_of.upload == pytest.approx((TEACHER + 2 * TRAINED) / 2e8)
    planned = plan(job(), flops_per_second=1e14)
    assert found["train"].seconds_of.compute == pytest.approx(planned.total_flops / 16e14)


def test_the_origin_of_the_speed_is_told() -> None:
    def speed(spec: JobSpec, **machines: Any) -> tuple[float | None, str | None]:
        found = plan(spec, **machines).assumptions
        return found.flops_per_second, found.flops_source

    assert speed(job()) == (0.4 * 989e12, "assumed: 40% of a peak of 989 TFLOPs")
    assert speed(job(), flops_per_second=1e12) == (1e12, "configured")
    assert speed(job(resources={"num_workers": 16})) == (None, None)
    assert speed(job(resources={"num_workers": 16, "peak_flops_per_second": 1e12}))[0] == 4e11
    assert phases(job(resources={"num_workers": 16}))["train"].seconds is None


def test_workers_fill_nodes() -> None:
    cases: list[tuple[dict[str, Any], dict[str, Any], tuple[int, int]]] = [
        (GPUS, {}, (2, 8)),
        (GPUS, {"node_gpus": 4}, (4, 4)),
        ({**GPUS, "gpus_per_worker": 2}, {}, (4, 4)),
        ({**GPUS, "num_workers": {"min": 2, "max": 4}}, {}, (1, 4)),
        ({"num_workers": 16}, {}, (1, 16)),
        ({"num_workers": 16, "cpus_per_worker": 4}, {"node_cpus": 10}, (8, 2)),
    ]
    for resources, machines, nodes in cases:
        found = plan(job(resources=resources), **machines).assumptions
        assert (found.num_nodes, found.workers_per_node) == nodes


def test_host_memory_beside_gpus() -> None:
    """Host memory holds the rows of a calibration (x and h in bfloat16; here one or eight rows of 8,192 tokens)
    and, at the first worker of ZeRO, a checkpoint."""
    few = {**GPUS, "num_workers": 2}
    one, eight = (
        phases(job(resources=few, swiftkv={"calibration_tokens": 2 * rows * 8192}))["calibrate"] for rows in (1, 8)
    )
    assert eight.host_bytes - one.host_bytes == 7 * 8192 * 4096 * 2 * 2
    assert eight.device_bytes == one.device_bytes
    zero = phases(job(resources=few, sharding={"strategy": "deepspeed", "zero_stage": 3}))
    assert zero["train"].host_bytes == 12 * TRAINED
    on_gpus, on_cpus = phases(job()), phases(job(resources={"num_workers": 16}))
    assert on_gpus["train"].host_bytes < on_gpus["train"].device_bytes, "only weights on their way to the GPU"
    assert {phase.device_bytes for phase in on_cpus.values()} == {None}
    assert on_cpus["train"].host_bytes == plan(job(resources={"num_workers": 16})).memory_per_worker


def test_too_small_a_disk_is_refused() -> None:
    needed = phases(job())["publish"].node_disk
    assert needed.total == needed.cache + needed.checkpoints + needed.artifact
    plan(job(), node_disk_bytes=needed.total)
    with pytest.raises(InvalidInputError) as refused:
        plan(job(), node_disk_bytes=needed.total - 1)
    error = refused.value
    assert (error.field, error.value) == ("model.name_or_path", "org/teacher")
    disk = "35.3 GB of a node's disk (cache 16.9, checkpoints 1.6, the artifact 16.9)"
    assert f"phase publish needs {disk}" in error.message
    assert f"nodes with {needed.total} bytes" in error.message
    assert "; use nodes with" in error.message


def test_too_little_memory_is_refused() -> None:
    """Too little host memory is refused, and a single GPU of 24 GB, which fits no training step and no evaluation."""
    needed = max(phases(job()).values(), key=lambda phase: phase.host_bytes if phase.phase != "publish" else 0)
    plan(job(resources={**GPUS, "memory_per_worker": needed.host_bytes}))
    with pytest.raises(InvalidInputError, match="of a worker's host memory") as refused:
        plan(job(resources={**GPUS, "memory_per_worker": needed.host_bytes - 1}))
    assert (refused.value.field, refused.value.value) == ("resources.memory_per_worker", needed.host_bytes - 1)
    assert f"{needed.host_bytes}, and what the process itself takes" in refused.value.message
    alone = {**GPUS, "num_workers": 1, "accelerator_type": "L4"}
    message = r"with 1 workers? needs .* use resources\.num_workers \d+$"
    with pytest.raises(InvalidInputError, match=message) as refused:
        plan(job(resources=alone))
    assert refused.value.field == "resources.num_workers"


def writing(*, written: bool = True, **resources: Any) -> JobSpec:
    """A job with a source of prompts that the teacher answers, unless `written` is false."""
    prompts = {"name_or_path": "prompts.jsonl", "complete": {"max_tokens": 64}}
    sources = [{"name_or_path": "text.jsonl"}] + [prompts] * written
    sections = {"data": {"sources": sources, "max_length": 2048}, "sharding": {"strategy": "fsdp2"}}
    return job(**sections, model={"dtype": "bfloat16"}, resources={"num_workers": 8, **resources})


def test_a_teacher_that_is_to_write_fits_a_worker_or_is_refused() -> None:
    assert [teacher_bytes(CONFIG, dtype) for dtype in ("bfloat16", "float32")] == [TEACHER, 2 * TEACHER]
    gpu = {"gpus_per_worker": 1, "accelerator_type": "H100"}
    refused: list[tuple[dict[str, Any], str]] = [
        (gpu | {"accelerator_type": "T4"}, "14.4 GB of its device"),
        ({"memory_per_worker": 10 << 30}, "10.7 GB of host memory (resources.memory_per_worker)"),
        (gpu | {"memory_per_worker": 1 << 30}, "1.1 GB of host memory"),
    ]
    for resources, given in refused:
        with pytest.raises(InvalidInputError) as caught:
            refuse_writers_without_room(writing(**resources), CONFIG)
        error = caught.value
        assert (error.field, error.value) == ("data.sources.1.complete", "prompts.jsonl")
        assert "the whole teacher, 16.1 GB in bfloat16" in error.message
        assert given in error.message
        refuse_writers_without_room(writing(written=False, **resources), CONFIG)
    fitting: list[dict[str, Any]] = [{}, {"gpus_per_worker": 1}, gpu | {"accelerator_type": "L4"}]
    for resources in (*fitting, {"memory_per_worker": 20 << 30}):
        refuse_writers_without_room(writing(**resources), CONFIG)
    message = r"data\.sources\[1\]\.complete has every worker load the whole teacher"
    with pytest.raises(InvalidInputError, match=message):
        estimate(writing(memory_per_worker=10 << 30), CONFIG, ())
