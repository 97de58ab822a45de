"""The serving benchmark: its pure functions, and its parts on a tiny model."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.serving.__main__ import main
from benchmarks.serving.loads import RequestTimes, compute_figures, compute_medians, make_poisson_requests, median_ratio

TINY = "--layers 4 --hidden-size 32 --intermediate-size 48 --heads 4 --kv-heads 2 --vocab-size 128 --kv-cache-mib 8"


def test_requests_arrive_at_a_rate_in_the_same_rhythm() -> None:
    slow, fast = make_poisson_requests(2.0, 5, 7, 3), make_poisson_requests(4.0, 5, 7, 3)
    assert slow[0].arrival == 0.0
    assert slow[-1].arrival == pytest.approx(2.0)  # four intervals
    assert [r.arrival for r in slow] == pytest.approx([2 * r.arrival for r in fast])
    assert {(r.num_input_tokens, r.num_output_tokens) for r in slow} == {(7, 3)}


def test_figures_in_the_fields_names() -> None:
    requests = [
        RequestTimes(arrival=0.0, num_input_tokens=10, token_times=(1.0, 1.5, 3.0)),
        RequestTimes(arrival=1.0, num_input_tokens=30, token_times=(4.0,)),
    ]
    found = compute_figures(requests)
    assert found["completed"] == 2
    assert found["duration"] == 4.0
    assert found["request_throughput"] == 0.5
    assert found["output_throughput"] == 1.0
    assert found["total_token_throughput"] == 11.0
    assert found["mean_ttft_ms"] == pytest.approx(2000)
    assert found["p99_ttft_ms"] == pytest.approx(2980)
    assert found["mean_tpot_ms"] == found["p99_tpot_ms"] == pytest.approx(1000)  # only one has a second token
    assert found["median_itl_ms"] == pytest.approx(1000)
    assert found["p99_itl_ms"] == pytest.approx(1490)
    assert found["mean_e2el_ms"] == pytest.approx(3000)
    assert "mean_tpot_ms" not in compute_figures(requests[1:])


def test_medians_and_ratios_over_rounds() -> None:
    mine, theirs = [{"a": 2.0}, {"a": 30.0}, {"a": 6.0, "b": 1.0}], [{"a": 1.0}, {"a": 10.0}, {"a": 1.0}]
    assert compute_medians(mine) == {"a": 6.0, "b": 1.0}
    assert median_ratio(mine, theirs, "a") == 3.0


def report(directory: Path, part: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((directory / f"{part}.json").read_text(encoding="utf-8"))
    return found


@pytest.mark.soak("plays loads on every engine")
def test_every_part_runs_and_says_how_its_figures_came_about(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = f"{TINY} --num-key-value-layers 2 --rounds 2"
    options += " --lengths 16 32 --length-total-tokens 64 --length-output-tokens 4"
    options += " --memory-mib 1 --num-memory-requests 16 --memory-input-tokens 240 --memory-output-tokens 40"
    main([*options.split(), "--output-dir", str(tmp_path / "out")])

    lengths = report(tmp_path / "out", "lengths")
    assert [row["num_input_tokens"] for row in lengths["rows"]] == [16, 32]
    assert lengths["arguments"]["rounds"] == 2
    for row in lengths["rows"]:
        assert list(row["results"]) == ["dense", "swiftkv_g2"]
        for name, found in row["results"].items():
            assert found["total_input_tokens"] == 64, name
            assert 0 < found["mean_ttft_ms"] <= found["p99_ttft_ms"] <= found["p99_e2el_ms"]
            assert len(row["rounds"][name]) == 2
    caches = report(tmp_path / "out", "memory")["rows"][0]["kv_cache"]
    blocks = {name: cache["num_blocks"] for name, cache in caches.items()}
    assert blocks["merge_all_layers"] == 4 * blocks["dense"]
    assert blocks["swiftkv_g2"] == blocks["dense"] * 4 // 3
    assert caches["dense"]["preemptions_per_round"] > 0
    assert caches["merge_all_layers"]["preemptions_per_round"] == 0
    shown = capsys.readouterr().out
    assert f"| SwiftKV, g = 2 | 1 | {blocks['swiftkv_g2']} |" in shown
    assert {path.name for path in (tmp_path / "out").glob("*.svg")} == {"lengths.svg", "memory.svg"}
