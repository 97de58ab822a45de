"""Job specs: fields that need each other, changes by dotted paths, and values left to the model and the data."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from swiftkv_platform.cli.context import read_spec
from swiftkv_platform.errors import InvalidInputError
from swiftkv_platform.sources.names import resolve_traffic_windows
from swiftkv_platform.specs import JobSpec
from swiftkv_platform.specs.base import STORED_CONTEXT
from swiftkv_platform.specs.documents import apply_changes, load_yaml
from swiftkv_platform.specs.job import resolve_batch_size, resolve_model_defaults


def spec(**fields: Any) -> JobSpec:
    return JobSpec.model_validate({"name": "n", **fields})


BYPASSING = {"prefill_layers": [0, 2, 4]}
LISTED = ("swiftkv.prefill_layers",)


@pytest.mark.parametrize(
    ("accepted", "refused", "field", "message"),
    [
        (
            {"publish": {"adapter": True}, "distillation": {"trainable": "tail"}},
            {"publish": {"adapter": True}, "distillation": {"trainable": "all"}},
            "publish.adapter",
            r"publish\.adapter is true, .* as large as the model",
        ),
        *(
            ({"swiftkv": BYPASSING, **accepted}, {"swiftkv": {**BYPASSING, **swiftkv}, **refused}, *LISTED, message)
            for accepted, swiftkv, refused, message in (
                ({}, {"prefill_layers": []}, {}, r"is \[\]: use an ascending list"),
                ({}, {"prefill_layers": [0, 2, 2]}, {}, r"is \[0, 2, 2\]: use an ascending list without repeats"),
                ({}, {"prefill_layers": [2, 0]}, {}, "use an ascending list"),
                ({}, {"prefill_layers": "2,0"}, {}, "is '2,0': use ascending layers and ranges, such as 0-2,4,6-16"),
                ({}, {"prefill_layers": "0-99999" * 400}, {}, "use ascending layers and ranges"),
                (
                    {},
                    {"num_key_value_layers": 6},
                    {},
                    "implies num_key_value_layers 5, not 6; remove num_key_value_layers",
                ),
                ({}, {"prefill_reduction": 0.5}, {}, "cannot be combined with prefill_reduction 0.5"),
                ({}, {"decode_key_value": "shared"}, {}, "requires decode_key_value: own"),
                ({}, {}, {"sharding": {"sequence_parallel_size": 2}}, "sequence_parallel_size 2; use 1"),
                ({}, {}, {"training": {"gradient_checkpointing": True}}, "use false"),
                ({}, {}, {"sweep": {"num_key_value_layers": [4, 5]}}, "num_key_value_layers; remove one of them"),
                (
                    {"distillation": {"trainable": "all"}, "sharding": {"strategy": "ddp"}},
                    {},
                    {"distillation": {"trainable": "all"}},
                    "under sharding.strategy 'fsdp2'; use distillation.trainable qkv, or sharding.strategy ddp",
                ),
            )
        ),
    ],
)
def test_a_field_that_needs_another_is_refused_without_it(
    accepted: dict[str, Any], refused: dict[str, Any], field: str, message: str
) -> None:
    assert spec(**accepted).swiftkv.is_calibrated
    with pytest.raises(ValidationError, match=message) as caught:
        spec(**refused)
    [error] = caught.value.errors()
    assert ".".join(filter(None, (*error["loc"], error.get("ctx", {}).get("field")))) == field


@pytest.mark.parametrize(
    ("deep_tail", "form", "message"),
    [
        (64, "shared", "a value above 1 requires decode_key_value: own"),
        (0, "own", "1 to 1,048,576 is accepted"),
        (1 << 21, "own", "1 to 1,048,576 is accepted"),
    ],
)
def test_a_deep_tail_needs_own_keys_and_values(deep_tail: int, form: str, message: str) -> None:
    assert spec(swiftkv={"deep_tail": 64}).swiftkv.request.deep_tail == 64
    with pytest.raises(ValidationError, match=message):
        spec(swiftkv={"deep_tail": deep_tail, "decode_key_value": form})


def test_a_list_without_gaps_is_another_name_of_l() -> None:
    listed = spec(swiftkv={"prefill_layers": "0-2", "num_key_value_layers": 3, "decode_key_value": "shared"}).swiftkv
    assert (listed.request.requested_depth, listed.request.has_bypassed_layers) == (3, False)
    bypassing = spec(swiftkv=BYPASSING).swiftkv
    assert (bypassing.request.requested_depth, bypassing.request.has_bypassed_layers) == (5, True)


@pytest.mark.parametrize(("swiftkv", "form"), [({}, "own"), ({"decode_key_value": "shared"}, "shared")])
def test_new_students_keep_what_they_write_and_stored_ones_stay_as_they_were(swiftkv: Any, form: str) -> None:
    new = JobSpec.model_validate({"name": "n", "swiftkv": swiftkv})
    assert new.swiftkv.decode_key_value == form
    assert JobSpec.model_validate(new.model_dump(mode="json"), context=STORED_CONTEXT) == new
    for stored in (swiftkv, {}, {"initialization": "refitted", "own_output_projection": True}):
        read = JobSpec.model_validate({"name": "n", "swiftkv": stored}, context=STORED_CONTEXT).swiftkv
        assert (read.decode_key_value, read.initialization) == ("shared", "calibrated")


def test_what_is_named_is_changed_and_the_original_is_not() -> None:
    before = spec().model_dump(mode="json")
    changes = {"training.max_steps": 7, "data.sources.0.weight": 2.0, "sweep.key_value_group_size": [1, 2], "name": "m"}
    changed = apply_changes(before, changes)
    assert changed["training"] == {**before["training"], "max_steps": 7}
    assert changed["data"]["sources"] == [{**before["data"]["sources"][0], "weight": 2.0}]
    assert (changed["sweep"], changed["name"]) == ({"key_value_group_size": [1, 2]}, "m")
    assert before == spec().model_dump(mode="json") == apply_changes(before, {})


@pytest.mark.parametrize(
    ("path", "why"),
    [
        ("data.sources.1.weight", "'1' is not an index of a list with 1 items"),
        ("data.sources.first.weight", "'first' is not an index of a list with 1 items"),
        (f"data.sources.{'9' * 5000}.weight", "is not an index of a list with 1 items"),
        ("data.sources.1", "'1' is not an index of a list with 1 items"),
        ("name.first", "'n' has no field 'first'"),
        ("training.", "a key is empty"),
        ("", "a key is empty"),
    ],
)
def test_a_path_that_leads_nowhere_is_refused(path: str, why: str) -> None:
    with pytest.raises(InvalidInputError, match=why) as refused:
        apply_changes(spec().model_dump(mode="json"), {path: 1})
    assert refused.value.field == path


@pytest.mark.parametrize(
    ("hidden_size", "trainable", "rate"),
    [(64, "qkv", 3e-3), (512, "qkv", 1.2e-3), (1024, "qkv", 6e-4), (8192, "qkv", 3e-4), (1024, "all", 2e-4)],
)
def test_smaller_models_learn_at_a_higher_rate(hidden_size: int, trainable: str, rate: float) -> None:
    resolved = resolve_model_defaults(
        spec(distillation={"trainable": trainable}), context_length=None, hidden_size=hidden_size
    )
    assert resolved.optimizer.learning_rate == pytest.approx(rate)


def test_what_is_given_stays() -> None:
    given = spec(optimizer={"learning_rate": 1e-5}, training={"batch_size": 6}, data={"max_length": 100})
    assert resolve_batch_size(resolve_model_defaults(given, context_length=4096, hidden_size=64), num_rows=3) == given


@pytest.mark.parametrize(
    ("context_length", "sequence_parallel_size", "length"),
    [(512, 1, 512), (8192, 1, 8192), (131072, 1, 8192), (None, 1, 8192), (1026, 4, 1024)],
)
def test_rows_fit_the_context_and_divide_among_the_workers_that_share_one(
    context_length: int | None, sequence_parallel_size: int, length: int
) -> None:
    shared = spec(sharding={"sequence_parallel_size": sequence_parallel_size}, resources={"num_workers": 4})
    assert resolve_model_defaults(shared, context_length=context_length, hidden_size=64).data.max_length == length


SIX_A_PASS = {"resources": {"num_workers": 3}, "training": {"micro_batch_size": 2}}


@pytest.mark.parametrize(
    ("fields", "num_rows", "size"),
    [
        *(({}, num_rows, size) for num_rows, size in ((6400, 32), (6399, 16), (2000, 8), (400, 2), (7, 2))),
        *((SIX_A_PASS, num_rows, size) for num_rows, size in ((10**5, 30), (10, 6))),
        ({"training": {"max_steps": 10}}, 5, 32),
    ],
)
def test_few_rows_make_small_batches_that_divide_among_the_workers(
    fields: dict[str, Any], num_rows: int, size: int
) -> None:
    """By default two epochs on two workers; a given number of steps sets the length of the run, whatever the rows."""
    assert resolve_batch_size(spec(**fields), num_rows).training.batch_size == size


@pytest.mark.parametrize(
    ("text", "key", "lines"),
    [
        ("name: a\nname: b\n", "name", (1, 2)),
        ('{"name": "a",\n "training": {"max_steps": 1,\n\n "max_steps": 2}}', "max_steps", (2, 4)),
        (
            "data:\n  sources:\n  - {name_or_path: a}\n  - name_or_path: b\n    'name_or_path': c\n",
            "name_or_path",
            (4, 5),
        ),
    ],
)
def test_a_key_given_twice_is_refused_with_both_lines(
    text: str, key: str, lines: tuple[int, int], tmp_path: Path
) -> None:
    path = tmp_path / "spec.yaml"
    path.write_text(text)
    with pytest.raises(InvalidInputError) as caught:
        read_spec(path)
    expected = f"{path}: duplicate key {key!r}, in line {lines[0]} and in line {lines[1]}; remove one"
    assert caught.value.message == expected


def test_a_key_may_stand_beside_one_that_is_merged_in() -> None:
    merged = "a: &a {x: 1, y: 1}\nb: &b\n  <<: *a\n  x: 2\nc:\n  <<: *b\n  y: 3\n"
    assert load_yaml(merged)["c"] == {"x": 2, "y": 3}


TRAFFIC = "traffic:dep_01JZ8Q4M7W3X5N6P9R2S1T0VAB"
SUBMITTED = 20_000.5 * 86400.0
"""2024-10-04T12:00:00Z."""


@pytest.mark.parametrize(
    ("times", "since", "until"),
    [
        ("", None, "2024-10-04T12:00:00Z"),
        ("since: 7d, until: 90m", "2024-09-27T12:00:00Z", "2024-10-04T10:30:00Z"),
        ("since: 2024-10-01, until: 2024-10-03", "2024-10-01T00:00:00Z", "2024-10-03T00:00:00Z"),
        ("since: 2024-10-01 06:00:00, until: 12h", "2024-10-01T06:00:00Z", "2024-10-04T00:00:00Z"),
        ("since: '2024-10-01T08:00+02:00'", "2024-10-01T06:00:00Z", "2024-10-04T12:00:00Z"),
        ("since: 2024-10-01T06:00:00.5Z, until: 2030-01-01", "2024-10-01T06:00:00.500000Z", "2024-10-04T12:00:00Z"),
        ("since: 99999d, until: 1m", "1750-12-21T12:00:00Z", "2024-10-04T11:59:00Z"),
    ],
)
def test_a_window_of_traffic_is_resolved_at_submission(
    times: str, since: str | None, until: str, tmp_path: Path
) -> None:
    """Also times that YAML reads as dates, since nobody quotes them. A resolved window stays."""
    path = tmp_path / "spec.yaml"
    path.write_text(f"name: n\ndata: {{sources: [{{name_or_path: '{TRAFFIC}', {times}}}]}}")
    resolved = resolve_traffic_windows(read_spec(path), SUBMITTED + 0.5)
    [source] = resolved.data.sources
    assert (source.since, source.until) == (since, until)
    assert resolve_traffic_windows(resolved, SUBMITTED + 86400.0) == resolved
    stored = JobSpec.model_validate_json(resolved.model_dump_json())
    assert stored.data.sources[0].window == source.window
    assert source.window[1] - source.window[0] > 0


@pytest.mark.parametrize("field", ["since", "until"])
@pytest.mark.parametrize(
    "value", ["", "now", "7", "0d", "7 d", "7w", "-7d", "2024-13-01", "12:00", "0001-01-01T00:00+14:00"]
)
def test_what_is_no_time_is_refused_with_examples(field: str, value: str) -> None:
    with pytest.raises(ValidationError, match=f"(?s){field}.*use a date or time such as 2026-11-30"):
        spec(data={"sources": [{"name_or_path": TRAFFIC, field: value}]})


@pytest.mark.parametrize("field", ["since", "until"])
@pytest.mark.parametrize("name", ["org/data", "rows.jsonl", "s3://bucket/rows", "file-01", "builtin:python-stdlib"])
def test_only_traffic_has_times(name: str, field: str) -> None:
    with pytest.raises(
        ValidationError, match=f"{field} is '7d', but only captured traffic .* has times; remove {field}"
    ):
        spec(data={"sources": [{"name_or_path": name, field: "7d"}]})


@pytest.mark.parametrize(
    "times", [{"since": "2024-10-05"}, {"since": "1h", "until": "1h"}, {"since": "1h", "until": "1d"}]
)
def test_an_empty_window_is_refused(times: dict[str, str]) -> None:
    sources = [{"name_or_path": "org/data"}, {"name_or_path": TRAFFIC, **times}]
    with pytest.raises(InvalidInputError, match="which is not before until") as refused:
        resolve_traffic_windows(spec(data={"sources": sources}), SUBMITTED)
    assert (refused.value.field, refused.value.value) == ("data.sources[1].since", times["since"])


def test_a_spec_without_traffic_is_not_changed() -> None:
    given = spec(data={"sources": [{"name_or_path": "org/data"}]})
    assert resolve_traffic_windows(given, SUBMITTED) is given
