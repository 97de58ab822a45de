"""Memory of a training worker, by use. Follows what the fork keeps for its backward pass and what each sharding
strategy holds; allocator overhead and kernels' workspaces are not included.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from swiftkv_platform.frozen import FrozenModel
from swiftkv_platform.planning.architecture import Architecture, Layer
from swiftkv_platform.planning.layers import LayerMap
from swiftkv_platform.planning.parameters import Parameters

if TYPE_CHECKING:
    from swiftkv_platform.planning.training_setup import TrainingSetup

WIDE = 4
"""Bytes of float32: masters, gradients, optimizer state, norms."""
LOGITS_PER_CHUNK = {"cuda": 1 << 25, "cpu": 1 << 19}
"""Elements of one [chunk, vocab] buffer of the losses: 128 MiB in float32 on a GPU."""
LOGITS_PER_PASS = {"cuda": 1 << 25, "cpu": 1 << 17}
"""Elements of logits that a pass of the losses takes at a time; on a CPU 512 KiB, so that the four buffers of a pass
fit into a core's cache.
"""
FEWEST_ROWS = 160
"""Fewest rows of a chunk, however large the vocabulary: products with fewer rows are bound by reading the head."""

_STATES = 5
"""Hidden states around a layer in a forward pass: its input and output, x, the teacher's result, the residual."""


class WorkerMemory(FrozenModel):
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
    """Weights gathered from all workers' shards, or cast for the forward pass, while in use."""
    activations: int
    """Tensors kept for the backward pass by the student's layers."""
    loss: int
    """Chunks of logits and hidden states around them."""
    remembered: int
    """Copy of the untrained weights in host memory while rates are tried."""
    peak: int
    """Largest sum at any time."""
    host: int
    """Bytes in host memory under `cpu_offload`."""


