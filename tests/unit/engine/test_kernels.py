"""The engine's C++ operators compute what PyTorch's do; without a compiler the engine runs without them."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import accumulate, product
from pathlib import Path
from typing import Any

import pytest
import torch
from structlog.testing import capture_logs
from torch import nn
from torch.nn import functional as F
from transformers import AutoModelForCausalLM
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from swiftkv_platform.engine import EngineConfig, LLMEngine, SamplingParams, kernels, loading
from swiftkv_platform.engine.kernels import packing
from swiftkv_platform.engine.kernels.packing import Arena
from swiftkv_platform.engine.loading import load_model
from swiftkv_platform.engine.native_layers import NativeEmbedding, NativeHead, NativeRMSNorm
from swiftkv_platform.engine.speculative import estimate_draft_costs
from swiftkv_platform.model.attention import rotate
from swiftkv_platform.model.cache import dequantize_from_bytes, quantize_to_bytes
from swiftkv_platform.model.weights.quantization import IntegerWeight, WeightFormat, dequantize_weight, quantize_weight

BF16 = torch.bfloat16


def numbers(*shape: int, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))) * scale).to(BF16)


def assert_rounded(actual: torch.Tensor, exact: torch.Tensor, atol: float = 1e-3) -> None:
    """Check that `actual` is `exact` to about the last bit of bfloat16."""
    assert actual.dtype == BF16
    torch.testing.assert_close(actual.float(), exact, atol=atol, rtol=1 / 128)


@pytest.mark.parametrize("size", [8, 40, 64, 1000])
def test_rms_norm(size: int, native_kernels: None) -> None:
    """Contiguous rows are normalized, and heads of a strided view."""
    weight, heads = torch.randn(size), numbers(1, 5, 3, 2 * size).transpose(1, 2)[..., :size]
    for x in (numbers(1, 70, size), heads):
        actual = kernels.rms_norm(x, packing.pad_to_block(weight), 1e-5)
        assert_rounded(actual, F.rms_norm(x.float(), (size,), weight, 1e-5))


shapes = pytest.mark.parametrize(("size_in", "size_out"), [(64, 40), (96, 1), (1024, 96), (2816, 64), (9000, 33)])


@shapes
def test_linear(size_in: int, size_out: int, native_kernels: None) -> None:
    weight, biases = numbers(size_out, size_in, scale=size_in**-0.5), (None, torch.randn(size_out))
    for num_tokens, bias in product((1, 2, 4, 7, 8, 9, 32, 33, 47, 64, 300), biases):
        x = numbers(1, num_tokens, size_in)
        actual = kernels.linear(
            x, packing.pack_weight(weight), None if bias is None else packing.pad_to_block(bias), size_out
        )
        assert_rounded(actual, F.linear(x.float(), weight.float(), bias))


@shapes
def test_gated_linear(size_in: int, size_out: int, native_kernels: None) -> None:
    gate, up = (numbers(size_out, size_in, scale=size_in**-0.5) for _ in range(2))
    up = up.flip(0)
    for num_tokens in (1, 8, 33, 300):
        x = numbers(1, num_tokens, size_in)
        actual = kernels.gated_linear(x, packing.pack_gated(gate, up), size_out)
        assert_rounded(actual, F.silu(F.linear(x.float(), gate.float())) * F.linear(x.float(), up.float()))


@shapes
def test_a_norm_before_a_product_is_as_apart(size_in: int, size_out: int, native_kernels: None) -> None:
    packed = packing.pack_weight(numbers(size_out, size_in, scale=size_in**-0.5))
    norm = NativeRMSNorm(LlamaRMSNorm(size_in, eps=1e-5))
    norm.weight.copy_(packing.pad_to_block(torch.randn(size_in)))
    for num_tokens in (1, 33):
        x = numbers(num_tokens, size_in)
        apart = kernels.linear(norm(x), packed, None, size_out)
        assert torch.equal(kernels.linear_with_norm(x, packed, None, size_out, norm=norm), apart)


@shapes
def test_logits_are_not_rounded(size_in: int, size_out: int, native_kernels: None) -> None:
    weight, x = numbers(size_out, size_in, scale=size_in**-0.5), numbers(1, 5, size_in)
    actual = kernels.compute_logits(x, packing.pack_weight(weight), None, size_out)
    torch.testing.assert_close(actual, F.linear(x.float(), weight.float()), atol=2e-6 * size_in**0.5, rtol=1e-5)


def test_a_tied_head_has_the_embeddings(native_kernels: None) -> None:
    """Embeddings are looked up in the head's packed weight, the only copy."""
    embedding = nn.Embedding(75, 48, dtype=BF16)
    head = NativeHead(embedding.weight, None, Arena(1 << 16))
    ids = torch.tensor([[0, 31, 32, 74, 5]])
    assert torch.equal(NativeEmbedding(embedding, head)(ids), embedding(ids))


