"""The serving benchmark: its pure functions, and its parts on a tiny model."""

import itertools
import json
import re
from pathlib import Path
from typing import Any

import pytest

from benchmarks.serving.__main__ import main, parse_arguments
from benchmarks.serving.metrics import RateSearch, RequestTimes, figures, median_ratio, medians
from benchmarks.serving.workloads import Request, at_rate, drawn, read_trace, scaled, thinned, uniform
from swiftkv_platform.errors import DataError, InvalidInputError

HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens\r\n"
TINY = "--layers 4 --hidden-size 32 --intermediate-size 48 --heads 4 --kv-heads 2 --vocab-size 128 --kv-cache-mib 8"


def azure(path: Path, *lines: str) -> Path:
    path.write_text(HEADER + "".join(f"{line}\r\n" for line in lines), encoding="utf-8")
    return path


def test_an_azure_trace_is_read_by_arrival(tmp_path: Path) -> None:
    trace = azure(tmp_path / "code.csv", "2023-11-16 18:17:04.5000000,30,3", "2023-11-16 18:17:03.9799600,4808,10")
    requests = read_trace(trace)
    assert [(r.num_input_tokens, r.num_output_tokens) for r in requests] == [(4808, 10), (30, 3)]
    assert [r.arrival for r in requests] == pytest.approx([0.0, 0.52004])


