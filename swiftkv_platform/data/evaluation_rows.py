"""Own rows of an evaluation (`evaluation.rows`): a prompt and, if the metric needs one, the expected answer; and scores
of single answers: exact match, containment, JSON schema and numbers.

White space and Unicode composition never matter. A JSON answer may stand in a code fence, since chat models write one,
but other text around it counts as invalid.
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Any

from swiftkv_platform.data.formats import FORMATS, PROMPT_FORMATS, Content, Conversation, RowFormat, hash_content
from swiftkv_platform.data.messages import Message, RowError, format_value, parse_json
from swiftkv_platform.data.source_rows import RemoteFiles, SourceRow, read_source_rows
from swiftkv_platform.errors import DataError
from swiftkv_platform.sources import UNRESTRICTED, Access
from swiftkv_platform.specs import RowTaskSpec

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


@dataclass(frozen=True)
class EvaluationRow:
    """One row of a `RowTaskSpec`."""

    key: str
    """Hash of the prompt, the same for all tokenizers and jobs."""
    prompt: Content
    answer: Message | None
    """Expected answer, as a message of the assistant; None if the row has none."""
    schema: Mapping[str, Any] | None
    """JSON schema of the answer, for the metric `json_schema`."""
    source: SourceRow

    @property
    def expected(self) -> str | None:
        """Text of the expected answer."""
        return None if self.answer is None else get_message_text(self.answer)


def get_message_text(message: Message) -> str:
    """Return the text of an assistant's message, with its tool calls as JSON."""
    calls = [call["function"] for call in message.get("tool_calls") or ()]
    return (message["content"] or "") + (json.dumps(calls, ensure_ascii=False) if calls else "")


def get_row_formats(task: RowTaskSpec) -> Sequence[RowFormat]:
    """Return the accepted formats of a task's rows: with answers, without, or both."""
    if task.metric == "json_schema" or task.answer_column is not None:
        return PROMPT_FORMATS
    return (*FORMATS, *PROMPT_FORMATS) if task.metric == "likelihood" else FORMATS


def read_evaluation_rows(
    task: RowTaskSpec, index: int, *, remote: RemoteFiles | None, access: Access = UNRESTRICTED
) -> Iterator[EvaluationRow]:
    """Yield the rows of `evaluation.rows[index]`. `sample_count` of them are the same for all jobs.

    Captured requests that lack what the metric needs are left out, since nobody can correct them.

    Raises `DataError` with the line of another row that lacks a prompt, the expected answer or a valid schema, and if
    there is no row.
    """
    field = f"evaluation.rows[{index}].source"
    columns = [name for name in (task.answer_column, task.json_schema_column) if name is not None]
    rows = read_source_rows(
        task.source,
        0,
        seed=0,
        remote=remote,
        access=access,
        formats=get_row_formats(task),
        source_field=field,
        other_columns=columns,
    )
    is_empty = True
    for row in rows:
        try:
            yield _parse_row(task, row)
        except RowError as error:
            if not row.is_captured:
                raise row.make_error(error, field) from error
        else:
            is_empty = False
    if is_empty:
        raise DataError.for_field(
            f"{field}.name_or_path", task.source.name_or_path, ", which has no rows; add rows, or leave out the task"
        )


def _parse_row(task: RowTaskSpec, row: SourceRow) -> EvaluationRow:
    # 1. split prompt and answer
    prompt, answer = row.content, None
    if not prompt:
        raise RowError("its prompt or its answer is empty; fill it, or leave the row out")
    if task.answer_column is not None:
        answer = {"role": "assistant", "content": _parse_answer(row.values.get(task.answer_column), task.answer_column)}
    elif row.is_captured and isinstance(prompt, str):
        prompt, answer = row.values["prompt"], {"role": "assistant", "content": row.values["completion"]}
    elif isinstance(prompt, Conversation) and prompt.messages[-1]["role"] == "assistant":
        answer = prompt.messages[-1]
        prompt = Conversation(prompt.messages[:-1], prompt.tools)
        if not prompt:
            raise RowError("it has an answer, but no message before it; add the user's message")
    # 2. check what the metric needs
    _check_answer(task, answer)
    schema = None
    if task.metric == "json_schema":
        schema = task.json_schema or _parse_schema(row.values.get(task.json_schema_column or ""), task)
    return EvaluationRow(f"{hash_content(prompt):016x}", prompt, answer, schema, row)


def _parse_answer(value: Any, column: str) -> str:
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise RowError(
            f"the answer in column {column} is {format_value(value)}; fill in a text or number, or change answer_column"
        )
    return value if isinstance(value, str) else repr(value)


def _check_answer(task: RowTaskSpec, answer: Message | None) -> None:
    """Raise `RowError` if a row's answer is missing, or not one that the metric can compare with."""
    metric = task.metric
    if metric == "json_schema" or (metric == "likelihood" and answer is None):
        return
    if answer is None:
        raise RowError(
            f"it has no answer, which metric {metric} needs; end the messages with the assistant's, or set "
            "answer_column to the column with the answer"
        )
    text, place = get_message_text(answer), task.answer_column or "the last message"
    if not text.strip():
        raise RowError(f"the answer in {place} is empty; fill it, or leave the row out")
    if metric == "likelihood":
        return
    if answer.get("tool_calls"):
        raise RowError(f"the answer in {place} calls a tool, which metric {metric} cannot score; use likelihood")
    if metric == "numeric" and parse_last_number(text) is None:
        raise RowError(f"the answer in {place} is {text!r:.80}, which has no number; metric numeric needs one")
    if metric == "classification" and find_label(task, text) is None:
        known = ", ".join(task.labels)
        raise RowError(f"the answer in {place} is {text!r:.80}, none of the labels ({known:.200}); add it to labels")


def find_label(task: RowTaskSpec, answer: str) -> int | None:
    """Return the index of the label that an expected answer is; None if it is none."""
    labels = [normalize_text(label) for label in task.labels]
    text = normalize_text(answer)
    return labels.index(text) if text in labels else None


def _parse_schema(value: Any, task: RowTaskSpec) -> Mapping[str, Any]:
    column = task.json_schema_column
    if value is None or value == "":
        raise RowError(f"column {column} has no schema; fill in a JSON schema, or set json_schema for all rows")
    schema: Mapping[str, Any] = parse_json(value, str(column)) if isinstance(value, str) else value
    compile_schema(schema)
    return schema