def worker_memory(
    model: Architecture, layer_map: LayerMap, parameters: Parameters, setup: TrainingSetup
) -> WorkerMemory:
    narrow = 2 if setup.dtype == "bfloat16" else WIDE
    shards = setup.num_workers
    trained, frozen = parameters.trained, narrow * parameters.frozen
    weights, gradients, moments = WIDE * trained, WIDE * trained, 2 * WIDE * trained
    gathered, host = 0, 0
    if setup.strategy == "ddp":
        gradients *= 2
        gathered = narrow * trained if narrow < WIDE else 0
    elif setup.strategy == "fsdp2" or setup.zero_stage == 3:
        gathered = gathered_weights(parameters, narrow, units=3 if setup.strategy == "fsdp2" else 2)
        frozen, weights, gradients, moments = (-(-part // shards) for part in (frozen, weights, gradients, moments))
    else:
        weights, moments = narrow * trained + -(-weights // shards), -(-moments // shards)
        gradients = narrow * trained + -(-gradients // (shards if setup.zero_stage == 2 else 1))
    if setup.cpu_offload and setup.device != "cpu":
        host = moments
        if setup.strategy == "fsdp2":
            host += frozen + weights + gradients
            frozen = weights = gradients = 0
        elif setup.strategy == "deepspeed":
            host += WIDE * trained // shards
            weights -= WIDE * trained // shards
            if setup.zero_stage == 3:
                host, frozen = host + frozen, 0
        moments = 0
    activations, recomputed = saved_activations(model, layer_map, setup)
    passing_back = recomputed + _gradients_of_activations(model, setup, narrow)
    loss = _loss(model, setup, narrow)
    persistent = frozen + weights + moments
    # Gradients of a step's first micro batch appear while activations are freed. FSDP2 shards them only with the last.
    unsharded = WIDE * trained if setup.strategy == "fsdp2" else gradients
    kept = unsharded if setup.num_micro_batches > 1 else 0
    sharded = 0 if kept else gradients  # the last micro batch's take the place of those that are kept
    during_passes = gathered + activations + max(loss, passing_back)
    if setup.strategy == "fsdp2":
        states = _STATES * narrow * model.hidden_size * setup.tokens_per_pass
        # A unit's gradients are gathered in float32, to be divided; those of K and V after all layers.
        of_layer, shared = (narrow + WIDE) * parameters.trained_of_layer, parameters.shared_key_value
        during_passes = max(
            activations + gathered + states,
            activations + gathered_weights(parameters, narrow, units=1) + loss,
            activations + gathered_weights(parameters, narrow, units=2) + passing_back + of_layer + sharded,
            narrow * parameters.root + (3 * narrow + WIDE) * shared + states + sharded,
        )
    # CUDA's update has buffers for all that this worker updates, the CPU's for one tensor; only DDP updates everything.
    updated = trained if setup.device != "cpu" else min(parameters.largest_tensor, trained)
    during_update = gradients + -(-WIDE * updated // (1 if setup.strategy == "ddp" else shards))
    between = 0 if setup.strategy == "fsdp2" else gathered
    peak = persistent + max(kept + during_passes, between + during_update)
    # ZeRO gathers every parameter on every worker to remember it.
    remembered = setup.searches_rate * -(-WIDE * trained // (shards if setup.strategy == "fsdp2" else 1))
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


def gathered_weights(parameters: Parameters, narrow: int, *, units: int) -> int:
    """Bytes of the weights that a sharded worker has whole: those outside the layers for a whole pass, and of layers
    `units` at a time.

    FSDP2 has up to three in a forward pass: a layer's shards are gathered in one buffer and copied out of it while the
    previous layer's buffer is still held; two in a backward pass, which prefetches the next while one runs; and one,
    the last buffer, between the passes.
    """
    return narrow * (parameters.root + units * max(parameters.largest_layer, parameters.shared_key_value))


def saved_activations(model: Architecture, layer_map: LayerMap, setup: TrainingSetup) -> tuple[int, int]:
    """Return the bytes that the student's layers keep of one micro batch for the backward pass and, under gradient
    checkpointing, those of one layer while it is recomputed.
    """
    narrow = 2 if setup.dtype == "bfloat16" else WIDE
    own, hidden = model.shared_attention, model.hidden_size
    first = layer_map.num_key_value_layers
    heads = own.num_heads * (own.query_size + own.value_size)
    cached = sum(entry.heads * entry.size for entry in own.entries)
    # norm_swiftkv is trained: its normalised input, and its output, which the projections keep.
    per_token = (2 * narrow + (narrow + WIDE) * model.normalises_inputs) * hidden
    begin = 0 if setup.trainable == "all" else first
    for i, layer in enumerate(model.layers[begin:], start=begin):
        # Heads and tokens are swapped in every layer, so with sequence parallelism layers share no K and V.
        swapped = setup.sequence_parallel_size > 1 and not setup.gradient_checkpointing
        shared = i in layer_map.leaders or swapped
        if shared or (i < first and not setup.gradient_checkpointing):
            per_token += narrow * (heads if own.expansion else cached)
        if setup.decodes_own and i in layer_map.leaders:  # the deep tokens' own, and both kinds concatenated
            per_token += narrow * 2 * cached
        if setup.gradient_checkpointing:
            per_token += narrow * hidden
            continue
        per_token += _layer(model, layer, setup, narrow, has_gradient=i > begin)
    if setup.trainable == "all":  # deep tokens run once more through the layers from the first bypassed one on
        for i in range(min(layer_map.bypassed, default=first), first):
            deep = _layer(model, model.layers[i], setup, narrow, has_gradient=True)
            per_token += round(setup.counted_share * (deep + narrow * cached)) + narrow * cached
            per_token -= (i in layer_map.bypassed) * _let_go(model, model.layers[i], setup, narrow)
    recomputed = 0
    if setup.gradient_checkpointing:
        recomputed = _layer(model, model.layers[-1], setup, narrow, has_gradient=True)
    return per_token * setup.tokens_per_pass, recomputed * setup.tokens_per_pass


def _let_go(model: Architecture, layer: Layer, setup: TrainingSetup, narrow: int) -> int:
    """Return the bytes per token that a layer does not keep of prompts that bypass it: all but its normalised input."""
    return _layer(model, layer, setup, narrow, has_gradient=True) - (narrow + WIDE) * model.hidden_size


def _gradients_of_activations(model: Architecture, setup: TrainingSetup, narrow: int) -> int:
    """Bytes of the gradients that the backward pass holds at once: those of gate, up and their product."""
    widest = max(_inner_features(model, layer) for layer in model.layers)
    return narrow * widest * setup.tokens_per_pass


def _inner_features(model: Architecture, layer: Layer) -> int:
    """Return the features of a token inside an MLP: outputs of gate and up, input of down, for all its experts."""
    hidden = model.hidden_size
    return sum(
        linear.active * (linear.in_features + linear.out_features - hidden)
        for linear in layer.mlp
        if hidden in (linear.in_features, linear.out_features)
    )


def _routed_features(model: Architecture, layer: Layer) -> int:
    """Return the features of a token's hidden state, times the number of its experts."""
    return sum(linear.active * model.hidden_size for linear in layer.mlp if linear.copies > 1) // 3


def _layer(model: Architecture, layer: Layer, setup: TrainingSetup, narrow: int, *, has_gradient: bool) -> int:
    """Return the bytes per token of one student layer, without K and V."""
    own, hidden = model.shared_attention, model.hidden_size
    norms = (model.num_norms - 1 + has_gradient) * WIDE * hidden
    query = narrow * sum(linear.in_features for linear in own.query)
    attention = narrow * own.num_heads * (own.query_size + own.value_size) + WIDE * own.num_heads
    inner = _inner_features(model, layer)
    routed = _routed_features(model, layer)
    tail = narrow * (2 * hidden + inner // 3) if setup.trainable != "qkv" else 0
    return norms + query + attention + narrow * (inner + routed) + tail


def _loss(model: Architecture, setup: TrainingSetup, narrow: int) -> int:
    """Return the bytes of chunk buffers, hidden states of teacher and student, and the gradient from the fused loss."""
    tokens = setup.tokens_per_pass
    rows = min(max(FEWEST_ROWS, LOGITS_PER_CHUNK[setup.device] // model.vocab_size), tokens)
    rows_per_pass = min(max(1, LOGITS_PER_PASS[setup.device] // model.vocab_size), rows)
    # A pass holds logits and targets in float32, both probabilities, and a product. Waiting rows are held in the
    # compute dtype; if that is float32, the pass works on them directly.
    waiting = 2 * rows * narrow if rows_per_pass < rows else 0
    in_pass = (3 if waiting and narrow == WIDE else 5) * rows_per_pass * WIDE
    chunk = model.vocab_size * (waiting + in_pass)
    states = 6 + 2 * setup.early_exit  # x, teacher, student, the counted rows of both, a gradient
    exit_head = WIDE * model.vocab_size * model.hidden_size * setup.early_exit
    return chunk + states * narrow * model.hidden_size * tokens + exit_head
