"""C++ operators for what the engine computes on a CPU in bfloat16 (`cpu.cpp`), on processors with AVX2 or AVX-512.

Between matrix products, PyTorch runs many small operators. Each is a call and a pass over memory, and together they
cost as much as the products. The kernels fuse them, and prefetch weights for the products of decode steps.

Numbers are stored in bfloat16, which halves what a decode step reads. Without bfloat16 instructions, products widen
them to floats as they are loaded. The source is compiled for this processor on first use, within seconds, and cached in
a directory. Without a compiler, the engine uses PyTorch's operators.
"""

from __future__ import annotations

import functools
import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.nn import functional as F
from torch.utils import cpp_extension

from swiftkv_platform.engine.kernels.packing import BLOCK_COLUMNS, PackedWeight, pack_weight
from swiftkv_platform.model.weights.quantization import IntegerWeight
from swiftkv_platform.private_directories import ensure_private_directory, is_private

if TYPE_CHECKING:
    from swiftkv_platform.engine.native_layers import NativeRMSNorm
    from swiftkv_platform.model.packed_attention import VarlenOperator

SOURCE_FILE = Path(__file__).with_name("cpu.cpp")
HEADER_FILES = sorted(SOURCE_FILE.parent.glob("*.h"))
CACHE_DIRECTORY_VARIABLE = "SWIFTKV_KERNEL_CACHE"
"""Environment variable: cache directory of compiled kernels. Default: `~/.cache/swiftkv/kernels`."""
VECTOR_FLAGS = {
    "AVX512": ("-DCPU_CAPABILITY=AVX512", "-DCPU_CAPABILITY_AVX512"),
    "AVX2": ("-DCPU_CAPABILITY=AVX2", "-DCPU_CAPABILITY_AVX2", "-mno-avx512f"),
}
"""Compiler flags for torch's vector headers, by the CPU capability that torch reports."""
COMPILER_FLAGS = ("-std=c++20", "-O3", "-march=native", "-fPIC", "-shared", "-fopenmp", "-w")
BUILD_TIMEOUT_S = 600
HEAD_DIM_MULTIPLE = 32
"""`attend` needs a head size that is a multiple of this."""
_CACHE_FORMATS = {None: 0, torch.float8_e4m3fn: 1, torch.int8: 2}
"""Value of `Format` in the C++ source, by the quantized dtype of the cache."""
NO_WINDOW = torch.iinfo(torch.int64).max >> 1


def supports_model(model: Any) -> bool:
    """Whether the kernels can run this model: on a CPU, in bfloat16, if they are available."""
    return bool(model.device.type == "cpu" and model.dtype == torch.bfloat16) and is_available()


def is_available() -> bool:
    return find_kernel_obstacle() is None


@functools.cache
def find_kernel_obstacle() -> str | None:
    """Compile and load the kernels, once per process. Returns why they are unavailable, or None."""
    try:
        torch.ops.load_library(str(_find_or_build_library()))
        with torch.autocast("cpu", enabled=False):  # the caller may train
            _verify_kernels()
        _get_num_threads()
    except (_UnavailableError, OSError, RuntimeError) as error:
        return str(error)
    return None


def describe_instructions() -> str:
    """Return the vector or matrix instructions that the kernels use: AVX2, AVX-512, AVX-512 BF16 or AMX."""
    names: str = torch.ops.swiftkv_cpu.instructions()
    return names


class _UnavailableError(Exception):
    """The kernels are unavailable, for the reason in the message."""


def _find_or_build_library() -> Path:
    """Return the shared library from the cache directory, and build it first if needed.

    Its name has a digest of sources, compiler, flags and PyTorch's version. No other user can write to the directory.
    Several processes may build it at the same time.
    """
    capability = torch.backends.cpu.get_cpu_capability()
    if capability not in VECTOR_FLAGS:
        raise _UnavailableError(f"the processor has {capability}; the kernels need {' or '.join(VECTOR_FLAGS)}")
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    if compiler is None:
        raise _UnavailableError("no C++ compiler; install g++ or set CXX")
    given = os.environ.get(CACHE_DIRECTORY_VARIABLE)
    directory = Path(given) if given else Path.home() / ".cache" / "swiftkv" / "kernels"
    flags = [*COMPILER_FLAGS, *VECTOR_FLAGS[capability]]
    target = subprocess.run([compiler, "-march=native", "-Q", "--help=target"], capture_output=True, check=False).stdout
    sources = b"".join(path.read_bytes() for path in (SOURCE_FILE, *HEADER_FILES))
    digest = hashlib.sha256(sources + target + repr([compiler, flags, torch.__version__]).encode())
    library = ensure_private_directory(directory) / f"cpu-{digest.hexdigest()[:16]}.so"
    if not is_private(library):  # another user could replace it
        _build_library(compiler, flags, library)
    return library


