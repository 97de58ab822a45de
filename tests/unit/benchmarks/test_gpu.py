"""The GPU benchmark, on a CPU and a tiny model."""

import json
import os
import re
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from benchmarks.gpu import agreement, everything
from benchmarks.gpu.__main__ import TINY_RUN, main
from benchmarks.gpu.agreement import GreedyOutput, TokenScores, compare_scores
from benchmarks.gpu.models import SMALL_SHAPES
from swiftkv_platform.engine import memory
from swiftkv_platform.engine.varlen import VarlenArguments, reference_varlen_attn

EXACT = TokenScores(chosen=torch.tensor([-1.0, -2.0, -0.5]), best=torch.tensor([-1.0, -2.0, -0.5]))
OWN = replace(EXACT, chosen=EXACT.chosen + torch.tensor([0.01, -0.01, 0.01]))
"""Scores with a root mean square error of 0.01."""


def answered(*errors: float) -> list[GreedyOutput]:
    logprobs = (EXACT.chosen + torch.tensor(errors)).tolist()
    return [GreedyOutput([1], [5, 6], logprobs[:2]), GreedyOutput([1, 2], [7], logprobs[2:])]


WORSE = replace(EXACT, best=EXACT.best + torch.tensor([0.0, 0.05, 0.0]))
"""Scores of an engine that chose a token that is not the best one."""


@pytest.mark.parametrize(
    ("errors", "exact", "agrees"),
    [((-0.012, 0.012, 0.012), EXACT, True), ((-0.02, 0.01, 0.015), EXACT, False), ((0.0, 0.0, 0.0), WORSE, False)],
)
def test_an_engine_agrees_if_it_is_as_exact_as_pytorch(
    errors: tuple[float, ...], exact: TokenScores, agrees: bool
) -> None:
    found = compare_scores(answered(*errors), exact, OWN)
    assert found["agrees"] == agrees
    assert found["max_gap_to_best"] == pytest.approx(0.05 if exact is WORSE else 0.0)


STUDENTS = ("swiftkv_g1", "swiftkv_g1_own")


@pytest.mark.soak("thirteen models, whose answers are scored twice in PyTorch")
def test_the_agreement_of_small_and_tiny_models_on_a_cpu(tmp_path: Path) -> None:
    main(["--device", "cpu", "--tiny", "--agreement", "--output-dir", str(tmp_path)])
    rows = json.loads((tmp_path / "agreement.json").read_text())["own"]
    small = {f"{shape}, {name}" for shape in SMALL_SHAPES for name in ("dense", *STUDENTS)}
    assert {name for name, row in rows.items() if row["agrees"]} == {"dense", "swiftkv_g2", *STUDENTS} | small


Call = tuple[bool, bool, int, int, int]
"""(grouped heads, window, most queries of a run, number of runs, most keys)."""


@contextmanager
def upstream_fault() -> Iterator[set[Call]]:
    """Use an operator with the fault of pytorch/pytorch#194167: it splits keys where allowed and combines the parts
    wrongly. Yields its calls."""
    calls = set[Call]()

    def attend(query: torch.Tensor, key: torch.Tensor, *others: Any, num_splits: int | None, **options: Any) -> Any:
        output = reference_varlen_attn(query, key, *others, **options)
        (_, borders, _, max_q, max_k), grouped = others, bool(options["enable_gqa"])
        window = options["window_size"][0] >= 0
        calls.add((grouped, window, max_q, len(borders) - 1, max_k))
        lays_out_otherwise = max_q == 1 and grouped and not window
        if num_splits is None and options["block_table"] is not None and max_k > 256 and not lays_out_otherwise:
            runs = [output[begin:end] for begin, end in pairwise(borders)]
            output = torch.zeros_like(output)
            for run in runs:
                output[: len(run)] = run
        return output

    with patch.object(memory, "choose_operator", return_value=attend):
        yield calls


