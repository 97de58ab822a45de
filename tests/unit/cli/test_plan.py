"""`swiftkv plan` and `swiftkv analyze`, for every way to name a model."""

import json
import sys
from functools import partial
from pathlib import Path

import pytest
from typer.testing import CliRunner

from swiftkv_platform.cli.app import app
from swiftkv_platform.installing import make_install_command
from swiftkv_platform.planning import plan
from swiftkv_platform.student_shape import format_layers
from tests.support.tiny_models import save_teacher
from tests.unit.cli.conftest import invoke

LLAMA_70B = Path(__file__).parents[3] / "benchmarks" / "configs" / "llama-3.1-70b.json"


run = partial(invoke, "plan")


def test_json_is_the_plan() -> None:
    layers, length = ("--num-key-value-layers", "40"), ("--sequence-length", "131072")
    result = run(LLAMA_70B, *layers, "--key-value-group-size", "4", *length, "--kv-cache-dtype", "fp8", "--json")
    assert result.exit_code == 0, result.output
    expected = plan(
        LLAMA_70B, num_key_value_layers=40, key_value_group_size=4, sequence_length=131072, kv_cache_dtype="fp8"
    )
    assert json.loads(result.output) == expected.model_dump(mode="json")
    assert expected.num_kv_cache_layers == 50


RECIPE = LLAMA_70B.parents[2] / "jobs" / "recipes" / "llama-3.1-70b.yaml"


def test_what_the_samples_of_tasks_can_exclude_is_told_before_a_job(tmp_path: Path) -> None:
    """The plan says so for a hub teacher too, and how many samples a limit needs that is too narrow for these."""
    narrow = tmp_path / "narrow.yaml"
    narrow.write_text(RECIPE.read_text().replace("max_drop: 4.0", "max_drop: 1.0"))
    rows = [line.split() for line in run(narrow).output.splitlines()]
    of_gsm8k = next(row for row in rows if row[0] == "gsm8k_llama")
    assert (of_gsm8k[1], of_gsm8k[3]) == ("1,319", "1")
    assert float(of_gsm8k[2]) > 1.0 < int(of_gsm8k[4].replace(",", ""))
    gates = json.loads(run(narrow, "--json").output)["gates"]
    assert [gate["task"] for gate in gates][-1] == "gsm8k_llama"
    few = tmp_path / "few.yaml"
    few.write_text(RECIPE.read_text().replace("tasks: [paper]", "tasks: [ifeval]").replace("drop: 4.0", "drop: auto"))
    warning = "that loses 3 points on every task passes these gates with a probability of about 33%"
    assert [warning in " ".join(run(spec).output.split()) for spec in (few, RECIPE)] == [True, False]
    validated = CliRunner().invoke(app, ["jobs", "validate", "-f", str(narrow), "--config", str(LLAMA_70B)])
    assert "gsm8k_llama" in validated.output


def test_the_table_compares_students_as_table_1_does(tmp_path: Path) -> None:
    result = run(LLAMA_70B, "-l", "60", "-l", "40", "-g", "1", "-g", "4")
    assert result.exit_code == 0, result.output
    rows = [line.split() for line in result.output.splitlines()]
    assert rows[1][:7] == ["dense", "4.2", "2.68", "21.5", "113", "172", "313"]
    assert [" ".join(row[:6]) for row in rows[2:6]] == [f"l = {l}, g = {g}" for l in (60, 40) for g in (1, 4)]  # noqa: E741
    assert rows[5][6:] == ["4.2", "1.68", "10.7", "56.4", "85.9", "159", "50.8%", "50.1%", "50", "204,800", "62.5%"]
    document = json.loads(run("builtin:python-5m", "-g", "1", "-g", "3", "--json").output)
    assert [each["num_kv_cache_layers"] for each in document["plans"]] == [12, 8]
    (tmp_path / "config.json").write_text(LLAMA_70B.read_text())
    assert run(tmp_path, "--json").output == run(LLAMA_70B, "--json").output, "a directory works as well"


