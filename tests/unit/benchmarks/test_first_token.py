"""`benchmarks.first_token` on a tiny student: one row for each length, a figure for each mode."""

import json
from pathlib import Path

import pytest

from benchmarks import first_token
from tests.unit.engine.tiny_models import save_swiftkv


@pytest.mark.slow  # loads two engines
def test_both_modes_of_an_artifact_are_timed_at_every_length(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    artifact, report = save_swiftkv(tmp_path / "student", 64), tmp_path / "report.json"
    first_token.main([str(artifact), "--lengths", "8", "32", "--rounds", "1", "--output", str(report)])
    rows = json.loads(report.read_text())["median_ttft_ms"]
    assert set(rows) == {"8", "32"}
    assert [set(row) for row in rows.values()] == [{"engine, teacher", "engine, student"}] * 2
    assert all(milliseconds > 0 for row in rows.values() for milliseconds in row.values())
    printed = [line for line in capsys.readouterr().out.splitlines() if " tokens: engine, teacher " in line]
    assert [line.strip().partition(" ")[0] for line in printed] == ["8", "32"]
