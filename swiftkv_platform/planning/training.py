"""Cost of a distillation step: FLOPs, memory of a worker, time. Follows the fork at layer l, without torch.

layers < l once, no gradient ─┬─ layers >= l as pretrained, no gradient
                              └─ layers >= l of the student: forward, gradients of inputs and of what is trained
"""

from __future__ import annotations

from collections.abc import Sequence

from swiftkv_platform.errors import InvalidInputError
from swiftkv_platform.frozen import FrozenModel
from swiftkv_platform.planning.architecture import Architecture, Layer, Linear
from swiftkv_platform.planning.config import ConfigSource
from swiftkv_platform.planning.flops import attention_pairs, maps_flops
from swiftkv_platform.planning.layers import LayerMap
from swiftkv_platform.planning.prefill import resolve_layer_map
from swiftkv_platform.planning.reading import read_architecture
from swiftkv_platform.planning.training_memory import WorkerMemory, worker_memory
from swiftkv_platform.planning.training_setup import TrainingSetup


class TrainingFlops(FrozenModel):
    """FLOPs per trained token."""

    lower: float
    """Layers below l, once for teacher and student; if prompts bypass some, once more for the student's deep tokens."""
    teacher: float
    student: float
    backward: float
    """Gradients of the student's activations and of the trained parameters."""
    recomputation: float
    """Forward passes of the student's layers again, under gradient checkpointing."""
    heads: float
    """Logits and their gradients, with the exit head's."""
    total: float


class TrainingPlan(FrozenModel):
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
    *,
    num_key_value_layers: int | None = None,
    key_value_group_size: int | None = None,
    prefill_layers: Sequence[int] | None = None,
    num_tokens: int | None = None,
    flops_per_second: float | None = None,
) -> TrainingPlan:
    """FLOPs, memory and time of a distillation job from its teacher's `config.json`.

    Args:
        num_tokens: tokens of the whole run.
        flops_per_second: FLOPs per second of one worker.

    Raises:
        InvalidInputError: a batch or sequence cannot be divided, or l or g is out of range.
        ModelError: the configuration cannot be read, or its family is unknown.
    """
    model = read_architecture(config)
    _check_sequence_parallelism(model, setup)
    if setup.batch_size % setup.rows_per_pass:
        raise InvalidInputError.of(
            "training.batch_size",
            setup.batch_size,
            f"; use a multiple of num_workers / sequence_parallel_size x micro_batch_size = {setup.rows_per_pass}",
        )
    layer_map = resolve_layer_map(model, num_key_value_layers, key_value_group_size, prefill_layers)
    parameters = setup.student_parameters(model, layer_map)
    flops = training_flops(model, layer_map, setup)
    total = None if num_tokens is None else num_tokens * flops.total
    seconds = None if total is None or flops_per_second is None else total / (flops_per_second * setup.num_workers)
    return TrainingPlan(
        num_key_value_layers=layer_map.num_key_value_layers,
        key_value_group_size=layer_map.key_value_group_size,
        parameters=parameters.total,
        trained_parameters=parameters.trained,
        flops_per_token=flops,
        memory=worker_memory(model, layer_map, parameters, setup),
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
            raise InvalidInputError.of("sharding.sequence_parallel_size", size, f", which must divide {name} = {count}")


def training_flops(model: Architecture, layer_map: LayerMap, setup: TrainingSetup) -> TrainingFlops:
    """Return the FLOPs of matrix products per token, averaged over the samples.

    Attention counts the pairs of tokens within a sample. The student's layers run for the positions that the loss
    counts, except keys, values and attention; attention too if deep tokens keep their own K and V, and these are
    assumed to be the last of their sample.
    """
    first = layer_map.num_key_value_layers
    lower = sum(_layer(layer, setup) for layer in model.layers[:first])
    teacher = setup.needs_teacher * sum(_layer(layer, setup) for layer in model.layers[first:])
    student = backward = recomputed = 0.0
    own, tail = model.shared_attention, setup.trainable != "qkv"
    trains_x = setup.trainable == "all"
    share = setup.counted_share if setup.skips_uncounted else 1.0
    if setup.trainable == "all" or layer_map.bypassed:  # the teacher runs these layers itself
        teacher += setup.needs_teacher * lower
    # Prompts run through the layers they bypass with the rest; the results after K and V are dropped.
    deep_lower = sum(
        _deep_layer(layer, setup, share) for layer in model.layers[min(layer_map.bypassed, default=first) : first]
    )
    if setup.trainable == "all":
        bypassed = [model.layers[i] for i in layer_map.bypassed]
        let_go = sum(_layer(layer, setup) - maps_flops(layer.attention.key_value) for layer in bypassed)
        backward, recomputed = 2 * (lower - let_go + deep_lower), lower + deep_lower
    lower += deep_lower
    for i, layer in enumerate(model.layers[first:], start=first):
        query = share * maps_flops(own.query)
        attention = _attention(layer, setup, setup.counted_share if setup.decodes_own else 1.0)
        leads, written = i in layer_map.leaders, setup.decodes_own * share
        key_value = leads * (maps_flops(own.key_value) + (1 + written) * maps_flops(own.expansion))
        deep = leads * written * maps_flops(own.key_value)
        rest = share * maps_flops((*own.output, *layer.mlp))
        student += query + key_value + deep + attention + rest
        # x needs no gradient; nor does the first layer's input, unless a norm before it is trained, as norm_swiftkv is.
        has_gradient = i > first or trains_x or (tail and model.normalises_inputs)
        into_x = 0 if has_gradient else share * own.query[0].flops + deep
        if not (trains_x or model.normalises_inputs):
            into_x += leads * maps_flops(own.key_value)
        backward += (2 * query + 2 * deep - into_x) + 2 * key_value + 2 * attention + (1 + tail) * rest
        recomputed += query + deep + attention + rest
    head = Linear(model.hidden_size, model.vocab_size).flops
    logits = 3 if setup.objective == "logits" else 2  # student, its gradient, teacher
    # The exit head is trained, and computes the teacher's logits again.
    heads = setup.counted_share * (logits + 4 * setup.early_exit) * head
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


def _layer(layer: Layer, setup: TrainingSetup) -> float:
    attention = layer.attention
    maps = (*attention.query, *attention.key_value, *attention.expansion, *attention.output, *layer.mlp)
    return maps_flops(maps) + _attention(layer, setup)


def _deep_layer(layer: Layer, setup: TrainingSetup, share: float) -> float:
    """Return the FLOPs per token of a layer for deep tokens, which come last in their sample."""
    attention = layer.attention
    maps = (*attention.query, *attention.key_value, *attention.output, *layer.mlp)
    return share * maps_flops(maps) + _attention(layer, setup, setup.counted_share)


def _attention(layer: Layer, setup: TrainingSetup, asking: float = 1.0) -> float:
    """`asking`: share of each sample's tokens, its last ones, that have queries."""
    samples = setup.samples or ((setup.sequence_length, 1),)
    queries = [(number, round(asking * length), length) for length, number in samples]
    pairs = sum(number * attention_pairs(count, length - count, layer.window) for number, count, length in queries)
    return pairs * layer.attention.flops_per_pair / sum(number * length for length, number in samples)
