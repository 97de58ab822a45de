"""Cost of a distillation step: FLOPs, memory of a worker by use, time; and the schedule of a run: steps of the
learning-rate search, validation measurements and checkpoints. Imports no torch.

layers < l once, no gradient ─┬─ layers >= l as pretrained, no gradient
                              └─ layers >= l of the student: forward, gradients of inputs and of what is trained

Memory includes the tensors saved for the backward pass and those of each sharding strategy, but neither allocator
overhead nor kernels' workspaces.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from swiftkv_platform.errors import InvalidInputError
from swiftkv_platform.frozen import FrozenBaseModel
from swiftkv_platform.planning.architecture import (
    Architecture,
    Layer,
    LinearShape,
    ParameterCounts,
    count_student_parameters,
    read_architecture,
)
from swiftkv_platform.planning.config import ConfigSource
from swiftkv_platform.planning.prefill import count_attention_pairs, resolve_layer_map, sum_linear_flops
from swiftkv_platform.specs import JobSpec
from swiftkv_platform.specs.job import TRAINABLE_LAYERS, Trainable
from swiftkv_platform.specs.training import ValidationSpec
from swiftkv_platform.student_shape import LayerMap, StudentShape

DEFAULT_MEASUREMENTS = 20
"""Default number of validation measurements per run."""
TRAINED_PER_MEASURED_ROW = 10
"""Min ratio of trained rows to measured rows between two measurements. A forward pass takes about half the time of a
training step over the same rows, so measurements take about 5% of a run."""
MIN_MEASURED_ROWS = 4
"""Min rows per measurement, by default. Packing sorts rows by the length of their samples, so a single row may have few
counted tokens, all of one kind, and would choose the model."""
SEARCH_STEPS_SHARE = 0.15
"""Share of a run's steps that the learning-rate search takes."""
MAX_TRIALS = 4
MIN_TRIAL_STEPS, MAX_TRIAL_STEPS = 4, 40
"""Min and max steps per trial. Shorter runs have no learning-rate search."""


def compute_measurement_interval(spec: ValidationSpec, batch_size: int, total_steps: int) -> int:
    """Return the steps between measurements: a twentieth of the run, but at least the trained rows that
    `MIN_MEASURED_ROWS` need."""
    if spec.every_steps is not None:
        return spec.every_steps
    trained_rows = MIN_MEASURED_ROWS * TRAINED_PER_MEASURED_ROW
    return max(math.ceil(total_steps / DEFAULT_MEASUREMENTS), math.ceil(trained_rows / batch_size))


