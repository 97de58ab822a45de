"""Scores of single answers, with hostile ones."""

from fractions import Fraction
from typing import Any

import pytest

from swiftkv_platform.data.evaluation_rows import (
    compile_schema,
    contains_answer,
    is_close,
    is_valid_json,
    matches_exactly,
    parse_last_number,
)
from swiftkv_platform.data.messages import RowError


@pytest.mark.parametrize(
    ("answer", "expected", "ignore_case", "passes"),
    [
        (" the\n cat\t", "the cat", False, True),
        ("The cat", "the cat", False, False),
        ("STRASSE", "straße", True, True),
        ("cafe\u0301", "caf\u00e9", False, True),
        ("a\u00a0b", "a b", False, True),
        ("the cat.", "the cat", False, False),
        ("", "the cat", False, False),
    ],
)
def test_exact_matches_ignore_white_space_and_composition(
    answer: str, expected: str, ignore_case: bool, passes: bool
) -> None:
    assert matches_exactly(answer, expected, ignore_case=ignore_case) is passes


def test_an_answer_may_contain_the_expected_one() -> None:
    assert contains_answer("It is  the\ncafe\u0301, I think", "the caf\u00e9")
    assert not contains_answer("It is The Cat", "the cat")
    assert contains_answer("It is The Cat", "the cat", ignore_case=True)


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("It is 42.", 42),
        ("first 3, then 4", 4),
        ("1,234,567.5 in total", Fraction("1234567.5")),
        ("1\u202f234 or 1_234", 1234),
        ("1,23", 23),
        ("-3", -3),
        ("\u22123", -3),
        ("-$4.50", Fraction("-4.5")),
        ("10-12", 12),
        ("12%", 12),
        ("1e-3", Fraction(1, 1000)),
        ("1E3 m", 1000),
        (".5", Fraction(1, 2)),
        ("-.5", Fraction(-1, 2)),
        ("答案是5", 5),
        ("٣٤", 34),
        ("x = 7", 7),
        ("abc12", None),
        ("NaN", None),
        ("infinity", None),
        ("none", None),
        ("", None),
        ("1." + "0" * 20 + "1", Fraction("1." + "0" * 20 + "1")),
        ("9" * 5000, None),
        ("1e9999", 1),
    ],
)
def test_the_last_number_of_a_text_is_exact(text: str, number: Any) -> None:
    assert parse_last_number(text) == number


@pytest.mark.parametrize(
    ("answer", "expected", "absolute", "relative", "passes"),
    [
        ("1.1", "1", 0.1, 0.0, True),  # floats would differ by 0.10000000000000009
        ("1.11", "1", 0.1, 0.0, False),
        ("0.1", "0.10", 0.0, 0.0, True),
        ("0.30000000000000001", "0.3", 0.0, 0.0, False),
        ("-101", "-100", 0.0, 0.01, True),
        ("101", "-100", 0.0, 0.01, False),
        ("103", "100", 5.0, 0.01, True),
        ("NaN", "1", 1e30, 0.0, False),
        ("0.5", "50%", 0.0, 0.0, False),
        ("50", "50%", 0.0, 0.0, True),
    ],
)
def test_numbers_pass_within_the_larger_tolerance(
    answer: str, expected: str, absolute: float, relative: float, passes: bool
) -> None:
    assert is_close(answer, expected, absolute=absolute, relative=relative) is passes


SCHEMA = {"type": "object", "required": ["n"], "properties": {"n": {"type": "integer", "maximum": 9}}}


@pytest.mark.parametrize(
    ("answer", "passes"),
    [
        ('{"n": 3}', True),
        ('\n```json\n{"n": 3}\n```\n', True),
        ('```\n{"n": 3}\n```', True),
        ('Here it is:\n```json\n{"n": 3}\n```', False),
        ('{"n": 3} is it', False),
        ('{"n": 30}', False),
        ('{"n": "3"}', False),
        ('{"m": 3}', False),
        ('{"n": NaN}', False),
        ('{"n": 3', False),
        ('{"n": 1e999}', False),
        ("1" * 400, False),
        ("1" * 5000, False),
        ("[" * 100_000, False),
        ("", False),
    ],
)
def test_json_answers_are_valid_as_a_whole(answer: str, passes: bool) -> None:
    assert is_valid_json(answer, compile_schema(SCHEMA)) is passes


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"type": "objekt"}, "not valid at type"),
        ({"$ref": "http://169.254.169.254/schema"}, "refers to 'http://169.254.169.254/schema'"),
        ({"properties": {"a": {"$ref": "file:///etc/passwd"}}}, "refers to 'file:///etc/passwd'"),
        ({"$ref": "#/$defs/lost"}, "refers to '#/\\$defs/lost'"),
        ({"pattern": "("}, "not valid at pattern"),
        ({"patternProperties": {"[": {}}}, "not valid at patternProperties"),
        ({"properties": {"default": {"$ref": "http://a"}}}, "refers to 'http://a'"),
        ({"$ref": "#/parts/a", "parts": {"a": {"items": {"$ref": "#/lost"}}}}, "refers to '#/lost'"),
        ({"$ref": "#/parts/a", "parts": {"a": {"properties": [1]}}}, "not valid at properties"),
        ({"$schema": 7}, "\\$schema is 7; the address of a draft"),
        ([1], "an object with a JSON schema is accepted"),
        ("{}", "an object with a JSON schema is accepted"),
        (None, "an object with a JSON schema is accepted"),
    ],
)
def test_schemas_that_cannot_decide_are_refused(schema: Any, message: str) -> None:
    with pytest.raises(RowError, match=message):
        compile_schema(schema)


def test_a_schema_may_refer_to_itself_and_name_its_draft() -> None:
    tree = {"$defs": {"node": {"type": "array", "items": {"$ref": "#/$defs/node"}}}, "$ref": "#/$defs/node"}
    assert is_valid_json("[[], [[]]]", compile_schema(tree))
    assert not is_valid_json("[[], [1]]", compile_schema(tree))
    pair = {"$schema": "http://json-schema.org/draft-07/schema#", "items": [{"type": "string"}, {"type": "null"}]}
    assert is_valid_json('["a", null]', compile_schema(pair))
    assert not is_valid_json('["a", 1]', compile_schema(pair))
    part = {"$id": "part", "$defs": {"a": {"type": "string"}}, "items": {"$ref": "#/$defs/a"}}
    whole = {"$id": "http://a/whole", "$defs": {"part": part}, "$ref": "part"}
    assert is_valid_json('["a"]', compile_schema(whole)), "references are relative to the nearest $id"
    assert not is_valid_json("[1]", compile_schema(whole))
    word = {"enum": [{"$ref": "http://nowhere"}, "a"]}
    assert is_valid_json('"a"', compile_schema(word)), "values are no schemas"


def test_no_number_of_an_answer_fails_the_evaluation() -> None:
    validator = compile_schema({"multipleOf": 0.5})
    assert [is_valid_json(answer, validator) for answer in ("1.5", "1.3", "1e999", "1" * 400)] == [True, *[False] * 3]