def _build_library(compiler: str, flags: list[str], library: Path) -> None:
    includes = [f"-isystem{path}" for path in cpp_extension.include_paths()]
    libraries = [f"-L{path}" for path in cpp_extension.library_paths()] + ["-ltorch_cpu", "-lc10"]
    with tempfile.TemporaryDirectory(dir=library.parent) as directory:
        built = Path(directory) / library.name
        command = [compiler, *flags, *includes, str(SOURCE_FILE), "-o", str(built), *libraries]
        try:
            run = subprocess.run(command, capture_output=True, text=True, timeout=BUILD_TIMEOUT_S, check=False)
        except subprocess.TimeoutExpired as error:
            raise _UnavailableError(f"{compiler} did not finish within {BUILD_TIMEOUT_S} s") from error
        if run.returncode:
            raise _UnavailableError(f"{compiler} failed: {run.stderr[-2000:]}")
        built.chmod(0o700)
        built.replace(library)


def _verify_kernels() -> None:
    """Raise `_UnavailableError` if the kernels' results differ from PyTorch's, e.g. on a processor without some
    instructions."""
    query = torch.linspace(-1, 1, 2 * 20 * 32).sin().bfloat16().view(1, 2, 20, 32)
    keys, values = query[0].flip(1), query[0].flip(2)
    tables = torch.tensor([[0, 20, 0, 1]]), torch.arange(20), torch.tensor([[0, 20]])
    found = attend(query, keys, values, *tables, scaling=1.0).float().transpose(1, 2)
    wanted = F.scaled_dot_product_attention(
        query.float(), keys[None].float(), values[None].float(), is_causal=True, scale=1.0
    )
    if not torch.allclose(found, wanted, atol=0.02):
        raise _UnavailableError("the attention kernel returned wrong numbers")
    integers = torch.arange(-64, 64, dtype=torch.int8).repeat(BLOCK_COLUMNS, 1)
    x = query.reshape(-1, integers.shape[1])[:1].expand(2 * BLOCK_COLUMNS, -1).contiguous()  # rows for tiles
    found = linear(
        x, pack_weight(IntegerWeight(integers, torch.full((BLOCK_COLUMNS, 1), 0.01), "int8")), None, BLOCK_COLUMNS
    )
    if not torch.allclose(found.float(), F.linear(x.float(), 0.01 * integers.float()), rtol=0.02, atol=0.02):
        raise _UnavailableError("the integer product kernel returned wrong numbers")


@functools.cache
def _get_num_threads() -> int:
    """Return PyTorch's number of threads at the first call."""
    return torch.get_num_threads()


@contextmanager
def reserve_threads_for_kernels() -> Iterator[None]:
    """Let kernels called by this thread use all threads, and PyTorch's operators one.

    PyTorch's threads spin for milliseconds after each operator, on cores that the kernels' threads need.
    """
    # In a thread that starts meanwhile (an engine that is swapped in), PyTorch reports 1. Then use the number at
    # loading.
    count = torch.get_num_threads()
    if count == 1:
        count = _get_num_threads()
    torch.ops.swiftkv_cpu.use_threads(count)
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(count)
        torch.ops.swiftkv_cpu.use_threads(0)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """RMSNorm: [..., size] -> [..., size]. `weight`: from `pad_to_block`."""
    y: torch.Tensor = torch.ops.swiftkv_cpu.rms_norm(x, weight, epsilon)
    return y


