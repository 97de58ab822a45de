"""Points of the benchmark of depths."""

from __future__ import annotations

import argparse

import pytest

from benchmarks.depths import POINTS, SPEC, name_of, point_spec
from swiftkv_platform.specs import load_spec


def arguments(**changed: object) -> argparse.Namespace:
    return argparse.Namespace(**{"steps": 20, "early_exit": False, "calibration_tokens": None} | changed)


@pytest.mark.parametrize(
    ("point", "expected"),
    [
        ("22:1", (22, 1, False, "calibrated")),
        ("15:2", (15, 2, True, "calibrated")),
        ("15:1:refitted", (15, 1, True, "refitted")),
        ("15:1:copied", (15, 1, False, "copied")),
    ],
)
def test_a_point_takes_the_place_of_the_specs_own(point: str, expected: tuple[int, int, bool, str]) -> None:
    spec = load_spec(SPEC)
    found = point_spec(spec, point, arguments(calibration_tokens=2048))
    swiftkv = found.swiftkv
    assert expected == (
        swiftkv.num_key_value_layers,
        swiftkv.key_value_group_size,
        swiftkv.own_output_projection,
        swiftkv.initialization,
    )
    assert (swiftkv.calibration_tokens, found.training.max_steps) == (2048, 20)
    assert (found.data, found.distillation, found.optimizer) == (spec.data, spec.distillation, spec.optimizer)


def test_what_is_kept_of_points_has_names_of_their_own() -> None:
    settings = (arguments(), arguments(early_exit=True), arguments(steps=0), arguments(calibration_tokens=4096))
    names = [name_of(point, args) for point in POINTS for args in settings]
    assert len(set(names)) == len(names)
