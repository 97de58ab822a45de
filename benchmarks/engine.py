"""The engine, dense and SwiftKV, side by side with what a user would pick instead: Hugging Face `generate`, vLLM.

    python -m benchmarks.engine [--output engine.json] [--short] [--rounds 7 --batch-size 8 ...]
    python -m benchmarks.engine --loads decode --systems dense swiftkv
    python -m benchmarks.engine --vllm-python VENV/bin/python    # one that has vLLM, for the dense model there

One random model, one run. Systems take turns within each round, so that all see the same noise of the machine; figures
are medians over rounds, under the field's names. FLOPs are counted on real steps, KV blocks are those of real caches.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count
from transformers import LlamaForCausalLM, StoppingCriteria, StoppingCriteriaList

from benchmarks.models import add_shape, random_llama
from benchmarks.reports import benchmark_parser, write_report
from benchmarks.vllm_client import VLLMWorker, add_vllm_python, engine_arguments
from swiftkv_platform.engine import EngineConfig, LLMEngine, SamplingParams, kernels
from swiftkv_platform.engine.loading import LoadedModel, load_model
from swiftkv_platform.engine.memory import make_cache
from swiftkv_platform.model import convert

KV_CACHE_BYTES = 99 << 20
"""Holds both loads; a whole number of blocks of either model of this shape, in bfloat16 and in 8 bits."""


@dataclass(frozen=True)
class Timings:
    """One load on one system."""

    num_input_tokens: int
    num_output_tokens: int
    duration: float
    """Seconds."""
    ttfts: list[float]
    """Seconds to the first token, by request."""
    tpots: list[float]
    """Seconds a token after the first, by request."""


OURS = ["dense", "swiftkv"]
SYSTEMS = [*OURS, "huggingface", "vllm"]
System = Callable[[torch.Tensor, int], Timings]
"""Prompts [num_requests, num_tokens], all there at once, and how many tokens to generate for each."""


def main(argv: list[str] | None = None) -> None:
    args = parse_arguments(argv)
    if args.threads:
        torch.set_num_threads(args.threads)
    config = EngineConfig(
        kv_cache_bytes=KV_CACHE_BYTES, enable_prefix_caching=False, seed=0, native_kernels=args.native_kernels
    )
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        dense_path, swiftkv_path = save_models(args, directory)
        loaded = {"dense": load_model(dense_path, config), "swiftkv": load_model(swiftkv_path, config)}
        engines = {name: LLMEngine(model, config) for name, model in loaded.items()}
        systems = {name: engine_system(engine) for name, engine in engines.items()}
        if "huggingface" in args.systems:
            hf = LlamaForCausalLM.from_pretrained(dense_path, dtype=torch.bfloat16, attn_implementation="sdpa").eval()
            systems["huggingface"] = hf_system(hf)
        report: dict[str, Any] = {
            "machine": {"cpu": platform.processor() or platform.machine(), "threads": torch.get_num_threads()}
            | {"torch": torch.__version__},
            "arguments": {key: value for key, value in vars(args).items() if key not in ("output", "vllm_python")},
            "counted": count(engines, args),
            "kv_blocks": kv_blocks(loaded),
            "speedups": {},
        }
        print(json.dumps(report["counted"] | {"kv_blocks": report["kv_blocks"]}), flush=True)
        if "vllm" in args.systems:
            worker = stack.enter_context(vllm_worker(args, dense_path, config))
            systems["vllm"] = vllm_system(worker)
            report["vllm"] = worker.made
            print(f"vllm     {json.dumps(worker.made)}", flush=True)
        loads = {
            "prefill": ((1, args.prompt_length), 1, args.prefill_rounds),
            "decode": ((args.batch_size, args.context_length), args.output_length, args.rounds),
        }
        for name in args.loads:
            shape, num_output, rounds = loads[name]
            results = compare({one: systems[one] for one in args.systems}, shape, num_output, rounds, args.vocab_size)
            report[name] = results
            report["speedups"][name] = speedups(results)
            print_table(name, results)
        if "vllm" in args.systems:
            report["vllm"]["idle_cpu_seconds"] = worker.idle_cpu_seconds
    write_report(report, args.output)


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--short", action="store_true", help="two rounds of each load")
    parser.add_argument("--loads", nargs="+", choices=["prefill", "decode"], default=["prefill", "decode"])
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, help="all; vllm where --vllm-python is given")
    parser.add_argument("--rounds", type=int, default=7, help="of decode")
    parser.add_argument("--prefill-rounds", type=int, default=5)
    parser.add_argument("--prompt-length", type=int, default=2048, help="of prefill")
    parser.add_argument("--batch-size", type=int, default=8, help="requests of decode")
    parser.add_argument("--context-length", type=int, default=128, help="prompt tokens of decode")
    parser.add_argument("--output-length", type=int, default=64, help="tokens a request generates in decode")
    parser.add_argument("--threads", type=int, default=0, help="0: torch's own choice")
    parser.add_argument(
        "--native-kernels", action=argparse.BooleanOptionalAction, default=True, help="or PyTorch's operators"
    )
    add_vllm_python(parser)
    add_shape(parser)
    parser.add_argument("--num-key-value-layers", type=int, default=8)
    parser.add_argument("--key-value-group-size", type=int, default=2)
    args = parser.parse_args(argv)
    if args.systems is None:
        args.systems = [name for name in SYSTEMS if name != "vllm" or args.vllm_python]
    if ("vllm" in args.systems) != (args.vllm_python is not None):
        parser.error("--systems vllm and --vllm-python PATH go together: give both, or neither")
    if args.short:
        args.rounds = args.prefill_rounds = 2
    return args


def save_models(args: argparse.Namespace, directory: Path) -> tuple[Path, Path]:
    """A random dense model and its student."""
    dense = random_llama(args, longest(args)).to(torch.bfloat16)
    dense.save_pretrained(directory / "dense")
    student = convert(
        dense, num_key_value_layers=args.num_key_value_layers, key_value_group_size=args.key_value_group_size
    )
    student.save_pretrained(directory / "swiftkv")
    return directory / "dense", directory / "swiftkv"


def longest(args: argparse.Namespace) -> int:
    """Tokens of the longest sequence, prompt and answer."""
    return int(max(args.prompt_length + 1, args.context_length + args.output_length))


def sampling(num_output: int) -> SamplingParams:
    return SamplingParams(max_tokens=num_output, temperature=0.0, ignore_eos=True)


def engine_system(engine: LLMEngine) -> System:
    def run(prompts: torch.Tensor, num_output: int) -> Timings:
        start = time.perf_counter()
        outputs = engine.generate(prompts.tolist(), sampling(num_output))
        duration = time.perf_counter() - start
        assert all(len(output.token_ids) == num_output for output in outputs)
        ttfts = [output.metrics.ttft for output in outputs]
        tpots = [output.metrics.tpot for output in outputs]
        return Timings(
            prompts.numel(),
            num_output * len(prompts),
            duration,
            [one for one in ttfts if one is not None],
            [one for one in tpots if one is not None],
        )

    return run


class _Clock(StoppingCriteria):
    """Notes when `generate` has chosen a token, and stops nothing."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def __call__(self, input_ids: torch.Tensor, _scores: object, **_: object) -> torch.Tensor:
        self.times.append(time.perf_counter())
        return torch.zeros(len(input_ids), dtype=torch.bool)


