"""Teacher and student in one forward pass that forks at layer l. Knows nothing of optimizers or workers.

    layers < l   once, no gradient ──▶ x ─┬─▶ layers >= l as pretrained, no gradient ──▶ teacher
                                          └─▶ layers >= l over shared K and V ─────────▶ student

The layers below l are frozen and the same in both models, so they run once, without gradients. The teacher runs its own
only if the student's are trained (`trainable: all`) or prompts bypass some. K and V of the student's layers >= l come
from x, so tokens that no loss counts skip these layers, as prompt tokens do in serving.

Losses are sums over positions, chunked so that [tokens, vocab] is never whole in memory; the caller divides by the
number of positions that count on all workers. Those on logits compute their gradient in the forward pass, chunk by
chunk (the softmax is at hand there), and keep only [tokens, hidden]. So a step holds a few [chunk, vocab] buffers,
whatever the sequence length. On a CPU a chunk has two sizes: matrix products take many rows, since each reads the whole
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

from swiftkv_platform.distillation.sequence_parallel import ATTENTION, SequenceGroup
from swiftkv_platform.errors import InvalidInputError
from swiftkv_platform.model.context import PACKED, DecoderContext, TokenSelection
from swiftkv_platform.model.packed_attention import (
    SAMPLES,
    TOKENS_MULTIPLE,
    AttentionImplementation,
    DeepSpanWriter,
    add_conversation_spans,
    make_packed_context,
    run_lower_layers_by_span,
)
from swiftkv_platform.planning.parameters import split_by_size
from swiftkv_platform.planning.training import FEWEST_ROWS, LOGITS_PER_CHUNK, LOGITS_PER_PASS
from swiftkv_platform.private_directories import private_directory
from swiftkv_platform.specs import DistillationSpec, JobSpec

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

    student, teacher: normalised hidden states [tokens, hidden]; heads: [vocab, hidden]. Gradients go to `student` and,
    if it is trained (the exit head), to `student_head`; never to the teacher. Scalar in nats.
    """
    shared = student_head is teacher_head
    teacher, teacher_head = teacher.detach(), teacher_head.detach()
    narrow, wide = teacher_head.dtype, _wide(teacher_head)
    # Dividing hidden states instead of logits saves two passes; in a narrow dtype only powers of two keep them exact.
    early = narrow == wide or math.frexp(temperature)[0] == 0.5
    rows_per_pass = max(1, LOGITS_PER_PASS[_kind(teacher_head)] // len(teacher_head))

    def logits_of(hidden: Tensor, head: Tensor) -> Tensor:
        return F.linear(hidden / temperature if early else hidden, head)

    def chunk_loss(hidden: Tensor, rows: slice) -> tuple[Tensor, Tensor]:
        target = teacher[rows].to(narrow)
        if shared:  # one product, which reads the head once
            logits, targets = logits_of(torch.cat((hidden, target)), teacher_head).split(len(hidden))
        else:
            logits, targets = logits_of(hidden, student_head.detach().to(narrow)), logits_of(target, teacher_head)
        if rows_per_pass >= len(hidden):
            logits, targets = logits.to(wide), targets.to(wide)
        losses = []
        for mine, theirs in zip(logits.split(rows_per_pass), targets.split(rows_per_pass), strict=True):
            # On a CPU a few rows are widened at a time: a chunk that is widened as a whole leaves the cache.
            in_pass, targets_in_pass = mine.to(wide), theirs.to(wide)
            if not early:
                in_pass, targets_in_pass = in_pass.div_(temperature), targets_in_pass.div_(temperature)
            losses.append(_kl_(in_pass, targets_in_pass))
            if in_pass is not mine:
                mine.copy_(in_pass)
        return torch.stack(losses).sum(), logits

    return _head_loss(student, student_head.to(narrow), chunk_loss, chunk_size, scale=temperature)


def _kl_(logits: Tensor, targets: Tensor) -> Tensor:
    """Summed KL(softmax(targets) || softmax(logits)), both [rows, vocab] and overwritten: `logits` by its gradient.

    Computed as the sum over the vocabulary of p (targets - logits), plus log Z(logits) - log Z(targets). Both follow
    from the largest probability of each row, so no other logarithm is needed.
    """
    p, q = torch.softmax(targets, dim=-1), torch.softmax(logits, dim=-1)
    normalisers = _normaliser(logits, q) - _normaliser(targets, p)
    differences: Tensor = torch.linalg.vecdot(p, targets.sub_(logits))
    torch.sub(q, p, out=logits)
    divergence: Tensor = (differences.double() + normalisers).sum()
    return divergence


def _normaliser(logits: Tensor, probabilities: Tensor) -> Tensor:
    """Logarithm of the sum of exponentials, [rows], in float64."""
    return logits.amax(dim=-1).double() - probabilities.amax(dim=-1).double().log()


def lm_loss(hidden: Tensor, head: Tensor, targets: Tensor, *, chunk_size: int | None = None) -> Tensor:
    """Sum over positions of the cross-entropy of the next token (table 6a's ablation).

    hidden: [tokens, hidden]; head: [vocab, hidden]; targets: token ids [tokens]. Scalar in nats.
    """

    def chunk_loss(hidden: Tensor, rows: slice) -> tuple[Tensor, Tensor]:
        index = targets[rows].unsqueeze(-1)
        log_q = F.log_softmax(F.linear(hidden, head.detach()).to(_wide(head)), dim=-1)
        loss = -log_q.gather(-1, index).sum()
        return loss, log_q.exp_().scatter_add_(-1, index, log_q.new_full((), -1.0).expand(index.shape))

    return _head_loss(hidden, head, chunk_loss, chunk_size)


def hidden_loss(student: Tensor, teacher: Tensor) -> Tensor:
    """Sum over positions of the squared difference of two hidden states [tokens, hidden], averaged over features."""
    return (student.float() - teacher.detach().float()).square().mean(dim=-1).sum()


def _wide(head: Tensor) -> torch.dtype:
    """Return the dtype of losses and of passes over logits: float32 or wider."""
    return torch.promote_types(head.dtype, torch.float32)


def _kind(head: Tensor) -> str:
    return "cpu" if head.device.type == "cpu" else "cuda"


def _head_loss(
    hidden: Tensor, head: Tensor, chunk_loss: ChunkLoss, chunk_size: int | None, *, scale: float = 1.0
) -> Tensor:
    """Apply `head` in its own dtype, outside autocast, so that forward and backward use the same products.

    Logits are divided by `scale`: so the loss is the sum of the chunks' losses times scale^2, and its gradient the
    chunks' gradients times scale.
    """
    chunk_size = chunk_size or max(FEWEST_ROWS, LOGITS_PER_CHUNK[_kind(head)] // len(head))
    with torch.autocast(hidden.device.type, enabled=False):
        loss: Tensor = _FusedHeadLoss.apply(hidden.to(head.dtype), head, chunk_loss, chunk_size, scale)  # type: ignore[no-untyped-call]
    return loss


class _FusedHeadLoss(torch.autograd.Function):
    """sum(loss(hidden @ head.T)) with both gradients ready when the forward pass ends."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, head: Tensor, chunk_loss: ChunkLoss, chunk_size: int, scale: float) -> Tensor:
        wide = _wide(head)
        needs_hidden, needs_head = ctx.needs_input_grad[:2]
        grad_hidden = torch.empty_like(hidden) if needs_hidden else None
        grad_head = torch.zeros_like(head, dtype=wide) if needs_head else None
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
        return (scale**2 * total).to(wide)

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


class Fork(nn.Module):
    """Losses of a student against its teacher, over one set of frozen weights.

    Changes `student`, a converted model, in place: trained parameters become float32 and require gradients, all others
    are cast to `dtype` and frozen.

    Args:
        attention: how packed samples attend, see `training.attn_implementation`. A student with eager attention keeps
            it.
        sequence: the workers that divide every row's tokens; None: each has whole rows.
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
        self.keeps_shapes = sequence is not None
        """Whether the student's layers take all tokens, for static shapes: the number that count varies."""
        self._dtype = dtype
        self._attention = attention
        if sequence is not None:
            student.config._attn_implementation = ATTENTION
        elif student.config._attn_implementation == "sdpa" or student.config.layer_map.deep_leaders:
            student.config._attn_implementation = PACKED
        self._spec = spec
        self._first = student.config.num_key_value_layers
        self._hidden_index = hidden_loss_index(student.config, spec) if spec.hidden_loss_weight else None
        self._first_trained = first_trained_layer(student.config, spec)
        # Trained layers of the student no longer equal the teacher's, which are kept as copies.
        keeps_teacher = spec.trainable != "qkv" and self._needs_teacher
        self.kept_teacher = keep_teacher(student.model, spec) if keeps_teacher else None
        self._freeze(dtype)
        if gradient_checkpointing:
            student.activation_checkpointing_enable({"use_reentrant": False})
            student.disable_input_require_grads()
            for layer in student.model.layers[min(self._first, self._first_trained) :]:
                layer.training = True  # transformers checks this flag; the submodules stay without dropout

    @classmethod
    def of_job(cls, student: Any, spec: JobSpec, *, device: torch.device) -> Fork:
        """Make the fork of a job. Collective if workers share rows."""
        shared = spec.sharding.sequence_parallel_size
        return cls(
            student,
            spec.distillation,
            dtype=getattr(torch, spec.model.dtype),
            gradient_checkpointing=spec.training.gradient_checkpointing,
            attention=spec.training.attn_implementation,
            sequence=SequenceGroup.create(shared, device) if shared > 1 else None,
        )

    def _freeze(self, dtype: torch.dtype) -> None:
        trained = trained_parameters(self.student, self._spec)
        for parameter in self.parameters():
            parameter.requires_grad_(False)
            parameter.data = parameter.data.to(dtype)
        for parameter in trained.values():
            parameter.data = parameter.data.float()
            parameter.requires_grad_(True)

    @property
    def trains_lower(self) -> bool:
        """Whether layers < l are trained, so that the teacher has its own."""
        return bool(self._first_trained < self._first)

    @property
    def loss_weights(self) -> dict[str, float]:
        """Weight in the loss of each sum that `forward` returns."""
        lm = self._spec.objective == "lm"
        weights = {"lm_loss": 1.0} if lm else {"logits_loss": self._spec.logits_loss_weight}
        if self._hidden_index is not None:
            weights["hidden_loss"] = self._spec.hidden_loss_weight
        if self.student.config.shape.has_exit_head:
            weights["exit_loss"] = self._spec.exit_loss_weight
        return weights

    def units(self) -> Iterator[nn.Module | list[nn.Module]]:
        """Modules (or lists of them that run together) whose weights are gathered together, inner ones first."""
        yield from sharding_units(self.student.model)
        yield from self.teacher_layers()

    def teacher_layers(self) -> list[nn.Module]:
        """Layers that belong only to the kept teacher."""
        return [] if self.kept_teacher is None else list(self.kept_teacher.layers[self._first_trained :])

    def heads(self) -> list[nn.Module]:
        """Modules whose weights the losses use directly, without calling the modules."""
        return [self.student.lm_head, *([self.student.exit_head] if self.student.config.shape.has_exit_head else [])]

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        loss_mask: Tensor,
        sample_lengths: Sequence[int] | None = None,
        *,
        measures: bool = False,
    ) -> dict[str, Tensor]:
        """Return the sums of the losses over the positions where `loss_mask` is set, by name, in nats (`hidden_loss`:
        squared). With `sequence`, the inputs are whole rows and the sums are over this worker's tokens.

        Args:
            input_ids: int64 [batch, num_tokens].
            position_ids: int64 of the same shape; they restart with every packed sample.
            loss_mask: bool of the same shape.
            sample_lengths: lengths of the samples in a batch of one row; None: derived from `position_ids`, which syncs
                with the host.
            measures: return only `held_out`, the measure of held-out text: the KL at temperature 1, or with `objective:
                lm` the loss on the next token.
        """
        decoder = self.student.model
        teacher_states: list[Tensor] = []  # output of each upper layer, if a loss needs it
        student_states: list[Tensor] = []
        recorded = self._hidden_index is not None and not measures
        with torch.no_grad():
            context = self._begin(input_ids, position_ids, sample_lengths)
            own_context = context
            if self.student.config.layer_map.deep_leaders:
                deep = loss_mask if self.sequence is None else self.sequence.union(loss_mask)
                own_context = add_conversation_spans(context, deep.flatten())
            targets, loss_mask = input_ids.roll(-1, dims=1).view(1, -1), loss_mask.reshape(1, -1)
            if self.sequence is not None:
                own = self.sequence.own(context.num_tokens)
                context, own_context = self.sequence.shard(context), self.sequence.shard(own_context)
                targets, loss_mask = targets[:, own], loss_mask[:, own]
            counted = loss_mask.flatten().nonzero().squeeze(1)  # [num_counted]
            kept = self._kept(context, loss_mask.flatten(), counted)
        with torch.set_grad_enabled(self.trains_lower and torch.is_grad_enabled()):
            x, entering = run_lower_layers_by_span(decoder, context, own_context, kept)
        teacher = None
        if self._needs_teacher:
            kept_teacher = self.kept_teacher or decoder
            with torch.no_grad():
                same = not self.trains_lower and not decoder.layer_map.bypassed_layers
                teacher_x = x if same else kept_teacher.run_lower(context)
                teacher = kept_teacher.run_teacher_upper(
                    teacher_x, context, record=teacher_states if recorded else None
                )
                teacher = _rows(teacher, counted)
        writer = None
        if self.student.config.layer_map.deep_leaders:
            writer = DeepSpanWriter(decoder.project_key_values(x, context.rotation))
        record = student_states if recorded else None
        student = decoder.run_student_upper(x, own_context, selection=kept, deep=writer, hidden=entering, record=record)

        def of_student(state: Tensor) -> Tensor:
            return _rows(state, counted) if kept is None else state[0, : len(counted)]

        student = of_student(student)
        if measures:
            return {"held_out": self._held_out(student, teacher, targets[0, counted])}
        sums = {}
        if self._spec.objective == "lm":
            sums["lm_loss"] = lm_loss(student, self.student.lm_head.weight, targets[0, counted])
        if teacher is None:
            return sums
        if self._spec.objective == "logits":
            sums["logits_loss"] = self._kl(student, self.student.lm_head.weight, teacher)
        if self._hidden_index is not None:
            last = self._hidden_index == -1
            mine = student if last else of_student(student_states[self._hidden_index])
            theirs = teacher if last else _rows(teacher_states[self._hidden_index], counted)
            sums["hidden_loss"] = hidden_loss(mine, theirs)
        if self.student.config.shape.has_exit_head:
            # The head reads x, but sends no gradient into it.
            exit_hidden = self.student.exit_norm(of_student(entering.detach()))
            sums["exit_loss"] = self._kl(exit_hidden, self.student.exit_head.weight, teacher)
        return sums

    def _begin(self, input_ids: Tensor, position_ids: Tensor, lengths: Sequence[int] | None) -> DecoderContext:
        """Begin a pass; packed attention sees all rows end to end."""
        decoder = self.student.model
        if self.sequence is None and self.student.config._attn_implementation != PACKED:
            return cast("DecoderContext", decoder.make_context(input_ids, position_ids=position_ids))
        attention, dtype = self._attention, self._dtype
        return make_packed_context(decoder, input_ids, position_ids, lengths, attention=attention, dtype=dtype)

    def _kept(self, context: DecoderContext, loss_mask: Tensor, counted: Tensor) -> TokenSelection | None:
        """Select the tokens that enter the student's layers >= l: those that count, then others to fill up to a
        multiple of `TOKENS_MULTIPLE`. None: all tokens."""
        if self.keeps_shapes or SAMPLES not in context.layer_arguments or len(counted) == context.num_tokens:
            return None
        # If nothing counts, layers run all the same: other workers wait for this one's gradients.
        num_kept = -(-max(len(counted), 1) // TOKENS_MULTIPLE) * TOKENS_MULTIPLE
        others = loss_mask.logical_not().nonzero().squeeze(1)[: num_kept - len(counted)]
        return TokenSelection(torch.cat((counted, others)))

    def _kl(self, hidden: Tensor, head: Tensor, teacher: Tensor) -> Tensor:
        return logits_loss(hidden, teacher, head, self.student.lm_head.weight, temperature=self._spec.temperature)

    def _held_out(self, student: Tensor, teacher: Tensor | None, targets: Tensor) -> Tensor:
        head = self.student.lm_head.weight
        if teacher is None or self._spec.objective == "lm":
            return lm_loss(student, head, targets)
        return logits_loss(student, teacher, head, head, temperature=1.0)

    @property
    def _needs_teacher(self) -> bool:
        spec = self._spec
        return spec.objective == "logits" or self._hidden_index is not None or self.student.config.shape.has_exit_head


def sharding_units(decoder: Any) -> Iterator[nn.Module | list[nn.Module]]:
    """Yield modules of a decoder (or lists of modules run together) whose weights are gathered together, inner ones
    first."""
    leaders = [decoder.layers[i].self_attn for i in decoder.layer_map.leaders]
    # K and V of all groups run before the layers that own their projections, so the projections are sharded apart.
    projecting = [leader.list_projecting_modules() for leader in leaders]
    apart = [[*modules, *leader.list_expanding_modules()] for modules, leader in zip(projecting, leaders, strict=True)]
    of_leaders = dict(zip(decoder.layer_map.leaders, map(_num_parameters, apart), strict=True))
    largest = max(_num_parameters([layer]) - of_leaders.get(i, 0) for i, layer in enumerate(decoder.layers))
    for run in split_by_size([_num_parameters(modules) for modules in projecting], largest):
        yield [module for modules in projecting[run] for module in modules]
    for leader in leaders:
        yield from leader.list_expanding_modules()
        yield from leader.list_shared_norms()
    yield from decoder.layers


def _num_parameters(modules: Iterable[nn.Module]) -> int:
    return sum(parameter.numel() for module in modules for parameter in module.parameters())


def compile_layers(fork: Fork) -> None:
    """Compile every layer in place (`training.compile`); layers of one kind share the compiled code.

    Call it before the fork is spread over workers: FSDP2 gathers layer by layer, and its communication stays out of the
    compiled code.
    """
    # PyTorch's own directory in /tmp is used whoever made it, and has code that is loaded.
    cache = Path(tempfile.gettempdir()) / f"swiftkv-inductor-{os.geteuid()}"
    if "TORCHINDUCTOR_CACHE_DIR" not in os.environ:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(private_directory(cache))
    fork.keeps_shapes = True
    for layer in [*fork.student.model.layers, *fork.teacher_layers()]:
        layer.compile(dynamic=False)


def _rows(states: Tensor, counted: Tensor) -> Tensor:
    """The states [batch, num_tokens, size] of the positions `counted`, [num_counted, size]."""
    return states.flatten(0, 1).index_select(0, counted)


def first_trained_layer(config: Any, spec: DistillationSpec) -> int:
    """Return the first layer from which on all parameters that the student runs are trained; the number of layers if
    there is none."""
    first: int = {"qkv": config.num_hidden_layers, "tail": config.num_key_value_layers, "all": 0}[spec.trainable]
    return first


def trained_parameters(student: Any, spec: DistillationSpec) -> dict[str, nn.Parameter]:
    """Return the parameters that `spec.trainable` names: the SwiftKV projections, norm and exit head, or with them
    every parameter of the student's layers >= l (table 6b), or of all its layers."""
    trained: dict[str, nn.Parameter] = dict(student.swiftkv_parameters())
    first = first_trained_layer(student.config, spec)
    for i, layer in enumerate(student.model.layers[first:], start=first):
        upper = i >= student.config.num_key_value_layers
        idle = tuple(f"self_attn.{name}." for name in layer.self_attn.list_idle_modules()) if upper else ()
        for name, parameter in layer.named_parameters():
            if not name.startswith(idle):
                trained[f"model.layers.{i}.{name}"] = parameter
    return trained


@torch.no_grad()
def load_trained(student: Any, tensors: Mapping[str, Tensor]) -> None:
    """Write trained tensors, by parameter name, into a student that has the same layer map."""
    parameters = dict(student.named_parameters())
    for name, tensor in tensors.items():
        parameters[name].copy_(tensor)


def hidden_loss_index(config: Any, spec: DistillationSpec) -> int:
    """Return `hidden_loss_layer` as a negative index into the hidden states; -1 is the normalised output. Raises
    `InvalidInputError` for a layer below the fork, where both models are the same."""
    num_layers, first = config.num_hidden_layers, config.num_key_value_layers
    index = spec.hidden_loss_layer
    index = index if index < 0 else index - (num_layers + 1)
    if not first - num_layers <= index <= -1:
        raise InvalidInputError.for_field(
            "distillation.hidden_loss_layer",
            spec.hidden_loss_layer,
            f", where teacher and student are the same; {first - num_layers}..-1 are accepted",
        )
    return index


def keep_teacher(decoder: Any, spec: DistillationSpec) -> Any:
    """Return the teacher of a decoder that is not trained yet: it has its own copy of the layers that `spec` trains and
    shares everything else."""
    shared = [decoder.embed_tokens, decoder.norm, decoder.norm_swiftkv, decoder.rotary_emb]
    shared += decoder.layers[: first_trained_layer(decoder.config, spec)]
    return copy.deepcopy(decoder, memo={id(module): module for module in shared})
