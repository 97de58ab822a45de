"""Models and promotions, and their rows. A promotion also swaps the model of deployments that follow its alias."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from sqlalchemy import delete, func, or_, select
from sqlalchemy.orm import Session

from swiftkv_platform.contract.attempts import AttemptId
from swiftkv_platform.control_plane.access.tenants import DEFAULT_POLICY, TenantPolicy
from swiftkv_platform.control_plane.access.usage import check_count_quota, check_storage_quota
from swiftkv_platform.control_plane.base import Page, PageQuery
from swiftkv_platform.control_plane.database.session import (
    count_fitting_rows,
    fetch_column,
    fetch_page,
    fetch_rows,
    get_tenant_row,
    make_row_bytes_expression,
    parse_readable_rows,
    to_dataclass,
)
from swiftkv_platform.control_plane.database.tables import DeletionRow, DeploymentRow, ModelRow, PromotionRow
from swiftkv_platform.control_plane.deployments.repository import (
    DeploymentRepository,
    DeploymentStatus,
    apply_change,
    read_deployment,
    replace_model,
    write_deployment,
)
from swiftkv_platform.control_plane.files.repository import lock_tenant_files
from swiftkv_platform.errors import StorageError
from swiftkv_platform.limits import MODEL_METADATA_BYTES, MODEL_METADATA_DEPTH, MODEL_METADATA_VALUES

IMPORTED_MODELS_PREFIX = "models"
"""Prefix of all imported models in the object store."""


@dataclass(frozen=True)
class Model:
    """A distilled model: an artifact that can be deployed, and its origin."""

    id: str
    tenant: str
    name: str
    job_id: str | None
    """None for an imported model."""
    attempt: int
    """0 for an imported model."""
    created_at: int
    artifact_uri: str
    manifest_digest: str
    """SHA-256 of the model's manifest, which has the SHA-256 of each file."""
    size: int
    """Bytes."""
    lineage: Mapping[str, Any]
    metrics: Mapping[str, Any]

    @property
    def prefix(self) -> str:
        """Prefix of the model's objects."""
        if self.job_id is None:
            return get_import_prefix(self.id)
        return AttemptId(self.job_id, self.attempt).artifact_prefix


def get_import_prefix(model_id: str) -> str:
    """Return the prefix of an imported model's objects."""
    return f"{IMPORTED_MODELS_PREFIX}/{model_id}"


def find_exceeded_document_limit(model: Model) -> str | None:
    """Return the limit that a model's lineage and metrics exceed; None if they can be stored in a row, which every
    list reads. Counts each value with its dotted name, as comparisons show it."""
    pending: list[tuple[Any, int, int]] = [(model.lineage, 0, 0), (model.metrics, 0, 0)]
    values = size = 0
    while pending:
        value, depth, name = pending.pop()
        values += 1
        size += name + (len(value.encode(errors="backslashreplace")) if isinstance(value, str) else 8)
        if isinstance(value, Mapping):
            pending += [
                (item, depth + 1, name + len(str(key).encode(errors="backslashreplace")) + 1)
                for key, item in value.items()
            ]
        elif isinstance(value, list | tuple):
            pending += [(item, depth + 1, 0) for item in value]
        if depth > MODEL_METADATA_DEPTH.default:
            return f"its lineage and report have more than {MODEL_METADATA_DEPTH.default} nested objects"
        if values > MODEL_METADATA_VALUES.default:
            return f"its lineage and report have more than {MODEL_METADATA_VALUES.default} values"
        if size > MODEL_METADATA_BYTES.default:
            return f"its lineage and report have more than {MODEL_METADATA_BYTES.default} bytes"
    return None


@dataclass(frozen=True)
class Promotion:
    """One change of an alias: a promotion or a rollback."""

    id: str
    tenant: str
    alias: str
    action: Literal["promote", "rollback"]
    model: str
    """Model that the alias points to from then on."""
    previous: str | None
    """Model that the alias pointed to before."""
    reason: str
    by: str
    """Name of the caller's key."""
    created_at: int
    version: int
    """Version of the alias from then on: the position in its history, from 1."""


DecidePromotion = Callable[[Iterator[Promotion]], Promotion]
_BATCH_ROWS = 20
"""Promotions per query."""
MAX_CANDIDATES = 5
"""Max models that an error for an ambiguous name lists."""
IMPORT_TIMEOUT_S = 86400.0
"""Seconds after which the objects of an unregistered import are removed."""


