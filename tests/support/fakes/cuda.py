"""A CUDA device without hardware: fake tensors, which have a shape, a dtype and a device, but no values.

Operators check devices as on a GPU, and a log lists what would make the host wait. Nothing is computed, so tests show
that code runs on GPU tensors, not that its results are right.
"""

import ctypes
import functools
import shutil
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils import cpp_extension
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

aten: Any = torch.ops.aten
DEVICE = torch.device("cuda", 0)
TOTAL_MEMORY, FREE_MEMORY, ALLOCATED_MEMORY, PEAK_MEMORY = 80 << 30, 60 << 30, 18 << 30, 21 << 30
FREE_VIEWS = {
    f"aten.{name}"
    for name in (
        *("view", "_unsafe_view", "slice", "select", "unsqueeze", "squeeze", "transpose", "permute", "expand"),
        *("split", "split_with_sizes", "unbind", "alias", "detach", "t", "as_strided", "lift_fresh", "narrow"),
        *("empty", "empty_strided", "empty_like", "new_empty", "reshape", "chunk", "unflatten", "view_as"),
        *("view_as_real", "view_as_complex"),
    )
} | {"prim.device"}
"""Operators that launch no kernel."""


class DeviceLog(TorchDispatchMode):
    """Records operators on the device since `clear`, and the waits and copies that they cost the host."""

    def __init__(self) -> None:
        super().__init__()
        self.clear()

    def clear(self) -> None:
        self.kernels: Counter[str] = Counter()
        """Operators that launch a kernel or a copy."""
        self.waits: list[str] = []
        """Each wait of the host for the device: values read back, shapes that depend on values, blocking copies."""
        self.copies = 0
        """Copies from the host to the device."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = f"{func.namespace}.{func._schema.name.split('::')[-1]}"
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        on_device = any(x.device.type == "cuda" for x in inputs)
        if not on_device and torch.device(kwargs.get("device") or "cpu").type != "cuda":
            return func(*args, **kwargs)
        if name not in FREE_VIEWS:
            self.kernels[name] += 1
        if name == "torch_attn._varlen_attn":
            _check_flash_attention(*args, **kwargs)
        if func is aten._local_scalar_dense.default:
            self.waits.append(name)
            return _number(args[0].dtype)
        if name in ("aten._to_copy", "aten.copy_"):
            self._note_copy(name, args, kwargs)
            return func(*args, **kwargs)
        if on_device and any(x.device.type == "cpu" and x.dim() for x in inputs):
            self.waits.append(f"{name} of a tensor on the host")  # torch copies it, or refuses it below
        return self._of_unknown_shape(name, func, args, kwargs)

    def _note_copy(self, name: str, args: Any, kwargs: Any) -> None:
        source, target = args[0].device.type, torch.device(kwargs.get("device") or args[0].device).type
        if name == "aten.copy_":
            source, target = args[1].device.type, args[0].device.type
        if source == target:
            return
        blocking = not (kwargs.get("non_blocking") or (name == "aten.copy_" and len(args) > 2 and args[2]))
        if target == "cuda":
            self.copies += 1
        if blocking or target == "cpu":
            self.waits.append(f"{name} from {source} to {target}")

    def _of_unknown_shape(self, name: str, func: Any, args: Any, kwargs: Any) -> Any:
        """Return results with a shape that torch cannot know for fake tensors: masks are all set, values all differ."""
        if name == "aten.index" and any(x is not None and x.dtype in (torch.bool, torch.uint8) for x in args[1]):
            self.waits.append("aten.index by a mask")
            (mask,) = args[1]
            return args[0].flatten(0, mask.dim() - 1)
        if name == "aten.nonzero":
            self.waits.append(name)
            return torch.empty(args[0].numel(), args[0].dim(), dtype=torch.long, device=args[0].device)
        if name in ("aten._unique2", "aten.unique_dim", "aten.masked_select", "aten.bincount"):
            self.waits.append(name)
        if name == "aten.bincount":
            return torch.empty(kwargs.get("minlength", 0) or args[2], dtype=torch.long, device=args[0].device)
        return func(*args, **kwargs)


def _check_flash_attention(
    query: Any,
    key: Any,
    value: Any,
    cu_seq_q: Any,
    cu_seq_k: Any,
    max_q: int,
    max_k: int,
    is_causal: bool,
    scale: float | None,
    window_size: Any,
    enable_gqa: bool = False,
    seqused_k: Any = None,
    block_table: Any = None,
    num_splits: Any = None,
) -> None:
    """Check requirements of PyTorch's FlashAttention 2 (`flash_api.cpp`) that fake kernels do not check."""
    heads, dim = query.shape[1:]
    assert query.dtype in (torch.float16, torch.bfloat16)
    assert key.dtype == value.dtype == query.dtype
    assert dim % 8 == 0
    assert dim <= 256
    assert query.stride(-1) == key.stride(-1) == value.stride(-1) == 1
    assert max_q > 0
    assert max_k > 0
    for table in (cu_seq_q, cu_seq_k, seqused_k, block_table):
        if table is not None:
            assert table.dtype == torch.int32
            assert table.is_contiguous()
    num_runs = cu_seq_q.shape[0] - 1
    assert cu_seq_k.shape == (num_runs + 1,)
    assert seqused_k is None or seqused_k.shape == (num_runs,)
    assert heads % key.shape[-2] == 0
    assert enable_gqa or heads == key.shape[-2]
    assert key.shape[-1] == value.shape[-1] == dim
    if block_table is not None:
        assert key.shape[1] % 256 == 0
        assert block_table.shape[0] == num_runs