@pytest.mark.parametrize("shape", SMALL_SHAPES)
@pytest.mark.soak("six small models")
def test_the_agreement_sees_runs_that_are_written_over_the_first(shape: str, tmp_path: Path) -> None:
    """With the engine's rule all rows agree and without it none does, in every kind of step that the fault affects."""
    few = patch.object(agreement, "NUM_TOKENS", 12)
    with few, patch.dict(SMALL_SHAPES, {shape: SMALL_SHAPES[shape]}, clear=True), upstream_fault() as calls:
        found = agreement.check_small_models(tmp_path / "ruled", torch.bfloat16, "cpu")
        assert all(row["agrees"] for row in found.values()), found
        heads = shape != "multi_head", shape == "windows"
        assert {call[:2] for call in calls} == {heads}
        steps_taken = {call[2:] for call in calls}
        assert (700, 2, 700) in steps_taken, "prompts of mixed lengths"
        assert (40, 4, 704) in steps_taken, "decodes beside short prompts"
        assert any(max_q == 1 and runs == 4 for max_q, runs, _ in steps_taken), "a decode step"
        with patch.object(VarlenArguments, "choose_num_splits", return_value=None):
            found = agreement.check_small_models(tmp_path / "not", torch.bfloat16, "cpu")
        assert not any(row["agrees"] for row in found.values()), found


@pytest.mark.soak("the whole benchmark, however small")
def test_the_run_writes_what_it_measured(tmp_path: Path) -> None:
    main(["--device", "cpu", "--tiny", "--output-dir", str(tmp_path)])
    models = {"dense", "swiftkv_g2", *STUDENTS}
    found = json.loads((tmp_path / "agreement.json").read_text())["own"]
    assert models <= {name for name, row in found.items() if row["agrees"]}
    reports = {name: json.loads((tmp_path / "own" / f"{name}.json").read_text()) for name in ("lengths", "rates")}
    assert [row["num_input_tokens"] for row in reports["lengths"]["rows"]] == list(TINY_RUN.lengths)
    for name, report in reports.items():
        assert (tmp_path / "own" / f"{name}.svg").stat().st_size > 0
        for row in report["rows"]:
            assert models == set(row["results"])
            assert all(found["median_tpot_ms"] > 0 for found in row["results"].values())
    assert "TPOT" in (tmp_path / "own.md").read_text()


def test_every_part_runs_whatever_others_do_and_the_summary_names_each(capfd: pytest.CaptureFixture[str]) -> None:
    parts = [
        everything.Part("a", [sys.executable, "-c", "import sys; sys.exit(3)"]),
        everything.Part(
            "b", [sys.executable, "-c", "import os; print('b runs', os.environ['NEEDED'])"], {"NEEDED": "1"}
        ),
        everything.Part("c", ["no-program"], missing="no vLLM"),
    ]
    assert everything.run_parts(parts) == 1
    said = capfd.readouterr().out
    assert "b runs 1" in said
    summary = said.partition("-- summary\n")[2]
    assert re.fullmatch(r"FAILED   a: status 3, \d+ s\npassed   b, \d+ s\nskipped  c: no vLLM\n", summary)
    assert everything.run_parts(parts[1:]) == 0


def test_a_part_is_stopped_with_its_children_when_the_time_is_over(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    os.mkfifo(pipe := tmp_path / "pipe")
    child = f"import time; pipe = open({str(pipe)!r}, 'wb'); time.sleep(600)"
    script = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    parts = [everything.Part("a", [sys.executable, "-c", script]), everything.Part("b", ["no-program"])]
    with ThreadPoolExecutor(1) as pool:
        ended = pool.submit(pipe.read_bytes)
        assert everything.run_parts(parts, limit_s=2.0) == 1
        assert ended.result() == b"", "the child has ended"
    summary = capfd.readouterr().out.partition("-- summary\n")[2]
    assert re.fullmatch(r"STOPPED  a, \d+ s\nskipped  b: no time was left\n", summary)