FORMS = [("int8", None), ("int4", 32), ("int4", 64)]


def rounded(weight: torch.Tensor, form: WeightFormat, group: int | None) -> IntegerWeight:
    return IntegerWeight(*quantize_weight(weight, form, group), form)


@pytest.fixture(params=[False, True], ids=["vectors", "tiles"])
def uses_tiles(request: pytest.FixtureRequest, native_kernels: None) -> Iterator[bool]:
    """Whether products are those for processors with AMX. They also run with AVX-512 BF16."""
    if not hasattr(torch.ops.swiftkv_cpu, "use_tiles"):
        if request.param:
            pytest.skip(f"{kernels.describe_instructions()} has no such products")
        yield False
        return
    before = kernels.describe_instructions() == "AMX"
    torch.ops.swiftkv_cpu.use_tiles(request.param)
    yield request.param
    torch.ops.swiftkv_cpu.use_tiles(before)


def round_inputs(x: torch.Tensor) -> torch.Tensor:
    """Round inputs to 8 bits as products in int4 do: 32 adjacent inputs share a scale."""
    units = x.float().unflatten(-1, (-1, 32))
    largest = units.abs().amax(-1, keepdim=True)
    factors = torch.where(
        largest > 0, torch.tensor(127.0) / largest, 0.0
    )  # `127.0 / largest` multiplies by a reciprocal
    return ((units * factors).round() * (largest / 127)).flatten(-2)


@pytest.mark.parametrize(("form", "group"), FORMS)
@pytest.mark.parametrize(("size_in", "size_out"), [(64, 40), (192, 1), (1024, 96), (2816, 64)])
def test_linear_in_integers(
    size_in: int, size_out: int, form: WeightFormat, group: int | None, uses_tiles: bool
) -> None:
    """Results are as close to float results as bfloat16 allows, and a row's do not depend on the rest of the batch.
    int4 rounds its inputs, except with tiles."""
    weight = rounded(numbers(size_out, size_in, scale=size_in**-0.5), form, group)
    floats, bias = dequantize_weight(weight.integers, weight.scale), torch.randn(size_out)
    x = numbers(1, 300, size_in)
    x[..., 5] *= 100  # as in models, one input dwarfs the others, which must keep 8 bits or more
    x[0, 3] = 0
    packed = packing.pack_weight(weight)
    inputs = round_inputs(x) if form == "int4" and not uses_tiles else x.float()
    together = kernels.linear(x, packed, None, size_out)
    assert_rounded(together, F.linear(inputs, floats), atol=0.01)
    found = kernels.linear(x, packed, packing.pad_to_block(bias), size_out)
    assert_rounded(found, F.linear(inputs, floats, bias), atol=0.01)
    for count in (1, 2, 3, 4, 5, 8, 9, 13, 16, 33, 47, 64):
        assert torch.equal(kernels.linear(x[:, :count], packed, None, size_out), together[:, :count])


@pytest.mark.parametrize(("form", "group"), FORMS)
def test_gated_linear_in_integers(form: WeightFormat, group: int | None, uses_tiles: bool) -> None:
    gate, up = (rounded(numbers(size, 128, scale=0.1), form, group) for size in (71, 71))
    up = IntegerWeight(up.integers.flip(0), up.scale.flip(0), form)
    wide = [dequantize_weight(one.integers, one.scale) for one in (gate, up)]
    for num_tokens in (1, 5, 33, 300):
        x = numbers(1, num_tokens, 128)
        actual = kernels.gated_linear(x, packing.pack_gated(gate, up), 71)
        inputs = round_inputs(x) if form == "int4" and not uses_tiles else x.float()
        assert_rounded(actual, F.silu(F.linear(inputs, wide[0])) * F.linear(inputs, wide[1]))