@functools.cache
def _register_device() -> None:
    if torch.backends.cuda.is_built():
        return
    compiler = shutil.which("g++")
    if compiler is None:
        raise RuntimeError("fake CUDA tensors on a torch without CUDA need g++")
    with tempfile.TemporaryDirectory() as directory:
        library = Path(directory) / "guard.so"
        includes = [f"-isystem{path}" for path in cpp_extension.include_paths()]
        libraries = [f"-L{path}" for path in cpp_extension.library_paths()]
        source = Path(__file__).with_name("cuda_guard.cpp")
        command = [compiler, "-std=c++20", "-fPIC", "-shared", "-w", *includes, str(source), "-o", str(library)]
        subprocess.run([*command, *libraries, "-lc10"], check=True)
        ctypes.CDLL(str(library))


def _number(dtype: torch.dtype) -> float:
    """Return the value that reading any element gives."""
    return True if dtype == torch.bool else 0.75 if dtype.is_floating_point else 1


def _to_list(tensor: Any) -> Any:
    """Copy `Tensor.tolist` in one transfer, as on a GPU; torch reads a fake tensor element by element."""
    host = tensor.cpu() if tensor.device.type == "cuda" else tensor

    def filled(sizes: tuple[int, ...]) -> Any:
        return [filled(sizes[1:]) for _ in range(sizes[0])] if sizes else _number(host.dtype)

    return filled(tuple(host.shape))


def _copied(tensor: torch.Tensor, _memo: Any) -> torch.Tensor:
    copied = tensor.detach().clone()
    return torch.nn.Parameter(copied, tensor.requires_grad) if isinstance(tensor, torch.nn.Parameter) else copied


@contextmanager
def fake_cuda() -> Iterator[DeviceLog]:
    """Provide a machine with one H100 whose tensors are fake; the log covers the block."""
    _register_device()
    properties = {
        "is_available": True,
        "device_count": 1,
        "get_device_capability": (9, 0),
        "is_bf16_supported": True,
        "mem_get_info": (FREE_MEMORY, TOTAL_MEMORY),
        "memory_allocated": ALLOCATED_MEMORY,
        "max_memory_allocated": PEAK_MEMORY,
        "reset_peak_memory_stats": None,
        "empty_cache": None,
        "synchronize": None,
    }
    with ExitStack() as stack:
        # torch does this by itself on a machine without a GPU, but this one claims to have one.
        stack.enter_context(patch.object(FakeTensorMode, "avoid_device_init", new=True))
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        for name, value in properties.items():
            stack.enter_context(patch.object(torch.cuda, name, return_value=value))
        stack.enter_context(patch.object(FakeTensor, "tolist", _to_list))
        # Modules are created on their final device: torch cannot replace a parameter's fake tensor.
        stack.enter_context(patch.object(torch.nn.Module, "to", lambda module, *_, **__: module))
        # Copying a parameter would copy memory that does not exist.
        stack.enter_context(patch.object(FakeTensor, "__deepcopy__", _copied))
        # In inference mode the dispatcher would show operators before they are decomposed, unlike on a GPU.
        stack.enter_context(patch.object(torch._C, "_InferenceMode", lambda _: torch.no_grad()))
        # The autograd engine counts devices when its first thread starts, which may be before the fake device exists.
        stack.enter_context(torch.autograd.set_multithreading_enabled(False))
        yield stack.enter_context(DeviceLog())
