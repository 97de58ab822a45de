"""Fake weights, rows and workers of a job, and replacements for the contents that fake tensors lack."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, TypeVar
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils.weak import WeakIdKeyDictionary

from swiftkv_platform.data.packing import PackedRows, Samples, pack
from swiftkv_platform.model import calibration_heads, packed_pass
from swiftkv_platform.model.families import student_classes
from swiftkv_platform.model.packed_attention import (
    AttentionImplementation,
    VarlenOperator,
    attention_head_dim,
    flash_refusal_of_heads,
)
from swiftkv_platform.model.workers import Workers
from swiftkv_platform.planning.training import LOGITS_PER_CHUNK
from swiftkv_platform.specs import JobSpec

T = TypeVar("T")

_SAMPLE_TOKENS = 128
"""Tokens of a sample in packed rows."""


class _Assume(TorchDispatchMode):
    """Replaces contents that fake tensors lack: every number is 1, and every mask is set everywhere."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            return 1.0 if args[0].is_floating_point() else 1
        if func is torch.ops.aten.nonzero.default:
            return torch.empty(args[0].numel(), args[0].ndim, dtype=torch.int64, device=args[0].device)
        if func is torch.ops.aten.index.Tensor:
            indices = [place for index in args[1] for place in _places(index)]
            return func(args[0], indices)
        return func(*args, **kwargs or {})


def _places(index: Tensor | None) -> list[Tensor | None]:
    """Return the indices of a fully set mask, by dimension; other indices unchanged."""
    if index is None or index.dtype != torch.bool:
        return [index]
    return [torch.empty(index.numel(), dtype=torch.int64, device=index.device) for _ in range(index.ndim)]