def test_a_model_that_is_not_there() -> None:
    for name, message in (
        ("nobody/nothing", "'nobody/nothing' is not a local file or directory, and the hub returned no config.json"),
        ("missing/config.json", "model is 'missing/config.json': no such file or directory here"),
        ("builtin:gpt", "the built-in teachers are builtin:python-5m and"),
    ):
        result = run(name)
        assert (result.exit_code, message in result.stderr) == (1, True)
        assert "Traceback" not in result.output + result.stderr
    assert "--config" in run(RECIPE).stdout, "a hub teacher needs --config"


def test_a_job_spec_is_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    result = run(RECIPE, "--config", LLAMA_70B, "--tokens", "160000000")
    assert result.exit_code == 0, result.output
    told = dict(line.split(maxsplit=1) for line in result.stdout.splitlines() if "  " in line)
    assert told["training"].startswith("2 epochs, 320 million tokens: ")
    assert told["memory"] == "23.5 GiB per worker, 74.5 GiB on one H100: fits"
    assert told["time"] == "2 h 41 min of training, assumed: 40% of a peak of 989 TFLOPs"
    assert json.loads(run(RECIPE, "--config", LLAMA_70B, "--json").output)["seconds"] is None, "epochs decide the steps"
    monkeypatch.setenv("SWIFTKV_FLOPS_PER_SECOND", "1e15")
    found = json.loads(run(RECIPE, "--config", LLAMA_70B, "--tokens", "160000000", "--json").output)
    assert found["seconds"] == pytest.approx(found["total_flops"] / (32 * 1e15))
    assert found["speed_source"] == "configured"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_teacher(tmp_path_factory.mktemp("model"))


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("Words to look at, one line after another.\n" * 20)
    return path


analyze = partial(invoke, "analyze")


def test_table_json_and_picture_agree(model: Path, text: Path, tmp_path: Path) -> None:
    picture = tmp_path / "similarity.png"
    result = analyze(model, "--text", text, "--max-length", "64", "--plot", picture, "--json")
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    assert len(document["sim_scores"]) == 5
    assert document["recommended_num_key_value_layers"] in range(3, 6)
    assert picture.read_bytes().startswith(b"\x89PNG")

    table = analyze(model, "--text", text, "--max-length", "64").stdout
    rows = [line.split() for line in table.splitlines()]
    assert rows[0] == ["l", "SimScore", "prefill", "FLOPs"]
    assert [row[1] for row in rows[1:5]] == [f"{score:.3f}" for score in document["sim_scores"][1:]]
    assert f"Recommended l: {document['recommended_num_key_value_layers']} (" in table


def test_lists_of_layers_that_prompts_run_through(model: Path, text: Path) -> None:
    given = (model, "--text", text, "--max-length", "64", "--num-prefill-layers", "3", "-l", "4")
    document = json.loads(analyze(*given, "--json").stdout)
    lines = analyze(*given).stdout.splitlines()
    assert [line.split() for line in lines[1:4]] == [
        [f"{i}", f"{kl:.4f}"] for i, kl in enumerate(document["bypass_kl"])
    ]
    listed = [format_layers(each["prefill_layers"]) for each in document["lists"]]
    assert [line.split()[0] for line in lines[5:7]] == listed
    chosen = format_layers(document["recommended_prefill_layers"])
    assert lines[-1] == f"Recommended: --prefill-layers {chosen} (same number of layers as -l 3)."


def test_without_matplotlib_nothing_is_read(model: Path, text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    result = analyze(model, "--text", text, "--plot", "similarity.png")
    assert result.exit_code == 1
    assert f"--plot needs matplotlib; run {make_install_command('plot')}" in result.stderr


def test_errors_are_one_line(text: Path, model: Path, tmp_path: Path) -> None:
    assert "no such file or directory here" in analyze(tmp_path / "nothing", "--text", text).stderr
    missing = analyze(model, "--text", tmp_path / "missing.txt")
    assert missing.exit_code == 1
    assert "missing.txt" in missing.stderr
    assert "Traceback" not in missing.output
