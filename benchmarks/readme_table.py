"""Write the demo's tables in README.md and docs/quality.md from the report of `make demo`.

python -m benchmarks.readme_table demo-report.json     # store this report, and write its tables
python -m benchmarks.readme_table                      # write the tables of the stored report again
"""

from __future__ import annotations

import argparse
import json
import textwrap
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.common import format_markdown_table, replace_table

ROOT = Path(__file__).parents[1]
STORED_REPORT = Path(__file__).with_name("demo_report.json")
MARKERS = ("<!-- demo: python -m benchmarks.readme_table demo-report.json -->", "<!-- end of demo -->")
_MAX_LINE_LENGTH = 150
SUMMARY_COLUMNS = ("model", "perplexity", "KL to the teacher (nats)", "time to first token")
COLUMNS = (
    "model",
    "perplexity",
    "KL to the teacher (nats)",
    "top-1 agreement",
    "prefill FLOPs",
    "KV bytes",
    "time to first token",
)
SUMMARY_INDICES = tuple(COLUMNS.index(name) for name in SUMMARY_COLUMNS)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("report", type=Path, nargs="?", help="demo-report.json of the run; default: the stored report")
    options = parser.parse_args()
    report = read_report(options.report or STORED_REPORT)
    # Check the markers of all pages before anything is overwritten.
    pages = {file: replace_table(file, MARKERS, format_table(report)) for file, format_table in PAGES.items()}
    STORED_REPORT.write_text(json.dumps(report, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    for file, page in pages.items():
        file.write_text(page, encoding="utf-8")
    print(format_details(report))


def read_report(path: Path) -> dict[str, Any]:
    report: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return report


def format_summary(report: dict[str, Any]) -> str:
    """Format README's table: perplexity, KL and time to first token of each row, and the machine and minutes."""
    rows = [tuple(row[index] for index in SUMMARY_INDICES) for row in _list_rows(report)]
    return f"{format_markdown_table(SUMMARY_COLUMNS, rows)}\n\n{_wrap(_describe_run(report['demo']))}"


def format_details(report: dict[str, Any]) -> str:
    """Format the table with all figures, its samples and intervals, and the machine and minutes of the run."""
    table = format_markdown_table(COLUMNS, _list_rows(report))
    return f"{table}\n\n{_wrap(_describe_samples(report))}\n\n{_wrap(_describe_run(report['demo']))}"


PAGES: Mapping[Path, Callable[[dict[str, Any]], str]] = {
    ROOT / "README.md": format_summary,
    ROOT / "docs" / "quality.md": format_details,
}


def _list_rows(report: dict[str, Any]) -> list[tuple[str, ...]]:
    """Return the cells of `COLUMNS` for the teacher and the three students."""
    copied, calibrated, distilled = (report[name] for name in ("rewired", "calibrated", "distilled"))
    costs = [report["prefill_flops_ratio"], report["kv_bytes_ratio"]]
    ttft = report["ttft_ms"]["swiftkv"] / report["ttft_ms"]["dense"]
    perplexity = f"{distilled['perplexity']:.2f} ({report['perplexity_ratio']:.2f}x)"
    last = (perplexity, *_format_quality(distilled), *(f"{cost:.3f}" for cost in costs), f"{ttft:.2f}")
    return [
        ("built-in teacher", f"{report['teacher']['perplexity']:.2f}", "", "", "1", "1", "1"),
        (
            "half the layers skipped, g = 2: projections copied",
            f"{copied['perplexity']:.2f}",
            *_format_quality(copied),
            *(f"{cost:.3f}" for cost in costs),
            "",
        ),
        (
            "the same: projections calibrated (no training yet)",
            f"{calibrated['perplexity']:.2f}",
            *_format_quality(calibrated),
            *[""] * 3,
        ),
        tuple(
            f"**{cell}**"
            for cell in (f"the same: distilled, {report['tokens_trained'] / 1e6:.1f} M counted tokens", *last)
        ),
    ]


def _wrap(paragraph: str) -> str:
    return textwrap.fill(paragraph, _MAX_LINE_LENGTH, break_long_words=False, break_on_hyphens=False)


def _format_quality(quality: dict[str, float]) -> tuple[str, str]:
    return f"{quality['kl']:.3f}", f"{quality['top1_agreement']:.1%}"


def _describe_samples(report: dict[str, Any]) -> str:
    intervals = report["intervals"]
    if intervals is None:
        return f"Samples: {report['num_positions']:,} positions of Python. Seeds: one. Interval: none measured."
    kl, ratio, agreement = (intervals[name] for name in ("kl", "perplexity_ratio", "top1_agreement"))
    return (
        f"Samples: {report['num_positions']:,} positions of {intervals['num_units']} {intervals['unit']}s of Python. "
        f"Seeds: one. Interval (95%) of the distilled student: KL {kl[0]:.3f} to {kl[1]:.3f}, "
        f"perplexity {ratio[0]:.2f} to {ratio[1]:.2f}x, agreement {agreement[0]:.1%} to {agreement[1]:.1%}."
    )


def _describe_run(demo: dict[str, Any]) -> str:
    machine = demo["machine"]
    name = f"{machine['processor']} ({machine['simd']})" if machine["simd"] else machine["processor"]
    return (
        f"`make demo` printed these figures after {demo['seconds']['total'] / 60:.1f} minutes, plus installation, on "
        f"{machine['num_cpus']} CPUs of {name} in {demo['dtype']} with PyTorch {machine['torch']} and "
        f"Python {machine['python']}."
    )


if __name__ == "__main__":
    main()
