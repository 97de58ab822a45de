"""Losses of the distillation, and the forward pass of teacher and student, which share the layers < l. Independent of
optimizers and workers.

    layers < l   once, no gradient ──▶ x ─┬─▶ layers >= l as pretrained, no gradient ──▶ teacher
                                          └─▶ layers >= l over shared K and V ─────────▶ student

By default the layers < l are frozen and the same in both models, so they run once, without gradients. The teacher runs
its own copy if the student's are trained (`trainable: all`) or prompts bypass some of them. The student's layers >= l
take K and V from x, so tokens that no loss counts skip these layers, as prompt tokens do in serving.

Losses are sums over positions, computed in chunks so that [tokens, vocab] is never whole in memory. The caller divides
by the number of counted positions on all workers. Losses of logits compute their gradient in the forward pass, chunk by
chunk, because the softmax is available there, and keep only [tokens, hidden]. So a step holds a few [chunk, vocab]
buffers, whatever the sequence length. On a CPU, matrix products take whole chunks, since each product reads the whole
head; the passes over their logits take a few rows at a time, which stay in a core's cache.
"""

from __future__ import annotations

import copy
import math
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from swiftkv_platform.distillation.sequence_parallel import ATTENTION_IMPLEMENTATION, SequenceGroup
from swiftkv_platform.engine import kernels
from swiftkv_platform.errors import InvalidInputError
from swiftkv_platform.model.context import PACKED_ATTENTION, DecoderContext, TokenSelection
from swiftkv_platform.model.packed_attention import (
    SAMPLES_KEY,
    TOKENS_MULTIPLE,
    AttentionImplementation,
    DeepSpanWriter,
    PackedLayout,
    add_conversation_spans,
    make_packed_context,
    run_lower_layers_by_span,
)
from swiftkv_platform.planning.architecture import split_by_size
from swiftkv_platform.planning.training import LOGITS_PER_CHUNK, LOGITS_PER_PASS, MIN_CHUNK_ROWS
from swiftkv_platform.private_directories import ensure_private_directory
from swiftkv_platform.specs import DistillationSpec, JobSpec
from swiftkv_platform.specs.job import TRAINABLE_LAYERS

ChunkLoss = Callable[[Tensor, slice], tuple[Tensor, Tensor]]
"""(hidden [chunk, hidden], its rows) -> (summed loss, gradient with respect to the logits [chunk, vocab])."""


def logits_loss(
    student: Tensor,
    teacher: Tensor,
    student_head: Tensor,
    teacher_head: Tensor,
    *,
    temperature: float,
    chunk_size: int | None = None,
) -> Tensor:
    """Sum over positions of tau^2 KL(teacher || student) at temperature tau (paper, section 3.3).

    student, teacher: normalized hidden states [tokens, hidden]; heads: [vocab, hidden]. Gradients go to `student` and,
    if it is trained (the exit head), to `student_head`; never to the teacher. Returns a scalar in nats.
    """
    shares_head = student_head is teacher_head
    teacher, teacher_head = teacher.detach(), teacher_head.detach()
    head_dtype, loss_dtype = teacher_head.dtype, _get_loss_dtype(teacher_head)
    # Dividing the hidden states instead of the logits saves two passes. In a 16-bit dtype only powers of two are exact.
    divides_hidden_states = head_dtype == loss_dtype or math.frexp(temperature)[0] == 0.5
    rows_per_pass = max(1, _count_rows_per_buffer(LOGITS_PER_PASS, teacher_head))

    def apply_head(hidden: Tensor, head: Tensor) -> Tensor:
        return F.linear(hidden / temperature if divides_hidden_states else hidden, head)

    def chunk_loss(hidden: Tensor, rows: slice) -> tuple[Tensor, Tensor]:
        target = teacher[rows].to(head_dtype)
        if shares_head:  # one product, which reads the head once
            logits, targets = apply_head(torch.cat((hidden, target)), teacher_head).split(len(hidden))
        else:
            logits, targets = apply_head(hidden, student_head.detach().to(head_dtype)), apply_head(target, teacher_head)
        if rows_per_pass >= len(hidden):
            logits, targets = logits.to(loss_dtype), targets.to(loss_dtype)
        losses = []
        for student_part, teacher_part in zip(logits.split(rows_per_pass), targets.split(rows_per_pass), strict=True):
            # On a CPU a few rows are converted at a time: a whole converted chunk does not fit into the cache.
            in_pass, targets_in_pass = student_part.to(loss_dtype), teacher_part.to(loss_dtype)
            if not divides_hidden_states:
                in_pass, targets_in_pass = in_pass.div_(temperature), targets_in_pass.div_(temperature)
            losses.append(_kl_(in_pass, targets_in_pass))
            if in_pass is not student_part:
                student_part.copy_(in_pass)
        return torch.stack(losses).sum(), logits

    return _head_loss(student, student_head.to(head_dtype), chunk_loss, chunk_size, scale=temperature)