def count_measured_rows(spec: ValidationSpec, tokens_per_row: float, rows_between: int) -> int:
    """Return the rows per measurement, at least one: up to `max_tokens` tokens, and up to one row per
    `TRAINED_PER_MEASURED_ROW` rows trained between two measurements."""
    return max(min(int(spec.max_tokens / tokens_per_row), rows_between // TRAINED_PER_MEASURED_ROW), 1)


def compute_trial_steps(total_steps: int) -> int | None:
    """Return the steps per trial of the learning-rate search; None if the run is too short for a search."""
    steps = int(SEARCH_STEPS_SHARE * total_steps / MAX_TRIALS)
    return min(steps, MAX_TRIAL_STEPS) if steps >= MIN_TRIAL_STEPS else None


def has_rate_search(spec: JobSpec) -> bool:
    """Whether a run of `spec`, whose defaults are resolved, searches its learning rate if it is long enough."""
    steps = spec.training.max_steps
    long_enough = steps is None or compute_trial_steps(steps) is not None
    return bool(spec.optimizer.rate_search) and spec.training.validation is not None and long_enough


@dataclass(frozen=True)
class RunSchedule:
    """Steps at which a run is saved and measured."""

    total_steps: int
    every_steps: int
    """Steps between regular checkpoints."""
    measurement_interval: int | None
    """Steps between measurements; None: no measurements."""
    best_every: int
    """Min steps between checkpoints of the best state; a multiple of `measurement_interval`."""

    @classmethod
    def from_spec(cls, spec: JobSpec, total_steps: int, *, measures: bool) -> RunSchedule:
        """Make the schedule of a spec whose defaults are resolved. `measures`: whether the run has validation rows."""
        training, checkpoint = spec.training, spec.checkpoint
        if training.validation is None or not measures:
            return cls(total_steps, checkpoint.every_steps, None, 1)
        assert training.batch_size is not None, "set before training by specs.job.resolve_model_defaults"
        interval = compute_measurement_interval(training.validation, training.batch_size, total_steps)
        best_every = interval * -(-(checkpoint.best_every_steps or interval) // interval)
        return cls(total_steps, checkpoint.every_steps, interval, best_every)

    def is_measured(self, step: int) -> bool:
        return self.measurement_interval is not None and (
            step % self.measurement_interval == 0 or step == self.total_steps
        )

    def is_checkpoint_due(self, step: int) -> bool:
        """Whether the state after `step` is saved regardless of its validation KL."""
        return step % self.every_steps == 0 or step == self.total_steps

    def may_be_best(self, step: int) -> bool:
        """Whether the state after `step` may be saved as the best. This depends on the step alone, so that resumed runs
        equal uninterrupted ones."""
        return self.is_checkpoint_due(step) or step % self.best_every == 0


SampleCounts = tuple[tuple[int, int], ...]
"""Lengths of samples with their counts: (length, number of samples)."""


@dataclass(frozen=True)
class TrainingSetup:
    """Fields of a job spec that determine its cost, by the spec's names."""

    sequence_length: int = 8192
    """`data.max_length`, the number of tokens per row."""
    samples: SampleCounts | None = None
    """Packed samples of the rows; None: one sample per row."""
    counted_share: float = 1.0
    """Share of positions that count in the loss."""
    deep_share: float | None = None
    """Share of positions that count or belong to the deep tail of a prompt; None: `counted_share`."""
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
    trainable: Trainable = "qkv"
    objective: Literal["logits", "lm"] = "logits"
    hidden_loss: bool = False
    searches_rate: bool = False
    """Whether the run searches its learning rate before the first step."""
    device: Literal["cuda", "cpu"] = "cuda"

    def runs_teacher(self, student: StudentShape) -> bool:
        return self.objective == "logits" or self.hidden_loss or student.has_exit_head

    @property
    def skips_uncounted(self) -> bool:
        """Whether tokens without loss skip the student's layers >= l."""
        return self.sequence_parallel_size == 1 and not self.compiled

    @property
    def deep_position_share(self) -> float:
        """Share of positions that run the student's layers >= l as deep tokens."""
        return self.counted_share if self.deep_share is None else self.deep_share

    @property
    def global_micro_batch_size(self) -> int:
        return self.num_workers // self.sequence_parallel_size * self.micro_batch_size

    @property
    def num_micro_batches(self) -> int:
        return self.batch_size // self.global_micro_batch_size

    @property
    def tokens_per_pass(self) -> int:
        return self.sequence_length // self.sequence_parallel_size * self.micro_batch_size


FLOAT32_BYTES = 4
"""Bytes of float32: masters, gradients, optimizer state, norms."""
LOGITS_PER_CHUNK = {"cuda": 1 << 25, "cpu": 1 << 19}
"""Elements of a [chunk, vocab] buffer of the losses: 128 MiB in float32 on a GPU."""
LOGITS_PER_PASS = {"cuda": 1 << 25, "cpu": 1 << 17}
"""Elements of logits per pass of the losses. On a CPU 512 KiB, so that a pass' four buffers fit into a core's cache."""
MIN_CHUNK_ROWS = 160
"""Min rows of a chunk for any vocabulary: products with fewer rows are bound by reading the head."""

_NUM_HIDDEN_STATES = 5
"""Hidden states around a layer in a forward pass: input, output, x, the teacher's result, the residual."""


class TrainingFlops(FrozenBaseModel):
    """FLOPs per trained token."""

    lower: float
    """Layers below l, shared by teacher and student; bypassed layers count again for the student's deep tokens."""
    teacher: float
    student: float
    backward: float
    """Gradients of the student's activations and of the trained parameters."""
    recomputation: float
    """Recomputed forward passes under gradient checkpointing."""
    heads: float
    """Logits and their gradients, including the exit head's."""
    total: float


class TrainingPlan(FrozenBaseModel):
    """Cost of distilling a student."""

    num_key_value_layers: int
    key_value_group_size: int
    parameters: int
    trained_parameters: int
    flops_per_token: TrainingFlops
    memory: WorkerMemory
    """Bytes on the device of each worker."""
    num_tokens: int | None
    total_flops: float | None
    seconds: float | None
    """Duration on all workers, at the given speed."""


def plan_training(
    config: ConfigSource,
    setup: TrainingSetup,
    shape: StudentShape | None = None,
    *,
    num_tokens: int | None = None,
    flops_per_second: float | None = None,
) -> TrainingPlan:
    """Compute FLOPs, memory and time of a distillation job from its teacher's `config.json`.

    Args:
        shape: see `resolve_layer_map`.
        num_tokens: tokens of the whole run.
        flops_per_second: FLOPs per second of one worker.

    Raises:
        InvalidInputError: a batch or sequence cannot be divided, or l or g is out of range.
        ModelError: the configuration cannot be read, or its family is unknown.
    """
    model = read_architecture(config, shape)
    _check_sequence_parallelism(model, setup)
    if setup.batch_size % setup.global_micro_batch_size:
        raise InvalidInputError.for_field(
            "training.batch_size",
            setup.batch_size,
            "; use a multiple of num_workers / sequence_parallel_size x micro_batch_size = "
            f"{setup.global_micro_batch_size}",
        )
    layer_map = resolve_layer_map(model)
    parameters = count_student_parameters(model, layer_map, setup.trainable)
    flops = count_training_flops(model, layer_map, setup)
    total = None if num_tokens is None else num_tokens * flops.total
    seconds = None if total is None or flops_per_second is None else total / (flops_per_second * setup.num_workers)
    return TrainingPlan(
        num_key_value_layers=layer_map.num_key_value_layers,
        key_value_group_size=layer_map.key_value_group_size,
        parameters=parameters.total,
        trained_parameters=parameters.trained,
        flops_per_token=flops,
        memory=compute_worker_memory(model, layer_map, parameters, setup),
        num_tokens=num_tokens,
        total_flops=total,
        seconds=seconds,
    )


def _check_sequence_parallelism(model: Architecture, setup: TrainingSetup) -> None:
    attention, size = model.layers[0].attention, setup.sequence_parallel_size
    counts = {
        "resources.num_workers": setup.num_workers,
        "data.max_length": setup.sequence_length,
        "num_attention_heads": attention.num_heads,
        # MLA expands its single entry to keys and values of every query head.
        "num_key_value_heads": attention.num_heads if attention.expansion else attention.entries[0].heads,
    }
    for name, count in counts.items():
        if count % size:
            raise InvalidInputError.for_field(
                "sharding.sequence_parallel_size", size, f", which must divide {name} = {count}"
            )


def count_training_flops(model: Architecture, layer_map: LayerMap, setup: TrainingSetup) -> TrainingFlops:
    """Return the FLOPs of matrix products per token, averaged over the samples.

    Attention counts the pairs of tokens within a sample. The student's layers run for the positions that the loss
    counts, except keys, values and attention; attention too if deep tokens keep their own K and V, and these are
    assumed to be the last of their sample.
    """
    first = layer_map.num_key_value_layers
    lower = sum(_count_layer_flops(layer, setup) for layer in model.layers[:first])
    needs_teacher = setup.runs_teacher(layer_map.shape)
    teacher = needs_teacher * sum(_count_layer_flops(layer, setup) for layer in model.layers[first:])
    student = backward = recomputed = 0.0
    own, tail, only_shared = model.shared_attention, setup.trainable in TRAINABLE_LAYERS, setup.trainable == "kv"
    trains_x = setup.trainable == "all"
    share = setup.deep_position_share if setup.skips_uncounted else 1.0
    if setup.trainable == "all" or layer_map.bypassed_layers:  # the teacher runs these layers itself
        teacher += needs_teacher * lower
    # Prompt tokens run through bypassed layers too, but only their K and V are used. Deep tokens run separately.
    deep_layers = model.layers[layer_map.first_bypassed_layer : first]
    deep_lower = sum(_count_deep_layer_flops(layer, setup, share) for layer in deep_layers)
    if setup.trainable == "all":
        bypassed = [model.layers[i] for i in layer_map.bypassed_layers]
        released = sum(_count_layer_flops(one, setup) - sum_linear_flops(one.attention.key_value) for one in bypassed)
        backward, recomputed = 2 * (lower - released + deep_lower), lower + deep_lower
    lower += deep_lower
    for i, layer in enumerate(model.layers[first:], start=first):
        query = share * sum_linear_flops(own.query)
        attention = _count_attention_flops(layer, setup, setup.deep_position_share if layer_map.deep_leaders else 1.0)
        leads, written = i in layer_map.leaders, (i in layer_map.deep_leaders) * share
        key_value = leads * sum_linear_flops(own.key_value)
        expansion = leads * (1 + written) * sum_linear_flops(own.expansion)
        deep = written * key_value
        rest = share * sum_linear_flops((*own.output, *layer.mlp))
        student += query + key_value + expansion + deep + attention + rest
        # x needs no gradient; nor does the first layer's input, unless a norm before it is trained, as norm_swiftkv is.
        has_gradient = i > first or trains_x or (tail and model.has_input_norm)
        if only_shared:  # with `kv` all other projections are frozen
            projections = has_gradient * (query + deep) + expansion
            into_query = 0 if has_gradient else own.query_size / (own.query_size + own.value_size) * attention
        else:
            into_x = 0 if has_gradient else share * own.query[0].flops + deep
            projections, into_query = 2 * (query + deep + expansion) - into_x, 0
        projections += (2 if trains_x or model.has_input_norm else 1) * key_value
        backward += projections + 2 * attention - into_query + (1 + tail) * rest
        recomputed += query + deep + attention + rest
    head = LinearShape(model.hidden_size, model.vocab_size).flops
    logits = 3 if setup.objective == "logits" else 2  # student, its gradient, teacher
    # The exit head is trained, and computes the teacher's logits again.
    heads = setup.counted_share * (logits + 4 * layer_map.shape.has_exit_head) * head
    recomputation = setup.gradient_checkpointing * recomputed
    return TrainingFlops(
        lower=lower,
        teacher=teacher,
        student=student,
        backward=backward,
        recomputation=recomputation,
        heads=heads,
        total=lower + teacher + student + backward + recomputation + heads,
    )


def _count_layer_flops(layer: Layer, setup: TrainingSetup) -> float:
    attention = layer.attention
    maps = (*attention.query, *attention.key_value, *attention.expansion, *attention.output, *layer.mlp)
    return sum_linear_flops(maps) + _count_attention_flops(layer, setup)


def _count_deep_layer_flops(layer: Layer, setup: TrainingSetup, share: float) -> float:
    """Return the FLOPs per token of a layer for deep tokens, the last ones of their sample."""
    attention = layer.attention
    maps = (*attention.query, *attention.key_value, *attention.output, *layer.mlp)
    return share * sum_linear_flops(maps) + _count_attention_flops(layer, setup, setup.deep_position_share)


def _count_attention_flops(layer: Layer, setup: TrainingSetup, query_share: float = 1.0) -> float:
    """Return the attention FLOPs per token. `query_share`: share of each sample's last tokens that have queries."""
    samples = setup.samples or ((setup.sequence_length, 1),)
    queries = [(number, round(query_share * length), length) for length, number in samples]
    pairs = sum(n * count_attention_pairs(count, length - count, layer.window) for n, count, length in queries)
    return pairs * layer.attention.flops_per_pair / sum(number * length for length, number in samples)


class WorkerMemory(FrozenBaseModel):
    """Bytes on one worker's device; without a GPU, in its host memory."""

    frozen: int
    """Frozen weights, shared by teacher and student."""
    trained: int
    """Trained weights: float32, and with ZeRO and bfloat16 also a copy in bfloat16."""
    gradients: int
    """Gradients; with DDP, also the buckets that they are reduced in."""
    optimizer: int
    """AdamW's two moments."""
    gathered: int
    """Temporary copies of weights: gathered from all workers' shards, or cast to bfloat16 for the forward pass."""
    activations: int
    """Activations that the student's layers keep for the backward pass."""
    loss: int
    """Chunks of logits in the losses, and the hidden states that they are computed from."""
    remembered: int
    """Host-memory copy of the initial weights, which every trial of the learning-rate search restores."""
    peak: int
    """Peak of the bytes in use at the same time."""
    host: int
    """Bytes in host memory under `cpu_offload`."""


def compute_worker_memory(
    model: Architecture, layer_map: LayerMap, parameters: ParameterCounts, setup: TrainingSetup
) -> WorkerMemory:
    dtype_bytes = 2 if setup.dtype == "bfloat16" else FLOAT32_BYTES
    shards = setup.num_workers
    # 1. weights, gradients and optimizer state, by sharding strategy
    trained, frozen = parameters.trained, dtype_bytes * parameters.frozen
    weights, gradients, moments = FLOAT32_BYTES * trained, FLOAT32_BYTES * trained, 2 * FLOAT32_BYTES * trained
    gathered, host = 0, 0
    if setup.strategy == "ddp":
        gradients *= 2
        gathered = dtype_bytes * trained if dtype_bytes < FLOAT32_BYTES else 0
    elif setup.strategy == "fsdp2" or setup.zero_stage == 3:
        gathered = compute_gathered_bytes(parameters, dtype_bytes, units=3 if setup.strategy == "fsdp2" else 2)
        frozen, weights, gradients, moments = (-(-part // shards) for part in (frozen, weights, gradients, moments))
    else:
        weights, moments = dtype_bytes * trained + -(-weights // shards), -(-moments // shards)
        gradients = dtype_bytes * trained + -(-gradients // (shards if setup.zero_stage == 2 else 1))
    if setup.cpu_offload and setup.device != "cpu":
        host = moments
        if setup.strategy == "fsdp2":
            host += frozen + weights + gradients
            frozen = weights = gradients = 0
        elif setup.strategy == "deepspeed":
            host += FLOAT32_BYTES * trained // shards
            weights -= FLOAT32_BYTES * trained // shards
            if setup.zero_stage == 3:
                host, frozen = host + frozen, 0
        moments = 0
    # 2. peaks of the forward and backward passes, and of the optimizer's update
    activations, recomputed = compute_activation_bytes(model, layer_map, setup)
    passing_back = recomputed + _compute_gradient_bytes(model, setup, dtype_bytes)
    loss = _compute_loss_bytes(model, layer_map.shape, setup, dtype_bytes)
    persistent = frozen + weights + moments
    # Gradients of a step's first micro batch appear while activations are freed. FSDP2 shards them only with the last.
    unsharded = FLOAT32_BYTES * trained if setup.strategy == "fsdp2" else gradients
    kept = unsharded if setup.num_micro_batches > 1 else 0
    sharded = 0 if kept else gradients  # the last micro batch's take the place of those that are kept
    during_passes = gathered + activations + max(loss, passing_back)
    if setup.strategy == "fsdp2":
        states = _NUM_HIDDEN_STATES * dtype_bytes * model.hidden_size * setup.tokens_per_pass
        # A unit's gradients are gathered in float32, to be divided; those of K and V after all layers.
        of_layer, shared = (dtype_bytes + FLOAT32_BYTES) * parameters.trained_of_layer, parameters.shared_key_value
        during_passes = max(
            activations + gathered + states,
            activations + compute_gathered_bytes(parameters, dtype_bytes, units=1) + loss,
            activations + compute_gathered_bytes(parameters, dtype_bytes, units=2) + passing_back + of_layer + sharded,
            dtype_bytes * parameters.root + (3 * dtype_bytes + FLOAT32_BYTES) * shared + states + sharded,
        )
    # CUDA's update has buffers for all that this worker updates, the CPU's for one tensor; only DDP updates everything.
    updated = trained if setup.device != "cpu" else min(parameters.largest_tensor, trained)
    during_update = gradients + -(-FLOAT32_BYTES * updated // (1 if setup.strategy == "ddp" else shards))
    between = 0 if setup.strategy == "fsdp2" else gathered
    peak = persistent + max(kept + during_passes, between + during_update)
    # ZeRO gathers every parameter on every worker to remember it.
    remembered = setup.searches_rate * -(-FLOAT32_BYTES * trained // (shards if setup.strategy == "fsdp2" else 1))
    if setup.device == "cpu":
        peak += remembered
    return WorkerMemory(
        frozen=frozen,
        trained=weights,
        gradients=gradients,
        optimizer=moments,
        gathered=gathered,
        activations=activations,
        loss=loss,
        remembered=remembered,
        peak=peak,
        host=host,
    )


def compute_gathered_bytes(parameters: ParameterCounts, dtype_bytes: int, *, units: int) -> int:
    """Bytes of the weights that a sharded worker has whole: those outside the layers for a whole pass, and of layers
    `units` at a time.

    FSDP2 has up to three in a forward pass: a layer's shards are gathered in one buffer and copied out of it while the
    previous layer's buffer is still held; two in a backward pass, which prefetches the next while one runs; and one,
    the last buffer, between the passes.
    """
    return dtype_bytes * (parameters.root + units * max(parameters.largest_layer, parameters.shared_key_value))


def compute_activation_bytes(model: Architecture, layer_map: LayerMap, setup: TrainingSetup) -> tuple[int, int]:
    """Return two sizes in bytes per micro batch: all activations that the student's layers keep for the backward pass;
    and, under gradient checkpointing, the activations of the one layer that is recomputed at a time, else 0."""
    dtype_bytes = 2 if setup.dtype == "bfloat16" else FLOAT32_BYTES
    own, hidden = model.shared_attention, model.hidden_size
    first = layer_map.num_key_value_layers
    heads = own.num_heads * (own.query_size + own.value_size)
    cached = sum(entry.heads * entry.size for entry in own.entries)
    # norm_swiftkv is trained: its normalized input, and its output, which the projections keep.
    per_token = (2 * dtype_bytes + (dtype_bytes + FLOAT32_BYTES) * model.has_input_norm) * hidden
    begin = 0 if setup.trainable == "all" else first
    for i, layer in enumerate(model.layers[begin:], start=begin):
        # Heads and tokens are swapped in every layer, so with sequence parallelism layers share no K and V.
        swapped = setup.sequence_parallel_size > 1 and not setup.gradient_checkpointing
        shared = i in layer_map.leaders or swapped
        if shared or (i < first and not setup.gradient_checkpointing):
            per_token += dtype_bytes * (heads if own.expansion else cached)
        if i in layer_map.deep_leaders:  # the deep tokens' own, and both kinds concatenated
            per_token += dtype_bytes * 2 * cached
        if setup.gradient_checkpointing:
            per_token += dtype_bytes * hidden
            continue
        per_token += _compute_layer_bytes(model, layer, setup, dtype_bytes, has_gradient=i > begin)
    if setup.trainable == "all":  # deep tokens run once more through the layers from the first gap on
        for i in range(layer_map.first_bypassed_layer, first):
            layer_bytes = _compute_layer_bytes(model, model.layers[i], setup, dtype_bytes, has_gradient=True)
            per_token += round(setup.deep_position_share * (layer_bytes + dtype_bytes * cached)) + dtype_bytes * cached
            # of prompts that bypass the layer, only its normalized input remains
            if i in layer_map.bypassed_layers:
                per_token -= layer_bytes - (dtype_bytes + FLOAT32_BYTES) * hidden
    recomputed = 0
    if setup.gradient_checkpointing:
        recomputed = _compute_layer_bytes(model, model.layers[-1], setup, dtype_bytes, has_gradient=True)
    return per_token * setup.tokens_per_pass, recomputed * setup.tokens_per_pass


def _compute_gradient_bytes(model: Architecture, setup: TrainingSetup, dtype_bytes: int) -> int:
    """Bytes of the gradients that the backward pass holds at once: those of gate, up and their product."""
    widest = max(_count_inner_features(model, layer) for layer in model.layers)
    return dtype_bytes * widest * setup.tokens_per_pass


def _count_inner_features(model: Architecture, layer: Layer) -> int:
    """Return the features of a token inside an MLP: outputs of gate and up, input of down, for all its experts."""
    hidden = model.hidden_size
    return sum(
        linear.active * (linear.in_features + linear.out_features - hidden)
        for linear in layer.mlp
        if hidden in (linear.in_features, linear.out_features)
    )


def _count_routed_features(model: Architecture, layer: Layer) -> int:
    """Return the features of a token's hidden state, times the number of its experts."""
    return sum(linear.active * model.hidden_size for linear in layer.mlp if linear.copies > 1) // 3


def _compute_layer_bytes(
    model: Architecture, layer: Layer, setup: TrainingSetup, dtype_bytes: int, *, has_gradient: bool
) -> int:
    """Return the bytes per token of one student layer, without K and V."""
    own, hidden = model.shared_attention, model.hidden_size
    norms = (model.num_norms - 1 + has_gradient) * FLOAT32_BYTES * hidden
    query = dtype_bytes * sum(linear.in_features for linear in own.query)
    attention = dtype_bytes * own.num_heads * (own.query_size + own.value_size) + FLOAT32_BYTES * own.num_heads
    inner = _count_inner_features(model, layer)
    routed = _count_routed_features(model, layer)
    tail = dtype_bytes * (2 * hidden + inner // 3) if setup.trainable in TRAINABLE_LAYERS else 0
    return norms + query + attention + dtype_bytes * (inner + routed) + tail


def _compute_loss_bytes(model: Architecture, student: StudentShape, setup: TrainingSetup, dtype_bytes: int) -> int:
    """Return the bytes of chunk buffers, hidden states of teacher and student, and the gradient from the fused loss."""
    tokens = setup.tokens_per_pass
    rows = min(max(MIN_CHUNK_ROWS, LOGITS_PER_CHUNK[setup.device] // model.vocab_size), tokens)
    rows_per_pass = min(max(1, LOGITS_PER_PASS[setup.device] // model.vocab_size), rows)
    # A pass holds logits and targets in float32, both probabilities, and a product. Waiting rows are held in the
    # compute dtype; if that is float32, the pass works on them directly.
    waiting = 2 * rows * dtype_bytes if rows_per_pass < rows else 0
    in_pass = (3 if waiting and dtype_bytes == FLOAT32_BYTES else 5) * rows_per_pass * FLOAT32_BYTES
    chunk = model.vocab_size * (waiting + in_pass)
    states = 6 + 2 * student.has_exit_head  # x, teacher, student, the counted rows of both, a gradient
    exit_head = FLOAT32_BYTES * model.vocab_size * model.hidden_size * student.has_exit_head
    return chunk + states * dtype_bytes * model.hidden_size * tokens + exit_head