def hf_system(model: Any) -> System:
    def run(prompts: torch.Tensor, num_output: int) -> Timings:
        clock = _Clock()
        start = time.perf_counter()
        token_ids = model.generate(
            prompts,
            attention_mask=torch.ones_like(prompts),
            do_sample=False,
            max_new_tokens=num_output,
            min_new_tokens=num_output,
            pad_token_id=0,
            stopping_criteria=StoppingCriteriaList([clock]),
        )
        duration = time.perf_counter() - start
        assert token_ids.shape[1] == prompts.shape[1] + num_output
        first, last = clock.times[0], clock.times[-1]
        ttfts = [first - start] * len(prompts)
        tpots = [(last - first) / (num_output - 1)] * len(prompts) if num_output > 1 else []
        return Timings(prompts.numel(), num_output * len(prompts), duration, ttfts, tpots)

    return run


def vllm_worker(args: argparse.Namespace, model: Path, config: EngineConfig) -> VLLMWorker:
    """vLLM on the dense model, with the limits of our engine."""
    arguments = engine_arguments(
        model,
        kv_cache_bytes=KV_CACHE_BYTES,
        max_model_len=longest(args),
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
    )
    return VLLMWorker(args.vllm_python, arguments, num_threads=torch.get_num_threads())


def vllm_system(worker: VLLMWorker) -> System:
    def run(prompts: torch.Tensor, num_output: int) -> Timings:
        times = worker.generate(prompts.tolist(), [num_output] * len(prompts))
        tpots = [(one[-1] - one[0]) / (num_output - 1) for one in times] if num_output > 1 else []
        duration = max(one[-1] for one in times)
        return Timings(prompts.numel(), num_output * len(prompts), duration, [one[0] for one in times], tpots)

    return run