class ModelRepository(DeploymentRepository):
    """Models and their promotions. Each method is one transaction."""

    def get_model(self, model_id: str, *, tenant: str) -> Model:
        """Return a model. Raises `NotFoundError`."""
        with self._database.begin_read() as session:
            return to_dataclass(Model, get_tenant_row(session, ModelRow, model_id, tenant))

    def schedule_import_cleanup(self, prefix: str, *, by: str, now: float) -> None:
        """Schedule the removal of an import's objects in a day, unless `register_import` cancels it."""
        with self._database.begin_write() as session:
            session.add(DeletionRow(prefix=prefix, created_at=int(now + IMPORT_TIMEOUT_S), by=by))

    def register_import(self, model: Model, *, policy: TenantPolicy = DEFAULT_POLICY, now: float) -> None:
        """Register an imported model and cancel the removal of its objects.

        Raises `QuotaExceededError` beyond the policy's number and bytes of models, and `StorageError` if the objects
        are due for removal within half a day, so that registration and removal never overlap.
        """
        noted = (DeletionRow.prefix == model.prefix, DeletionRow.created_at >= now + IMPORT_TIMEOUT_S / 2)
        with self._database.begin_write() as session:
            if session.connection().execute(delete(DeletionRow).where(*noted)).rowcount != 1:
                raise StorageError(
                    f"the import of {model.name!r} took too long, and its copy is being deleted; import it again"
                )
            lock_tenant_files(self._database, session, model.tenant)
            check_storage_quota(session, model.tenant, model.size, policy)
            check_count_quota(session, "max_imported_models", model.tenant, policy)
            session.add(ModelRow(**vars(model)))

    def check_import_quota(self, tenant: str, size: int, policy: TenantPolicy) -> None:
        """Raise `QuotaExceededError` if the tenant may not import another model, of `size` bytes."""
        with self._database.begin_read() as session:
            check_count_quota(session, "max_imported_models", tenant, policy)
            check_storage_quota(session, tenant, size, policy)

    def list_models(self, page: PageQuery, *, tenant: str) -> Page[Model]:
        with self._database.begin_read() as session:
            rows = fetch_page(session, ModelRow, page, tenant)
            return Page([to_dataclass(Model, row) for row in rows.items], rows.has_more)

    def find_models(self, *, tenant: str, **columns: str) -> Sequence[Model]:
        """Return the tenant's models with these column values, newest first, at most `MAX_CANDIDATES` + 1."""
        query = select(ModelRow).filter_by(tenant=tenant, **columns).order_by(ModelRow.id.desc())
        with self._database.begin_read() as session:
            return [to_dataclass(Model, row) for row in session.scalars(query.limit(MAX_CANDIDATES + 1))]

    def list_promotions(self, *, tenant: str, alias: str | None = None) -> Sequence[Promotion]:
        """Return promotions, oldest first."""
        with self._database.begin_read() as session:
            return select_promotions(session, tenant, alias)

    def get_newest_promotion(self, alias: str, *, tenant: str) -> Promotion | None:
        """Return the newest change of an alias; None for an unknown alias."""
        with self._database.begin_read() as session:
            return _get_newest(session, tenant, alias)

    def list_model_promotions(self, model_id: str, *, tenant: str, limit: int) -> Sequence[Promotion]:
        """Return the newest promotions to or from this model, oldest first."""
        query = select(PromotionRow).where(
            PromotionRow.tenant == tenant, or_(PromotionRow.model == model_id, PromotionRow.previous == model_id)
        )
        with self._database.begin_read() as session:
            rows = fetch_rows(session, query, PromotionRow.sequence, PageQuery(limit=limit), after=None).items
            return [to_dataclass(Promotion, row) for row in reversed(rows)]

    def list_aliases(self, page: PageQuery, *, tenant: str, newest: int) -> Page[Sequence[Promotion]]:
        """Return a page of aliases by name, each with its `newest` promotions, oldest first. The page is limited in
        bytes."""
        # 1. names of the page  2. bytes of each alias's newest promotions  3. the promotions of as many aliases as fit
        query = select(PromotionRow.alias).where(PromotionRow.tenant == tenant).distinct()
        rank = func.row_number().over(partition_by=PromotionRow.alias, order_by=PromotionRow.sequence.desc())
        size = make_row_bytes_expression(PromotionRow)
        with self._database.begin_read() as session:
            names = fetch_column(session, query, PromotionRow.alias, page, after=page.after)
            ranked = select(PromotionRow.alias, PromotionRow.sequence, rank.label("rank"), size.label("size")).where(
                PromotionRow.tenant == tenant, PromotionRow.alias.in_(names.items)
            )
            kept = ranked.subquery()
            total = select(kept.c.alias, func.sum(kept.c.size)).where(kept.c.rank <= newest).group_by(kept.c.alias)
            sizes = {alias: int(each) for alias, each in session.execute(total)}
            shown = names.items[: count_fitting_rows(sizes[name] for name in names.items)]
            rows = session.scalars(
                select(PromotionRow)
                .join(kept, kept.c.sequence == PromotionRow.sequence)
                .where(kept.c.rank <= newest, PromotionRow.alias.in_(shown))
                .order_by(PromotionRow.sequence)
            )
            found: dict[str, list[Promotion]] = {name: [] for name in shown}
            for row in rows:
                found[row.alias].append(to_dataclass(Promotion, row))
        return Page(list(found.values()), has_more=names.has_more or len(shown) < len(names.items))

    def promote(self, decide: DecidePromotion, alias: str, tenant: str, *, policy: TenantPolicy) -> Promotion:
        """Store and return the promotion that `decide` returns, and change the deployments that follow the alias, in
        one transaction. If the alias's last promotion is that one, nothing changes.

        `decide` gets the alias's history, newest first, of which it should read no more than it needs; `policy` says
        how many aliases the tenant may have, and how long their histories are.
        Raises `QuotaExceededError`, what `decide` raises, and as `replace_model`.
        """
        with self._database.begin_write() as session:
            # 1. decide  2. the promotion, and the end of its history  3. deployments
            self._lock_deployments(session, tenant)
            newest = _get_newest(session, tenant, alias)
            promotion = decide(iterate_promotions(session, tenant, alias))
            if promotion == newest:
                return promotion
            if newest is None:
                check_count_quota(session, "max_aliases", tenant, policy)
            _trim_history(session, promotion, policy.max_alias_changes)
            session.add(PromotionRow(**vars(promotion)))
            model = to_dataclass(Model, session.get_one(ModelRow, promotion.model))
            following = select(DeploymentRow).where(DeploymentRow.tenant == tenant, DeploymentRow.alias == alias)
            rows = {row.id: row for row in session.scalars(following.with_for_update())}
            for deployment in parse_readable_rows(rows.values(), read_deployment)[0]:
                if deployment.state.status is not DeploymentStatus.DELETING:
                    spec = replace_model(deployment.spec, model.id, model.artifact_uri)
                    write_deployment(rows[deployment.spec.id], *apply_change(deployment, spec))
        return promotion


