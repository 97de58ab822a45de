"""Loads of requests with arrival times: scaled traces of real services, and similar random loads. No torch.

A load keeps the order and the rhythm of its trace. It is scaled in length (prompts and answers by the same factor) and
in time (to a mean arrival rate, so that bursts remain).
"""

from __future__ import annotations

import csv
import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path

import numpy as np

from swiftkv_platform.errors import DataError, InvalidInputError

QUANTILES = (0.0, 0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99, 1.0)
SHAPES = {
    "code": (
        (3, 75, 147, 578, 1469, 2745, 5186, 7302, 7436, 7437),
        (6, 6, 7, 9, 13, 24, 55, 90, 252, 1899),
    ),
    "conversation": (
        (2, 181, 207, 396, 1020, 1189, 2734, 4083, 4142, 14050),
        (7, 41, 54, 85, 129, 395, 424, 451, 601, 1000),
    ),
}
"""Prompt and answer lengths of the two Azure traces of 2023, at `QUANTILES`."""


@dataclass(frozen=True)
class Request:
    """One request of a load."""

    arrival: float
    """Seconds after the first request."""
    num_input_tokens: int
    num_output_tokens: int


def read_trace(path: Path) -> list[Request]:
    """Read the requests of an Azure LLM inference trace, by arrival.

    Args:
        path: CSV with columns TIMESTAMP, ContextTokens, GeneratedTokens.

    Raises:
        DataError: a line lacks these fields or has an invalid value, or there are no requests.
    """
    requests = []
    with path.open(encoding="utf-8", newline="") as file:
        for number, row in enumerate(csv.DictReader(file), start=2):
            try:
                # Seconds may have seven decimals, one more than the standard library parses.
                at = datetime.fromisoformat(row["TIMESTAMP"][:26]).timestamp()
                lengths = int(row["ContextTokens"]), int(row["GeneratedTokens"])
            except (KeyError, TypeError, ValueError) as error:
                raise DataError(f"{path}, line {number}: {error}", field="trace", value=row) from error
            if min(lengths) < 1:
                raise DataError(f"{path}, line {number}: a length is at least 1", field="trace", value=row)
            requests.append(Request(at, *lengths))
    if not requests:
        raise DataError(f"trace {str(path)!r} has no request; give one with at least one", field="trace")
    requests.sort(key=lambda request: request.arrival)
    return [replace(request, arrival=request.arrival - requests[0].arrival) for request in requests]


def drawn(shape: str, num_requests: int, seed: int) -> list[Request]:
    """Draw a load with lengths from one of `SHAPES`, independently, and Poisson arrivals at one per second."""
    generator = random.Random(seed)
    inputs, outputs = SHAPES[shape]
    return [
        Request(at, *(round(float(np.interp(generator.random(), QUANTILES, values))) for values in (inputs, outputs)))
        for at in itertools.islice(_poisson(generator), num_requests)
    ]


def uniform(num_requests: int, num_input_tokens: int, num_output_tokens: int, seed: int) -> list[Request]:
    """Make identical requests with Poisson arrivals at one per second."""
    arrivals = itertools.islice(_poisson(random.Random(seed)), num_requests)
    return [Request(at, num_input_tokens, num_output_tokens) for at in arrivals]


def thinned(requests: Sequence[Request], num_requests: int, number: int = 0) -> list[Request]:
    """Take every k-th request of a trace, so that a few span all of it. Another `number` gives another sample.

    Raises:
        InvalidInputError: the trace has fewer requests.
    """
    if not 1 <= num_requests <= len(requests):
        raise InvalidInputError(
            f"num_requests is {num_requests}; the trace has {len(requests)}: 1..{len(requests)} are accepted",
            field="num_requests",
            value=num_requests,
        )
    step = len(requests) // num_requests
    # Golden-ratio steps spread the first few samples evenly.
    shift = round(number * step * 0.618) % step
    chosen = requests[shift::step][:num_requests]
    return [replace(request, arrival=request.arrival - chosen[0].arrival) for request in chosen]


def scaled(requests: Sequence[Request], length_scale: float) -> list[Request]:
    """Scale the lengths of prompts and answers, to at least one token."""
    if not length_scale > 0:
        raise InvalidInputError(
            f"length_scale is {length_scale}; a number above 0 is accepted", field="length_scale", value=length_scale
        )
    return [
        replace(
            request,
            num_input_tokens=max(1, round(request.num_input_tokens * length_scale)),
            num_output_tokens=max(1, round(request.num_output_tokens * length_scale)),
        )
        for request in requests
    ]


def at_rate(requests: Sequence[Request], rate: float) -> list[Request]:
    """Scale arrivals to a mean of `rate` per second, keeping their rhythm; infinite: all at once."""
    if not rate > 0:
        raise InvalidInputError(f"rate is {rate}; a number above 0 is accepted", field="rate", value=rate)
    duration = requests[-1].arrival - requests[0].arrival
    stretch = (len(requests) - 1) / rate / duration if duration else 0.0
    return [replace(request, arrival=(request.arrival - requests[0].arrival) * stretch) for request in requests]


def _poisson(generator: random.Random) -> Iterator[float]:
    at = 0.0
    while True:
        yield at
        at += generator.expovariate(1.0)
