"""Changes by dotted paths: what is named is changed, nothing else, and a path that leads nowhere is refused."""

from __future__ import annotations

from typing import Any

import pytest

from swiftkv_platform.errors import InvalidInputError
from swiftkv_platform.specs import JobSpec
from swiftkv_platform.specs.changes import with_changes


def test_what_is_named_is_changed_and_the_original_is_not() -> None:
    spec = JobSpec(name="n").model_dump(mode="json")
    changed = with_changes(
        spec, {"training.max_steps": 7, "data.sources.0.weight": 2.0, "sweep.key_value_group_size": [1, 2], "name": "m"}
    )
    assert changed["training"] == {**spec["training"], "max_steps": 7}
    assert changed["data"]["sources"] == [{**spec["data"]["sources"][0], "weight": 2.0}]
    assert (changed["sweep"], changed["name"]) == ({"key_value_group_size": [1, 2]}, "m")
    assert spec == JobSpec(name="n").model_dump(mode="json")
    assert with_changes(spec, {}) == spec


@pytest.mark.parametrize(
    ("path", "why"),
    [
        ("data.sources.1.weight", "the list has 1 items"),
        ("data.sources.first.weight", "'first' is none of 0 to 0"),
        ("data.sources.1", "the list has 1 items"),
        ("name.first", "what would hold 'first' is 'n'"),
        ("training.", "a key in it is empty"),
        ("", "a key in it is empty"),
    ],
)
def test_a_path_that_leads_nowhere_is_refused(path: str, why: str) -> None:
    spec: dict[str, Any] = JobSpec(name="n").model_dump(mode="json")
    with pytest.raises(InvalidInputError, match=why) as refused:
        with_changes(spec, {path: 1})
    assert refused.value.field == path
