"""One page of a query. Knows ordering and cursors, nothing about what is listed."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from pydantic import ValidationError
from sqlalchemy import Select
from sqlalchemy.orm import InstrumentedAttribute, Session

from swiftkv_platform.errors import InvalidInputError, UnreadableRowError
from swiftkv_platform.logs import get_logger
from swiftkv_platform.orchestration.ports import Page, Slice

Row = TypeVar("Row")
Item = TypeVar("Item")


def fetch(
    session: Session, query: Select[Row], key: InstrumentedAttribute[Any], page: Page, *, after: Any
) -> Slice[Row]:
    """Fetch at most `page.limit` rows, ordered by the unique column `key`, from beyond its value `after` on."""
    ascending = page.order == "asc"
    if after is not None:
        query = query.where(key > after if ascending else key < after)
    query = query.order_by(key.asc() if ascending else key.desc())
    rows = session.scalars(query.limit(page.limit + 1)).all()
    return Slice(rows[: page.limit], has_more=len(rows) > page.limit)


def readable(rows: Iterable[Row], read: Callable[[Row], Item]) -> tuple[list[Item], list[str]]:
    """Return what the rows hold, and the ids of the rows that cannot be read."""
    items: list[Item] = []
    left_out: list[str] = []
    for row in rows:
        try:
            items.append(read(row))
        except UnreadableRowError as error:
            get_logger().error("row left out", row=error.value, reason=error.message)
            left_out.append(str(error.value))
    return items, left_out


def unreadable(kind: str, row_id: str, error: ValidationError | TypeError) -> UnreadableRowError:
    """The refusal of a row that does not hold what this version of the program stores."""
    why = "its state is no object"
    if isinstance(error, ValidationError):
        first = error.errors(include_url=False)[0]
        why = f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
    return UnreadableRowError(
        f"{kind} {row_id} cannot be read, perhaps since another version of this program has stored it: {why}; run that "
        "version, or remove it there",
        field=f"{kind}_id",
        value=row_id,
    )


def unknown_cursor(value: str) -> InvalidInputError:
    return InvalidInputError(
        f"after is {value!r}, which is not in this list; pass the `last_id` of an earlier page",
        field="after",
        value=value,
    )
