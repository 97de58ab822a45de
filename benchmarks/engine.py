"""The engine, dense and SwiftKV, side by side with Hugging Face `generate` and vLLM.

    python -m benchmarks.engine [--output engine.json] [--short] [--rounds 7 --batch-size 8 ...]
    python -m benchmarks.engine --loads decode --systems dense swiftkv
    python -m benchmarks.engine --vllm-python VENV/bin/python    # one that has vLLM, for the dense model there
    python -m benchmarks.engine --vllm-python VENV/bin/python --systems vllm vllm-swiftkv    # one with our plugin too
    python -m benchmarks.engine --vllm-python VENV/bin/python --systems vllm-int8 vllm-swiftkv-int8    # W8A8
    python -m benchmarks.engine --peers-python VENV/bin/python --systems swiftkv-int8 openvino-int8 llama.cpp-q8_0

One random model, one run. Systems take turns within each round, so that all see the same noise of the machine; figures
are medians over rounds. FLOPs are counted on real steps, KV blocks are those of real caches.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count
from transformers import LlamaForCausalLM

from benchmarks.common import (
    add_shape_arguments,
    describe_conditions,
    make_benchmark_parser,
    make_random_llama,
    make_random_student,
    measure_product,
    measure_read,
    write_report,
)
from benchmarks.engine_worker import EngineWorker, add_vllm_python_argument, make_vllm_arguments
from benchmarks.serving.loads import Figures, Request, RequestTimes, compute_medians, make_simultaneous_requests
from benchmarks.serving.systems import Prompts, System, make_generate_system, make_vllm_system, play_round
from swiftkv_platform.engine import EngineConfig, LLMEngine, SamplingParams, kernels
from swiftkv_platform.engine.loading import LoadedModel, load_model
from swiftkv_platform.engine.memory import make_cache
from swiftkv_platform.model import export
from swiftkv_platform.planning.machines import describe_processor

KV_CACHE_BYTES = 99 << 20
"""Bytes for 3,168 tokens of either model of this shape, a whole number of blocks in bfloat16 and in 8 bits; longer
loads use multiples."""
VLLM_KV_CACHE_BYTES = 96 << 20
"""Bytes of whole blocks for both models at vLLM's block size of 128 on CPUs; for the dense model as many tokens as
`KV_CACHE_BYTES`."""
TOKENS_PER_CACHE = 3000
"""Max tokens of a load per `KV_CACHE_BYTES`."""
NATIVE_SYSTEMS = ["dense", "swiftkv"]
VLLM_SYSTEMS: dict[str, tuple[str, dict[str, Any]]] = {
    "vllm": ("dense", {}),
    "vllm-swiftkv": ("swiftkv", {}),
    "vllm-int8": ("int8", {"hf_overrides": {"swiftkv": False}}),
    "vllm-swiftkv-int8": ("int8", {}),
}
"""Model that vLLM serves, and options, by system; the dense model in int8 is the quantized student's teacher."""
INTEGER_SYSTEMS = {f"{name}-{form}": (name, form) for name in NATIVE_SYSTEMS for form in ("int8", "int4")}
"""Model and `EngineConfig.weights` of our engine with weights rounded on loading, by system."""
BYTES_PER_WEIGHT = {"swiftkv": 2.0, "swiftkv-int8": 1.0, "swiftkv-int4": 0.5 + 2 / 32}
"""Bytes that a decode step reads per weight, with a 16-bit scale for 32 weights of int4."""
PEER_SYSTEMS = {
    **{f"openvino-{form}": ("openvino_worker.py", form) for form in ("bfloat16", "int8", "int4")},
    **{f"llama.cpp-{form}": ("llama_cpp_worker.py", form) for form in ("bf16", "q8_0", "q4_0")},
}
"""Worker and weights of the dense model in OpenVINO GenAI and llama.cpp, by system."""
SYSTEMS = [*NATIVE_SYSTEMS, *INTEGER_SYSTEMS, "huggingface", *VLLM_SYSTEMS, *PEER_SYSTEMS]


