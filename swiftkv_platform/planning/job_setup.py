"""Settings of the training run that a job spec asks for."""

from __future__ import annotations

from swiftkv_platform.planning.steering import searches_rate
from swiftkv_platform.planning.training_setup import TrainingSetup
from swiftkv_platform.specs import JobSpec
from swiftkv_platform.specs.defaults import BATCH_SIZE


def training_setup(spec: JobSpec) -> TrainingSetup:
    """Return the settings of `spec` that its plan depends on, with the default batch size if `training.batch_size` is
    not set."""
    return TrainingSetup(
        sequence_length=spec.data.max_length,
        micro_batch_size=spec.training.micro_batch_size,
        batch_size=spec.training.batch_size or BATCH_SIZE,
        num_workers=spec.resources.max_workers,
        dtype=spec.model.dtype,
        strategy=spec.sharding.strategy,
        zero_stage=spec.sharding.zero_stage,
        cpu_offload=spec.sharding.cpu_offload,
        sequence_parallel_size=spec.sharding.sequence_parallel_size,
        gradient_checkpointing=spec.training.gradient_checkpointing,
        compiled=spec.training.compile,
        early_exit=spec.swiftkv.early_exit,
        own_output_projection=spec.swiftkv.own_output_projection,
        decodes_own=spec.swiftkv.decode_key_value == "own",
        trainable=spec.distillation.trainable,
        objective=spec.distillation.objective,
        hidden_loss=spec.distillation.hidden_loss_weight > 0,
        searches_rate=searches_rate(spec),
        device="cuda" if spec.resources.gpus_per_worker else "cpu",
    )
