"""Phases of a job over fake tensors: its real wrapping, training step, calibration and evaluation."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any, cast

import torch
from transformers import AutoConfig

from swiftkv_platform.distillation.course import Progress
from swiftkv_platform.distillation.fork import Fork
from swiftkv_platform.distillation.measured import MeasuredStudent
from swiftkv_platform.distillation.parallel import Parallel
from swiftkv_platform.distillation.trainer import Trainer, parallelize
from swiftkv_platform.errors import InvalidInputError
from swiftkv_platform.jobs.dry_run.fakes import Fakes, FakeWeights, FakeWorkers, faked
from swiftkv_platform.jobs.dry_run.tracker import Collective, DryRun, Gradients, Memory, Tracker
from swiftkv_platform.jobs.worker.measure import Evaluation
from swiftkv_platform.jobs.worker.setup import compute_dtype, student_shape
from swiftkv_platform.model.calibration_stream import calibrate_streamed
from swiftkv_platform.model.conversion import make_student_config
from swiftkv_platform.model.packed_attention import to_tensors
from swiftkv_platform.planning.job_setup import training_setup
from swiftkv_platform.specs import JobSpec
from swiftkv_platform.specs.defaults import resolve_batch_size, resolve_defaults

_HELD_OUT_TOKENS = 8192
"""Tokens of the rows of one forward pass of an evaluation, or a whole row."""


def dry_run(spec: JobSpec, config: Mapping[str, Any]) -> DryRun:
    """Run a job's phases without data, weights and machines. `config`: the teacher's `config.json`. Raises
    `InvalidInputError`: DDP and DeepSpeed copy by addresses, which fake tensors do not have."""
    strategy = spec.sharding.strategy
    if strategy != "fsdp2":
        raise InvalidInputError(
            f"sharding.strategy is {strategy!r}, whose buffers are made of addresses that fake tensors do not have; "
            "fsdp2 can be run dry, and `swiftkv jobs validate` plans the others by formula",
            field="sharding.strategy",
            value=strategy,
        )
    spec = _settled(spec, config)
    student_config = _student_config(spec, config)
    with faked(spec) as fakes:
        train, collectives, counts = _train(spec, student_config, fakes)
        calibrated = spec.swiftkv.is_calibrated
        return DryRun(
            num_workers=spec.resources.max_workers,
            num_micro_batches=training_setup(spec).num_micro_batches,
            num_parameters=counts[0],
            num_trained_parameters=counts[1],
            train=train,
            collectives=collectives,
            calibrate=_calibrate(spec, student_config, fakes) if calibrated else None,
            evaluate=_evaluate(spec, student_config, fakes),
        )


def _train(spec: JobSpec, config: Any, fakes: Fakes) -> tuple[Memory, tuple[Collective, ...], tuple[int, int]]:
    """Memory and collectives of a step, and the numbers of parameters, all and trained."""
    parallel = _spread(spec, config, fakes)
    nothing = cast("Any", None)  # a single step neither saves nor reports
    trainer = Trainer(parallel, fakes.rows(_batch_size(spec)), nothing, spec, total_steps=1, listener=nothing)
    counts = (
        sum(parameter.numel() for parameter in parallel.module.parameters()),
        sum(parameter.numel() for parameter in parallel.module.parameters() if parameter.requires_grad),
    )
    tracker, gradients = Tracker(), Gradients()
    tracker.track_external(parallel.module)
    parameters = tracker.alive
    with fakes.active(tracker):
        parallel.state()  # as a worker looks for a checkpoint to go on from, which makes the optimizer's state
        optimizer = tracker.alive - parameters
        # A worker with a GPU remembers in host memory.
        remembers = training_setup(spec).searches_rate and not spec.resources.gpus_per_worker
        put_back = parallel.remember() if remembers else None
        remembered = tracker.alive - parameters - optimizer
        tracker.restart()
        with gradients:
            trainer.train_step(Progress(0, 0))
        del put_back
    memory = Memory(
        peak=tracker.peak,
        parameters=parameters,
        gradients=gradients.num_bytes,
        optimizer=optimizer,
        remembered=remembered,
        passing=tracker.peak - parameters - optimizer - remembered,
    )
    return memory, tracker.collectives, counts


def _spread(spec: JobSpec, config: Any, fakes: Fakes) -> Parallel:
    """The fork over the workers, as `swiftkv_platform.jobs.worker.train` has it."""
    device = torch.device("cpu")
    fork = Fork.of_job(fakes.student(config), spec, device=device)
    weights = FakeWeights(fork.student, fakes)
    return parallelize(fork, spec, dtype=compute_dtype(spec), device=device, weights=weights)


def _calibrate(spec: JobSpec, config: Any, fakes: Fakes) -> Memory:
    source, tracker = FakeWeights(fakes.student(config).to(compute_dtype(spec)), fakes), Tracker()
    rows = [to_tensors(fakes.rows(1).batch([0]))]
    with fakes.active(tracker):
        for _ in calibrate_streamed(source, rows, workers=FakeWorkers(), refit=spec.swiftkv.is_refitted):
            pass
    return Memory(peak=tracker.peak, parameters=0, passing=tracker.peak)


def _evaluate(spec: JobSpec, config: Any, fakes: Fakes) -> Memory:
    """Memory of one of the workers that share the model, for the rows of a forward pass."""
    weights = cast("Any", FakeWeights(fakes.student(config).to(compute_dtype(spec)), fakes))
    model = MeasuredStudent(weights, spec.distillation, sharded=True, device=torch.device("cpu"))
    tracker = Tracker()
    tracker.track_external(model)
    parameters = tracker.alive
    size = spec.resources.max_workers
    rows = fakes.rows(size * -(-_HELD_OUT_TOKENS // spec.data.max_length))
    settings = spec.evaluation.model_copy(update={"max_tokens": size * _HELD_OUT_TOKENS})
    with fakes.active(tracker):
        workers = FakeWorkers(in_step=True)
        model(lambda student: Evaluation(student, rows, settings, workers=workers).compare("distilled"))
    return Memory(peak=tracker.peak, parameters=parameters, passing=tracker.peak - parameters)


def _settled(spec: JobSpec, config: Mapping[str, Any]) -> JobSpec:
    length = config.get("max_position_embeddings")
    settled = resolve_defaults(spec, context_length=length, hidden_size=config["hidden_size"])
    settled = resolve_batch_size(settled, num_rows=sys.maxsize)
    size = min(_batch_size(settled), 2 * settled.rows_per_pass)
    return settled.model_copy(update={"training": settled.training.model_copy(update={"batch_size": size})})


def _batch_size(spec: JobSpec) -> int:
    assert spec.training.batch_size is not None, "settled"
    return spec.training.batch_size


def _student_config(spec: JobSpec, config: Mapping[str, Any]) -> Any:
    values = {key: value for key, value in config.items() if key != "quantization_config"}
    return make_student_config(AutoConfig.for_model(**values), **student_shape(spec))