@pytest.mark.parametrize(("form", "group"), FORMS)
@pytest.mark.parametrize("broken", [float("nan"), float("inf"), float("-inf")])
def test_a_row_that_is_not_finite_is_so_alone(
    broken: float, form: WeightFormat, group: int | None, uses_tiles: bool
) -> None:
    packed, x = packing.pack_weight(rounded(numbers(40, 64), form, group)), numbers(6, 64)
    exact = kernels.linear(x, packed, None, 40)
    x[2, 7] = broken
    found = kernels.linear(x, packed, None, 40)
    assert found[2].isnan().all()
    assert torch.equal(found[[0, 1, 3, 4, 5]], exact[[0, 1, 3, 4, 5]])


def test_int4_with_scales_of_others_is_not_packed() -> None:
    weight = rounded(numbers(8, 64), "int4", 32)
    assert packing.can_pack(weight)
    assert not packing.can_pack(weight._replace(scale=torch.rand(8, 2) + 0.1))
    assert not packing.can_pack(IntegerWeight(weight.integers, torch.ones(8, 4), "int4")), "groups of 16"


@contextmanager
def at_threads(count: int) -> Iterator[None]:
    """Let PyTorch and the kernels use `count` threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def test_any_number_of_threads_gives_the_same(native_kernels: None) -> None:
    """Threads share out the blocks of the weight for few rows, and the rows themselves for many."""
    weight = numbers(200, 64, scale=0.1)
    for num_tokens, threads in product((2, 700, 40_000), (1, 3)):
        x = numbers(num_tokens, 64)
        once = kernels.linear(x, packing.pack_weight(weight), None, 200)
        with at_threads(threads):
            assert torch.equal(kernels.linear(x, packing.pack_weight(weight), None, 200), once)


def test_a_thread_that_begins_during_a_step_has_all_threads(
    native_kernels: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread of an engine that is swapped in begins so, and PyTorch tells it of one thread."""
    monkeypatch.setattr(kernels, "_get_num_threads", lambda: 3)
    counts = []

    def begin() -> None:
        counts.append(torch.get_num_threads())
        with kernels.reserve_threads_for_kernels():
            counts.append(torch.get_num_threads())
        counts.append(torch.get_num_threads())

    with at_threads(3), kernels.reserve_threads_for_kernels():
        thread = threading.Thread(target=begin)
        thread.start()
        thread.join()
    assert counts == [1, 1, 3]


def test_threads_serve_whoever_calls(native_kernels: None) -> None:
    """Results are right for concurrent callers, and in a forked child, which has no other thread."""
    cases = []
    for size_out in (33, 320, 1024, 4096):
        packed, x = packing.pack_weight(numbers(size_out, 256)), numbers(1, 3, 256)
        cases.append((x, packed, size_out, kernels.linear(x, packed, None, size_out)))

    def agree(times: int) -> bool:
        with at_threads(4):
            return all(torch.equal(kernels.linear(*case[:2], None, case[2]), case[3]) for case in cases * times)

    with ThreadPoolExecutor(4) as callers:
        assert all(callers.map(agree, [200] * 4))
    child = os.fork()
    if child == 0:
        signal.alarm(60)
        os._exit(int(not agree(1)))
    assert os.waitpid(child, 0)[1] == 0


@pytest.mark.parametrize("window", [None, 300])
def test_any_number_of_threads_attends_the_same(window: int | None, native_kernels: None) -> None:
    """Threads share out the queries of a chunk, whose last part has three, beside a sequence of few queries."""
    chunk, few, context = 2 * 1024 + 3, 5, 2500
    query, keys, values = numbers(1, 2, chunk + few, 64), numbers(1, context, 64), numbers(1, context, 64)
    sequences = torch.tensor([[0, chunk, 0, 1], [chunk, few, 1, 1]])
    positions = torch.cat([torch.arange(context - chunk, context), torch.arange(few)])
    runs, outputs = torch.tensor([[0, context], [0, few]]), []
    for threads in (1, 2, 5):
        with at_threads(threads):
            outputs.append(kernels.attend(query, keys, values, sequences, positions, runs, scaling=0.3, window=window))
    assert torch.equal(outputs[0], outputs[1])
    assert torch.equal(outputs[0], outputs[2])


