"""A job's plan, phase by phase: memory of a worker, disk of a node, bytes in the store and moved, time. Computed from a
spec, a `config.json` and the operator's figures for the machines.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from swiftkv_platform.planning.architecture import Architecture, Linear
from swiftkv_platform.planning.job_setup import training_setup
from swiftkv_platform.planning.layers import LayerMap
from swiftkv_platform.planning.machines import DEVICE_MEMORY, Machines
from swiftkv_platform.planning.parameters import Parameters
from swiftkv_platform.planning.phase_plans import Assumptions, DiskUse, JobPlan, PhaseName, PhasePlan, PhaseSeconds
from swiftkv_platform.planning.phases import (
    MAX_ACTIVATION_BYTES,
    MODEL_SHARE,
    Phase,
    PhaseMemory,
    calibration_rows,
    plan_phases,
    refuse_small_disks,
    waiting_activations,
)
from swiftkv_platform.planning.steering import MAX_TRIALS, RunSchedule, num_measured_rows, steps_of_trial
from swiftkv_platform.planning.training import TrainingFlops, calibrating_flops, measuring_flops, training_flops
from swiftkv_platform.planning.training_setup import TrainingSetup
from swiftkv_platform.planning.volumes import BYTES_PER_TOKEN, MAX_SHARD_BYTES, Inputs, Volumes, volumes
from swiftkv_platform.specs import JobSpec

_MEMORY_PER_TEXT_BYTE = 0.42
"""Host memory for preparing one byte of text, as measured in docs/data.md."""
_DATA = "data sources of unknown size"
_FETCHED_DATA = "downloads of data sources"
_ANSWERS = "answers to tasks, needles and continuations"
_EPOCHS = "steps, which depend on data and epochs"
_ROLLBACKS = "going back to the best state, for which every node fetches its checkpoint"
_ROLLBACKS_IN_PARTS = "going back to the best state, for which every worker fetches its part of a checkpoint"


def plan_job(
    spec: JobSpec,
    config: Mapping[str, Any],
    model: Architecture,
    layer_map: LayerMap,
    parameters: Parameters,
    *,
    inputs: Inputs,
    machines: Machines,
) -> JobPlan:
    """Plan a job whose defaults are resolved. Raises `InvalidInputError` if a node's disk is too small for a phase."""
    setup = training_setup(spec)
    memory = plan_phases(model, layer_map, parameters, setup, calibration_tokens=calibration_tokens(spec))
    job = _Job(
        spec=spec,
        model=model,
        layer_map=layer_map,
        parameters=parameters,
        setup=setup,
        memory={each.phase: each for each in memory},
        volumes=volumes(spec, config, model, layer_map, inputs),
        inputs=inputs,
        machines=machines,
    )
    phases = [job.prepare(), *([job.calibrate()] if calibration_tokens(spec) else []), job.train(), job.evaluate()]
    plan = JobPlan(phases=(*phases, job.publish()), assumptions=job.assumptions)
    refuse_small_disks(plan, spec.model.name_or_path)
    return plan


def calibration_tokens(spec: JobSpec) -> int:
    """Tokens of a job's calibrated start; 0 for a copied one."""
    return spec.swiftkv.calibration_tokens if spec.swiftkv.is_calibrated else 0


@dataclass(frozen=True)
class _Fetched:
    """Bytes that each of `nodes` downloads."""

    nodes: int = 1
    hub: int = 0
    store: int = 0

    @property
    def total(self) -> int:
        return self.nodes * (self.hub + self.store)


