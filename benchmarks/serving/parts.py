"""Parts of the serving benchmark, each of which yields its report.

In each round the systems take turns on the same requests, and every round starts with another system, so that all see
the same noise of the machine. Figures are medians over rounds, ratios medians of the rounds' ratios. A part yields its
report after every round, so that an interrupted run keeps its results.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from benchmarks.serving import workloads
from benchmarks.serving.metrics import Figures, RateSearch, figures, median_ratio, medians
from benchmarks.serving.systems import System, Systems, engine_system
from benchmarks.serving.workloads import Request
from swiftkv_platform.engine import LLMEngine

Report = dict[str, Any]
Part = Callable[[Systems, argparse.Namespace], Iterator[Report]]
ALL_AT_ONCE = float("inf")
THROUGHPUT = "total_token_throughput"
SHARE_WITHIN_LIMIT = 0.9
"""Share of a load's requests that must have their first token in time for its rate to count as sustained."""


def saturation(systems: Systems, args: argparse.Namespace) -> Iterator[Report]:
    """Throughput of each system with all requests of the trace at once."""
    engines = _engines(systems, ["dense", "swiftkv_g1", student(args)])
    runs: dict[str, list[Figures]] = {}
    loads = []
    for number in range(args.rounds):
        requests = workloads.at_rate(trace(args, args.num_requests, number), ALL_AT_ONCE)
        loads.append(described(requests))
        _take_turns(systems, engines, requests, number, runs)
        yield {"loads": loads, **summary(runs)}


def sustained(systems: Systems, args: argparse.Namespace) -> Iterator[Report]:
    """The highest arrival rate of the trace at which enough requests have their first token within the limit.

    Rates above a system's saturated throughput are not tried: they cannot be sustained, but a short trace may end
    before its queue shows.
    """
    engines = _engines(systems, ["dense", student(args)])
    runs: list[Report] = []
    loads = []
    for number in range(args.rounds):
        requests = trace(args, args.num_search_requests, number)
        loads.append(described(requests))
        full: dict[str, list[Figures]] = {}
        _take_turns(systems, engines, workloads.at_rate(requests, ALL_AT_ONCE), number, full)
        limits = {name: some[0]["request_throughput"] for name, some in full.items()}
        searches = {name: RateSearch(limit / 2, limit, args.num_trials) for name, limit in limits.items()}
        trials: dict[str, list[Figures]] = {name: [] for name in engines}
        while any(search.next_rate for search in searches.values()):
            for name, search in searches.items():
                rate = search.next_rate
                if rate is not None:
                    trial = _trial(systems, engines[name], workloads.at_rate(requests, rate), number, args.ttft_limit)
                    search.record(rate, sustained=trial["share_within_limit"] >= SHARE_WITHIN_LIMIT)
                    trials[name].append({"request_rate": rate} | trial)
                    _say(name, {"request_rate": rate} | trial, "request_rate", "share_within_limit", "p90_ttft_ms")
        rates = {name: search.sustained or 0.0 for name, search in searches.items()}
        runs.append({"sustained": rates, "saturated": limits, "trials": trials})
        yield {
            "ttft_limit_s": args.ttft_limit,
            "share_within_limit": SHARE_WITHIN_LIMIT,
            "loads": loads,
            **_sustained_summary(runs),
            "rounds": runs,
        }


def lengths(systems: Systems, args: argparse.Namespace) -> Iterator[Report]:
    """Combined throughput by prompt length, with about equal total tokens, all requests at once (paper, figure 3)."""
    engines = _engines(systems, ["dense", student(args)])
    runs: list[dict[str, list[Figures]]] = [{} for _ in args.lengths]
    counts = [max(1, args.length_total_tokens // length) for length in args.lengths]
    for number in range(args.rounds):
        for length, num_requests, some in zip(args.lengths, counts, runs, strict=True):
            requests = workloads.uniform(num_requests, length, args.length_output_tokens, seed=number)
            _take_turns(systems, engines, workloads.at_rate(requests, ALL_AT_ONCE), number, some)
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
    for number in range(args.rounds):
        requests = workloads.uniform(
            args.num_memory_requests, args.memory_input_tokens, args.memory_output_tokens, seed=number
        )
        for play, some in zip(players, runs, strict=True):
            _take_turns(systems, play, workloads.at_rate(requests, ALL_AT_ONCE), number, some)
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
    "saturation": saturation,
    "sustained": sustained,
    "lengths": lengths,
    "memory": memory,
}


def student(args: argparse.Namespace) -> str:
    return f"swiftkv_g{args.key_value_group_size}"


def trace(args: argparse.Namespace, num_requests: int, number: int) -> list[Request]:
    """Sample the trace, differently in every round, or draw similar requests, and scale their lengths."""
    if args.trace is None:
        requests = workloads.drawn(args.synthetic, num_requests, seed=number)
    else:
        requests = workloads.thinned(workloads.read_trace(args.trace), num_requests, number)
    return workloads.scaled(requests, args.length_scale)


def described(requests: Sequence[Request]) -> dict[str, float]:
    inputs, outputs = ([getattr(r, f"num_{kind}_tokens") for r in requests] for kind in ("input", "output"))
    return {
        "num_requests": len(requests),
        "mean_input_tokens": sum(inputs) / len(inputs),
        "median_input_tokens": statistics.median(inputs),
        "max_input_tokens": max(inputs),
        "mean_output_tokens": sum(outputs) / len(outputs),
        "max_output_tokens": max(outputs),
    }


def _engines(systems: Systems, names: Sequence[str]) -> dict[str, System]:
    engines = {name: engine_system(systems.engine(name)) for name in dict.fromkeys(names)}
    _warm_up(systems, engines)
    return engines


def _warm_up(systems: Systems, engines: dict[str, System]) -> None:
    requests = [Request(0.0, 64, 4)] * 2
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
    names = list(engines)
    first = number % len(names)
    for name in names[first:] + names[:first]:
        found = figures(engines[name](requests, prompts))
        runs.setdefault(name, []).append(found)
        _say(name, found, "completed", "duration", THROUGHPUT)


def _kv_cache(engines: dict[str, LLMEngine], num_rounds: int) -> Report:
    return {
        name: {"num_blocks": engine.num_blocks, "preemptions_per_round": engine.state.num_preemptions / num_rounds}
        for name, engine in engines.items()
    }


def _sustained_summary(runs: Sequence[Report]) -> Report:
    """Return medians over rounds, with ratios to dense only if dense sustains some rate."""
    names = list(runs[0]["sustained"])
    some = {name: [{"request_rate": run["sustained"][name]} for run in runs] for name in names}
    comparable = all(one["request_rate"] for one in some["dense"])
    return {
        "results": {name: {"sustained_request_rate": medians(some[name])["request_rate"]} for name in names},
        "against_dense": {
            name: median_ratio(some[name], some["dense"], "request_rate") for name in names if comparable
        },
    }


def _trial(systems: Systems, play: System, requests: Sequence[Request], number: int, ttft_limit: float) -> Figures:
    times = play(requests, systems.prompts(requests, seed=number))
    in_time = sum(one.ttft <= ttft_limit for one in times)
    return figures(times) | {"share_within_limit": in_time / len(times)}


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


def _say(name: str, found: Figures, *shown: str) -> None:
    print(f"{name:18}", *(f"{figure} {found[figure]:.4g}" for figure in shown), flush=True)
