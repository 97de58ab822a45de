"""Requests with arrival times, and serving metrics from token times, named as in other serving benchmarks. No torch."""

from __future__ import annotations

import itertools
import random
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

Figures = dict[str, float]


@dataclass(frozen=True)
class Request:
    """One request of a load."""

    arrival: float
    """Seconds after the first request."""
    num_input_tokens: int
    num_output_tokens: int


def make_simultaneous_requests(num_requests: int, num_input_tokens: int, num_output_tokens: int) -> list[Request]:
    """Return identical requests that arrive together."""
    return [Request(0.0, num_input_tokens, num_output_tokens)] * num_requests


def make_poisson_requests(
    rate: float, num_requests: int, num_input_tokens: int, num_output_tokens: int
) -> list[Request]:
    """Return identical requests with Poisson arrivals at a mean of `rate` per second, the same in every call."""
    generator = random.Random(0)
    gaps = [generator.expovariate(1.0) for _ in range(num_requests - 1)]
    stretch = len(gaps) / rate / sum(gaps)
    arrivals = itertools.accumulate((gap * stretch for gap in gaps), initial=0.0)
    return [Request(arrival, num_input_tokens, num_output_tokens) for arrival in arrivals]


@dataclass(frozen=True)
class RequestTimes:
    """Times of one completed request, in seconds since the load began."""

    arrival: float
    """Scheduled arrival, even if the client sent the request later."""
    num_input_tokens: int
    token_times: tuple[float, ...]
    """Arrival times of the output tokens; at least one."""

    @property
    def ttft(self) -> float:
        return self.token_times[0] - self.arrival

    @property
    def tpot(self) -> float | None:
        """Mean time per token after the first; None if there is only one token."""
        later = len(self.token_times) - 1
        return (self.token_times[-1] - self.token_times[0]) / later if later else None

    @property
    def inter_token_latencies(self) -> list[float]:
        return [after - before for before, after in itertools.pairwise(self.token_times)]


def compute_figures(requests: Sequence[RequestTimes]) -> Figures:
    """Compute throughputs per second and latencies in milliseconds, from the first arrival to the last token."""
    duration = max(request.token_times[-1] for request in requests) - min(request.arrival for request in requests)
    num_input = sum(request.num_input_tokens for request in requests)
    num_output = sum(len(request.token_times) for request in requests)
    found: Figures = {
        "completed": len(requests),
        "duration": duration,
        "total_input_tokens": num_input,
        "total_output_tokens": num_output,
        "request_throughput": len(requests) / duration,
        "output_throughput": num_output / duration,
        "total_token_throughput": (num_input + num_output) / duration,
    }
    # latencies: mean, median and percentiles
    latencies = {
        "ttft": [request.ttft for request in requests],
        "tpot": [request.tpot for request in requests if request.tpot is not None],
        "itl": [latency for request in requests for latency in request.inter_token_latencies],
        "e2el": [request.token_times[-1] - request.arrival for request in requests],
    }
    for name, seconds in latencies.items():
        if seconds:
            found[f"mean_{name}_ms"] = 1e3 * statistics.fmean(seconds)
            found[f"median_{name}_ms"] = 1e3 * statistics.median(seconds)
            for share in (90, 99):
                found[f"p{share}_{name}_ms"] = 1e3 * float(np.percentile(seconds, share))
    return found


def compute_medians(rounds: Sequence[Mapping[str, float]]) -> Figures:
    """Compute the median of each figure over the rounds that have it."""
    names = dict.fromkeys(name for figures_ in rounds for name in figures_)
    return {name: statistics.median(one[name] for one in rounds if name in one) for name in names}


def median_ratio(rounds: Sequence[Mapping[str, float]], base: Sequence[Mapping[str, float]], name: str) -> float:
    """Median over rounds of a figure, relative to another system's in the same round, with the same noise."""
    return statistics.median(one[name] / other[name] for one, other in zip(rounds, base, strict=True))