def test_kernels_are_checked_alike_while_training(native_kernels: None) -> None:
    with torch.autocast("cpu", dtype=BF16):
        assert kernels.find_kernel_obstacle.__wrapped__() is None


@pytest.mark.parametrize(("dim", "value_dim"), [(64, 64), (48, 48), (48, 32)])
@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize(
    "lengths", [[(70, 70), (1, 1), (130, 130)], [(3, 90), (0, 0), (64, 64), (40, 41)]], ids=["samples", "spans"]
)
def test_packed_attention_without_gradients_is_that_of_sdpa(
    lengths: list[tuple[int, int]], window: int | None, dim: int, value_dim: int, native_kernels: None
) -> None:
    """Training and evaluation run the kernel wherever no input needs gradients, and SDPA elsewhere."""
    operator = kernels.find_packed_operator(torch.device("cpu"), BF16)
    assert operator is not None
    assert kernels.find_packed_operator(torch.device("cpu"), torch.float32) is None
    num_queries, num_keys = zip(*lengths, strict=True)
    query = numbers(sum(num_queries), 4, dim)
    key, value = numbers(sum(num_keys), 2, dim), F.pad(numbers(sum(num_keys), 2, value_dim), (0, dim - value_dim))
    cumulative = [torch.tensor([0, *accumulate(of)], dtype=torch.int32) for of in (num_queries, num_keys)]
    window_size = (-1 if window is None else window - 1, 0)
    output = operator(query, key, value, *cumulative, 130, 130, scale=None, window_size=window_size, enable_gqa=True)
    parts = zip(query.split(num_queries), key.split(num_keys), value.split(num_keys), strict=True)
    exact = []
    for queries, keys, values in parts:
        behind = torch.arange(len(keys) - len(queries), len(keys))[:, None] - torch.arange(len(keys))
        seen = (behind >= 0) & (behind < (window or len(keys) + 1))
        inputs = (tensor.float().transpose(0, 1)[None] for tensor in (queries, keys, values))
        exact.append(F.scaled_dot_product_attention(*inputs, attn_mask=seen, enable_gqa=True)[0].transpose(0, 1))
    assert_rounded(output, torch.cat(exact), atol=0.01)


@pytest.mark.parametrize("dim", [8, 24, 64, 128])
def test_rotate_parts_of_a_fused_projection(dim: int, native_kernels: None) -> None:
    heads = numbers(1, 30, 5 * dim).split([2 * dim, 3 * dim], dim=-1)[1].unflatten(-1, (-1, dim)).transpose(1, 2)
    rotation = numbers(1, 30, dim), numbers(1, 30, dim, scale=0.5)
    actual = kernels.rotate(heads, rotation)
    assert actual.shape == heads.shape
    cos, sin = rotation
    torch.testing.assert_close(
        actual.float(), rotate(heads.float(), (cos.float(), sin.float())), atol=0.02, rtol=1 / 128
    )


def test_write(native_kernels: None) -> None:
    rows, x = numbers(3, 50, 40), numbers(1, 20, 3, 40)[0].transpose(0, 1)
    slots = torch.randperm(50, generator=torch.Generator().manual_seed(0))[:20]
    expected = rows.index_copy(1, slots, x)
    kernels.write_slots(rows, slots, x)
    assert torch.equal(rows, expected)