def compare(
    systems: dict[str, System], shape: tuple[int, int], num_output: int, rounds: int, vocab_size: int
) -> dict[str, dict[str, float]]:
    """Medians over rounds, by system. Each round has a prompt of its own, the same for all, and begins with another."""
    generator = torch.Generator().manual_seed(0)
    timings: dict[str, list[Timings]] = {name: [] for name in systems}
    names = list(systems)
    for round_ in range(rounds + 1):  # the first one warms up
        prompts = torch.randint(3, vocab_size, shape, generator=generator)
        for name in names[round_ % len(names) :] + names[: round_ % len(names)]:
            timed = systems[name](prompts, num_output)
            if round_:
                timings[name].append(timed)
    return {name: summary(some) for name, some in timings.items()}


def summary(rounds: Sequence[Timings]) -> dict[str, float]:
    """A system's rounds in the field's names."""

    def median(figure: Callable[[Timings], float]) -> float:
        return statistics.median(map(figure, rounds))

    figures = {
        "duration": median(lambda one: one.duration),
        "total_input_tokens": rounds[0].num_input_tokens,
        "total_output_tokens": rounds[0].num_output_tokens,
        "total_token_throughput": median(lambda one: (one.num_input_tokens + one.num_output_tokens) / one.duration),
        "output_throughput": median(lambda one: one.num_output_tokens / one.duration),
    }
    for name, values in (("ttft", "ttfts"), ("tpot", "tpots")):
        if not getattr(rounds[0], values):
            continue
        figures[f"mean_{name}_ms"] = 1e3 * median(lambda one, of=values: statistics.mean(getattr(one, of)))
        figures[f"median_{name}_ms"] = 1e3 * median(lambda one, of=values: statistics.median(getattr(one, of)))
        figures[f"p99_{name}_ms"] = 1e3 * median(lambda one, of=values: percentile(getattr(one, of), 0.99))
        figures[f"least_{name}_ms"] = 1e3 * min(statistics.median(getattr(one, values)) for one in rounds)
    if rounds[0].tpots:
        figures["decode_throughput"] = len(rounds[0].tpots) * 1e3 / figures["mean_tpot_ms"]
    return figures


def percentile(values: Sequence[float], share: float) -> float:
    return torch.tensor(values, dtype=torch.float64).quantile(share).item()


def speedups(results: dict[str, dict[str, float]]) -> dict[str, dict[str, float]]:
    """Return the speed of each system relative to each of the others' software: {that: {system: ratio of medians}}.

    Speed is tokens a second in decode, or the inverse of the time to the first token where there is no decode.
    """

    def speed(row: dict[str, float]) -> float:
        return row["decode_throughput"] if "decode_throughput" in row else 1e3 / row["median_ttft_ms"]

    return {
        other: {name: speed(row) / speed(results[other]) for name, row in results.items() if name != other}
        for other in results
        if other not in OURS
    }