def _get_newest(session: Session, tenant: str, alias: str) -> Promotion | None:
    return next(iterate_promotions(session, tenant, alias, part=1), None)


def iterate_promotions(session: Session, tenant: str, alias: str, *, part: int = _BATCH_ROWS) -> Iterator[Promotion]:
    """Yield an alias's history, newest first, read in batches."""
    before: int | None = None
    while before != 0:
        query = select(PromotionRow).where(PromotionRow.tenant == tenant, PromotionRow.alias == alias)
        if before is not None:
            query = query.where(PromotionRow.sequence < before)
        rows = session.scalars(query.order_by(PromotionRow.sequence.desc()).limit(part)).all()
        yield from (to_dataclass(Promotion, row) for row in rows)
        before = rows[-1].sequence if len(rows) == part else 0


def _trim_history(session: Session, promotion: Promotion, max_changes: int | None) -> None:
    """Remove an alias's oldest changes, so that its history has at most `max_changes` including this one."""
    if max_changes is not None and promotion.version > max_changes:
        of_alias = (PromotionRow.tenant == promotion.tenant, PromotionRow.alias == promotion.alias)
        session.execute(delete(PromotionRow).where(*of_alias, PromotionRow.version <= promotion.version - max_changes))


def select_promotions(session: Session, tenant: str, alias: str | None) -> list[Promotion]:
    query = select(PromotionRow).where(PromotionRow.tenant == tenant).order_by(PromotionRow.sequence)
    if alias is not None:
        query = query.where(PromotionRow.alias == alias)
    return [to_dataclass(Promotion, row) for row in session.scalars(query)]