def linear(x: torch.Tensor, packed: PackedWeight, bias: torch.Tensor | None, size_out: int) -> torch.Tensor:
    """y = x W^T + b: x [..., size_in] -> [..., size_out]. `bias`: from `pad_to_block`.

    For integer weights, x is rounded to integers: each row to 16 bits or, for int4 without AMX, each 32 adjacent inputs
    to 8 bits. A row's result does not depend on other rows.
    """
    return torch.unflatten(linear_with_norm(x.flatten(0, -2), packed, bias, size_out), 0, x.shape[:-1])


def linear_with_norm(
    x: torch.Tensor,
    packed: PackedWeight,
    bias: torch.Tensor | None,
    size_out: int,
    *,
    norm: NativeRMSNorm | None = None,
) -> torch.Tensor:
    """`linear` of norm(x), for x [num_tokens, size_in]."""
    weight, epsilon = (None, 0.0) if norm is None else (norm.weight, norm.variance_epsilon)
    y: torch.Tensor = torch.ops.swiftkv_cpu.linear.default(x, *packed, bias, size_out, weight, epsilon)
    return y


def compute_logits(x: torch.Tensor, packed: PackedWeight, bias: torch.Tensor | None, size_out: int) -> torch.Tensor:
    """`linear` with results in float32."""
    y = torch.ops.swiftkv_cpu.logits(x.flatten(0, -2), *packed, bias, size_out)
    return torch.unflatten(y, 0, x.shape[:-1])


def gated_linear(x: torch.Tensor, packed: PackedWeight, size_out: int) -> torch.Tensor:
    """silu(x G^T) * x U^T: x [..., size_in] -> [..., size_out]."""
    y = torch.ops.swiftkv_cpu.gated_linear.default(x.flatten(0, -2), *packed, size_out)
    return torch.unflatten(y, 0, x.shape[:-1])


def rotate(x: torch.Tensor, rotation: torch.Tensor | tuple[torch.Tensor, ...]) -> torch.Tensor:
    """RoPE as `model.attention.rotate`, for x [1, num_heads, num_tokens, head_dim]."""
    cos, sin = rotation
    y: torch.Tensor = torch.ops.swiftkv_cpu.rotate(x, cos, sin)
    return y


def write_slots(
    rows: torch.Tensor, slots: torch.Tensor, x: torch.Tensor, quantized_dtype: torch.dtype | None = None
) -> None:
    """Write x [num_heads, num_tokens, dim] to `slots` [num_tokens] of `rows` [num_heads, num_slots, dim]. With a
    quantized dtype, write the result of `model.cache.pack` to [num_heads, num_slots, dim + 2]."""
    torch.ops.swiftkv_cpu.write(rows, slots, x, _CACHE_FORMATS[quantized_dtype])


def write_projected(
    projected: torch.Tensor,
    slots: torch.Tensor,
    layers: Sequence[tuple[torch.Tensor, torch.Tensor]],
    *,
    norms: Sequence[NativeRMSNorm],
    rotation: Sequence[torch.Tensor] | None,
    quantized_dtype: torch.dtype | None,
) -> None:
    """Write keys and values of several cache layers to the slots of a step's tokens: norms, RoPE and `write_slots` in
    one.

    Args:
        projected: keys and values of all heads, layer by layer, [num_tokens, size].
        slots: int64 [num_tokens].
        layers: `rows` of keys and of values, per layer.
        norms: norm of the key heads, per layer; empty: no norms.
        rotation: cosines and sines [1, num_tokens, size] for a head's first dimensions; None: no RoPE.
    """
    torch.ops.swiftkv_cpu.write_projected.default(
        projected,
        [norm.weight for norm in norms],
        norms[0].variance_epsilon if norms else 0.0,
        *(rotation or (None, None)),
        slots,
        [keys for keys, _ in layers],
        [values for _, values in layers],
        _CACHE_FORMATS[quantized_dtype],
    )


