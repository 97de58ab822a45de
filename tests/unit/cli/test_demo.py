"""The parts of the demo that need no cluster: its spec, its home, its report, and its failing in order."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from swiftkv_platform.cli.app import app
from swiftkv_platform.client import MetricPoint
from swiftkv_platform.errors import SwiftKVError
from swiftkv_platform.local.demo.report import build_report, plot_loss, print_report, write_report
from swiftkv_platform.local.demo.run import job_spec
from swiftkv_platform.specs import JobSpec
from tests.requirements import required_module

EVALUATION: dict[str, Any] = {
    "teacher": {"perplexity": 8.0},
    "rewired": {"perplexity": 12.0, "kl": 0.4, "top1_agreement": 0.6},
    "calibrated": {"perplexity": 10.0, "kl": 0.2, "top1_agreement": 0.7},
    "distilled": {"perplexity": 8.5, "kl": 0.1, "top1_agreement": 0.9},
    "kl_recovered": 0.75,
    "prefill_flops_ratio": 0.55,
    "kv_bytes_ratio": 0.75,
    "prompt_length": 2048,
    "prefill_flops_per_token": {"dense": 22_300_000.0, "swiftkv": 12_265_000.0},
    "kv_bytes_per_token": {"dense": 9216.0, "swiftkv": 6912.0},
    "ttft_ms": {"dense": 100.0, "swiftkv": 60.0},
    "tokens_trained": 123456,
}


def test_the_recipe_is_a_valid_spec_of_half_the_layers() -> None:
    spec = JobSpec.model_validate(job_spec(None))
    assert spec.model.name_or_path == "builtin:python-5m"
    assert spec.swiftkv.key_value_group_size == 2
    assert spec.resources.num_workers == 2


def test_another_teacher_skips_half_of_its_own_layers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "teacher").mkdir()
    monkeypatch.chdir(tmp_path)
    spec = JobSpec.model_validate(job_spec("teacher"))
    assert spec.model.name_or_path == str(tmp_path / "teacher")
    assert (spec.swiftkv.num_key_value_layers, spec.swiftkv.prefill_reduction) == (None, 0.5)
    assert JobSpec.model_validate(job_spec("some/model")).model.name_or_path == "some/model"


def test_the_report_has_the_evaluation_and_what_was_observed(tmp_path: Path) -> None:
    report = build_report({**EVALUATION, "more": 1}, {"job_id": "job_1"})
    assert report == {**EVALUATION, "demo": {"job_id": "job_1"}}
    write_report(report, tmp_path / "demo-report.json")
    assert json.loads((tmp_path / "demo-report.json").read_text()) == report


@pytest.mark.parametrize("calibrated", [EVALUATION["calibrated"], None])
def test_the_report_is_printed_with_every_stage(calibrated: dict[str, float] | None) -> None:
    console = Console(file=io.StringIO(), width=100)
    print_report(build_report({**EVALUATION, "calibrated": calibrated}, {}), console)
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    for figure in ("8.00", "12.00", "8.50", "90.0%", "75%", "123,456", "0.550", "60 ms", "0.600"):
        assert figure in text
    assert ("10.00" in text) == (calibrated is not None)


def test_the_cost_table_has_no_empty_cell() -> None:
    console = Console(file=io.StringIO(), width=100)
    print_report(build_report(EVALUATION, {}), console)
    assert isinstance(console.file, io.StringIO)
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in console.file.getvalue().splitlines()]
    assert rows[-4:-1] == [
        ["prefill a token", "22.3 MFLOPs", "12.3 MFLOPs", "0.550"],
        ["KV cache a token", "9 KiB", "6.75 KiB", "0.750"],
        ["time to first token", "100 ms", "60 ms", "0.600"],
    ]
    assert "prompt of 2,048 tokens" in console.file.getvalue()


def test_a_report_without_its_figures_is_an_error() -> None:
    with pytest.raises(SwiftKVError, match="kl_recovered, ttft_ms"):
        build_report({k: v for k, v in EVALUATION.items() if k not in ("kl_recovered", "ttft_ms")}, {})


def test_the_loss_curve_is_a_picture(tmp_path: Path) -> None:
    required_module("matplotlib")
    points = [MetricPoint(step=n, tokens=n * 100, logits_loss=1.0 / n) for n in range(1, 5)]
    assert plot_loss(points, tmp_path / "loss.png") is None
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_without_losses_or_matplotlib_there_is_a_reason_and_no_picture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    point = MetricPoint(step=1, tokens=100, logits_loss=1.0)
    assert "no loss" in str(plot_loss([MetricPoint(step=1)], tmp_path / "loss.png"))
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    assert "matplotlib" in str(plot_loss([point], tmp_path / "loss.png"))
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_no_demo_made_is_left_alone(tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    (home / "thesis.txt").write_text("years of work")
    result = CliRunner().invoke(app, ["demo", "--home", str(home), "--output", str(tmp_path / "report.json")])
    assert result.exit_code == 1
    assert "not an earlier demo's" in result.stderr
    assert (home / "thesis.txt").read_text() == "years of work"
