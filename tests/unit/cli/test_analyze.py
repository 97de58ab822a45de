"""`swiftkv analyze` prints, draws and refuses."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from swiftkv_platform.cli.app import app
from tests.tiny_models import save_teacher


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_teacher(tmp_path_factory.mktemp("model"))


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("Words to look at, one line after another.\n" * 20)
    return path


def run(*arguments: str | Path) -> Result:
    return CliRunner(env={"HF_HUB_OFFLINE": "1"}).invoke(app, ["analyze", *map(str, arguments)])


def test_table_json_and_picture_agree(model: Path, text: Path, tmp_path: Path) -> None:
    picture = tmp_path / "similarity.png"
    result = run(model, "--text", text, "--max-length", "64", "--plot", picture, "--json")
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    assert len(document["sim_scores"]) == 5
    assert document["recommended_num_key_value_layers"] in range(3, 6)
    assert picture.read_bytes().startswith(b"\x89PNG")

    table = run(model, "--text", text, "--max-length", "64").stdout
    rows = [line.split() for line in table.splitlines()]
    assert rows[0] == ["l", "SimScore", "prefill", "FLOPs"]
    assert [row[1] for row in rows[1:5]] == [f"{score:.3f}" for score in document["sim_scores"][1:]]
    assert f"Recommended l: {document['recommended_num_key_value_layers']} (" in table


def test_without_matplotlib_nothing_is_read(model: Path, text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    result = run(model, "--text", text, "--plot", "similarity.png")
    assert result.exit_code == 1
    assert "a picture needs matplotlib; pip install 'swiftkv-platform[plot]'" in result.stderr


def test_errors_are_one_line(text: Path, model: Path, tmp_path: Path) -> None:
    assert "cannot be read" in run(tmp_path / "nothing", "--text", text).stderr
    missing = run(model, "--text", tmp_path / "missing.txt")
    assert missing.exit_code == 1
    assert "missing.txt" in missing.stderr
    assert "Traceback" not in missing.output
