"""Rows of models and promotions. A promotion also swaps the model of deployments that follow its alias."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from sqlalchemy import delete, func, select
from sqlalchemy.orm import Session

from swiftkv_platform.control_plane.base import Page, Slice
from swiftkv_platform.control_plane.database.paging import (
    fetch_names,
    fitting,
    owned,
    page_of,
    readable,
    stored_bytes,
    value_of,
)
from swiftkv_platform.control_plane.database.tables import DeletionRow, DeploymentRow, ModelRow, PromotionRow
from swiftkv_platform.control_plane.deployments.deployment import DeploymentStatus
from swiftkv_platform.control_plane.deployments.rows import DeploymentRepository, read_deployment, write_deployment
from swiftkv_platform.control_plane.files.rows import check_room
from swiftkv_platform.control_plane.models.model import Change, Model, Promotion
from swiftkv_platform.errors import StorageError

MOST_CANDIDATES = 5
"""Most models that a refusal of an ambiguous name lists."""
IMPORT_S = 86400.0
"""Seconds after which the objects of an unregistered import are removed."""


class Registry(DeploymentRepository):
    """Models and their promotions. Each method is one transaction."""

    def get_model(self, model_id: str, *, tenant: str) -> Model:
        """Return a model. Raises `NotFoundError`."""
        with self._database.reading() as session:
            return value_of(Model, owned(session, ModelRow, model_id, tenant))

    def note_import(self, prefix: str, *, by: str, now: float) -> None:
        """Schedule the removal of an import's objects in a day, unless `add_model` registers the model before."""
        with self._database.writing() as session:
            session.add(DeletionRow(prefix=prefix, created_at=int(now + IMPORT_S), by=by))

    def add_model(self, model: Model, *, max_bytes: int | None, now: float) -> None:
        """Register an imported model and cancel the removal of its objects. Raises `StorageError` if they are due
        within half a day, so that registration and removal never overlap."""
        noted = (DeletionRow.prefix == model.prefix, DeletionRow.created_at >= now + IMPORT_S / 2)
        with self._database.writing() as session:
            if session.connection().execute(delete(DeletionRow).where(*noted)).rowcount != 1:
                raise StorageError(
                    f"the import of {model.name!r} took too long, and its copy is being deleted; import it again"
                )
            if max_bytes is not None:
                check_room(self._database, session, model.tenant, model.size, max_bytes)
            session.add(ModelRow(**vars(model)))

    def list_models(self, page: Page, *, tenant: str) -> Slice[Model]:
        with self._database.reading() as session:
            rows = page_of(session, ModelRow, page, tenant)
            return Slice([value_of(Model, row) for row in rows.items], rows.has_more)

    def models(self, *, tenant: str, **columns: str) -> Sequence[Model]:
        """Return the tenant's models with these values of columns, newest first, at most `MOST_CANDIDATES` + 1."""
        query = select(ModelRow).filter_by(tenant=tenant, **columns).order_by(ModelRow.id.desc())
        with self._database.reading() as session:
            return [value_of(Model, row) for row in session.scalars(query.limit(MOST_CANDIDATES + 1))]

    def promotions(self, *, tenant: str, alias: str | None = None) -> Sequence[Promotion]:
        """Promotions in the order in which they happened."""
        with self._database.reading() as session:
            return promotions_of(session, tenant, alias)

    def list_aliases(self, page: Page, *, tenant: str, newest: int) -> Slice[Sequence[Promotion]]:
        """A page of aliases by name: the `newest` promotions of each, in the order in which they happened. It ends as
        pages of rows do."""
        query = select(PromotionRow.alias).where(PromotionRow.tenant == tenant).distinct()
        rank = func.row_number().over(partition_by=PromotionRow.alias, order_by=PromotionRow.sequence.desc())
        size = stored_bytes(PromotionRow)
        with self._database.reading() as session:
            names = fetch_names(session, query, PromotionRow.alias, page, after=page.after)
            ranked = select(PromotionRow.alias, PromotionRow.sequence, rank.label("rank"), size.label("size")).where(
                PromotionRow.tenant == tenant, PromotionRow.alias.in_(names.items)
            )
            kept = ranked.subquery()
            total = select(kept.c.alias, func.sum(kept.c.size)).where(kept.c.rank <= newest).group_by(kept.c.alias)
            sizes = {alias: int(each) for alias, each in session.execute(total)}
            shown = names.items[: fitting(sizes[name] for name in names.items)]
            rows = session.scalars(
                select(PromotionRow)
                .join(kept, kept.c.sequence == PromotionRow.sequence)
                .where(kept.c.rank <= newest, PromotionRow.alias.in_(shown))
                .order_by(PromotionRow.sequence)
            )
            found: dict[str, list[Promotion]] = {name: [] for name in shown}
            for row in rows:
                found[row.alias].append(value_of(Promotion, row))
        return Slice(list(found.values()), has_more=names.has_more or len(shown) < len(names.items))

    def promote(
        self, decide: Callable[[Sequence[Promotion]], Promotion], alias: str, tenant: str, change: Change
    ) -> Promotion:
        """Store and return the promotion that `decide` returns for the alias's history, and change the deployments that
        follow the alias, in one transaction. If the history already has that promotion, nothing changes."""
        with self._database.writing() as session:
            self._await_turn(session, tenant)
            history = promotions_of(session, tenant, alias)
            promotion = decide(history)
            if promotion in history:
                return promotion
            session.add(PromotionRow(**vars(promotion)))
            model = value_of(Model, session.get_one(ModelRow, promotion.model))
            following = select(DeploymentRow).where(DeploymentRow.tenant == tenant).with_for_update()
            rows = {row.id: row for row in session.scalars(following)}
            for deployment in readable(rows.values(), read_deployment)[0]:
                row = rows[deployment.spec.id]
                if deployment.spec.alias == alias and deployment.state.status is not DeploymentStatus.DELETING:
                    write_deployment(row, *change(deployment, model))
        return promotion


def promotions_of(session: Session, tenant: str, alias: str | None) -> list[Promotion]:
    query = select(PromotionRow).where(PromotionRow.tenant == tenant).order_by(PromotionRow.sequence)
    if alias is not None:
        query = query.where(PromotionRow.alias == alias)
    return [value_of(Promotion, row) for row in session.scalars(query)]
