"""Points of the benchmark of depths."""

import argparse
import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from benchmarks import depths
from benchmarks.depths import POINTS, SPEC_FILE, TrainingRuns, main, make_point_spec, make_result_name, summarize_seeds
from swiftkv_platform.distillation.trainer import StepMetrics
from swiftkv_platform.specs import load_spec
from tests.support.tiny_models import save_teacher


def arguments(**changed: object) -> argparse.Namespace:
    return argparse.Namespace(**{"steps": 20, "early_exit": False, "calibration_tokens": None} | changed)


@pytest.mark.parametrize(
    ("point", "expected"),
    [
        ("22:1", (22, 1, False, "calibrated", "shared")),
        ("15:2", (15, 2, True, "calibrated", "shared")),
        ("15:1:copied", (15, 1, False, "copied", "shared")),
        ("15:2:teacher-output", (15, 2, False, "calibrated", "shared")),
        ("15:2:own", (15, 2, True, "calibrated", "own")),
    ],
)
def test_a_point_takes_the_place_of_the_specs_own(point: str, expected: tuple[int, int, bool, str, str]) -> None:
    spec = load_spec(SPEC_FILE)
    found = make_point_spec(spec, point, arguments(calibration_tokens=2048), seed=3)
    swiftkv = found.swiftkv
    assert expected == (
        swiftkv.num_key_value_layers,
        swiftkv.key_value_group_size,
        swiftkv.own_output_projection,
        swiftkv.initialization,
        swiftkv.decode_key_value,
    )
    assert (swiftkv.calibration_tokens, found.training.max_steps, found.training.seed) == (2048, 20, 3)
    assert (found.data, found.distillation, found.optimizer) == (spec.data, spec.distillation, spec.optimizer)


def test_a_point_sets_any_field() -> None:
    point = "15:1:own:swiftkv.deep_tail=64:distillation.trainable=all:steps=7"
    found = make_point_spec(load_spec(SPEC_FILE), point, arguments(), seed=0)
    assert (found.swiftkv.deep_tail, found.swiftkv.decode_key_value) == (64, "own")
    assert (found.distillation.trainable, found.training.max_steps) == ("all", 7)


def test_what_is_kept_of_points_has_names_of_their_own() -> None:
    settings = (arguments(), arguments(early_exit=True), arguments(steps=0), arguments(calibration_tokens=4096))
    names = [make_result_name(point, args, seed) for point in POINTS for args in settings for seed in (0, 1)]
    assert len(set(names)) == len(names)


def test_seeds_become_their_mean_and_range() -> None:
    rows = [{"start": {"kl": start}, "end": {"kl": end}} for start, end in ((0.2, 0.1), (0.5, 0.3))]
    assert summarize_seeds(rows)["end"] == {"mean": 0.2, "lowest": 0.1, "highest": 0.3}
    assert summarize_seeds(rows)["start"]["mean"] == 0.35


def write_tiny_spec(directory: Path) -> Path:
    texts = directory / "texts.jsonl"
    rows = [json.dumps({"text": f"def add_{i}(x):\n    return x + {i}\n"}) for i in range(60)]
    texts.write_text("\n".join(rows) + "\n")
    document = {
        "name": "tiny",
        "model": {"name_or_path": str(save_teacher(directory / "teacher")), "dtype": "float32"},
        "swiftkv": {"calibration_tokens": 1024},
        "data": {"sources": [{"name_or_path": str(texts)}], "max_length": 64, "validation_fraction": 0.2},
        "training": {"batch_size": 2, "micro_batch_size": 2},
        "checkpoint": {"every_steps": 2},
        "sharding": {"strategy": "ddp"},
        "resources": {"num_workers": 1},
    }
    file = directory / "spec.yaml"
    file.write_text(yaml.safe_dump(document))
    return file


@pytest.mark.soak("trains students of a tiny model")
def test_points_are_trained_measured_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = write_tiny_spec(tmp_path)
    report = tmp_path / "report.json"
    options = f"{tmp_path / 'kept'} --spec {spec} --points 2:1 2:2 2:1:shared --steps 4 --seeds 0 1"
    monkeypatch.setattr("sys.argv", ["depths", *options.split(), "--needle-lengths", "--output", str(report)])
    assert main() == 0
    points = json.loads(report.read_text())["points"]
    assert {point: len(seeds) for point, seeds in points.items()} == {"2:1": 2, "2:2": 2, "2:1:shared": 2}
    counted = [points[point][0]["end"]["positions"] for point in ("2:1", "2:1:shared")]
    assert counted[0] < counted[1], "with own K and V of deep tokens, part of a text is a prompt"
    assert points["2:2"][0]["swiftkv"]["own_output_projection"]
    assert points["2:1"][0]["end"]["kl"] != points["2:1"][1]["end"]["kl"]
    kept = {path: path.stat().st_mtime_ns for path in (tmp_path / "kept").glob("*-steps-*.json")}
    assert main() == 0
    assert {path: path.stat().st_mtime_ns for path in kept} == kept


def test_an_interrupted_point_continues_from_its_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec, report, steps = write_tiny_spec(tmp_path), tmp_path / "report.json", list[int]()
    on_step = depths._TrainingListener.on_step

    def run_point(directory: str, last_step: int) -> int:
        def record(listener: depths._TrainingListener, metrics: StepMetrics) -> None:
            steps.append(metrics.step)
            on_step(listener, metrics)
            if metrics.step == last_step:
                raise KeyboardInterrupt

        options = f"{tmp_path / directory} --spec {spec} --points 2:1 --steps 6 --needle-lengths --output {report}"
        monkeypatch.setattr("sys.argv", ["depths", *options.split()])
        monkeypatch.setattr(depths._TrainingListener, "on_step", record)
        return main()

    with pytest.raises(KeyboardInterrupt):
        run_point("interrupted", last_step=5)
    del steps[:]
    assert run_point("interrupted", last_step=-1) == 0
    assert steps in ([3, 4, 5, 6], [5, 6]), "the last checkpoint may still have been in writing"
    assert not list((tmp_path / "interrupted").glob("*.training"))
    [continued] = json.loads(report.read_text())["points"]["2:1"]
    assert run_point("whole", last_step=-1) == 0
    [whole] = json.loads(report.read_text())["points"]["2:1"]
    assert (continued["end"], continued["tokens"]) == (whole["end"], whole["tokens"])


def test_an_interrupted_measurement_continues_with_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec, report, measured = write_tiny_spec(tmp_path), tmp_path / "report.json", list[str]()
    compare, measure_needles = TrainingRuns.compare_on_held_out, depths.measure_needles
    options = f"{tmp_path / 'points'} --spec {spec} --points 2:1 --steps 0 --needle-lengths --output {report}"
    monkeypatch.setattr("sys.argv", ["depths", *options.split()])

    def record(runs: TrainingRuns, *arguments: Any) -> Any:
        measured.append("held-out")
        return compare(runs, *arguments)

    def interrupt(*_: Any, **__: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(TrainingRuns, "compare_on_held_out", record)
    monkeypatch.setattr(depths, "measure_needles", interrupt)
    with pytest.raises(KeyboardInterrupt):
        main()
    assert measured == ["held-out"] * 2
    monkeypatch.setattr(depths, "measure_needles", measure_needles)
    assert main() == 0
    assert measured == ["held-out"] * 2
    [point] = json.loads(report.read_text())["points"]["2:1"]
    assert point["start"]["kl"] == point["end"]["kl"] > 0
    assert not list((tmp_path / "points").glob("*.training"))
