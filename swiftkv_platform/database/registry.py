"""Promotions in SQL, with the deployments that follow an alias."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from sqlalchemy import select
from sqlalchemy.orm import Session

from swiftkv_platform.database.catalog import SqlCatalog, read_deployment, read_model, write_deployment
from swiftkv_platform.database.paging import readable
from swiftkv_platform.database.tables import DeploymentRow, ModelRow, PromotionRow
from swiftkv_platform.orchestration.deployment import DeploymentStatus
from swiftkv_platform.orchestration.job import Model
from swiftkv_platform.orchestration.registry import Change, Promotion


class SqlRegistry(SqlCatalog):
    """`Registry` on a `Database`."""

    def model_of_job(self, job_id: str, *, tenant: str) -> Model | None:
        query = select(ModelRow).where(ModelRow.job_id == job_id, ModelRow.tenant == tenant)
        with self._database.reading() as session:
            row = session.scalar(query)
            return None if row is None else read_model(row)

    def promotions(self, *, tenant: str, alias: str | None = None) -> Sequence[Promotion]:
        with self._database.reading() as session:
            return _promotions(session, tenant, alias)

    def promote(
        self, decide: Callable[[Sequence[Promotion]], Promotion], alias: str, tenant: str, change: Change
    ) -> None:
        with self._database.writing() as session:
            self._await_turn(session, tenant)
            history = _promotions(session, tenant, alias)
            promotion = decide(history)
            if promotion in history:
                return
            session.add(PromotionRow(**vars(promotion)))
            model = read_model(session.get_one(ModelRow, promotion.model))
            following = select(DeploymentRow).where(DeploymentRow.tenant == tenant).with_for_update()
            rows = {row.id: row for row in session.scalars(following)}
            for deployment in readable(rows.values(), read_deployment)[0]:
                row = rows[deployment.spec.id]
                if deployment.spec.alias == alias and deployment.state.status is not DeploymentStatus.DELETING:
                    write_deployment(row, *change(deployment, model))


def _promotions(session: Session, tenant: str, alias: str | None) -> list[Promotion]:
    query = select(PromotionRow).where(PromotionRow.tenant == tenant).order_by(PromotionRow.sequence)
    if alias is not None:
        query = query.where(PromotionRow.alias == alias)
    return [
        Promotion(**{name: getattr(row, name) for name in Promotion.__dataclass_fields__})
        for row in session.scalars(query)
    ]
