"""Scores of single answers: exact match, containment, JSON schema and numbers. Pure functions of texts.

White space and Unicode composition never matter. A JSON answer may stand in a code fence, since chat models write one,
but other text around it counts as invalid.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Mapping
from fractions import Fraction
from typing import TYPE_CHECKING, Any

from swiftkv_platform.data.messages import RowError, parse_json

if TYPE_CHECKING:
    from jsonschema.protocols import Validator

_NUMBER = re.compile(
    r"(?<![A-Za-z0-9_.])(?P<sign>[-+\u2212]?)\s?[$\u20ac\u00a3\u00a5]?"
    r"(?P<whole>\d{1,3}(?:[,_\u00a0\u2009\u202f]\d{3})+(?!\d)|\d+|(?=\.\d))(?P<fraction>\.\d+)?"
    r"(?P<exponent>[eE][-+]?\d{1,3}(?!\d))?"
)
_GROUPING = str.maketrans("", "", ",_\u00a0\u2009\u202f")
_CODE_FENCE = re.compile(r"\A```[A-Za-z0-9]*[ \t]*\n(.*?)\n?```\Z", re.DOTALL)
_REFERENCES = ("$ref", "$dynamicRef", "$recursiveRef")
"""Keywords of JSON Schema that refer to a schema."""


def normalize_text(text: str, *, ignore_case: bool = False) -> str:
    """Return a text in composed Unicode (NFC), with single spaces, and case-folded if case is ignored."""
    composed = unicodedata.normalize("NFC", " ".join(text.split()))
    return unicodedata.normalize("NFC", composed.casefold()) if ignore_case else composed


def matches_exactly(answer: str, expected: str, *, ignore_case: bool = False) -> bool:
    return normalize_text(answer, ignore_case=ignore_case) == normalize_text(expected, ignore_case=ignore_case)


def contains_answer(answer: str, expected: str, *, ignore_case: bool = False) -> bool:
    return normalize_text(expected, ignore_case=ignore_case) in normalize_text(answer, ignore_case=ignore_case)


def parse_last_number(text: str) -> Fraction | None:
    """Return the last number of a text, exactly; None without one.

    A point is the decimal separator; commas, underscores, and thin or protected spaces may group thousands. Currency
    and percent signs are ignored: 12% is 12. NaN and infinity are no numbers.
    """
    found = None
    for match in _NUMBER.finditer(text):
        whole, fraction, exponent = match["whole"].translate(_GROUPING), match["fraction"] or "", match["exponent"]
        sign = "-" if match["sign"] in ("-", "\u2212") else ""
        try:
            found = Fraction(f"{sign}{whole or '0'}{fraction}{exponent or ''}")
        except ValueError:  # more digits than Python converts
            found = None
    return found


def is_close(answer: str, expected: str, *, absolute: float = 0.0, relative: float = 0.0) -> bool:
    """Whether the last numbers of both texts differ by at most the larger tolerance, computed without rounding."""
    number, wanted = parse_last_number(answer), parse_last_number(expected)
    if number is None or wanted is None:
        return False
    # Tolerances count as they are written, e.g. 0.1 as one tenth.
    return abs(number - wanted) <= max(Fraction(repr(absolute)), Fraction(repr(relative)) * abs(wanted))


def parse_json_answer(text: str) -> Any:
    """Return the JSON value that a text consists of, apart from a code fence around it. Raises `RowError` for other
    text, and for NaN and infinity."""
    stripped = text.strip()
    fenced = _CODE_FENCE.match(stripped)
    return parse_json(stripped if fenced is None else fenced[1], "the answer")


def is_valid_json(answer: str, validator: Validator) -> bool:
    """Whether an answer is JSON that a schema allows."""
    try:
        return bool(validator.is_valid(parse_json_answer(answer)))
    except (RowError, RecursionError, OverflowError):  # not JSON, too deep, or integers beyond all floats
        return False


def compile_schema(schema: Any) -> Validator:
    """Return the validator of a JSON schema: of the draft in its `$schema`, by default 2020-12.

    Raises `RowError` for a schema that is not valid, or that refers to something outside of it: nothing is downloaded.
    """
    from jsonschema import Draft202012Validator
    from jsonschema.exceptions import SchemaError
    from jsonschema.validators import validator_for
    from referencing import Registry
    from referencing.exceptions import Unresolvable
    from referencing.jsonschema import DRAFT202012, specification_with

    if not isinstance(schema, Mapping):
        raise RowError(f"the schema is {schema!r:.80}; an object with a JSON schema is accepted")
    if not isinstance(draft := schema.get("$schema", ""), str):
        raise RowError(f"$schema is {draft!r:.80}; the address of a draft is accepted, or leave it out")
    chosen = validator_for(schema, default=Draft202012Validator)
    try:
        # Every schema that an answer can reach is checked, so that none fails after the training.
        chosen.check_schema(schema)
        specification = specification_with(draft, default=DRAFT202012)
        root = specification.create_resource(schema)
        pending, seen = [(root, Registry().resolver_with_root(root))], set[int]()
        while pending:
            resource, resolver = pending.pop()
            contents = resource.contents
            if id(contents) in seen or not isinstance(contents, Mapping):
                continue
            seen.add(id(contents))
            pending += [(each, resolver.in_subresource(each)) for each in resource.subresources()]
            for reference in (contents[name] for name in _REFERENCES if name in contents):
                found = resolver.lookup(reference)
                chosen.check_schema(found.contents)
                pending.append((specification.create_resource(found.contents), found.resolver))
    except SchemaError as error:
        place = "/".join(map(str, error.absolute_path)) or "its top"
        raise RowError(f"the schema is not valid at {place}: {error.message}; use a JSON schema") from error
    except Unresolvable as error:
        why = f"the schema refers to {reference!r}, which it does not define; add the definition to `$defs`"
        raise RowError(why) from error
    except RecursionError as error:
        raise RowError("the schema is nested too deeply; use a flatter one") from error
    validator: Validator = chosen(schema, registry=Registry())
    return validator
