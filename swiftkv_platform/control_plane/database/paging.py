"""Queries for a tenant's rows and pages of rows, and their conversion to dataclasses."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import fields
from typing import Any, TypeVar

from pydantic import ValidationError
from sqlalchemy import JSON, ColumnElement, LargeBinary, Select, String, cast, func, literal, select
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.orm import InstrumentedAttribute, Session
from sqlalchemy.sql.functions import GenericFunction

from swiftkv_platform.control_plane.base import Page, PageQuery
from swiftkv_platform.control_plane.database.session import Database
from swiftkv_platform.control_plane.database.tables import Base, DeploymentRow, FileRow, JobRow, ModelRow
from swiftkv_platform.errors import InvalidInputError, NotFoundError, UnreadableRowError
from swiftkv_platform.limits import PAGE_BYTES as _PAGE
from swiftkv_platform.logs import get_logger

PAGE_BYTES = _PAGE.default
"""Max bytes of texts and documents in the rows of a page. A page is built while other requests wait, and takes about
ten times as much memory."""
_ROW_OVERHEAD_BYTES = 256
"""Bytes counted per row in addition to its texts and documents."""
_MAX_PARAMETERS = 500
"""Max parameters of a statement; databases limit them."""
Row = TypeVar("Row")
Owned = TypeVar("Owned", JobRow, ModelRow, DeploymentRow, FileRow)
Item = TypeVar("Item")
_TABLE_NAMES: dict[type[Base], tuple[str, str, str]] = {
    JobRow: ("job", "/jobs", "job_id"),
    ModelRow: ("model", "/models", "model"),
    DeploymentRow: ("deployment", "/deployments", "deployment_id"),
    FileRow: ("file", "/v1/files", "file_id"),
}
"""By table: (name of a row's object, route that lists the objects, field that contains an object's id)."""


class Repository:
    """Base class of repositories of a `Database`."""

    def __init__(self, database: Database) -> None:
        self._database = database


def get_tenant_row(
    session: Session, table: type[Owned], row_id: str, tenant: str | None, *, lock: bool = False
) -> Owned:
    """Return a tenant's row; any tenant's if `tenant` is None. Raises `NotFoundError`, also for another tenant's
    row."""
    row = session.get(table, row_id, with_for_update=lock)
    if row is None or tenant not in (None, row.tenant):
        kind, route, field = _TABLE_NAMES[table]
        raise NotFoundError(f"there is no {kind} {row_id}; GET {route} lists them", field=field, value=row_id)
    return row


def fetch_page(
    session: Session,
    table: type[Owned],
    page: PageQuery,
    tenant: str,
    *where: ColumnElement[bool],
) -> Page[Owned]:
    """Return a page of a tenant's rows. Raises `InvalidInputError` if the cursor is not a row of the tenant."""
    if page.after is not None:
        seen = session.get(table, page.after)
        if seen is None or seen.tenant != tenant:
            raise make_cursor_error(page.after)
    query: Select[Any] = select(table).where(table.tenant == tenant, *where)
    return fetch_rows(session, query, table.id, page, after=page.after)


class _OctetLength(GenericFunction[int]):
    """SQL function: bytes of a text."""

    inherit_cache = True
    name = "octet_length"


@compiles(_OctetLength, "sqlite")  # has `octet_length` since 3.43
def _compile_on_sqlite(function: _OctetLength, compiler: Any, **options: Any) -> str:
    return str(compiler.process(func.length(cast(next(iter(function.clauses)), LargeBinary)), **options))


def make_row_bytes_expression(table: Any) -> ColumnElement[int]:
    """Return an SQL expression for the bytes of a row's texts and documents."""
    sizes: ColumnElement[int] = literal(_ROW_OVERHEAD_BYTES)
    for column in table.__table__.columns:
        if isinstance(column.type, String | JSON):
            sizes = sizes + func.coalesce(_OctetLength(cast(column, String)), 0)
    return sizes


def count_fitting_rows(sizes: Iterable[int]) -> int:
    """Return how many of the first rows fit into `PAGE_BYTES`, at least 1. Stops reading sizes after the first that
    does not fit."""
    totals = itertools.accumulate(sizes)
    return max(sum(1 for _ in itertools.takewhile(lambda total: total <= PAGE_BYTES, totals)), 1)