@pytest.mark.parametrize(
    "line",
    [
        "yesterday,30,3",
        "2023-11-16 18:17:04.5000000,many,3",
        "2023-11-16 18:17:04.5000000,30,0",
        "2023-11-16 18:17:04.5000000,30",
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: str) -> None:
    good = "2023-11-16 18:17:03.9799600,4808,10"
    with pytest.raises(DataError, match="line 3: "):
        read_trace(azure(tmp_path / "bad.csv", good, line))


def test_a_trace_without_a_request_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no request"):
        read_trace(azure(tmp_path / "empty.csv"))


def test_scaling_keeps_rhythm_and_ratio() -> None:
    requests = [Request(0.0, 1000, 40), Request(1.0, 2, 2), Request(4.0, 100, 20)]
    short = scaled(requests, 0.25)
    assert [(r.num_input_tokens, r.num_output_tokens) for r in short] == [(250, 10), (1, 1), (25, 5)]
    faster = at_rate(short, 4.0)  # scales two intervals to half a second
    assert [r.arrival for r in faster] == pytest.approx([0.0, 0.125, 0.5])
    assert [r.arrival for r in at_rate(short, float("inf"))] == [0.0, 0.0, 0.0]
    assert [r.num_input_tokens for r in faster] == [250, 1, 25]


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan")])
def test_impossible_scales_are_refused(value: float) -> None:
    with pytest.raises(InvalidInputError, match="length_scale is"):
        scaled([Request(0.0, 1, 1)], value)
    with pytest.raises(InvalidInputError, match="rate is"):
        at_rate([Request(0.0, 1, 1)], value)


def test_a_thinned_trace_spans_all_of_it_and_other_samples_are_others() -> None:
    requests = [Request(float(at), at + 1, 1) for at in range(100)]
    samples = [thinned(requests, 10, number) for number in range(4)]
    for sample in samples:
        assert [b.num_input_tokens - a.num_input_tokens for a, b in itertools.pairwise(sample)] == [10] * 9
        assert sample[0].arrival == 0.0
    assert len({sample[0].num_input_tokens for sample in samples}) == 4
    assert len(thinned(requests, 100, 3)) == 100
    with pytest.raises(InvalidInputError, match=r"1\.\.100 are accepted"):
        thinned(requests, 101)


def test_drawn_loads_have_the_lengths_of_their_trace() -> None:
    requests = drawn("code", 4000, seed=0)
    assert requests == drawn("code", 4000, seed=0) != drawn("code", 4000, seed=1)
    inputs = sorted(r.num_input_tokens for r in requests)
    outputs = sorted(r.num_output_tokens for r in requests)
    assert inputs[2000] == pytest.approx(1469, rel=0.1)
    assert sum(inputs) / 4000 == pytest.approx(2048, rel=0.1)
    assert outputs[2000] == pytest.approx(13, rel=0.1)
    assert requests[-1].arrival == pytest.approx(4000, rel=0.1)  # one a second
    assert {(r.num_input_tokens, r.num_output_tokens) for r in uniform(5, 7, 3, seed=0)} == {(7, 3)}


def test_figures_in_the_fields_names() -> None:
    requests = [
        RequestTimes(arrival=0.0, num_input_tokens=10, token_times=(1.0, 1.5, 3.0)),
        RequestTimes(arrival=1.0, num_input_tokens=30, token_times=(4.0,)),
    ]
    found = figures(requests)
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
    assert "mean_tpot_ms" not in figures(requests[1:])


def test_medians_and_ratios_over_rounds() -> None:
    mine, theirs = [{"a": 2.0}, {"a": 30.0}, {"a": 6.0, "b": 1.0}], [{"a": 1.0}, {"a": 10.0}, {"a": 1.0}]
    assert medians(mine) == {"a": 6.0, "b": 1.0}
    assert median_ratio(mine, theirs, "a") == 3.0


@pytest.mark.parametrize(("capacity", "expected"), [(10.0, 7.5), (5.2, 5.0), (4.0, 4.0), (3.0, None)])
def test_the_search_finds_the_highest_sustained_rate(capacity: float, expected: float | None) -> None:
    search = RateSearch(low=4.0, high=8.0, num_trials=3)
    tried = []
    while (rate := search.next_rate) is not None:
        tried.append(rate)
        search.record(rate, sustained=rate <= capacity)
    assert search.sustained == expected
    assert tried[0] == 6.0
    assert len(tried) == 3 + (capacity < 4.5)
    assert tried == list(search.trials)


def test_an_unknown_part_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_arguments(["speed"])
    assert "saturation, sustained, lengths, memory" in capsys.readouterr().err


def report(directory: Path, part: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((directory / f"{part}.json").read_text(encoding="utf-8"))
    return found


@pytest.mark.soak("replays traces on every engine")
def test_every_part_runs_and_says_how_its_figures_came_about(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    times = [f"2023-11-16 18:17:0{second}.0000000,{1000 + second},{150 + second}" for second in range(8)]
    trace = azure(tmp_path / "code.csv", *times)
    options = f"{TINY} --num-key-value-layers 2 --length-scale 0.02 --rounds 2 --num-requests 4"
    options += " --num-search-requests 2 --num-trials 1"
    options += " --lengths 16 32 --length-total-tokens 64 --length-output-tokens 4"
    options += " --memory-mib 1 --num-memory-requests 16 --memory-input-tokens 240 --memory-output-tokens 40"
    main([*options.split(), "--trace", str(trace), "--output-dir", str(tmp_path / "out")])

    saturation = report(tmp_path / "out", "saturation")
    assert list(saturation["results"]) == ["dense", "swiftkv_g1", "swiftkv_g2"]
    load = saturation["loads"][0]
    assert load["num_requests"] == 4
    for name, found in saturation["results"].items():
        assert found["completed"] == 4
        assert found["total_input_tokens"] == 4 * load["mean_input_tokens"], name
        assert found["total_output_tokens"] == 4 * load["mean_output_tokens"], name
        assert 0 < found["mean_ttft_ms"] <= found["p99_ttft_ms"] <= found["p99_e2el_ms"]
    assert len(saturation["rounds"]["dense"]) == 2
    assert saturation["arguments"]["trace"] == "code.csv"
    assert saturation["arguments"]["length_scale"] == 0.02

    sustained = report(tmp_path / "out", "sustained")
    for run in sustained["rounds"]:
        for name, rate in run["sustained"].items():
            assert 0.5 <= rate / run["saturated"][name] < 1.0, "a tiny model starts every request within the limit"
    assert sustained["against_dense"]["dense"] == 1.0

    assert [row["num_input_tokens"] for row in report(tmp_path / "out", "lengths")["rows"]] == [16, 32]
    caches = report(tmp_path / "out", "memory")["rows"][0]["kv_cache"]
    blocks = {name: cache["num_blocks"] for name, cache in caches.items()}
    assert blocks["merge_all_layers"] == 4 * blocks["dense"]
    assert blocks["swiftkv_g2"] == blocks["dense"] * 4 // 3
    assert caches["dense"]["preemptions_per_round"] > 0
    assert caches["merge_all_layers"]["preemptions_per_round"] == 0
    shown = capsys.readouterr().out
    assert f"| SwiftKV, g = 2 | 1 | {blocks['swiftkv_g2']} |" in shown
    printed = [float(number) for number in re.findall(r"\| dense \| ([0-9.]+) \|", shown)]
    rate = sustained["results"]["dense"]["sustained_request_rate"]  # rounded once more than the printed value
    assert any(number == pytest.approx(rate, abs=0.011) for number in printed)
    assert {path.name for path in (tmp_path / "out").glob("*.svg")} == {"lengths.svg", "memory.svg"}