class _FusedAttention(torch.autograd.Function):
    """Shapes of an attention kernel that stores no scores, which CUDA has for every head size. The CPU's stores them if
    keys and values differ in size."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        bias = None if mask is None else mask.to(query.dtype)
        output = query.new_empty(*query.shape[:-1], value.shape[-1])
        ctx.save_for_backward(query, key, value, bias, output, query.new_empty(query.shape[:-1], dtype=torch.float32))
        return output

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        query, key, value, *_ = ctx.saved_tensors
        return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value), None


def _attend_varlen(query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Tensor:
    """Attention of all samples at once, [num_tokens, num_heads, dim] from queries, keys and values of that shape."""
    output: Tensor = _FusedAttention.apply(query, key, value, None)  # type: ignore[no-untyped-call]
    return output


def _choose_operator(
    implementation: AttentionImplementation, config: Any, _: torch.device, dtype: torch.dtype
) -> VarlenOperator | None:
    """Return the operator that a GPU with FlashAttention would use."""
    if implementation == "sdpa" or flash_refusal_of_heads(dtype, attention_head_dim(config)) is not None:
        return None
    return _attend_varlen


def _assign_heads(lost: Tensor) -> list[int]:
    """Return any assignment; all cost the same."""
    return list(range(len(lost)))


def _attend(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, **_: Any) -> Tensor:
    output: Tensor = _FusedAttention.apply(query, key, value, attn_mask)  # type: ignore[no-untyped-call]
    return output


class Fakes:
    """Fake weights and rows for a job."""

    def __init__(self, spec: JobSpec, mode: FakeTensorMode) -> None:
        self._spec = spec
        self._mode = mode
        self._tied = WeakIdKeyDictionary()

    @contextmanager
    def active(self, *modes: TorchDispatchMode) -> Iterator[None]:
        """Run under fake tensors, `modes` and the replacements for contents."""
        with ExitStack() as stack:
            for mode in (self._mode, *modes, _Assume()):  # type: ignore[no-untyped-call]
                stack.enter_context(mode)
            yield

    def student(self, config: Any) -> Any:
        """Make a student on the meta device, except for its positional buffers."""
        config = copy.deepcopy(config)
        with torch.device("meta"):
            model = student_classes(config.model_type.removesuffix("_swiftkv")).causal_lm(config)
        model.tie_weights()
        # Without scores no expert can be chosen: the loop over experts becomes one grouped product with as many rows.
        model.config._experts_implementation_internal = "grouped_mm"
        with self._mode:
            model.model.rotary_emb = type(model.model.rotary_emb)(config=config)
        return model.eval()

    def fill(self, module: nn.Module) -> None:
        """Give every parameter of `module` that is on the meta device a fake tensor on the CPU."""
        for part in module.modules():
            for leaf, parameter in part._parameters.items():
                if parameter is not None and parameter.is_meta:
                    part._parameters[leaf] = self._filled(parameter)

    def _filled(self, parameter: nn.Parameter) -> nn.Parameter:
        known: nn.Parameter | None = self._tied.get(parameter)
        if known is None:
            with self._mode:
                values = torch.empty(parameter.shape, dtype=parameter.dtype)
                known = self._tied[parameter] = nn.Parameter(values, requires_grad=parameter.requires_grad)
        return known

    def forget(self, filled: nn.Parameter) -> None:
        """Forget a parameter that `fill` has made, even if another module still waits for a tied one."""
        for empty in [empty for empty, known in self._tied.items() if known is filled]:
            del self._tied[empty]

    def rows(self, num_rows: int) -> PackedRows:
        """Make full rows, packed with samples of a typical length unless packing is off."""
        data = self._spec.data
        length = min(_SAMPLE_TOKENS, data.max_length) if data.packing else data.max_length
        per_row = -(-data.max_length // length)
        num_tokens = num_rows * data.max_length
        starts = np.concatenate([row * data.max_length + np.arange(per_row) * length for row in range(num_rows)])
        samples = Samples(
            tokens=np.zeros(num_tokens, dtype=np.int32),
            counts=np.ones(num_tokens, dtype=np.bool_),
            starts=np.append(starts, num_tokens),
        )
        return pack(samples, np.arange(len(samples)), max_length=data.max_length, pad_token_id=0, packing=data.packing)


@contextmanager
def faked(spec: JobSpec) -> Iterator[Fakes]:
    """Set up a fake process group of all workers, and fake tensors with the chunks and the attention of the job's
    device."""
    store, size = FakeStore(), spec.resources.max_workers
    dist.init_process_group("fake", store=store, rank=0, world_size=size)
    try:
        with ExitStack() as patched:
            if spec.resources.gpus_per_worker:
                patched.enter_context(patch.dict(LOGITS_PER_CHUNK, cpu=LOGITS_PER_CHUNK["cuda"]))
                patched.enter_context(patch.object(torch.nn.functional, "scaled_dot_product_attention", _attend))
                patched.enter_context(patch.object(packed_pass, "choose_operator", _choose_operator))
            patched.enter_context(patch.object(calibration_heads, "assign_heads", _assign_heads))
            patched.enter_context(
                patch.object(ShardingPropagator, "_propagate_tensor_meta_non_cached", _propagate_unseen)
            )
            yield Fakes(spec, FakeTensorMode(allow_non_fake_inputs=True))
    finally:
        dist.destroy_process_group()


_propagate = ShardingPropagator._propagate_tensor_meta_non_cached


def _propagate_unseen(propagator: ShardingPropagator, op_schema: Any) -> Any:
    """Infer the shape of an operator's result like DTensor does, over fake tensors as large as all shards together.
    They are fake in a real run too, so trackers must not see them."""
    with _disable_current_modes():
        return _propagate(propagator, op_schema)


class FakeWeights:
    """Weights without values, used instead of a `LazyStudent`."""

    def __init__(self, model: Any, fakes: Fakes) -> None:
        self.model = model
        self._fakes = fakes

    def attach(self, _fork: nn.Module) -> None:
        """Do nothing: all weights are alike."""

    def fill(self, module: nn.Module, *, own: bool = True, read: bool = True) -> None:
        """Give storage to the parameters of `module` that are on the meta device."""
        del own, read
        self._fakes.fill(module)

    def fill_shards(self, _root: nn.Module) -> None:
        """Write nothing: shards have their storage."""

    def release(self, module: nn.Module) -> None:
        """Put the parameters of `module` back on the meta device."""
        for part in module.modules():
            for leaf, parameter in part._parameters.items():
                if parameter is not None:
                    part._parameters[leaf] = nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)
                    self._fakes.forget(parameter)


class FakeWorkers(Workers):
    """Workers of a fake process group, which cannot send objects: this worker's value counts for all."""

    def gather(self, value: T) -> list[T]:
        return [value] * self.size

    def from_first(self, value: T) -> T:
        return value