def main(argv: list[str] | None = None) -> None:
    args = parse_arguments(argv)
    if args.threads:
        torch.set_num_threads(args.threads)
    config = EngineConfig(kv_cache_bytes=count_caches(args) * KV_CACHE_BYTES, enable_prefix_caching=False, seed=0)
    with ExitStack() as stack:
        # 1. load our engines and Hugging Face
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        paths = save_models(args, directory)
        loaded = {name: load_model(path, config) for name, path in paths.items()}
        engines = {name: LLMEngine(model, config) for name, model in loaded.items()}
        systems = {name: make_engine_system(engine) for name, engine in engines.items()}
        for name in [name for name in args.systems if name in INTEGER_SYSTEMS]:
            model, weights = INTEGER_SYSTEMS[name]
            rounded = config.model_copy(update={"weights": weights})
            systems[name] = make_engine_system(LLMEngine(load_model(paths[model], rounded), rounded))
        if "huggingface" in args.systems:
            dense: Any = LlamaForCausalLM.from_pretrained(
                paths["dense"], dtype=torch.bfloat16, attn_implementation="sdpa"
            )
            systems["huggingface"] = make_generate_system(dense.eval(), args.batch_size)
        report: dict[str, Any] = {
            **describe_conditions(args),
            "counted": count_flops(engines, args),
            "kv_blocks": count_kv_blocks(loaded),
        }
        print(json.dumps(report["counted"] | {"kv_blocks": report["kv_blocks"]}), flush=True)
        # 2. start other engines in their interpreters
        workers: dict[str, EngineWorker] = {}
        for name in [name for name in args.systems if name in VLLM_SYSTEMS]:
            model, options = VLLM_SYSTEMS[name]
            workers[name] = stack.enter_context(start_vllm_worker(args, directory / model, config, options))
            systems[name] = make_vllm_system(workers[name])
        for name in [name for name in args.systems if name in PEER_SYSTEMS]:
            script, form = PEER_SYSTEMS[name]
            arguments = {
                "model": str(paths["dense"]),
                "form": form,
                "precision": "bf16" if torch.backends.cpu.get_cpu_capability() == "AVX512" else "f32",
                "max_tokens": count_caches(args) * TOKENS_PER_CACHE,
                "max_sequences": args.batch_size,
            }
            worker = EngineWorker(
                args.peers_python,
                arguments,
                num_threads=torch.get_num_threads(),
                script=Path(__file__).with_name(script),
            )
            workers[name] = stack.enter_context(worker)
            systems[name] = make_vllm_system(worker)
        for name, worker in workers.items():
            print(f"{name} {json.dumps(worker.settings)}", flush=True)
        # 3. measure each load
        loads = {
            "prefill": ((1, args.prompt_length), 1, args.prefill_rounds),
            "decode": ((args.batch_size, args.context_length), args.output_length, args.rounds),
        }
        report["speedups"] = {}
        for name in args.loads:
            shape, num_output, rounds = loads[name]
            results = compare_systems(
                {one: systems[one] for one in args.systems}, shape, num_output, rounds, args.vocab_size
            )
            report[name], report["speedups"][name] = results, compute_speedups(results)
            print_table(name, results)
            limits = compute_limits_ms(report["counted"]["swiftkv"], name, args.batch_size)
            print(f"{name} lower limits in ms: {json.dumps(limits)}", flush=True)
            if args.results is not None:
                append_result(args, name, shape[1] if name == "prefill" else shape[0], results, limits)
        report["workers"] = {name: worker.settings for name, worker in workers.items()}
    write_report(report, args.output)


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = make_benchmark_parser(__doc__)
    parser.add_argument("--short", action="store_true", help="two rounds of each load")
    parser.add_argument("--loads", nargs="+", choices=["prefill", "decode"], default=["prefill", "decode"])
    parser.add_argument(
        "--systems",
        nargs="+",
        choices=SYSTEMS,
        help="default: dense, swiftkv and huggingface; vllm if --vllm-python is given",
    )
    parser.add_argument("--rounds", type=int, default=7, help="rounds of decode")
    parser.add_argument("--prefill-rounds", type=int, default=5)
    parser.add_argument("--prompt-length", type=int, default=2048, help="prompt tokens of prefill")
    parser.add_argument("--batch-size", type=int, default=8, help="concurrent requests of decode")
    parser.add_argument("--context-length", type=int, default=128, help="prompt tokens of decode")
    parser.add_argument("--output-length", type=int, default=64, help="output tokens per request of decode")
    parser.add_argument("--threads", type=int, default=0, help="0: torch's default")
    add_vllm_python_argument(parser)
    parser.add_argument(
        "--peers-python",
        type=Path,
        metavar="PATH",
        help="Python interpreter with OpenVINO GenAI and llama.cpp (`make peers-env`)",
    )
    parser.add_argument("--results", type=Path, metavar="DIRECTORY", help="append the medians to a file per processor")
    add_shape_arguments(parser)
    args = parser.parse_args(argv)
    if args.systems is None:
        args.systems = [*NATIVE_SYSTEMS, "huggingface", *(["vllm"] if args.vllm_python else [])]
    if any(name in VLLM_SYSTEMS for name in args.systems) != (args.vllm_python is not None):
        parser.error("give --systems vllm and --vllm-python PATH together, or neither")
    if any(name in PEER_SYSTEMS for name in args.systems) != (args.peers_python is not None):
        parser.error("give --systems openvino-... or llama.cpp-... and --peers-python PATH together, or neither")
    if args.short:
        args.rounds = args.prefill_rounds = 2
    return args


