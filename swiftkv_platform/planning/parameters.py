"""Parameter counts of a student and of the part that distillation trains."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from swiftkv_platform.planning.architecture import Architecture, Layer
from swiftkv_platform.specs.job import TRAINABLE_LAYERS, Trainable
from swiftkv_platform.student_shape import LayerMap


@dataclass(frozen=True)
class Parameters:
    """Parameter counts of a student. Tied embeddings count once."""

    frozen: int
    """Frozen parameters, including the teacher's copies of trained layers."""
    trained: int
    root: int
    """Parameters outside the layers: embeddings, heads, norms."""
    largest_layer: int
    """Parameters of the largest layer as FSDP gathers it, with the student's query and output projections but without
    its KV projections."""
    shared_key_value: int
    """Parameters of the KV projections that FSDP gathers together: of as many groups as fit into the size of a
    layer."""
    trained_of_layer: int
    """Trained parameters of the largest layer."""
    largest_tensor: int

    @property
    def total(self) -> int:
        return self.frozen + self.trained


def count_dense_parameters(model: Architecture) -> int:
    layers = sum(_count_layer_parameters(model, layer) for layer in model.layers)
    return layers + _count_embedding_parameters(model) + model.hidden_size


def count_student_parameters(model: Architecture, layer_map: LayerMap, trainable: Trainable = "qkv") -> Parameters:
    """Count the parameters of a student during distillation, with its teacher's projections."""
    # 1. new tensors: query and output projections per layer, KV projections per group, norm, exit head
    hidden, vocabulary = model.hidden_size, model.vocab_size * model.hidden_size
    upper = model.layers[layer_map.num_key_value_layers :]
    own = model.shared_attention
    of_output = layer_map.shape.own_output_projection * own.output_parameters
    own_of_layer = own.query_parameters + of_output
    twins = len(upper) * own_of_layer
    decode = bool(layer_map.deep_leaders) * own.decode_parameters
    key_value = len(layer_map.leaders) * (own.key_value_parameters + decode)
    projecting = len(layer_map.leaders) * own.decode_parameters  # of K and V that tokens share
    exit_head = layer_map.shape.has_exit_head * (vocabulary + hidden)
    norm = hidden * model.has_input_norm
    added = twins + key_value + norm + exit_head
    # 2. trained tensors: the new ones, with `kv` not all, with `tail` also the layers >= l, with `all` also those below
    total = count_dense_parameters(model) + added
    teacher_projections = sum(
        layer.attention.query_parameters + layer.attention.key_value_parameters + of_output for layer in upper
    )
    trained = projecting + norm + exit_head if trainable == "kv" else added
    if trainable in TRAINABLE_LAYERS:
        tail = sum(_count_layer_parameters(model, layer) for layer in upper)
        # Layers after their group's first one have no keys to normalize.
        idle_norms = upper[-1].attention.shared_key_norms * (len(upper) - len(layer_map.leaders))
        trained += tail - teacher_projections - idle_norms
        total += tail + twins + key_value  # the teacher's copies are whole layers with the student's projections
    if trainable == "all":
        lower = sum(_count_layer_parameters(model, layer) for layer in model.layers[: layer_map.num_key_value_layers])
        trained += lower
        total += lower
    # 3. largest units that FSDP gathers
    first = layer_map.num_key_value_layers
    own_of_layer += decode  # upper bound: any kind of layer may be a leader
    largest = max(
        _count_layer_parameters(model, layer) + (i >= first) * own_of_layer for i, layer in enumerate(model.layers)
    )
    projecting = own.decode_parameters + own.key_norms
    runs = split_by_size([projecting] * len(layer_map.leaders), largest)
    return Parameters(
        frozen=total - trained,
        trained=trained,
        root=_count_embedding_parameters(model) + hidden + norm + exit_head,
        largest_layer=largest,
        shared_key_value=projecting * max((run.stop - run.start for run in runs), default=0),
        trained_of_layer=largest if trainable in TRAINABLE_LAYERS else own_of_layer,
        largest_tensor=max(vocabulary, *(m.in_features * m.out_features * m.copies for m in upper[-1].mlp)),
    )


def _count_embedding_parameters(model: Architecture) -> int:
    return (1 if model.tie_word_embeddings else 2) * model.vocab_size * model.hidden_size


def _count_layer_parameters(model: Architecture, layer: Layer) -> int:
    """Count the parameters of a teacher's layer."""
    attention = layer.attention
    norms = attention.shared_query_norms + attention.shared_key_norms
    projections = attention.query_parameters + attention.key_value_parameters + norms
    maps = attention.output_parameters + sum(linear.parameters for linear in layer.mlp)
    return projections + maps + model.num_norms * model.hidden_size


def count_served_parameters(model: Architecture, layer_map: LayerMap) -> tuple[int, int]:
    """Count the parameters in the layers, and outside them, of a student without its teacher's projections; of the
    teacher with a dense map."""
    first, hidden = layer_map.num_key_value_layers, model.hidden_size
    layers = sum(_count_layer_parameters(model, layer) for layer in model.layers)
    for i, layer in enumerate(model.layers[first:], start=first):
        layers -= layer.attention.query_parameters + layer.attention.key_value_parameters
        layers += model.shared_attention.query_parameters
        own = model.shared_attention
        layers += (i in layer_map.leaders) * own.key_value_parameters
        layers += (i in layer_map.deep_leaders) * own.decode_parameters
    return layers, _count_embedding_parameters(model) + hidden * (
        1 + (model.has_input_norm and bool(layer_map.leaders))
    )


def split_by_size(sizes: Sequence[int], limit: int) -> list[slice]:
    """Split a sequence into the fewest slices with sums of at most `limit`; a larger item is a slice by itself.

    With a layer's size as the limit, it decides which groups FSDP shards and gathers together.
    """
    runs, begin, total = [], 0, 0
    for i, size in enumerate(sizes):
        if i > begin and total + size > limit:
            runs.append(slice(begin, i))
            begin, total = i, 0
        total += size
    return [*runs, slice(begin, len(sizes))] if sizes else []
