"""The run for a GPU, on a CPU and a tiny model; with vLLM where SWIFTKV_TEST_VLLM_PYTHON names an interpreter."""

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.gpu import training
from benchmarks.gpu.__main__ import TINY, main
from benchmarks.gpu.agreement import Answer, Scores, compare

VLLM_PYTHON = os.environ.get("SWIFTKV_TEST_VLLM_PYTHON")
EXACT = Scores(chosen=torch.tensor([-1.0, -2.0, -0.5]), best=torch.tensor([-1.0, -2.0, -0.5]))
OWN = replace(EXACT, chosen=EXACT.chosen + torch.tensor([0.01, -0.01, 0.01]))
"""Root mean square error 0.01."""


def answered(*errors: float) -> list[Answer]:
    logprobs = (EXACT.chosen + torch.tensor(errors)).tolist()
    return [Answer([1], [5, 6], logprobs[:2]), Answer([1, 2], [7], logprobs[2:])]


def test_an_engine_as_exact_as_pytorch_agrees() -> None:
    assert compare(answered(-0.012, 0.012, 0.012), EXACT, OWN)["agrees"]


def test_a_less_exact_engine_does_not() -> None:
    assert not compare(answered(-0.02, 0.01, 0.015), EXACT, OWN)["agrees"]


def test_an_engine_that_chooses_a_worse_token_does_not() -> None:
    better = replace(EXACT, best=EXACT.best + torch.tensor([0.0, 0.05, 0.0]))
    found = compare(answered(0.0, 0.0, 0.0), better, OWN)
    assert found["max_gap_to_best"] == pytest.approx(0.05)
    assert not found["agrees"]


@pytest.mark.slow  # the whole benchmark, however small
@pytest.mark.parametrize(
    "vllm",
    [
        pytest.param(False, marks=pytest.mark.soak("the whole benchmark, however small")),
        pytest.param(True, marks=pytest.mark.skipif(not VLLM_PYTHON, reason="no vLLM")),
    ],
)
def test_the_run_writes_what_it_measured(vllm: bool, tmp_path: Path) -> None:
    options = ["--vllm-python", str(VLLM_PYTHON)] if vllm else []
    main(["--device", "cpu", "--tiny", "--output-dir", str(tmp_path), *options])
    models = {"dense", "swiftkv_g1", "swiftkv_g2", "swiftkv_g1_own"}
    agreement = json.loads((tmp_path / "agreement.json").read_text())
    for engine in ("own", "vllm")[: 1 + vllm]:
        assert {name for name, row in agreement[engine].items() if row["agrees"]} == models
        reports = {
            name: json.loads((tmp_path / engine / f"{name}.json").read_text())
            for name in ("lengths", "rates", "memory")
        }
        assert [row["num_input_tokens"] for row in reports["lengths"]["rows"]] == list(TINY.lengths)
        for name, report in reports.items():
            assert (tmp_path / engine / f"{name}.svg").stat().st_size > 0
            for row in report["rows"]:
                assert models <= set(row["results"])
                assert all(found["median_tpot_ms"] > 0 for found in row["results"].values())
        (row,) = reports["memory"]["rows"]
        blocks = {name: cache["num_blocks"] for name, cache in row["kv_cache"].items()}
        assert blocks["dense"] == blocks["swiftkv_g1"]
        assert blocks["swiftkv_g2"] > blocks["dense"]
        assert "TPOT" in (tmp_path / f"{engine}.md").read_text()


def test_training_steps_stand_beside_their_plan(capsys: pytest.CaptureFixture[str]) -> None:
    training.main(["--device", "cpu", "--tiny", "--max-length", "128", "--steps", "3"])
    rows = capsys.readouterr().out.splitlines()[-2:]
    assert [row.split(" | ")[:2] for row in rows] == [["| shared", "ddp"], ["| own", "fsdp2"]]
    assert all(int(row.split(" | ")[4].replace(",", "")) > 0 for row in rows)


def test_without_a_gpu_it_names_the_options_for_a_cpu(capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(SystemExit):
        main([])
    assert "--device cpu --tiny" in capsys.readouterr().err
