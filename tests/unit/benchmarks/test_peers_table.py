"""The comparison with other engines on the performance page is that of the stored runs."""

import json
from pathlib import Path
from unittest.mock import patch

from benchmarks import engine
from benchmarks.common import replace_table
from benchmarks.engine import append_result, parse_arguments, time_decode_apart
from benchmarks.peers_table import MARKERS, PAGE, RESULTS_DIRECTORY, format_tables
from benchmarks.serving.loads import RequestTimes, make_simultaneous_requests
from swiftkv_platform.engine import kernels


def test_the_page_shows_the_stored_runs() -> None:
    table = format_tables(RESULTS_DIRECTORY)
    assert "| decode, batch 1 |" in table
    assert replace_table(PAGE, MARKERS, table) == PAGE.read_text(encoding="utf-8"), "python -m benchmarks.peers_table"


def test_a_table_compares_with_the_fastest_engine_of_the_last_run(tmp_path: Path) -> None:
    medians = {"swiftkv": 10.0, "swiftkv-int8": 6.0, "swiftkv-int4": 5.0, "openvino-int8": 9.0, "llama.cpp-q8_0": 12.0}
    medians |= {"openvino-bfloat16": 15.0, "vllm": 12.0, "openvino-int4": 8.0, "llama.cpp-q4_0": 4.0}
    machine = {"processor": "A CPU", "threads": 2, "capability": "AVX2", "torch": "2.13.0"}
    limits = {"swiftkv": 7.0, "swiftkv-int8": 3.0, "swiftkv-int4": 3.0}
    run = {"load": "decode", "size": 8, "medians_ms": medians, "machine": machine}
    lines = [run | {"medians_ms": medians | {"vllm": 1.0}}, run, run | {"load": "prefill", "size": 2048}]
    lines.append(lines[-1] | {"limits_ms": limits})
    (tmp_path / "AVX2.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    heading, _, *table = format_tables(tmp_path).splitlines()
    assert heading == "**AVX2** (A CPU, 2 threads, limited to AVX2 except in OpenVINO):"
    assert table == [
        "|  | `bfloat16` | `int8` | `int4` |",
        "|---|---|---|---|",
        "| prompts of 2,048 tokens | **1.20** vLLM, 70% | **1.50** OpenVINO, 50% | 0.80 llama.cpp, 60% |",
        "| decode, batch 8 | **1.20** vLLM | **1.50** OpenVINO | 0.80 llama.cpp |",
    ]


def test_runs_are_appended_by_processor(tmp_path: Path, native_kernels: None) -> None:
    args = parse_arguments(["--results", str(tmp_path / "peers")])
    for median in (3.0, 4.0):
        append_result(args, "decode", 8, {"swiftkv": {"median_tpot_ms": median}}, {"swiftkv": 2.0})
    (file,) = (tmp_path / "peers").iterdir()
    assert file.name == f"{kernels.describe_instructions()}.jsonl"
    assert [json.loads(line)["medians_ms"] for line in file.open()] == [{"swiftkv": 3.0}, {"swiftkv": 4.0}]


def test_a_load_takes_as_long_as_its_products_or_as_reading_the_weights() -> None:
    counted = {"prefill_flops": 2_000_000, "decode_step_flops": 8_000}  # 1,000 weights, a batch of 4
    with patch.multiple(engine, measure_product=lambda _: 1e6, measure_read=lambda: 1e5):
        assert engine.compute_limits_ms(counted, "prefill", 4) == dict.fromkeys(engine.BYTES_PER_WEIGHT, 2_000.0)
        assert engine.compute_limits_ms(counted, "decode", 4) == {
            "swiftkv": 20.0,
            "swiftkv-int8": 10.0,
            "swiftkv-int4": 8.0,
        }


def test_prefill_of_some_requests_is_no_decode_of_others() -> None:
    """Two requests whose prompts are read one after the other, then decoded at one token a second."""
    requests = make_simultaneous_requests(2, 10, 4)
    times = [(1.0, 5.0, 6.0, 7.0), (5.0, 6.0, 7.0, 8.0)]
    system = time_decode_apart(lambda requests, _: [RequestTimes(0.0, 10, one) for one in times])
    assert [played.tpot for played in system(requests, [[], []])] == [1.0, 1.0]
    one_token = [RequestTimes(0.0, 10, (3.0,)), RequestTimes(0.0, 10, (4.0,))]
    kept = time_decode_apart(lambda requests, _: one_token)(make_simultaneous_requests(2, 10, 1), [[], []])
    assert [played.ttft for played in kept] == [3.0, 4.0]
