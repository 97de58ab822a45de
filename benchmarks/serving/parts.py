"""Parts of the serving benchmark, each of which yields its report.

In each round the systems take turns on the same requests, and every round starts with another system, so that all see
the same noise of the machine. Figures are medians over rounds, ratios medians of the rounds' ratios. A part yields its
report after every round, so that an interrupted run keeps its results.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from benchmarks.serving.loads import Figures, Request, at_once, median_ratio, medians
from benchmarks.serving.systems import System, Systems, engine_system, play_in_turns
from swiftkv_platform.engine import LLMEngine

Report = dict[str, Any]
Part = Callable[[Systems, argparse.Namespace], Iterator[Report]]
THROUGHPUT = "total_token_throughput"


def lengths(systems: Systems, args: argparse.Namespace) -> Iterator[Report]:
    """Combined throughput by prompt length, with about equal total tokens, all requests at once (paper, figure 3)."""
    engines = _engines(systems, ["dense", student(args)])
    runs: list[dict[str, list[Figures]]] = [{} for _ in args.lengths]
    counts = [max(1, args.length_total_tokens // length) for length in args.lengths]
    for number in range(args.rounds):
        for length, num_requests, some in zip(args.lengths, counts, runs, strict=True):
            _take_turns(systems, engines, at_once(num_requests, length, args.length_output_tokens), number, some)
        yield {
            "num_output_tokens": args.length_output_tokens,
            "rows": [
                {"num_input_tokens": length, "num_requests": num_requests, **summary(some)}
                for length, num_requests, some in zip(args.lengths, counts, runs, strict=True)
            ],
        }


def memory(systems: Systems, args: argparse.Namespace) -> Iterator[Report]:
    """Combined throughput by size of the KV cache (paper, table 5)."""
    names = ["dense", "merge_all_layers", "swiftkv_g1", student(args), f"{student(args)}_fp8"]
    engines: list[dict[str, LLMEngine]] = [
        {
            name: systems.engine(
                name.removesuffix("_fp8"),
                kv_cache_bytes=mib << 20,
                kv_cache_dtype="fp8" if name.endswith("_fp8") else "auto",
            )
            for name in names
        }
        for mib in args.memory_mib
    ]
    players = [{name: engine_system(engine) for name, engine in some.items()} for some in engines]
    for one in players:
        _warm_up(systems, one)
    runs: list[dict[str, list[Figures]]] = [{} for _ in args.memory_mib]
    requests = at_once(args.num_memory_requests, args.memory_input_tokens, args.memory_output_tokens)
    for number in range(args.rounds):
        for play, some in zip(players, runs, strict=True):
            _take_turns(systems, play, requests, number, some)
        yield {
            "num_requests": args.num_memory_requests,
            "num_input_tokens": args.memory_input_tokens,
            "num_output_tokens": args.memory_output_tokens,
            "rows": [
                {"kv_cache_mib": mib, **summary(some), "kv_cache": _kv_cache(own, number + 1)}
                for mib, some, own in zip(args.memory_mib, runs, engines, strict=True)
            ],
        }


PARTS: dict[str, Part] = {
    "lengths": lengths,
    "memory": memory,
}


def student(args: argparse.Namespace) -> str:
    return f"swiftkv_g{args.key_value_group_size}"


def _engines(systems: Systems, names: Sequence[str]) -> dict[str, System]:
    engines = {name: engine_system(systems.engine(name)) for name in dict.fromkeys(names)}
    _warm_up(systems, engines)
    return engines


def _warm_up(systems: Systems, engines: dict[str, System]) -> None:
    requests = at_once(2, 64, 4)
    for play in engines.values():
        play(requests, systems.prompts(requests, seed=0))


def _take_turns(
    systems: Systems,
    engines: dict[str, System],
    requests: Sequence[Request],
    number: int,
    runs: dict[str, list[Figures]],
) -> None:
    """One round."""
    prompts = systems.prompts(requests, seed=number)
    for name, found in play_in_turns(engines, requests, prompts, number).items():
        runs.setdefault(name, []).append(found)
        shown = (f"{figure} {found[figure]:.4g}" for figure in ("completed", "duration", THROUGHPUT))
        print(f"{name:18}", *shown, flush=True)


def _kv_cache(engines: dict[str, LLMEngine], num_rounds: int) -> Report:
    return {
        name: {"num_blocks": engine.num_blocks, "preemptions_per_round": engine.state.num_preemptions / num_rounds}
        for name, engine in engines.items()
    }


def summary(runs: dict[str, list[Figures]]) -> Report:
    dense = runs["dense"]
    return {
        "results": {name: medians(some) for name, some in runs.items()},
        "against_dense": {
            name: {
                figure: median_ratio(some, dense[: len(some)], figure)
                for figure in (THROUGHPUT, "median_ttft_ms", "median_tpot_ms")
                # No ratio to 0, the time between tokens that arrive together.
                if all(figure in one for one in some) and all(one.get(figure) for one in dense)
            }
            for name, some in runs.items()
        },
        "rounds": runs,
    }
