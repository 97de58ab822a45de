"""Aliases of models in use: which model an alias such as `production` points to, and who set it and why. Knows the
registry alone.

A deployment made of an alias follows it: a promotion or a rollback swaps its model.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import Literal

from swiftkv_platform.contract.verdicts import describe_undecided_gates
from swiftkv_platform.control_plane.access.tenants import TenantPolicies
from swiftkv_platform.control_plane.base import Clock, new_id
from swiftkv_platform.control_plane.merge_patch import ExpectedVersions
from swiftkv_platform.control_plane.models.repository import MAX_CANDIDATES, Model, ModelRepository, Promotion
from swiftkv_platform.errors import ConflictError, InvalidInputError, NotFoundError, StaleVersionError

ALIAS_PATTERN = r"^[a-z][a-z0-9-]{0,31}$"


@dataclass(frozen=True)
class RegistryService:
    """Promotes, rolls back and looks up models."""

    registry: ModelRepository
    clock: Clock
    policies: TenantPolicies

    def resolve_model(self, name: str, tenant: str) -> tuple[Model, str | None]:
        """Return (model, alias or None) that `name` refers to. `name`: a `mdl_` id, a `job_` id, an
        alias, or the name of a single model of the tenant; an alias takes precedence over a name. Raises
        `InvalidInputError`."""
        try:
            return self._find_model_by_name(name, tenant)
        except NotFoundError as error:
            raise InvalidInputError(error.message, field=error.field, value=name) from error

    def find_model(self, name: str, tenant: str) -> Model:
        """Return the model that `name` refers to, as in `resolve_model`. Raises `NotFoundError`, and
        `InvalidInputError` for an ambiguous name."""
        return self._find_model_by_name(name, tenant)[0]

    def _find_model_by_name(self, name: str, tenant: str) -> tuple[Model, str | None]:
        # 1. by id, job id or alias  2. by name  3. refuse none or several
        found: Sequence[Model] = ()
        if name.startswith("mdl_"):
            found = self.registry.find_models(tenant=tenant, id=name)
        elif name.startswith("job_"):
            found = self.registry.find_models(tenant=tenant, job_id=name)
        elif (newest := self.registry.get_newest_promotion(name, tenant=tenant)) is not None:
            return self.registry.get_model(newest.model, tenant=tenant), name
        found = found or self.registry.find_models(tenant=tenant, name=name)
        if not found:
            raise NotFoundError(
                f"model is {name!r}: there is no such model; use a `mdl_` id, the `job_` id of a job that succeeded, "
                "an alias that a model was promoted to, or a name that only one model has; GET /models lists them",
                field="model",
                value=name,
            )
        if len(found) > 1:
            ids = [model.id for model in found]
            shown = ", ".join(ids[:MAX_CANDIDATES]) + (", ..." if len(ids) > MAX_CANDIDATES else "")
            message = f"model is {name!r}, the name of several models; use the id of one (newest first): {shown}"
            raise InvalidInputError(message, field="model", value=name)
        return found[0], None

    def get_history(self, alias: str, tenant: str) -> Sequence[Promotion]:
        """Return an alias's history. Raises `NotFoundError` for an unknown alias."""
        found = self.registry.list_promotions(tenant=tenant, alias=alias)
        if not found:
            raise _make_unknown_alias_error(alias)
        return found

    def promote(
        self,
        model_name: str,
        alias: str,
        *,
        tenant: str,
        by: str,
        reason: str,
        expected: ExpectedVersions | None = None,
        accept_undecided: bool = False,
    ) -> Promotion:
        """Point `alias` to the model; if it already does, nothing changes. `expected`: versions of the alias that may
        be changed (0: it does not exist yet); None: the version it has now.

        Raises `NotFoundError` for an unknown model, `InvalidInputError` for an ambiguous name, `ConflictError` for a
        model with an undecided gate unless `accept_undecided`, `PreconditionFailedError` for an alias at another
        version than `expected`, `StaleVersionError` if another model is promoted at the same time,
        `QuotaExceededError` for a new alias of a tenant that has too many, and as `replace_model`.
        """
        found = self.find_model(model_name, tenant)
        _check_gates(found, accept_undecided=accept_undecided)
        return self._move_alias(alias, found.id, tenant=tenant, by=by, reason=reason, expected=expected)

    def roll_back(
        self, alias: str, *, tenant: str, by: str, reason: str, expected: ExpectedVersions | None = None
    ) -> Promotion:
        """Point `alias` to the model before the current one. Raises `NotFoundError` for an unknown alias,
        `ConflictError` if there is no earlier model, and as `promote`."""
        return self._move_alias(alias, None, tenant=tenant, by=by, reason=reason, expected=expected)

    def _move_alias(
        self, alias: str, model: str | None, *, tenant: str, by: str, reason: str, expected: ExpectedVersions | None
    ) -> Promotion:
        """Point `alias` to the model; None: to the model before the current one."""
        seen, now = self.registry.get_newest_promotion(alias, tenant=tenant), int(self.clock())

        def decide(history: Iterator[Promotion]) -> Promotion:
            # 1. check the alias's version  2. find the model, for a rollback the one before the current  3. the change
            newest = next(history, None)
            if newest is None and model is None:
                raise _make_unknown_alias_error(alias)
            version = 0 if newest is None else newest.version
            if expected is not None:
                expected.check_version(f"alias {alias!r}", version)
            if newest is not None and newest.model == model:
                return newest
            if newest is not None and expected is None and (seen is None or seen.version != version):
                raise StaleVersionError(
                    f"alias {alias!r} was moved to {newest.model} by {newest.by!r} at the same time, at version "
                    f"{version}; read the alias, and send the change again if it still applies",
                    field="alias",
                    value=alias,
                )
            wanted, previous = model, None if newest is None else newest.model
            if wanted is None and newest is not None:
                wanted = next(islice(_iterate_rollback_targets(chain([newest], history)), 1, None), None)
            if wanted is None:
                message = f"alias {alias!r} has no model before {previous} to roll back to; promote another model"
                raise ConflictError(message, field="alias", value=alias)
            action: Literal["promote", "rollback"] = "rollback" if model is None else "promote"
            return Promotion(new_id("prm"), tenant, alias, action, wanted, previous, reason, by, now, version + 1)

        return self.registry.promote(decide, alias, tenant, policy=self.policies.get(tenant))


