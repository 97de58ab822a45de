"""The comparison with other engines on the performance page is that of the stored runs."""

import json
from pathlib import Path

from benchmarks.common import replace_table
from benchmarks.engine import append_result, parse_arguments
from benchmarks.peers_table import MARKERS, PAGE, RESULTS_DIRECTORY, format_tables
from swiftkv_platform.engine import kernels


def test_the_page_shows_the_stored_runs() -> None:
    table = format_tables(RESULTS_DIRECTORY)
    assert "| decode, batch 1 |" in table
    assert replace_table(PAGE, MARKERS, table) == PAGE.read_text(encoding="utf-8"), "python -m benchmarks.peers_table"


def test_a_table_compares_with_the_fastest_engine_of_the_last_run(tmp_path: Path) -> None:
    medians = {"swiftkv": 10.0, "swiftkv-int8": 6.0, "swiftkv-int4": 5.0, "openvino-int8": 9.0, "llama.cpp-q8_0": 12.0}
    medians |= {"openvino-bfloat16": 15.0, "vllm": 12.0, "openvino-int4": 8.0, "llama.cpp-q4_0": 4.0}
    machine = {"processor": "A CPU", "threads": 2, "capability": "AVX2", "torch": "2.13.0"}
    run = {"load": "decode", "size": 8, "medians_ms": medians, "machine": machine}
    lines = [run | {"medians_ms": medians | {"vllm": 1.0}}, run, run | {"load": "prefill", "size": 2048}]
    (tmp_path / "AVX2.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    heading, _, *table = format_tables(tmp_path).splitlines()
    assert heading == "**AVX2** (A CPU, 2 threads, limited to AVX2 except in OpenVINO):"
    assert table == [
        "|  | `bfloat16` | `int8` | `int4` |",
        "|---|---|---|---|",
        "| prompts of 2,048 tokens | **1.20** vLLM | **1.50** OpenVINO | 0.80 llama.cpp |",
        "| decode, batch 8 | **1.20** vLLM | **1.50** OpenVINO | 0.80 llama.cpp |",
    ]


def test_runs_are_appended_by_processor(tmp_path: Path, native_kernels: None) -> None:
    args = parse_arguments(["--results", str(tmp_path / "peers")])
    for median in (3.0, 4.0):
        append_result(args, "decode", 8, {"swiftkv": {"median_tpot_ms": median}})
    (file,) = (tmp_path / "peers").iterdir()
    assert file.name == f"{kernels.describe_instructions()}.jsonl"
    assert [json.loads(line)["medians_ms"] for line in file.open()] == [{"swiftkv": 3.0}, {"swiftkv": 4.0}]