@dataclass(frozen=True)
class _Job:
    """A job and its surroundings; a method for each phase."""

    spec: JobSpec
    model: Architecture
    layer_map: LayerMap
    parameters: Parameters
    setup: TrainingSetup
    memory: Mapping[Phase, PhaseMemory]
    volumes: Volumes
    inputs: Inputs
    machines: Machines

    @property
    def num_workers(self) -> int:
        return self.setup.num_workers

    @cached_property
    def on_node(self) -> int:
        return self.machines.workers_per_node(self.spec.resources)

    @property
    def num_nodes(self) -> int:
        return -(-self.num_workers // self.on_node)

    @cached_property
    def flops_per_second(self) -> float | None:
        speed = self.machines.speed(self.spec)
        return None if speed is None else speed[0]

    @property
    def assumptions(self) -> Assumptions:
        machines, speed = self.machines, self.machines.speed(self.spec)
        return Assumptions(
            num_nodes=self.num_nodes,
            workers_per_node=self.on_node,
            node_disk_bytes=machines.node_disk_bytes,
            flops_per_second=None if speed is None else speed[0],
            flops_source=None if speed is None else speed[1],
            hub_bytes_per_second=machines.hub_bytes_per_second,
            store_bytes_per_second=machines.store_bytes_per_second,
            disk_bytes_per_second=machines.disk_bytes_per_second,
            text_bytes_per_second=machines.text_bytes_per_second,
            bytes_per_token=BYTES_PER_TOKEN,
        )

    def prepare(self) -> PhasePlan:
        """Plan the task that downloads and checks the teacher's files and prepares the rows."""
        own, known = self.volumes, self.inputs.tokens is not None
        teacher = self._teacher()
        return self._phase(
            "prepare",
            num_workers=1,
            device=0,
            host=int(_MEMORY_PER_TEXT_BYTE * own.text),
            disk=DiskUse.of(cache=teacher.total + own.rows),
            store=DiskUse.of(cache=own.rows),
            fetched=teacher,
            disk_bytes=own.rows,
            compute=own.text / self.machines.text_bytes_per_second if known else None,
            uploaded=own.rows,
            left_out=(_FETCHED_DATA,) if known else (_DATA,),
        )

    def calibrate(self) -> PhasePlan:
        """Plan the calibrated start: each worker runs the teacher layer by layer over its share of the rows."""
        own, memory, setup = self.volumes, self.memory["calibrate"], self.setup
        tokens = self.spec.swiftkv.calibration_tokens
        # If refitted, the student's layers run after the teacher's, at most twice: they are fitted without their MLPs.
        refits = 2 * setup.refitted * self._measuring_flops.student
        flops = calibrating_flops(self.model, self.layer_map, setup) + refits
        activations = waiting_activations(self.model, self.layer_map, setup, tokens)
        waiting = max(activations - MAX_ACTIVATION_BYTES, 0)
        fetched = self._teacher(self.num_nodes)
        return self._phase(
            "calibrate",
            device=memory.device,
            host=memory.in_host_memory,
            disk=DiskUse.of(cache=self._on_node + self.on_node * waiting),
            store=DiskUse.of(cache=own.rows + own.start),
            fetched=replace(fetched, store=fetched.store + own.rows + own.start),
            disk_bytes=own.teacher + own.start,
            compute=self._seconds(calibration_rows(setup, tokens) * setup.sequence_length * flops),
            uploaded=own.start,
            left_out=() if self.inputs.tokens is not None else (_DATA,),
        )

    def train(self) -> PhasePlan:
        """Plan training: trials of learning rates, all steps, measurements and checkpoints. A run that resumes or goes
        back downloads a checkpoint to each node; with FSDP2, to each worker its part, which is not kept on disk."""
        own, memory, steps = self.volumes, self.memory["train"], self._steps
        calibrated = "calibrate" in self.memory
        fetched = _Fetched(self.num_nodes)
        if not calibrated:
            fetched = self._teacher(self.num_nodes)
            fetched = replace(fetched, store=fetched.store + own.rows)
        kept = self._kept_teacher + own.rows
        share = self.on_node / self.num_workers if self.spec.sharding.shards_parameters else 1.0
        schedule = None if steps is None else RunSchedule.of(self.spec, steps)
        saved = 1 if schedule is None else schedule.num_saves
        # Every worker writes its share of a checkpoint; with ZeRO the first worker writes all of it.
        written = own.checkpoint // (1 if self.spec.sharding.strategy == "deepspeed" else self.num_nodes)
        loads_parts = self.spec.sharding.strategy == "fsdp2"
        # A restored checkpoint, or one being uploaded while the next is written.
        on_disk = min(own.checkpoint, 2 * written) if loads_parts else own.checkpoint
        whole = None if steps is None else self._seconds(steps * self._flops_per_step)
        steering = None if schedule is None else self._seconds(self._steering_flops(schedule))
        # All but the last are uploaded while steps run.
        beside = (whole or 0.0) * self.machines.store_bytes_per_second
        left_out = (_DATA,) if self.inputs.tokens is None else ()
        if self.spec.training.guard is not None and self.spec.training.validation is not None:
            left_out = (*left_out, _ROLLBACKS_IN_PARTS if loads_parts else _ROLLBACKS)
        return self._phase(
            "train",
            device=memory.device,
            host=memory.in_host_memory,
            disk=max(
                DiskUse.of(cache=self._on_node), DiskUse.of(cache=kept, checkpoints=on_disk), key=lambda use: use.total
            ),
            store=DiskUse.of(cache=own.rows + own.start, checkpoints=(self._num_kept + 1) * own.checkpoint),
            fetched=fetched,
            disk_bytes=int(share * own.teacher) + own.start + saved * written,
            compute=whole,
            steering=steering,
            uploaded=saved * own.checkpoint,
            awaited=min(saved, 1) * written + max(int((saved - 1) * written - beside), 0),
            left_out=left_out if steps is not None else (*left_out, _EPOCHS),
        )

    def evaluate(self) -> PhasePlan:
        """Held-out rows through teacher and student: as copied, as calibrated, as trained."""
        own, memory, setup = self.volumes, self.memory["evaluate"], self.setup
        stages = 3 if "calibrate" in self.memory else 2
        rows = -(-self.spec.evaluation.max_tokens // (setup.sequence_length * self.num_workers))
        flops = self._measuring_flops
        head = 2 * Linear(self.model.hidden_size, self.model.vocab_size).flops
        # If prompts bypass layers, the teacher's share includes its own pass through layers < l.
        per_token = (1 if self.layer_map.bypassed else 2) * flops.lower + flops.teacher + flops.student + head
        fetched = self._teacher(self.num_nodes)
        brought = own.rows + own.start + (own.trained // self.num_nodes if self._divides else own.trained)
        fetched = replace(fetched, hub=0, store=fetched.store + brought)  # the hub's cache has the teacher already
        share = self.on_node / self.num_workers if self.spec.sharding.shards_parameters else 1.0
        return self._phase(
            "evaluate",
            device=memory.device,
            host=memory.in_host_memory,
            disk=DiskUse.of(cache=self._on_node, checkpoints=self._copied),
            store=self._stored,
            fetched=fetched,
            disk_bytes=int(share * own.teacher) + own.start + self._copied,
            compute=self._seconds(stages * rows * setup.sequence_length * per_token),
            uploaded=0,
            left_out=(_ANSWERS,) if self.inputs.tokens is not None else (_ANSWERS, _DATA),
        )

    def publish(self) -> PhasePlan:
        """Plan publishing: the first worker writes the student's weight files one by one and uploads them."""
        own = self.volumes
        largest = (2 if self.setup.dtype == "bfloat16" else 4) * self.parameters.largest_tensor
        stored = self._stored
        return self._phase(
            "publish",
            num_workers=1,
            device=0,
            host=min(own.artifact, MAX_SHARD_BYTES + largest),
            disk=DiskUse.of(cache=self._on_node, checkpoints=self._copied, artifact=own.artifact),
            store=DiskUse.of(cache=stored.cache, checkpoints=stored.checkpoints, artifact=own.artifact),
            fetched=_Fetched(store=own.trained),
            disk_bytes=3 * own.artifact,  # tensors are read, files written, and read again for digests
            compute=0.0,
            uploaded=own.artifact,
            left_out=() if self.inputs.tokens is not None else (_DATA,),
        )

    def _phase(
        self,
        name: PhaseName,
        *,
        device: int,
        host: int,
        disk: DiskUse,
        store: DiskUse,
        fetched: _Fetched,
        disk_bytes: int,
        compute: float | None,
        uploaded: int,
        left_out: tuple[str, ...],
        num_workers: int | None = None,
        awaited: int | None = None,
        steering: float | None = 0.0,
    ) -> PhasePlan:
        """Return a phase whose parts run one after the other.

        Args:
            disk_bytes: bytes read from and written to the busiest disk.
            awaited: bytes of `uploaded` by the busiest node that the phase waits for; None: all.
        """
        machines = self.machines
        seconds = PhaseSeconds(
            download=fetched.hub / machines.hub_bytes_per_second + fetched.store / machines.store_bytes_per_second,
            read=disk_bytes / machines.disk_bytes_per_second,
            compute=compute,
            steering=steering,
            upload=(uploaded if awaited is None else awaited) / machines.store_bytes_per_second,
        )
        return PhasePlan(
            phase=name,
            num_workers=num_workers or self.num_workers,
            device_bytes=device if self.spec.resources.gpus_per_worker else None,
            host_bytes=host,
            node_disk=disk,
            store=store,
            downloaded_bytes=fetched.total,
            uploaded_bytes=uploaded,
            seconds=seconds.total,
            seconds_of=seconds,
            left_out=left_out,
        )

    def _teacher(self, nodes: int = 1) -> _Fetched:
        """The teacher's files, by each of `nodes`."""
        size, origin = self.volumes.teacher, self.inputs.teacher
        return _Fetched(nodes, hub=size * (origin == "hub"), store=size * (origin == "store"))

    @property
    def _kept_teacher(self) -> int:
        """Bytes of the teacher that stay on a node: the hub's cache."""
        return self._teacher().hub

    @property
    def _on_node(self) -> int:
        """Bytes on a node's disk when a phase with all workers begins."""
        return self._teacher().total + self.volumes.rows + self.volumes.start

    @cached_property
    def _divides(self) -> bool:
        """Whether workers divide the model to measure it, so that each reads only its part of the trained tensors. If a
        worker's memory is unknown, the model is assumed to fit."""
        resources = self.spec.resources
        room = DEVICE_MEMORY.get(resources.accelerator_type or "")
        if not resources.gpus_per_worker:
            room = resources.memory_per_worker
        weights = (2 if self.setup.dtype == "bfloat16" else 4) * self.parameters.total
        divides = self.spec.sharding.shards_parameters and self.num_workers > 1
        return divides and room is not None and weights >= MODEL_SHARE * room

    @property
    def _copied(self) -> int:
        """Bytes of the copy of the trained tensors that the workers of a node share."""
        return 0 if self._divides or self.on_node == 1 else self.volumes.trained

    @property
    def _stored(self) -> DiskUse:
        own = self.volumes
        return DiskUse.of(cache=own.rows + own.start, checkpoints=self._num_kept * own.checkpoint)

    @property
    def _num_kept(self) -> int:
        """Checkpoints in the store between two saves: the newest ones, and the best if held-out KL is measured."""
        return self.spec.checkpoint.keep + (self.spec.training.validation is not None)

    @cached_property
    def _measuring_flops(self) -> TrainingFlops:
        """FLOPs per token of both modes, independent of what is trained."""
        plain = replace(self.setup, objective="logits", trainable="qkv", gradient_checkpointing=False)
        return training_flops(self.model, self.layer_map, plain)

    @property
    def _steps(self) -> int | None:
        training, tokens = self.spec.training, self.inputs.tokens
        if training.max_steps is not None or tokens is None:
            return training.max_steps
        return max(-(-training.num_epochs * tokens // (self.setup.batch_size * self.setup.sequence_length)), 1)

    @cached_property
    def _flops_per_step(self) -> float:
        tokens = self.setup.batch_size * self.setup.sequence_length
        return tokens * training_flops(self.model, self.layer_map, self.setup).total / self.num_workers

    def _steering_flops(self, schedule: RunSchedule) -> float:
        """Return the FLOPs of one worker for all trials of the rate search, each with a measurement, and for the run's
        measurements. The worker with the largest share of rows counts; the others wait for it."""
        validation, setup = self.spec.training.validation, self.setup
        if validation is None or schedule.measured_every is None:
            return 0.0
        of_trial = steps_of_trial(schedule.total_steps) if setup.searches_rate else None
        trials, trial_steps = (0, 0) if of_trial is None else (MAX_TRIALS, MAX_TRIALS * of_trial)
        rows = num_measured_rows(validation, setup.sequence_length, setup.batch_size * schedule.measured_every)
        of_worker = -(-rows // (setup.num_workers // setup.sequence_parallel_size))
        tokens = of_worker * setup.sequence_length / setup.sequence_parallel_size
        measuring = tokens * measuring_flops(self.model, self.layer_map, setup)
        return trial_steps * self._flops_per_step + (schedule.num_measurements + trials) * measuring

    def _seconds(self, flops: float) -> float | None:
        return None if self.flops_per_second is None else flops / self.flops_per_second