def to_dataclass(kind: type[Item], row: Base, **changes: Any) -> Item:
    """Build a dataclass from the row's columns with the names of its fields; `changes` override them."""
    names = {field.name for field in fields(kind)} - changes.keys()  # type: ignore[arg-type]  # a dataclass
    return kind(**{name: getattr(row, name) for name in names}, **changes)


def fetch_rows(
    session: Session,
    query: Select[Row],
    key_column: InstrumentedAttribute[Any],
    page: PageQuery,
    *,
    after: Any,
    extra_bytes: ColumnElement[int] | None = None,
) -> Page[Row]:
    """Fetch up to `page.limit` rows, ordered by the unique `key_column`, after its value `after`. The page ends before
    its rows exceed `PAGE_BYTES`, but has at least one; other rows are not loaded.

    Args: `extra_bytes`: SQL expression for bytes to load in addition to each row.
    """
    ordered = _order_after(query, key_column, page, after)
    size = make_row_bytes_expression(key_column.class_) + (0 if extra_bytes is None else func.coalesce(extra_bytes, 0))
    sizes = session.execute(
        ordered.with_only_columns(size, maintain_column_froms=True).limit(page.limit).execution_options(yield_per=100)
    )
    limit = min(count_fitting_rows(each[0] for each in sizes), page.limit)
    sizes.close()
    rows = session.scalars(ordered.limit(limit)).all()
    # A query for the key alone, since the next row may be the largest.
    beyond = ordered.with_only_columns(key_column).offset(limit).limit(1)
    return Page(rows, has_more=len(rows) == limit and session.execute(beyond).first() is not None)


def fetch_column(
    session: Session, query: Select[str], key_column: InstrumentedAttribute[Any], page: PageQuery, *, after: Any
) -> Page[str]:
    """Fetch up to `page.limit` values of the short column `key_column`, which `query` selects, ordered by it."""
    found = session.scalars(_order_after(query, key_column, page, after).limit(page.limit + 1)).all()
    return Page(found[: page.limit], has_more=len(found) > page.limit)


def _order_after(
    query: Select[Any], key_column: InstrumentedAttribute[Any], page: PageQuery, after: Any
) -> Select[Any]:
    """Order the query by the column `key_column` in the page's order, beginning after the value `after`."""
    ascending = page.order == "asc"
    if after is not None:
        query = query.where(key_column > after if ascending else key_column < after)
    return query.order_by(key_column.asc() if ascending else key_column.desc())


def split_into_batches(values: Sequence[Item]) -> Iterator[Sequence[Item]]:
    """Yield the values in batches that fit into one statement."""
    for start in range(0, len(values), _MAX_PARAMETERS):
        yield values[start : start + _MAX_PARAMETERS]


def parse_readable_rows(rows: Iterable[Row], read: Callable[[Row], Item]) -> tuple[list[Item], list[str]]:
    """Return (rows converted by `read`, ids of unreadable rows)."""
    items: list[Item] = []
    left_out: list[str] = []
    for row in rows:
        try:
            items.append(read(row))
        except UnreadableRowError as error:
            get_logger().error("unreadable row skipped", row=error.value, reason=error.message)
            left_out.append(str(error.value))
    return items, left_out


def make_unreadable_row_error(kind: str, row_id: str, error: ValidationError | TypeError) -> UnreadableRowError:
    """Return the error for a row that does not have the format of this version of the program."""
    why = "its state is not a JSON object"
    if isinstance(error, ValidationError):
        first = error.errors(include_url=False)[0]
        why = f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
    return UnreadableRowError(
        f"{kind} {row_id} cannot be read: {why}; if another version of this program stored it, run that version, or "
        "delete it with that version",
        field=f"{kind}_id",
        value=row_id,
    )


def make_cursor_error(value: str) -> InvalidInputError:
    return InvalidInputError.for_field(
        "after", value, ", which is not in this list; pass the `last_id` of an earlier page"
    )
