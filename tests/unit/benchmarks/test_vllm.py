"""vLLM behind a pipe: the worker with a stand-in for vLLM, and with vLLM itself where SWIFTKV_TEST_VLLM_PYTHON names an
interpreter that has it."""

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks import engine
from benchmarks.engine_worker import EngineWorker, WorkerError, make_vllm_arguments
from benchmarks.gpu import weights
from tests.support.fakes.vllm_package.vllm import DIES, SLEEPS

FAKE = Path(__file__).parents[2] / "support" / "fakes" / "vllm_package"
REAL = os.environ.get("SWIFTKV_TEST_VLLM_PYTHON")
REASON = "SWIFTKV_TEST_VLLM_PYTHON names no interpreter; vLLM's dependencies differ from ours"


pytestmark = pytest.mark.slow  # the worker is an interpreter of its own


@pytest.fixture(scope="module")
def fake_python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """This interpreter, with the stand-in on its path."""
    python = tmp_path_factory.mktemp("fake") / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH="{FAKE}" exec "{sys.executable}" "$@"\n', encoding="utf-8")
    python.chmod(0o755)
    return python


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    shape = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=128, num_key_value_heads=2, max_position_embeddings=256, **shape)
    LlamaForCausalLM(config).save_pretrained(path)
    return path


@pytest.fixture(
    scope="module", params=["fake", pytest.param("vllm", marks=pytest.mark.skipif(not REAL, reason=REASON))]
)
def python(request: pytest.FixtureRequest, fake_python: Path) -> Path:
    return fake_python if request.param == "fake" else Path(str(REAL))


@pytest.fixture(scope="module")
def worker(python: Path, model: Path) -> Iterator[EngineWorker]:
    with started(python, model) as worker:
        yield worker
        worker.close()
        assert ended(worker)


def started(python: Path, model: Path = FAKE) -> EngineWorker:
    arguments = make_vllm_arguments(
        model, kv_cache_bytes=1 << 20, max_model_len=128, max_num_seqs=4, max_num_batched_tokens=64
    )
    arguments["enforce_eager"] = True  # compiling takes a minute for each worker
    return EngineWorker(python, arguments, num_threads=1)


def ended(worker: EngineWorker) -> bool:
    return worker._process.poll() is not None


def test_answers_come_with_the_time_of_every_token(worker: EngineWorker) -> None:
    assert worker.settings["max_num_batched_tokens"] == 64
    assert worker.settings["threads"] == 1
    for lengths in ([1], [5, 3]):
        times = worker.generate([[7] * 20] * len(lengths), lengths)
        assert [len(one) for one in times] == lengths
        assert all(one[0] > 0 and one == sorted(one) for one in times)


def test_what_vllm_refuses_ends_the_worker_with_its_reason(python: Path, model: Path) -> None:
    with started(python, model) as worker:
        with pytest.raises(WorkerError, match=r"(?s)exit status 1.*Traceback.*maximum context length"):
            worker.generate([[7] * 200], [4])
        assert ended(worker)
        with pytest.raises(WorkerError, match="has exited"):
            worker.generate([[7]], [1])


def test_a_worker_that_is_killed_is_noticed(fake_python: Path) -> None:
    with started(fake_python) as worker, pytest.raises(WorkerError, match=r"has exited \(exit status -9\)"):
        worker.generate([[DIES]], [1])


@pytest.mark.soak("waits for what does not come")
def test_a_silent_worker_is_stopped(fake_python: Path) -> None:
    with started(fake_python) as worker:
        worker._response_timeout_s = 0.5
        with pytest.raises(WorkerError, match=r"has not responded for 0\.5 s"):
            worker.generate([[SLEEPS]], [1])
    assert ended(worker)


def test_an_interpreter_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    with pytest.raises(WorkerError, match=r"the interpreter '.*/missing' does not run \(.*No such file"):
        started(tmp_path / "missing")
    bare = tmp_path / "python"
    bare.write_text(f'#!/bin/sh\nexec "{sys.executable}" -S "$@"\n', encoding="utf-8")
    bare.chmod(0o755)
    with pytest.raises(WorkerError, match=r"exit status 1.*\n(?s:.*)No module named"):
        started(bare)


@pytest.mark.soak("four interpreters")
def test_forms_of_weights_take_turns(fake_python: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--device", "cpu", "--tiny", "--rounds", "2", "--weights", "bfloat16", "fp8", "int8"]
    weights.main([*options, "--vllm-python", str(fake_python), "--output", str(tmp_path / "weights.json")])
    report = json.loads((tmp_path / "weights.json").read_text(encoding="utf-8"))
    table = capsys.readouterr().out
    for load, found in report["rows"].items():
        assert {form: list(rows) for form, rows in found.items()} == {
            "bfloat16": [weights.DENSE, weights.OWN, "swiftkv_g1"],
            "fp8": [weights.DENSE, weights.OWN],
            "int8": [weights.DENSE, weights.OWN],
        }
        for rows in found.values():
            assert all(row["least"] <= row["against_dense"] <= row["largest"] for row in rows.values())
            assert rows[weights.DENSE]["against_dense"] == 1
        row = found["fp8"][weights.OWN]
        assert f"| {load} |" in table
        assert f"{row['ms']:.1f} ms ({row['against_dense']:.3f}x," in table


@pytest.mark.soak("four engines on one model")
def test_the_benchmark_compares_with_it(fake_python: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tiny = "--layers 4 --hidden-size 64 --intermediate-size 96 --heads 4 --kv-heads 2 --vocab-size 128"
    tiny += " --num-key-value-layers 2 --prompt-length 40 --context-length 12 --output-length 4 --short"
    systems = ["dense", "swiftkv", "huggingface", "vllm", "vllm-swiftkv", "vllm-int8", "vllm-swiftkv-int8"]
    tiny += f" --systems {' '.join(systems)}"
    engine.main([*tiny.split(), "--vllm-python", str(fake_python), "--output", str(tmp_path / "engine.json")])
    report = json.loads((tmp_path / "engine.json").read_text(encoding="utf-8"))
    assert {name: settings["vllm"] for name, settings in report["workers"].items()} == dict.fromkeys(
        systems[3:], "fake"
    )
    for load, figure, tokens in (("prefill", "median_ttft_ms", 41), ("decode", "median_tpot_ms", 8 * 16)):
        rows = report[load]
        assert list(rows) == systems
        counted = {row["total_input_tokens"] + row["total_output_tokens"] for row in rows.values()}
        assert counted == {tokens}
        faster = rows["vllm"][figure] / rows["swiftkv"][figure]
        found = report["speedups"][load]["vllm"]
        assert set(found) == set(systems) - {"vllm"}
        if load == "prefill":
            assert found["swiftkv"] == pytest.approx(faster)
    assert "speed relative to vllm: dense " in capsys.readouterr().out