def attend(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    sequences: torch.Tensor,
    positions: torch.Tensor,
    runs: torch.Tensor,
    *,
    scaling: float,
    window: int | None = None,
    quantized_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Attention of a flat batch of sequences to their paged contexts.

    Args:
        query: [1, num_heads, num_tokens, head_dim].
        keys: of all slots, [num_kv_heads, num_slots, head_dim]; with a quantized dtype, as `write_slots` stores
            them.
        values: likewise.
        sequences: first query, number of queries, first run and number of runs per sequence, int64 [num_sequences, 4].
        positions: position of each query in its sequence, ascending, int64 [num_tokens].
        runs: adjacent slots [first, end), int64 [num_runs, 2].
        window: number of tokens that a query attends to, including itself; None: all tokens up to itself.

    Returns:
        [1, num_tokens, num_heads, head_dim].
    """
    y: torch.Tensor = torch.ops.swiftkv_cpu.attend(
        query,
        keys,
        values,
        sequences,
        positions,
        runs,
        scaling,
        NO_WINDOW if window is None else window,
        _CACHE_FORMATS[quantized_dtype],
    )
    return y


def find_packed_operator(device: torch.device, dtype: torch.dtype) -> VarlenOperator | None:
    """Return `attend_packed` if it can run on this device with this dtype. It has no backward pass."""
    return attend_packed if device.type == "cpu" and dtype == torch.bfloat16 and is_available() else None


def attend_packed(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seq_q: torch.Tensor,
    cu_seq_k: torch.Tensor,
    _max_q: int,
    _max_k: int,
    *,
    scale: float | None,
    window_size: tuple[int, int],
    **_: Any,
) -> torch.Tensor:
    """Causal attention of concatenated sequences, with the signature of `torch.nn.attention.varlen.varlen_attn`. The
    queries of a sequence are those of its last keys."""
    # 1. tables: each sequence has one run of slots, its keys
    num_queries = cu_seq_q.diff()
    sequence = torch.arange(num_queries.numel())
    tables = torch.stack([cu_seq_q[:-1], num_queries, sequence, torch.ones_like(sequence)], dim=1).long()
    ends = (cu_seq_k.diff() - cu_seq_q[1:]).repeat_interleave(num_queries)
    positions = (torch.arange(query.shape[0]) + ends).long()
    runs = torch.stack([cu_seq_k[:-1], cu_seq_k[1:]], dim=1).long()
    # 2. attend to heads of a size that the kernel supports
    head_dim, value_dim = query.shape[-1], value.shape[-1]
    padding = (0, -head_dim % HEAD_DIM_MULTIPLE)
    query, key, value = (F.pad(tensor, padding).transpose(0, 1) for tensor in (query, key, value))
    output = attend(
        query[None],
        key.contiguous(),
        value.contiguous(),
        tables[num_queries > 0],
        positions,
        runs,
        scaling=head_dim**-0.5 if scale is None else scale,
        window=None if window_size[0] < 0 else window_size[0] + 1,
    )
    return output[0, ..., :value_dim]


class LayerOperands(NamedTuple):
    """Operands of `run_layers`, concatenated over layers."""

    weights: list[torch.Tensor | None]
    """Per layer: `PackedWeight` and bias of its four products (queries, keys and values; output; gate and up; down),
    and norms before attention, before the MLP, of query heads and of key heads."""
    sizes: list[int]
    """Per layer: number of outputs of each product, number of query heads, offsets of queries and of keys in the first
    product's outputs (values follow keys; -1: the layer reads another layer's), and the window of `attend`."""
    factors: list[float]
    """Per layer: epsilons of the norms before attention, before the MLP and of heads, and the scaling of `attend`."""


def run_layers(
    x: torch.Tensor,
    operands: LayerOperands,
    rotations: list[torch.Tensor | None],
    slots: list[torch.Tensor | None],
    keys: list[torch.Tensor],
    values: list[torch.Tensor],
    tables: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    quantized_dtype: torch.dtype | None,
) -> torch.Tensor:
    """Run decoder layers over x [num_tokens, hidden_size]: x += attention(norm(x)), then x += MLP(norm(x)), per layer.

    Args:
        rotations: per layer, cosines and sines as in `write_projected`, or None twice.
        slots: per layer, slots of the tokens' keys and values, int64 [num_tokens]; None: they are already written.
        keys: per layer, as in `attend`; values likewise.
        tables: sequences, positions and runs of `attend`.
    """
    y: torch.Tensor = torch.ops.swiftkv_cpu.layers.default(
        x, *operands, rotations, slots, keys, values, *tables, _CACHE_FORMATS[quantized_dtype]
    )
    return y