@pytest.mark.parametrize("quantized_dtype", [torch.float8_e4m3fn, torch.int8])
def test_write_in_eight_bits_is_what_pack_makes(quantized_dtype: torch.dtype, native_kernels: None) -> None:
    """Rows of any scale are packed as `pack` does; a row that is not finite comes back as NaN."""
    x = torch.cat([numbers(3, 40, 32, scale=scale) for scale in (1e-30, 1e-3, 1.0, 1e4, 1e30)], dim=1)
    x[0, 0] = 0.0
    x[0, 1, 5] = torch.finfo(BF16).max
    x[1, 2, 3] = -x[1, 2].abs().amax()
    slots = torch.randperm(300, generator=torch.Generator().manual_seed(0))[:200]
    rows = torch.zeros(3, 300, 34, dtype=torch.uint8)
    kernels.write_slots(rows, slots, x, quantized_dtype)
    assert torch.equal(rows[:, slots], quantize_to_bytes(x, quantized_dtype))
    for broken in (float("nan"), float("inf"), float("-inf")):
        x[0, 0, 7] = broken
        kernels.write_slots(rows, slots[:1], x[:, :1], quantized_dtype)
        assert dequantize_from_bytes(rows[:1, slots[:1]], quantized_dtype, BF16).isnan().all()


@pytest.mark.parametrize("quantized_dtype", [None, torch.int8])
@pytest.mark.parametrize("normalized", [False, True])
def test_layers_written_at_once_are_as_one_by_one(
    quantized_dtype: torch.dtype | None, normalized: bool, native_kernels: None
) -> None:
    """Norms, RoPE and slots of three layers are equal to the bit, on more tokens than a part has."""
    layers, heads, dim, tokens = 3, 2, 32, 70
    projected, slots = numbers(tokens, 2 * layers * heads * dim), torch.randperm(100)[:tokens]
    rotation = numbers(1, tokens, dim), numbers(1, tokens, dim, scale=0.5)
    norms = [NativeRMSNorm(LlamaRMSNorm(dim, eps=1e-5)) for _ in range(layers)] if normalized else []
    for norm in norms:
        norm.weight.copy_(packing.pad_to_block(torch.randn(dim)))
    size, dtype = (dim, BF16) if quantized_dtype is None else (dim + 2, torch.uint8)
    stored = torch.zeros(2, layers, 2, heads, 100, size, dtype=dtype)
    kernels.write_projected(
        projected, slots, list(stored[0]), norms=norms, rotation=rotation, quantized_dtype=quantized_dtype
    )
    for layer, parts in enumerate(projected.view(tokens, layers, 2, heads, dim).permute(1, 2, 3, 0, 4)):
        keys, values = parts[0][None], parts[1]
        keys = norms[layer](keys) if normalized else keys
        kernels.write_slots(stored[1, layer, 0], slots, kernels.rotate(keys, rotation)[0], quantized_dtype)
        kernels.write_slots(stored[1, layer, 1], slots, values, quantized_dtype)
    assert stored[0].any()
    assert torch.equal(stored[0], stored[1])