def _check_gates(model: Model, *, accept_undecided: bool) -> None:
    found = describe_undecided_gates(model.metrics)
    if found and not accept_undecided:
        raise ConflictError(
            f"{model.id} has inconclusive quality gates: {'; '.join(found)}; evaluate it on more samples, or "
            "promote it with accept_undecided and a reason",
            field="accept_undecided",
            value=False,
        )


def _iterate_rollback_targets(newest_first: Iterable[Promotion]) -> Iterator[str]:
    """Yield the models that the alias can be rolled back to, beginning with the current one. The oldest changes may
    be missing."""
    undone = 0
    for promotion in newest_first:
        if promotion.action == "rollback":
            undone += 1
        elif undone:
            undone -= 1
        else:
            yield promotion.model


def _make_unknown_alias_error(alias: str) -> NotFoundError:
    return NotFoundError(f"there is no alias {alias!r}; GET /aliases lists them", field="alias", value=alias)


def count_superseded_promotions(history: Sequence[Promotion], *, before: float, keep: int) -> int:
    """Count the oldest promotions that are older than `before` and not needed for rollbacks. `keep`: number of
    newest models, including the current one, that must remain available for rollbacks."""
    stack: list[int] = []
    for place, promotion in enumerate(history):
        if promotion.action == "promote":
            stack.append(place)
        elif stack:  # else of a promotion that is gone already
            stack.pop()
    needed = stack[-keep:][0] if stack else 0
    return next((place for place in range(needed) if history[place].created_at > before), needed)
