"""The tables of the demo in README and the quality page are those of the stored report of a run."""

from pathlib import Path
from typing import Any

import pytest

from benchmarks.common import replace_table
from benchmarks.readme_table import (
    MARKERS,
    PAGES,
    STORED_REPORT,
    format_details,
    format_summary,
    read_report,
)
from swiftkv_platform.local.demo import build_report
from tests.unit.cli.test_demo import EVALUATION


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_shows_the_stored_run(page: Path) -> None:
    table = PAGES[page](read_report(STORED_REPORT))
    assert replace_table(page, MARKERS, table) == page.read_text(encoding="utf-8"), "python -m benchmarks.readme_table"


def demo_report(**changes: Any) -> dict[str, Any]:
    report = build_report({**EVALUATION, **changes}, {"seconds": {"total": 738.0}, "dtype": "float32"})
    machine = {"processor": "A CPU", "simd": "AVX2", "num_cpus": 2, "torch": "2.13.0", "python": "3.12.1"}
    assert report["demo"]["machine"].keys() == machine.keys()
    return {**report, "demo": {**report["demo"], "machine": machine}}


def test_every_figure_of_a_report_is_written(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"# Title\n{MARKERS[0]}\nold\n{MARKERS[1]}\nrest\n")
    written = replace_table(page, MARKERS, format_details(demo_report()))
    assert written.startswith(f"# Title\n{MARKERS[0]}\n\n| model |")
    assert written.endswith(f"\n\n{MARKERS[1]}\nrest\n")
    assert "old" not in written
    assert [line for line in written.splitlines() if line.startswith("| ")][1:] == [
        "| built-in teacher | 8.00 |  |  | 1 | 1 | 1 |",
        "| half the layers skipped, g = 2: projections copied | 12.00 | 0.400 | 60.0% | 0.550 | 0.750 |  |",
        "| the same: projections calibrated (no training yet) | 10.00 | 0.200 | 70.0% |  |  |  |",
        "| **the same: distilled, 0.1 M counted tokens** | **8.50 (1.06x)** | **0.100** | **90.0%** | **0.550** "
        "| **0.750** | **0.60** |",
    ]
    sentences = " ".join(written.split())
    assert (
        "Samples: 7,313 positions of 34 rows of Python. Seeds: one. Interval (95%) of the distilled student: KL 0.091 "
        "to 0.110, perplexity 1.04 to 1.09x, agreement 88.0% to 91.5%." in sentences
    )
    assert (
        "after 12.3 minutes, plus installation, on 2 CPUs of A CPU (AVX2) in float32 with PyTorch 2.13.0" in sentences
    )
    assert "Interval: none measured." in format_details(demo_report(intervals=None))


def test_the_summary_has_four_columns_of_the_same_rows() -> None:
    lines = [line for line in format_summary(demo_report()).splitlines() if line.startswith("| ")]
    assert lines == [
        "| model | perplexity | KL to the teacher (nats) | time to first token |",
        "| built-in teacher | 8.00 |  | 1 |",
        "| half the layers skipped, g = 2: projections copied | 12.00 | 0.400 |  |",
        "| the same: projections calibrated (no training yet) | 10.00 | 0.200 |  |",
        "| **the same: distilled, 0.1 M counted tokens** | **8.50 (1.06x)** | **0.100** | **0.60** |",
    ]


def test_a_page_without_markers_is_left_alone(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# Title\n")
    with pytest.raises(SystemExit, match=r"page\.md lacks the markers"):
        replace_table(page, MARKERS, "| a |")