@pytest.mark.parametrize("compiler", ["no-such-compiler", "false"])
def test_without_a_compiler_they_are_not_available(
    compiler: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    monkeypatch.setenv("CXX", compiler)
    monkeypatch.setenv(kernels.CACHE_DIRECTORY_VARIABLE, str(tmp_path))
    problem = kernels.find_kernel_obstacle.__wrapped__()
    assert "C++ compiler" in problem or "false failed" in problem
    assert list(tmp_path.iterdir()) == []


def test_a_library_that_others_could_have_placed_is_built_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler, cache = tmp_path / "compiler", tmp_path / "cache"
    compiler.write_text('#!/bin/sh\nwhile [ $# -gt 0 ]; do [ "$1" = -o ] && echo built > "$2"; shift; done\n')
    compiler.chmod(0o755)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setenv(kernels.CACHE_DIRECTORY_VARIABLE, str(cache))
    library = kernels._find_or_build_library()
    assert (library.read_text(), cache.stat().st_mode & 0o777) == ("built\n", 0o700)
    library.write_text("kept")
    assert kernels._find_or_build_library().read_text() == "kept", "it is not built again"
    library.chmod(0o777)
    assert kernels._find_or_build_library().read_text() == "built\n"
    library.unlink()
    (tmp_path / "evil.so").write_text("evil")
    library.symlink_to(tmp_path / "evil.so")
    assert kernels._find_or_build_library().read_text() == "built\n"
    if os.geteuid() == 0:
        os.chown(cache, 12345, 12345)
        assert "belongs to user 12345" in kernels.find_kernel_obstacle.__wrapped__()


@pytest.mark.parametrize("dtype", ["auto", "bfloat16"])
@pytest.mark.parametrize("is_fast", [True, False])
def test_an_engine_does_without(
    dtype: Any, is_fast: bool, swiftkv_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model whose dtype PyTorch multiplies slowly becomes float32, unless its dtype is given."""
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "DEFAULT")
    problem = kernels.find_kernel_obstacle.__wrapped__()
    assert problem == "the processor has DEFAULT; the kernels need AVX512 or AVX2"
    monkeypatch.setattr(kernels, "find_kernel_obstacle", lambda: problem)
    monkeypatch.setattr(loading, "has_fast_products", lambda dtype: is_fast)
    AutoModelForCausalLM.from_pretrained(swiftkv_dir, dtype=BF16).save_pretrained(tmp_path)
    with capture_logs() as logs:
        engine = LLMEngine.from_pretrained(tmp_path, EngineConfig(dtype=dtype, weights="int8"))
    operators = "PyTorch, float32" if dtype == "auto" and not is_fast else "PyTorch, bfloat16"
    assert engine.description.operators == operators
    (line,) = [line for line in logs if line["event"] == "cpu_operators"]
    assert line["operators"] == operators
    assert line["reason"] == (
        f"no native kernels: {problem}; weights 'int8' are rounded but multiplied as floats, which saves no time: use "
        "weights 'auto'"
    )
    assert len(engine.generate([[5, 6, 7]], SamplingParams(max_tokens=5, ignore_eos=True))[0].token_ids) == 5


@pytest.mark.parametrize(("weights", "operators"), [("auto", "bfloat16"), ("int4", "bfloat16, int4, int8")])
def test_an_engine_states_what_computes_its_model(
    weights: Any, operators: str, swiftkv_dir: Path, native_kernels: None
) -> None:
    engine = LLMEngine.from_pretrained(swiftkv_dir, EngineConfig(dtype="bfloat16", weights=weights))
    assert engine.description.operators == f"native kernels ({kernels.describe_instructions()}), {operators}"


OTHER_PROCESSORS = {
    "AVX2": ({"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"}, ""),
    "AVX-512": ({}, " -mno-avx512bf16 -mno-avx512vnni"),
}
"""Environment and compiler flags that leave out instructions which this processor may have."""


@pytest.mark.parametrize("instructions", OTHER_PROCESSORS)
def test_kernels_of_other_processors_compute_the_same(instructions: str, tmp_path: Path, native_kernels: None) -> None:
    """All tests of kernels and attention, with kernels for processors that have fewer instructions."""
    if torch.backends.cpu.get_cpu_capability() != "AVX512" or kernels.describe_instructions() == instructions:
        pytest.skip("this processor has no further instructions to leave out")
    environment, flags = OTHER_PROCESSORS[instructions]
    compiler = tmp_path / "compiler"
    compiler.write_text(f'#!/bin/sh\nexec {os.environ.get("CXX", "g++")} "$@"{flags}\n')
    compiler.chmod(0o755)
    environment |= {"CXX": str(compiler), kernels.CACHE_DIRECTORY_VARIABLE: str(tmp_path / "cache")}
    files = [__file__, str(Path(__file__).with_name("test_attention.py"))]
    command = [
        sys.executable,
        "-m",
        "pytest",
        *files,
        "-q",
        "-p",
        "no:cacheprovider",
        "-k",
        "not other_processors and not tiles",
    ]
    run = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout[-3000:]
    assert "skipped" not in run.stdout.splitlines()[-1]


def test_packed_weights_state_their_sizes(swiftkv_dir: Path, native_kernels: None) -> None:
    """Draft costs are computed from weight sizes, and are the same for packed weights."""
    costs = [
        estimate_draft_costs(load_model(swiftkv_dir, EngineConfig(dtype=dtype, native_kernels=uses_kernels)).model)
        for dtype, uses_kernels in (("float32", False), ("bfloat16", False), ("bfloat16", True))
    ]
    assert costs[0] == costs[1] == costs[2]
