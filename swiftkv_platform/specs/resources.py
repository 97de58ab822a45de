"""Sections `sharding`, `resources` and `fault_tolerance` of a job spec."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import model_validator

from swiftkv_platform.specs.base import HostMemory, NumCores, NumGpus, NumWorkers, PeakFlopsPerSecond, Range, Spec, Word


class ShardingSpec(Spec):
    strategy: Literal["ddp", "fsdp2", "deepspeed"] = "fsdp2"
    """`ddp`: every worker has a full replica. `fsdp2`: parameters, gradients and optimizer state are sharded.
    `deepspeed`: ZeRO, see `zero_stage`."""
    zero_stage: Literal[1, 2, 3] = 2
    """`deepspeed`: shard the optimizer state (1), gradients too (2), parameters too (3)."""
    cpu_offload: bool = False
    """Offload to host memory: sharded parameters with FSDP2; optimizer state with ZeRO, in stage 3 also parameters."""
    sequence_parallel_size: NumWorkers = 1
    """Number of workers that share the tokens of a row, for rows too long for one worker. Must divide
    `resources.num_workers`, `data.max_length`, and the numbers of attention heads and key-value heads."""

    @property
    def shards_parameters(self) -> bool:
        """Whether each worker has only a part of the parameters."""
        return self.strategy == "fsdp2" or (self.strategy == "deepspeed" and self.zero_stage == 3)


class ElasticSpec(Spec):
    """Elastic number of workers."""

    min: NumWorkers
    max: NumWorkers

    @model_validator(mode="after")
    def _validate_bounds(self) -> Self:
        if self.min > self.max:
            raise ValueError(f"min {self.min} is above max {self.max}")
        return self


class ResourcesSpec(Spec):
    num_workers: NumWorkers | ElasticSpec = 2
    """Number of workers, or `{min, max}`: training continues with fewer workers when nodes leave, and with more when
    nodes join."""
    gpus_per_worker: NumGpus = 0
    cpus_per_worker: NumCores = 1
    """Cores that Ray reserves per worker. Quotas (`max_cpus`) count at least one core per worker."""
    memory_per_worker: HostMemory | None = None
    """Bytes of host memory that Ray reserves per worker, and per task of the job; null: none."""
    accelerator_type: Word | None = None
    """GPU type by Ray's name, e.g. `H100`."""
    peak_flops_per_second: PeakFlopsPerSecond | None = None
    """Peak FLOPs per second of a worker's device in `model.dtype`, for the metric `mfu`. Default: known for current
    GPUs; no `mfu` for others."""

    @property
    def max_workers(self) -> int:
        return self.num_workers if isinstance(self.num_workers, int) else self.num_workers.max

    @property
    def min_workers(self) -> int:
        return self.num_workers if isinstance(self.num_workers, int) else self.num_workers.min

    def describe(self, num_workers: int) -> str:
        """Return e.g. `2 workers with 1 CPU and 1 GPU each`."""
        each = {"CPU": self.cpus_per_worker, "GPU": self.gpus_per_worker}
        amounts = " and ".join(f"{amount:g} {name}" for name, amount in each.items() if amount)
        if self.memory_per_worker is not None:
            amounts += f" and {self.memory_per_worker / (1 << 30):.3g} GiB of memory"
        kind = f" of type {self.accelerator_type}" if self.accelerator_type else ""
        return (
            f"1 worker with {amounts}{kind}" if num_workers == 1 else f"{num_workers} workers with {amounts}{kind} each"
        )


class FaultToleranceSpec(Spec):
    max_retries: Annotated[int, Range(0, 1000)] = 3
    """Max retries after transient failures; data errors are never retried."""
