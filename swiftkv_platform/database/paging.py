"""One page of a query. Knows ordering and cursors, nothing about what is listed."""

from __future__ import annotations

from typing import Any, TypeVar

from sqlalchemy import Select
from sqlalchemy.orm import InstrumentedAttribute, Session

from swiftkv_platform.errors import InvalidInputError
from swiftkv_platform.orchestration.ports import Page, Slice

Row = TypeVar("Row")


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


def unknown_cursor(value: str) -> InvalidInputError:
    return InvalidInputError(
        f"after is {value!r}, which is not in this list; pass the `last_id` of an earlier page",
        field="after",
        value=value,
    )