def _kl_(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the summed KL(softmax(targets) || softmax(logits)) of tensors [rows, vocab]. Overwrites both, `logits`
    with its gradient q - p.

        KL(p || q) = sum p (targets - logits) + log Z(logits) - log Z(targets)

    The maximum probability of each row gives its log Z, so no other logarithm is needed.
    """
    p, q = torch.softmax(targets, dim=-1), torch.softmax(logits, dim=-1)
    log_normalizers = _compute_log_normalizer(logits, q) - _compute_log_normalizer(targets, p)
    differences: Tensor = torch.linalg.vecdot(p, targets.sub_(logits))
    torch.sub(q, p, out=logits)
    divergence: Tensor = (differences.double() + log_normalizers).sum()
    return divergence


def _compute_log_normalizer(logits: Tensor, probabilities: Tensor) -> Tensor:
    """Return log Z, the logarithm of the sum of exponentials: [rows], in float64."""
    return logits.amax(dim=-1).double() - probabilities.amax(dim=-1).double().log()


def lm_loss(hidden: Tensor, head: Tensor, targets: Tensor, *, chunk_size: int | None = None) -> Tensor:
    """Return the sum over positions of the cross-entropy of the next token, in nats (ablation in the paper's table 6a).

    hidden: [tokens, hidden]; head: [vocab, hidden]; targets: token ids [tokens].
    """

    def chunk_loss(hidden: Tensor, rows: slice) -> tuple[Tensor, Tensor]:
        index = targets[rows].unsqueeze(-1)
        log_q = F.log_softmax(F.linear(hidden, head.detach()).to(_get_loss_dtype(head)), dim=-1)
        loss = -log_q.gather(-1, index).sum()
        return loss, log_q.exp_().scatter_add_(-1, index, log_q.new_full((), -1.0).expand(index.shape))

    return _head_loss(hidden, head, chunk_loss, chunk_size)


def hidden_loss(student: Tensor, teacher: Tensor) -> Tensor:
    """Return the sum over positions of the mean squared difference of hidden states [tokens, hidden]."""
    return (student.float() - teacher.detach().float()).square().mean(dim=-1).sum()


def _get_loss_dtype(head: Tensor) -> torch.dtype:
    """Return the dtype to compute losses and softmax in: at least float32."""
    return torch.promote_types(head.dtype, torch.float32)


def _count_rows_per_buffer(max_logits: Mapping[str, int], head: Tensor) -> int:
    """Return how many rows of logits fit into a buffer of `max_logits` elements, given by type of device."""
    return max_logits["cpu" if head.device.type == "cpu" else "cuda"] // len(head)


def _head_loss(
    hidden: Tensor, head: Tensor, chunk_loss: ChunkLoss, chunk_size: int | None, *, scale: float = 1.0
) -> Tensor:
    """Apply `head` in its own dtype, outside autocast, so that forward and backward use the same products.

    The chunks' losses have logits divided by `scale`, so their sum is multiplied by scale^2 and its gradient by scale.
    """
    chunk_size = chunk_size or max(MIN_CHUNK_ROWS, _count_rows_per_buffer(LOGITS_PER_CHUNK, head))
    with torch.autocast(hidden.device.type, enabled=False):
        loss: Tensor = _FusedHeadLoss.apply(hidden.to(head.dtype), head, chunk_loss, chunk_size, scale)  # type: ignore[no-untyped-call]
    return loss


class _FusedHeadLoss(torch.autograd.Function):
    """sum(chunk_loss(hidden @ head.T)); the forward pass computes both gradients."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, head: Tensor, chunk_loss: ChunkLoss, chunk_size: int, scale: float) -> Tensor:
        loss_dtype = _get_loss_dtype(head)
        needs_hidden, needs_head = ctx.needs_input_grad[:2]
        grad_hidden = torch.empty_like(hidden) if needs_hidden else None
        grad_head = torch.zeros_like(head, dtype=loss_dtype) if needs_head else None
        total = torch.zeros((), dtype=torch.float64, device=hidden.device)
        for start in range(0, hidden.shape[0], chunk_size):
            rows = slice(start, start + chunk_size)
            loss, grad_logits = chunk_loss(hidden[rows], rows)
            total += loss
            grad_logits = grad_logits.to(head.dtype)  # [chunk, vocab]
            if grad_hidden is not None:
                grad_hidden[rows] = grad_logits @ head
            if grad_head is not None:
                grad_head += grad_logits.mT @ hidden[rows]
            del grad_logits  # frees memory for the next chunk's
        ctx.save_for_backward(grad_hidden, grad_head)
        ctx.head_dtype, ctx.scale = head.dtype, scale
        return (scale**2 * total).to(loss_dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        grad_hidden, grad_head = ctx.saved_tensors
        grad = grad * ctx.scale
        if grad_hidden is not None:
            grad_hidden = grad_hidden * grad.to(grad_hidden.dtype)
        if grad_head is not None:
            grad_head = (grad_head * grad).to(ctx.head_dtype)
        return grad_hidden, grad_head, None, None, None


class DistillationModel(nn.Module):
    """Student and teacher over one set of frozen weights; its forward pass returns the losses.

    Changes `student`, a converted model, in place: trained parameters become float32 and require gradients, all others
    are cast to `dtype` and frozen.

    Args:
        attention: `training.attn_implementation` for packed samples. A student with eager attention keeps it.
        sequence: workers that split the tokens of every row; None: each worker has whole rows.
    """

    def __init__(
        self,
        student: Any,
        spec: DistillationSpec,
        *,
        dtype: torch.dtype,
        gradient_checkpointing: bool = False,
        attention: AttentionImplementation = "auto",
        sequence: SequenceGroup | None = None,
    ) -> None:
        super().__init__()
        self.student = student.eval()
        self.sequence = sequence
        self.uses_static_shapes = sequence is not None
        """Whether the student's layers take all tokens, so that shapes do not depend on the number of counted ones."""
        self._dtype = dtype
        self._attention = attention
        if sequence is not None:
            student.config._attn_implementation = ATTENTION_IMPLEMENTATION
        elif _uses_packed_attention(student.config):
            student.config._attn_implementation = PACKED_ATTENTION
        self._spec = spec
        self._num_lower_layers = student.config.num_key_value_layers
        self._hidden_index = find_hidden_loss_index(student.config, spec) if spec.hidden_loss_weight else None
        self._first_trained = find_first_trained_layer(student.config, spec)
        # Trained layers of the student no longer equal the teacher's, which therefore has its own copy of them.
        needs_copy = spec.trainable in TRAINABLE_LAYERS and self._uses_teacher
        self.teacher_copy = copy_teacher(student.model, spec) if needs_copy else None
        self._freeze(dtype)
        if gradient_checkpointing:
            student.activation_checkpointing_enable({"use_reentrant": False})
            student.disable_input_require_grads()
            for layer in student.model.layers[min(self._num_lower_layers, self._first_trained) :]:
                layer.training = True  # transformers checks this flag; the submodules stay without dropout

    @classmethod
    def from_spec(cls, student: Any, spec: JobSpec, *, device: torch.device) -> DistillationModel:
        """Build the model of a job. Collective if workers share rows."""
        size = spec.sharding.sequence_parallel_size
        return cls(
            student,
            spec.distillation,
            dtype=getattr(torch, spec.model.dtype),
            gradient_checkpointing=spec.training.gradient_checkpointing,
            attention=spec.training.attn_implementation,
            sequence=SequenceGroup.create(size, device) if size > 1 else None,
        )

    def _freeze(self, dtype: torch.dtype) -> None:
        trained = select_trained_parameters(self.student, self._spec)
        for parameter in self.parameters():
            parameter.requires_grad_(False)
            parameter.data = parameter.data.to(dtype)
        for parameter in trained.values():
            parameter.data = parameter.data.float()
            parameter.requires_grad_(True)

    @property
    def trains_lower_layers(self) -> bool:
        """Whether layers < l are trained, so that the teacher has its own copy of them."""
        return bool(self._first_trained < self._num_lower_layers)

    @property
    def loss_weights(self) -> dict[str, float]:
        """Weight of each loss that `forward` returns."""
        lm = self._spec.objective == "lm"
        weights = {"lm_loss": 1.0} if lm else {"logits_loss": self._spec.logits_loss_weight}
        if self._hidden_index is not None:
            weights["hidden_loss"] = self._spec.hidden_loss_weight
        if self.student.config.shape.has_exit_head:
            weights["exit_loss"] = self._spec.exit_loss_weight
        return weights

    def iter_sharding_units(self) -> Iterator[nn.Module | list[nn.Module]]:
        """Yield modules, or lists of modules that run together, whose weights are gathered together; inner first."""
        yield from iter_sharding_units(self.student.model)
        yield from self.get_teacher_layers()

    def get_teacher_layers(self) -> list[nn.Module]:
        """Return the layers that only the teacher runs."""
        return [] if self.teacher_copy is None else list(self.teacher_copy.layers[self._first_trained :])

    def get_heads(self) -> list[nn.Module]:
        """Return the modules whose weights the losses use directly, without calling the modules."""
        return [self.student.lm_head, *([self.student.exit_head] if self.student.config.shape.has_exit_head else [])]

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        loss_mask: Tensor,
        sample_lengths: Sequence[int] | None = None,
        *,
        held_out_only: bool = False,
    ) -> dict[str, Tensor]:
        """Return by name the sums of the losses over the counted positions, in nats (`hidden_loss`: squared). With
        `sequence`, the inputs are whole rows and the sums are over this worker's tokens.

        Args:
            input_ids: int64 [batch, num_tokens].
            position_ids: int64 of the same shape; they restart with every packed sample.
            loss_mask: bool of the same shape; True where the loss counts.
            sample_lengths: lengths of the samples in a batch of one row; None: derived from `position_ids`, which syncs
                with the host. Only the latter finds shared prefixes, see `make_packed_context`.
            held_out_only: return only `held_out`, the figure of held-out text: the KL at temperature 1, or with
                `objective: lm` the loss on the next token.
        """
        decoder = self.student.model
        teacher_states: list[Tensor] = []  # output of each layer >= l, if a loss needs it
        student_states: list[Tensor] = []
        records_states = self._hidden_index is not None and not held_out_only

        # 1. embeddings, and the tokens that enter the student's layers >= l
        with torch.no_grad():
            context = self._begin_pass(input_ids, position_ids, sample_lengths)
            own_context = context
            if self.student.config.layer_map.deep_leaders:
                deep = loss_mask if self.sequence is None else self.sequence.unite_masks(loss_mask)
                # A pass over all tokens has each token once.
                own_context = add_conversation_spans(
                    context,
                    deep.flatten(),
                    self._choose_deep_tail(input_ids, held_out_only),
                    overlapping=not self.uses_static_shapes,
                )
            targets, loss_mask = input_ids.roll(-1, dims=1).view(1, -1), loss_mask.reshape(1, -1)
            if self.sequence is not None:
                own = self.sequence.get_own_positions(context.num_tokens)
                context, own_context = self.sequence.shard_context(context), self.sequence.shard_context(own_context)
                targets, loss_mask = targets[:, own], loss_mask[:, own]
            counted = loss_mask.flatten().nonzero().squeeze(1)  # [num_counted]
            selection, student_rows = self._select_tokens(own_context, loss_mask.flatten(), counted)

        # 2. layers < l: x, the input of layer l
        with torch.set_grad_enabled(self.trains_lower_layers and torch.is_grad_enabled()):
            x, entering = run_lower_layers_by_span(decoder, context, own_context, selection)

        # 3. teacher: layers >= l as pretrained, with their own K and V
        teacher = None
        if self._uses_teacher:
            teacher_decoder = self.teacher_copy or decoder
            with torch.no_grad():
                shares_x = not self.trains_lower_layers and not decoder.layer_map.bypassed_layers
                teacher_x = x if shares_x else teacher_decoder.run_lower_layers(context)
                record = teacher_states if records_states else None
                teacher = _select_rows(teacher_decoder.run_teacher_upper(teacher_x, context, record=record), counted)

        # 4. student: layers >= l over K and V projected from x (SwiftKV)
        writer = None
        if self.student.config.layer_map.deep_leaders:
            writer = DeepSpanWriter(decoder.project_key_values(x, context.rotation))
        record = student_states if records_states else None
        output = decoder.run_student_upper(
            x, own_context, selection=selection, deep=writer, hidden=entering, record=record
        )

        # 5. losses at the counted positions
        student = _select_rows(output, student_rows)
        if held_out_only:
            return {"held_out": self._compute_held_out_loss(student, teacher, targets[0, counted])}
        sums = {}
        if self._spec.objective == "lm":
            sums["lm_loss"] = lm_loss(student, self.student.lm_head.weight, targets[0, counted])
        if teacher is None:
            return sums
        if self._spec.objective == "logits":
            sums["logits_loss"] = self._compute_kl_loss(student, self.student.lm_head.weight, teacher)
        if self._hidden_index is not None:
            is_output = self._hidden_index == -1
            student_state = student if is_output else _select_rows(student_states[self._hidden_index], student_rows)
            teacher_state = teacher if is_output else _select_rows(teacher_states[self._hidden_index], counted)
            sums["hidden_loss"] = hidden_loss(student_state, teacher_state)
        if self.student.config.shape.has_exit_head:
            # The exit head reads x, but sends no gradient into it.
            exit_hidden = self.student.exit_norm(_select_rows(entering.detach(), student_rows))
            sums["exit_loss"] = self._compute_kl_loss(exit_hidden, self.student.exit_head.weight, teacher)
        return sums

    def _choose_deep_tail(self, input_ids: Tensor, held_out_only: bool) -> int:
        """Return the deep tail of a pass in tokens: the served one for held-out text, else one of
        `list_training_deep_tails`. It depends on the rows alone, so a resumed run chooses the same."""
        deep_tail: int = self.student.config.shape.swiftkv_deep_tail
        tails = (deep_tail,) if held_out_only else list_training_deep_tails(deep_tail, self._spec)
        return tails[0] if len(tails) == 1 else tails[int(input_ids.sum()) % len(tails)]

    def _begin_pass(self, input_ids: Tensor, position_ids: Tensor, lengths: Sequence[int] | None) -> DecoderContext:
        """Embed the tokens; packed attention takes all rows concatenated."""
        decoder = self.student.model
        if self.sequence is None and self.student.config._attn_implementation != PACKED_ATTENTION:
            return cast("DecoderContext", decoder.make_context(input_ids, position_ids=position_ids))
        return make_packed_context(
            decoder,
            input_ids,
            position_ids,
            lengths,
            attention=self._attention,
            inference_operator=kernels.find_packed_operator(input_ids.device, self._dtype),
            dtype=self._dtype,
        )

    def _select_tokens(
        self, context: DecoderContext, loss_mask: Tensor, counted: Tensor
    ) -> tuple[TokenSelection | None, Tensor]:
        """Select the tokens that enter the student's layers >= l: the deep ones, or else the counted ones, padded by
        others to a multiple of `TOKENS_MULTIPLE`. None: all tokens. Also return the rows of the counted tokens among
        the selected ones."""
        samples: PackedLayout | None = context.layer_arguments.get(SAMPLES_KEY)
        if self.uses_static_shapes or samples is None or len(counted) == context.num_tokens:
            return None, counted
        entering, rows = counted, torch.arange(len(counted), device=counted.device)
        if samples.spans is not None:
            entering, rows = samples.deep_tokens, samples.counted_rows
        # Layers run even if nothing counts: other workers wait for this one's gradients.
        num_selected = -(-max(len(entering), 1) // TOKENS_MULTIPLE) * TOKENS_MULTIPLE
        others = loss_mask.logical_not().nonzero().squeeze(1)[: num_selected - len(entering)]
        return TokenSelection(torch.cat((entering, others))), rows

    def _compute_kl_loss(self, hidden: Tensor, head: Tensor, teacher: Tensor) -> Tensor:
        return logits_loss(hidden, teacher, head, self.student.lm_head.weight, temperature=self._spec.temperature)

    def _compute_held_out_loss(self, student: Tensor, teacher: Tensor | None, targets: Tensor) -> Tensor:
        head = self.student.lm_head.weight
        if teacher is None or self._spec.objective == "lm":
            return lm_loss(student, head, targets)
        return logits_loss(student, teacher, head, head, temperature=1.0)

    @property
    def _uses_teacher(self) -> bool:
        spec = self._spec
        return spec.objective == "logits" or self._hidden_index is not None or self.student.config.shape.has_exit_head


def iter_sharding_units(decoder: Any) -> Iterator[nn.Module | list[nn.Module]]:
    """Yield modules of a decoder, or lists of modules that run together, whose weights are gathered together; inner
    ones first."""
    leaders = [decoder.layers[i].self_attn for i in decoder.layer_map.leaders]
    # K and V of all groups are projected before the layers run, so their projections are separate units.
    projecting = [leader.list_projecting_modules() for leader in leaders]
    separate = [
        [*modules, *leader.list_expanding_modules()] for modules, leader in zip(projecting, leaders, strict=True)
    ]
    num_separate = dict(zip(decoder.layer_map.leaders, map(_count_parameters, separate), strict=True))
    largest = max(_count_parameters([layer]) - num_separate.get(i, 0) for i, layer in enumerate(decoder.layers))
    for run in split_by_size([_count_parameters(modules) for modules in projecting], largest):
        yield [module for modules in projecting[run] for module in modules]
    for leader in leaders:
        yield from leader.list_expanding_modules()
        yield from leader.list_shared_norms()
    yield from decoder.layers


def _count_parameters(modules: Iterable[nn.Module]) -> int:
    return sum(parameter.numel() for module in modules for parameter in module.parameters())


def compile_layers(model: DistillationModel) -> None:
    """Compile every layer in place (`training.compile`); layers of one kind share the compiled code.

    Call it before `parallelize`, so that FSDP2's communication stays out of the compiled code.
    """
    # PyTorch would load code from its default directory in /tmp, whoever created that directory.
    cache = Path(tempfile.gettempdir()) / f"swiftkv-inductor-{os.geteuid()}"
    if "TORCHINDUCTOR_CACHE_DIR" not in os.environ:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(ensure_private_directory(cache))
    model.uses_static_shapes = True
    for layer in [*model.student.model.layers, *model.get_teacher_layers()]:
        layer.compile(dynamic=False)


def supports_shared_prefixes(spec: JobSpec, config: Any) -> bool:
    """Whether samples of a row may share the tokens of a common prompt. Only packed attention knows such rows, and if
    all tokens enter the student's layers >= l once, those of a deep tail cannot belong to several samples.

    Args:
        config: the student's configuration.
    """
    enters_once = spec.sharding.sequence_parallel_size > 1 or spec.training.compile
    return _uses_packed_attention(config) and not enters_once


def _uses_packed_attention(config: Any) -> bool:
    """Whether a student is trained with packed attention; one with eager attention keeps it."""
    return bool(config._attn_implementation == "sdpa" or config.layer_map.deep_leaders)


def _select_rows(states: Tensor, rows: Tensor) -> Tensor:
    """Select the states [batch, num_tokens, size] of some rows of all batches: [num_rows, size]."""
    return states.flatten(0, 1).index_select(0, rows)


def list_training_deep_tails(deep_tail: int, spec: DistillationSpec) -> tuple[int, ...]:
    """Return the deep tails of training in tokens, which are equally likely. `deep_tail`: the served one."""
    return (
        (1, max(deep_tail // 4, 1), deep_tail // 2, deep_tail)
        if spec.vary_deep_tail and deep_tail > 1
        else (deep_tail,)
    )


def find_first_trained_layer(config: Any, spec: DistillationSpec) -> int:
    """Return the first layer that is trained as a whole, like all layers after it; the number of layers if there is
    none."""
    first: int = {"tail": config.num_key_value_layers, "all": 0}.get(spec.trainable, config.num_hidden_layers)
    return first


def select_trained_parameters(student: Any, spec: DistillationSpec) -> dict[str, nn.Parameter]:
    """Return the parameters to train: with `trainable: kv` those that make the K and V that tokens share, and the exit
    head; with `qkv` all SwiftKV projections, norm and exit head; with `tail` also the student's layers >= l (table 6b);
    with `all` also the layers < l."""
    trained: dict[str, nn.Parameter] = dict(student.swiftkv_parameters())
    if spec.trainable == "kv":
        shared = student.model.list_shared_projections()
        kept = {id(parameter) for module in shared for parameter in module.parameters()}
        return {name: p for name, p in trained.items() if id(p) in kept or name.startswith("exit_")}
    first = find_first_trained_layer(student.config, spec)
    for i, layer in enumerate(student.model.layers[first:], start=first):
        upper = i >= student.config.num_key_value_layers
        unused = tuple(f"self_attn.{name}." for name in layer.self_attn.list_teacher_only_modules()) if upper else ()
        for name, parameter in layer.named_parameters():
            if not name.startswith(unused):
                trained[f"model.layers.{i}.{name}"] = parameter
    return trained


@torch.no_grad()
def load_trained_tensors(student: Any, tensors: Mapping[str, Tensor]) -> None:
    """Copy trained tensors, by parameter name, into a student with the same layer map."""
    parameters = dict(student.named_parameters())
    for name, tensor in tensors.items():
        parameters[name].copy_(tensor)


def find_hidden_loss_index(config: Any, spec: DistillationSpec) -> int:
    """Return `hidden_loss_layer` as a negative index into the hidden states; -1 is the normalized output. Raises
    `InvalidInputError` for a layer < l, where both models are the same."""
    num_layers, first = config.num_hidden_layers, config.num_key_value_layers
    index = spec.hidden_loss_layer
    index = index if index < 0 else index - (num_layers + 1)
    if not first - num_layers <= index <= -1:
        raise InvalidInputError.for_field(
            "distillation.hidden_loss_layer",
            spec.hidden_loss_layer,
            f", a layer that teacher and student share; use {first - num_layers}..-1",
        )
    return index


def copy_teacher(decoder: Any, spec: DistillationSpec) -> Any:
    """Return a teacher for an untrained decoder, with its own copy of the layers that `spec` trains; it shares all
    other weights."""
    shares_head = [decoder.embed_tokens, decoder.norm, decoder.norm_swiftkv, decoder.rotary_emb]
    shares_head += decoder.layers[: find_first_trained_layer(decoder.config, spec)]
    return copy.deepcopy(decoder, memo={id(module): module for module in shares_head})