def print_table(load: str, results: dict[str, dict[str, float]]) -> None:
    """Ratios are to the first system; `least` is the best round, which the machine's noise disturbs least."""
    first = next(iter(results.values()))
    latency = "tpot" if "median_tpot_ms" in first else "ttft"
    for name, row in results.items():
        throughput = row.get("decode_throughput", row["total_token_throughput"])
        median, least = (f"{kind}_{latency}_ms" for kind in ("median", "least"))
        print(
            f"{load:8} {name:12} {median} {row[median]:8.2f} ({first[median] / row[median]:5.3f}x)  "
            f"least {row[least]:8.2f} ({first[least] / row[least]:5.3f}x)  tokens/s {throughput:7.0f}",
            flush=True,
        )
    for other, ratios in speedups(results).items():
        shown = ", ".join(f"{name} {ratio:.3f}x" for name, ratio in ratios.items())
        print(f"{load:8} as fast as {other}: {shown}", flush=True)


def _linear_flops(x: Sequence[int], _weight: Sequence[int], *_: Any, out_shape: Sequence[int], **__: Any) -> int:
    return 2 * torch.Size(x).numel() * out_shape[-1]


def _attention_flops(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    return int(sdpa_flop_count(query, key, value))


def _packed_flops(x: Sequence[int], packed: Sequence[int], *_: Any, **__: Any) -> int:
    return 2 * math.prod(x[:-1]) * math.prod(packed)


def _paged_flops(query: torch.Tensor, *tables: Any, **_: Any) -> int:
    """Count the FLOPs of the keys that each query sees, in full: no window."""
    positions = tables[3]
    return 4 * query.shape[1] * query.shape[3] * int((positions + 1).sum())


_paged_flops._get_raw = True  # type: ignore[attr-defined]  # torch hands it tensors, not their shapes


def counted() -> dict[Any, Any]:
    """Operators of the engine on a CPU that torch's counter does not know."""
    formulas: dict[Any, Any] = {
        torch.ops.mkldnn._linear_pointwise: _linear_flops,
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention_flops,
    }
    if kernels.available():
        own = torch.ops.swiftkv_cpu
        formulas |= {own.linear: _packed_flops, own.gated_linear: _packed_flops, own.attend: _paged_flops}
    return formulas


def count(engines: dict[str, LLMEngine], args: argparse.Namespace) -> dict[str, dict[str, int]]:
    """FLOPs of one prefill and of one decode step, all matrix products, by system."""
    generator = torch.Generator().manual_seed(1)
    long = torch.randint(3, args.vocab_size, (1, args.prompt_length), generator=generator)
    short = torch.randint(3, args.vocab_size, (args.batch_size, args.context_length), generator=generator)
    return {
        name: {
            "prefill_flops": _flops_of_step(engine, long, num_steps_before=0),
            "decode_step_flops": _flops_of_step(engine, short, num_steps_before=1),
        }
        for name, engine in engines.items()
    }


def _flops_of_step(engine: LLMEngine, prompts: torch.Tensor, *, num_steps_before: int) -> int:
    request_ids = [engine.add_request(prompt, sampling(2 + num_steps_before)) for prompt in prompts.tolist()]
    for _ in range(num_steps_before):
        engine.step()
    with FlopCounterMode(display=False, custom_mapping=counted()) as counter:
        engine.step()
    for request_id in request_ids:
        engine.abort(request_id)
    return int(counter.get_total_flops())


def kv_blocks(loaded: dict[str, LoadedModel]) -> dict[str, dict[str, int]]:
    """Blocks of the KV cache at equal memory, by system and type."""
    return {
        name: {
            dtype: make_cache(model, EngineConfig(kv_cache_bytes=KV_CACHE_BYTES, kv_cache_dtype=dtype)).num_blocks
            for dtype in ("bfloat16", "fp8")
        }
        for name, model in loaded.items()
    }


if __name__ == "__main__":
    main()