def compute_limits_ms(counted: dict[str, int], load: str, batch_size: int, repeats: int = 5) -> dict[str, float]:
    """Return the milliseconds in which this machine, just now, can at best compute the products of a load or read the
    weights, whichever takes longer, per system of our student.

    Args:
        counted: FLOPs of the student by `count_flops`.
        load: "prefill" or "decode".
    """
    has_avx512 = torch.backends.cpu.get_cpu_capability() == "AVX512"  # also False if limited to AVX2
    dtypes = (torch.float32, torch.bfloat16) if has_avx512 else (torch.float32,)
    products = max(measure_product(dtype) for dtype in dtypes for _ in range(repeats))
    read = max(measure_read() for _ in range(repeats))
    num_weights = counted["decode_step_flops"] / (2 * batch_size)
    compute_seconds = counted["prefill_flops" if load == "prefill" else "decode_step_flops"] / products
    return {
        system: round(1e3 * max(compute_seconds, num_bytes * num_weights / read), 3)
        for system, num_bytes in BYTES_PER_WEIGHT.items()
    }


def append_result(
    args: argparse.Namespace, load: str, size: int, results: dict[str, Figures], limits_ms: dict[str, float]
) -> None:
    """Append the medians of a load to the file of this class of processors, for `benchmarks.peers_table`."""
    processor, _ = describe_processor()
    instructions = kernels.describe_instructions()
    latency = "median_ttft_ms" if load == "prefill" else "median_tpot_ms"
    line = {
        "load": load,
        "size": size,
        "medians_ms": {name: round(row[latency], 3) for name, row in results.items()},
        "limits_ms": limits_ms,
        "machine": {
            "processor": processor,
            "threads": torch.get_num_threads(),
            "capability": instructions if "ATEN_CPU_CAPABILITY" in os.environ else None,
            "torch": torch.__version__,
        },
    }
    args.results.mkdir(exist_ok=True)
    with (args.results / f"{instructions}.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


def save_models(args: argparse.Namespace, directory: Path) -> dict[str, Path]:
    dense: Any = make_random_llama(args, compute_max_length(args))
    dense = dense.to(torch.bfloat16)
    dense.save_pretrained(directory / "dense")
    make_random_student(dense, args).save_pretrained(directory / "swiftkv")
    if any(VLLM_SYSTEMS[name][0] == "int8" for name in args.systems if name in VLLM_SYSTEMS):
        export(directory / "swiftkv", directory / "int8", teacher=True, quantize="int8")
    return {name: directory / name for name in NATIVE_SYSTEMS}


def compute_max_length(args: argparse.Namespace) -> int:
    return int(max(args.prompt_length + 1, args.context_length + args.output_length))


def count_caches(args: argparse.Namespace) -> int:
    """Return how many times `KV_CACHE_BYTES` the largest load requires."""
    tokens = max(args.prompt_length + 1, args.batch_size * (args.context_length + args.output_length))
    return int(-(-tokens // TOKENS_PER_CACHE))


def make_sampling_params(num_output: int) -> SamplingParams:
    return SamplingParams(max_tokens=num_output, temperature=0.0, ignore_eos=True)


def make_engine_system(engine: LLMEngine) -> System:
    """Return our engine as a system for requests that all arrive at once, stepped by this thread."""

    def play(requests: Sequence[Request], prompts: Prompts) -> list[RequestTimes]:
        start = time.perf_counter()
        times: dict[str, list[float]] = {}
        for request, prompt in zip(requests, prompts, strict=True):
            times[engine.add_request(prompt, make_sampling_params(request.num_output_tokens))] = []
        while engine.has_unfinished_requests:
            outputs = engine.step()
            now = time.perf_counter() - start
            for output in outputs:
                seen = times[output.request_id]
                seen += [now] * (len(output.token_ids) - len(seen))
        return [
            RequestTimes(0.0, request.num_input_tokens, tuple(one))
            for request, one in zip(requests, times.values(), strict=True)
        ]

    return play


def start_vllm_worker(
    args: argparse.Namespace, model: Path, config: EngineConfig, options: dict[str, Any]
) -> EngineWorker:
    arguments = make_vllm_arguments(
        model,
        kv_cache_bytes=count_caches(args) * VLLM_KV_CACHE_BYTES,
        max_model_len=compute_max_length(args),
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
    )
    return EngineWorker(args.vllm_python, arguments | options, num_threads=torch.get_num_threads())


def compare_systems(
    systems: dict[str, System], shape: tuple[int, int], num_output: int, rounds: int, vocab_size: int
) -> dict[str, Figures]:
    """Return medians over rounds by system. Each round has its own prompts, the same for all systems, and starts with
    another system.

    Args:
        shape: prompts of a round and tokens of each.
    """
    generator = torch.Generator().manual_seed(0)
    requests = make_simultaneous_requests(*shape, num_output)
    systems = {name: time_decode_apart(system) for name, system in systems.items()}
    played = []
    for number in range(rounds + 1):
        prompts = torch.randint(3, vocab_size, shape, generator=generator).tolist()
        played.append(play_round(systems, requests, prompts, number))
    del played[0]  # the first round warms up
    return {name: summarize_rounds([some[name] for some in played]) for name in systems}


def time_decode_apart(system: System) -> System:
    """Return the system with the later tokens of simultaneous requests timed from when all have their first token.

    Systems prefill a batch in one step or several. Without this, the prefill of some requests would count as decode of
    others, except in OpenVINO, which returns whole batches.
    """

    def play(requests: Sequence[Request], prompts: Prompts) -> list[RequestTimes]:
        played = system(requests, prompts)
        assert all(
            len(one.token_times) == request.num_output_tokens for one, request in zip(played, requests, strict=True)
        )
        if all(len(one.token_times) == 1 for one in played):
            return played
        start = max(one.token_times[0] for one in played)
        return [
            replace(one, token_times=(start, *(each for each in one.token_times if each > start))) for one in played
        ]

    return play


def summarize_rounds(rounds: Sequence[Figures]) -> Figures:
    """Return a system's medians, and the figures of its fastest round (`least`), which has the least noise."""
    found = compute_medians(rounds)
    for name in ("ttft", "tpot"):
        if f"median_{name}_ms" in found:
            found[f"least_{name}_ms"] = min(one[f"median_{name}_ms"] for one in rounds)
    if "mean_tpot_ms" in found:
        found["decode_throughput"] = found["completed"] * 1e3 / found["mean_tpot_ms"]
    return found


def compute_speedups(results: dict[str, Figures]) -> dict[str, Figures]:
    """Return the speed of each system relative to each third-party system: {third party: {system: ratio of medians}}.

    Speed is tokens per second in decode or, for loads without decode, the inverse of the time to the first token.
    """

    def speed(row: Figures) -> float:
        return row["decode_throughput"] if "decode_throughput" in row else 1e3 / row["median_ttft_ms"]

    return {
        other: {name: speed(row) / speed(results[other]) for name, row in results.items() if name != other}
        for other in results
        if other not in NATIVE_SYSTEMS and other not in INTEGER_SYSTEMS
    }


def print_table(load: str, results: dict[str, Figures]) -> None:
    """Print a table of results, with ratios to the first system."""
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
    for other, ratios in compute_speedups(results).items():
        shown = ", ".join(f"{name} {ratio:.3f}x" for name, ratio in ratios.items())
        print(f"{load:8} speed relative to {other}: {shown}", flush=True)


def _attention_flops(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    return int(sdpa_flop_count(query, key, value))


def _packed_flops(x: Sequence[int], packed: Sequence[int], *_: Any, **__: Any) -> int:
    return 2 * math.prod(x[:-1]) * math.prod(packed)


def _layers_flops(
    x: torch.Tensor, weights: Sequence[torch.Tensor | None], sizes: Sequence[int], *others: Any, **_: Any
) -> int:
    """Count the FLOPs of packed weights, the only ones of four dimensions, and of attention over all keys that each
    query sees, without a window."""
    keys, positions = others[3], others[6]
    products = sum(_packed_flops(x.shape, one.shape) for one in weights if one is not None and one.dim() == 4)
    heads = sum(count * rows.shape[2] for count, rows in zip(sizes[4::8], keys, strict=True))
    return products + 4 * heads * int((positions + 1).sum())


_layers_flops._get_raw = True  # type: ignore[attr-defined]  # torch passes tensors, not their shapes


def make_flop_formulas() -> dict[Any, Any]:
    """Return FLOP formulas for our operators on a CPU, which torch's counter does not know."""
    formulas: dict[Any, Any] = {
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention_flops,
    }
    if kernels.is_available():
        own = torch.ops.swiftkv_cpu
        formulas |= {own.linear: _packed_flops, own.logits: _packed_flops, own.layers: _layers_flops}
    return formulas


def count_flops(engines: dict[str, LLMEngine], args: argparse.Namespace) -> dict[str, dict[str, int]]:
    """Count the FLOPs of all matrix products in a prefill and in a decode step, by system."""
    generator = torch.Generator().manual_seed(1)
    long = torch.randint(3, args.vocab_size, (1, args.prompt_length), generator=generator)
    short = torch.randint(3, args.vocab_size, (args.batch_size, args.context_length), generator=generator)
    return {
        name: {
            "prefill_flops": _count_step_flops(engine, long, decodes=False),
            "decode_step_flops": _count_step_flops(engine, short, decodes=True),
        }
        for name, engine in engines.items()
    }


def _count_step_flops(engine: LLMEngine, prompts: torch.Tensor, *, decodes: bool) -> int:
    """Count the FLOPs of all steps until the first token, or of the first step in which all requests decode."""
    params = make_sampling_params(2 + len(prompts))  # some requests decode while others prefill
    request_ids = [engine.add_request(prompt, params) for prompt in prompts.tolist()]
    waiting = set(request_ids) if decodes else set()
    while waiting:
        waiting -= {output.request_id for output in engine.step() if output.token_ids}
    with FlopCounterMode(display=False, custom_mapping=make_flop_formulas()) as counter:
        while not any(output.token_ids for output in engine.step()):
            pass
    for request_id in request_ids:
        engine.abort(request_id)
    return int(counter.get_total_flops())


def count_kv_blocks(loaded: dict[str, LoadedModel]) -> dict[str, dict[str, int]]:
    return {
        name: {
            dtype: make_cache(model, EngineConfig(kv_cache_bytes=KV_CACHE_BYTES, kv_cache_dtype=dtype)).num_blocks
            for dtype in ("bfloat16", "fp8")
        }
        for name, model in loaded.items()
    }


if __name__ == "__main__":
    main()
