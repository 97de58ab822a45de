"""The reports as Markdown tables, as the documentation shows them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from benchmarks.serving.plots import label

Report = dict[str, Any]


def saturation(report: Report) -> str:
    head = [
        "",
        "requests/s",
        "tokens/s",
        "against dense",
        "median TTFT",
        "p99 TTFT",
        "median TPOT",
        "p99 TPOT",
        "rounds",
    ]
    rows = [
        [
            label(name),
            f"{found['request_throughput']:.2f}",
            f"{found['total_token_throughput']:.0f}",
            f"{report['against_dense'][name]['total_token_throughput']:.2f}x",
            *(_milliseconds(found, f"{share}_{name_}_ms") for name_ in ("ttft", "tpot") for share in ("median", "p99")),
            str(len(report["rounds"][name])),
        ]
        for name, found in report["results"].items()
    ]
    return _table(head, rows)


def sustained(report: Report) -> str:
    head = ["", "sustained requests/s", "against dense", "of saturation, by round"]
    rows = [
        [
            label(name),
            f"{found['sustained_request_rate']:.2f}",
            f"{report['against_dense'][name]:.2f}x" if report["against_dense"] else "",
            ", ".join(f"{run['sustained'][name] / run['saturated'][name]:.0%}" for run in report["rounds"]),
        ]
        for name, found in report["results"].items()
    ]
    return _table(head, rows)


def rates(report: Report) -> str:
    return by_row(report, "request_rate", "requests/s", ("median_ttft_ms", "median_tpot_ms"))


def lengths(report: Report) -> str:
    return by_row(report, "num_input_tokens", "prompt tokens", ("total_token_throughput",))


def memory(report: Report) -> str:
    text = by_row(report, "kv_cache_mib", "MiB of KV cache", ("total_token_throughput",))
    caches = [
        [label(name), f"{row['kv_cache_mib']}", str(cache["num_blocks"]), f"{cache['preemptions_per_round']:.1f}"]
        for row in report["rows"]
        for name, cache in row["kv_cache"].items()
    ]
    return text + "\n\n" + _table(["", "MiB", "KV blocks", "preemptions a round"], caches)


TABLES: dict[str, Callable[[Report], str]] = {
    "saturation": saturation,
    "sustained": sustained,
    "rates": rates,
    "lengths": lengths,
    "memory": memory,
}


def by_row(report: Report, key: str, title: str, figures: Sequence[str]) -> str:
    """One column a figure and system, what it is against dense beside it."""
    rows, names = report["rows"], list(report["rows"][0]["results"])
    units = {"total_token_throughput": "tokens/s", "median_ttft_ms": "TTFT", "median_tpot_ms": "TPOT"}
    head = [title, *(f"{label(name)}: {units[figure]}" for figure in figures for name in names)]
    return _table(head, ([f"{row[key]:g}", *_cells(row, names, figures)] for row in rows))


def _cells(row: Report, names: Sequence[str], figures: Sequence[str]) -> list[str]:
    cells = []
    for figure in figures:
        for name in names:
            value = row["results"][name].get(figure)
            against = row["against_dense"][name].get(figure)
            unit = " ms" if figure.endswith("_ms") else ""
            ratio = "" if name == "dense" or against is None else f" ({against:.2f}x)"
            cells.append("" if value is None else f"{value:.0f}{unit}{ratio}")
    return cells


def _milliseconds(found: dict[str, float], name: str) -> str:
    return f"{found[name]:.0f} ms" if name in found else ""


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |".replace("|  |", "| |") for line in lines)
