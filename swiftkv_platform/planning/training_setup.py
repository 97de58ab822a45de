"""Settings of a training run that its plan depends on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from swiftkv_platform.planning.architecture import Architecture
from swiftkv_platform.planning.layers import LayerMap
from swiftkv_platform.planning.parameters import Parameters, Trainable, student_parameters

SampleCounts = tuple[tuple[int, int], ...]
"""Number of samples by their length: (length, number)."""


@dataclass(frozen=True)
class TrainingSetup:
    """Fields of a job spec that determine its cost, under the spec's names and meanings."""

    sequence_length: int = 8192
    """`data.max_length`, the number of tokens of every row."""
    samples: SampleCounts | None = None
    """Samples that fill the rows; each attends to itself only. None: one sample per row."""
    counted_share: float = 1.0
    """Share of the positions that the loss counts."""
    micro_batch_size: int = 1
    batch_size: int = 32
    num_workers: int = 1
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    strategy: Literal["ddp", "fsdp2", "deepspeed"] = "fsdp2"
    zero_stage: Literal[1, 2, 3] = 2
    cpu_offload: bool = False
    sequence_parallel_size: int = 1
    gradient_checkpointing: bool = False
    compiled: bool = False
    early_exit: bool = False
    own_output_projection: bool = False
    decodes_own: bool = False
    """Whether `swiftkv.decode_key_value` is `own`."""
    trainable: Trainable = "qkv"
    objective: Literal["logits", "lm"] = "logits"
    hidden_loss: bool = False
    searches_rate: bool = False
    """Whether a search for the learning rate comes before the first step."""
    device: Literal["cuda", "cpu"] = "cuda"

    @property
    def needs_teacher(self) -> bool:
        return self.objective == "logits" or self.hidden_loss or self.early_exit

    @property
    def skips_uncounted(self) -> bool:
        """Whether tokens that no loss counts stay out of the student's layers >= l."""
        return self.sequence_parallel_size == 1 and not self.compiled

    @property
    def rows_per_pass(self) -> int:
        return self.num_workers // self.sequence_parallel_size * self.micro_batch_size

    @property
    def num_micro_batches(self) -> int:
        return self.batch_size // self.rows_per_pass

    @property
    def tokens_per_pass(self) -> int:
        return self.sequence_length // self.sequence_parallel_size * self.micro_batch_size

    def student_parameters(self, model: Architecture, layer_map: LayerMap) -> Parameters:
        return student_parameters(
            model,
            layer_map,
            early_exit=self.early_exit,
            own_output_projection=self.own_output_projection,
            decodes_own=self.decodes_own,
            trainable=self.trainable,
        )
