"""Write the table of docs/performance.md that compares our engine with other engines on CPUs, from the runs that
`make peers` stored in `benchmarks/peers`, a file per class of processors.

python -m benchmarks.peers_table
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.common import format_markdown_table, replace_table

PAGE = Path(__file__).parents[1] / "docs" / "performance.md"
RESULTS_DIRECTORY = Path(__file__).with_name("peers")
MARKERS = ("<!-- peers: python -m benchmarks.peers_table -->", "<!-- end of peers -->")
FORMS = {
    "swiftkv": ("bfloat16", ("openvino-bfloat16", "llama.cpp-bf16", "vllm")),
    "swiftkv-int8": ("int8", ("openvino-int8", "llama.cpp-q8_0")),
    "swiftkv-int4": ("int4", ("openvino-int4", "llama.cpp-q4_0")),
}
"""Weights of our engine's systems, and the other engines with weights of the same size."""
PEER_NAMES = {"openvino": "OpenVINO", "llama.cpp": "llama.cpp", "vllm": "vLLM"}
LOADS = [("prefill", 512), ("prefill", 2048), ("prefill", 8192), ("decode", 1), ("decode", 8), ("decode", 32)]


def main() -> None:
    table = format_tables(RESULTS_DIRECTORY)
    PAGE.write_text(replace_table(PAGE, MARKERS, table), encoding="utf-8")
    print(table)


def format_tables(directory: Path) -> str:
    """Format a table per class of processors: the speed of our engine relative to the fastest other engine."""
    return "\n\n".join(_format_class(path.stem, _read_runs(path)) for path in sorted(directory.glob("*.jsonl")))


def _read_runs(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def _format_class(name: str, runs: Sequence[dict[str, Any]]) -> str:
    last = {(run["load"], run["size"]): run for run in runs}  # later runs replace earlier ones
    rows = [(_name_load(*load), *(_compare(last[load], system) for system in FORMS)) for load in LOADS if load in last]
    table = format_markdown_table(("", *(f"`{weights}`" for weights, _ in FORMS.values())), rows)
    machine = runs[-1]["machine"]
    note = "" if machine["capability"] is None else f", limited to {machine['capability']} except in OpenVINO"
    return f"**{name}** ({machine['processor']}, {machine['threads']} threads{note}):\n\n{table}"


def _name_load(load: str, size: int) -> str:
    return f"prompts of {size:,} tokens" if load == "prefill" else f"decode, batch {size}"


def _compare(run: dict[str, Any], system: str) -> str:
    """Return our speed relative to the fastest other engine with the same weights, its name, and our speed in percent
    of what this machine's products and memory allow, if that was measured."""
    _, peers = FORMS[system]
    medians_ms: dict[str, float] = run["medians_ms"]
    peer = min((name for name in peers if name in medians_ms), key=lambda name: medians_ms[name])
    ratio = f"{medians_ms[peer] / medians_ms[system]:.2f}"
    bold = f"**{ratio}**" if medians_ms[system] < medians_ms[peer] else ratio
    of_limit = f", {run['limits_ms'][system] / medians_ms[system]:.0%}" if "limits_ms" in run else ""
    return f"{bold} {PEER_NAMES[peer.rpartition('-')[0] or peer]}{of_limit}"


if __name__ == "__main__":
    main()
