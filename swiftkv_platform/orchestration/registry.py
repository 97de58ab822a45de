"""Names for models in use: the model that an alias such as `production` stands for, and the history of its promotions,
with author and reason. And two models side by side. Knows the catalog alone.

A deployment made of an alias follows it: what is promoted is swapped in, what is rolled back as well.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

from swiftkv_platform.errors import ConflictError, InvalidInputError, NotFoundError
from swiftkv_platform.orchestration.job import Model, new_id
from swiftkv_platform.orchestration.ports import (
    Clock,
    Deployment,
    DeploymentSpec,
    DeploymentState,
    DeploymentStatus,
)

ALIAS_PATTERN = r"^[a-z][a-z0-9-]{0,31}$"


@dataclass(frozen=True)
class Promotion:
    """One change of what an alias stands for."""

    id: str
    tenant: str
    alias: str
    action: Literal["promote", "rollback"]
    model: str
    """Model that the alias stands for from then on."""
    previous: str | None
    """Model that it stood for before."""
    reason: str
    by: str
    """Name of the key that asked."""
    created_at: int


Change = Callable[[Deployment, Model], tuple[DeploymentSpec, DeploymentState]]
"""Function that gives the new state of a deployment whose alias stands for another model now."""


class Registry(Protocol):
    """Promotions and the models they are about. Each method is one transaction."""

    def get_model(self, model_id: str, *, tenant: str) -> Model:
        """Raises `NotFoundError`."""
        ...

    def model_of_job(self, job_id: str, *, tenant: str) -> Model | None: ...

    def promotions(self, *, tenant: str, alias: str | None = None) -> Sequence[Promotion]:
        """Promotions in the order in which they happened."""
        ...

    def promote(
        self, decide: Callable[[Sequence[Promotion]], Promotion], alias: str, tenant: str, change: Change
    ) -> None:
        """Store what `decide` makes of the alias's history, and change the deployments that follow it, or nothing."""
        ...


class RegistryService:
    """Promoting, rolling back and looking up."""

    def __init__(self, registry: Registry, *, clock: Clock) -> None:
        self._registry = registry
        self._clock = clock

    def resolve(self, name: str, tenant: str) -> tuple[Model, str | None]:
        """The model that a `mdl_` id, a `job_` id or an alias stands for; and the alias, if it is one.

        Raises `InvalidInputError`.
        """
        if name.startswith("mdl_"):
            try:
                return self._registry.get_model(name, tenant=tenant), None
            except NotFoundError as error:
                raise _no_model(name) from error
        if name.startswith("job_"):
            model = self._registry.model_of_job(name, tenant=tenant)
            if model is None:
                raise _no_model(name)
            return model, None
        stack = _stack(self._registry.promotions(tenant=tenant, alias=name))
        if not stack:
            raise _no_model(name)
        return self._registry.get_model(stack[-1], tenant=tenant), name

    def aliases(self, tenant: str) -> Mapping[str, Sequence[Promotion]]:
        """History by alias."""
        found: dict[str, list[Promotion]] = {}
        for promotion in self._registry.promotions(tenant=tenant):
            found.setdefault(promotion.alias, []).append(promotion)
        return found

    def history(self, alias: str, tenant: str) -> Sequence[Promotion]:
        """Raises `NotFoundError` for an alias that nothing was ever promoted to."""
        found = self._registry.promotions(tenant=tenant, alias=alias)
        if not found:
            raise NotFoundError(f"there is no alias {alias!r}; GET /aliases lists them", field="alias", value=alias)
        return found

    def promote(self, model_id: str, alias: str, *, tenant: str, by: str, reason: str) -> Promotion:
        """Let `alias` stand for the model; promoting what it stands for already changes nothing.

        Raises `NotFoundError` for an unknown model.
        """
        model = self._registry.get_model(model_id, tenant=tenant)

        def decide(history: Sequence[Promotion]) -> Promotion:
            if history and history[-1].model == model.id:
                return history[-1]
            previous = history[-1].model if history else None
            return self._promotion(alias, "promote", model.id, previous, tenant=tenant, by=by, reason=reason)

        return self._store(alias, tenant, decide)

    def rollback(self, alias: str, *, tenant: str, by: str, reason: str) -> Promotion:
        """Let `alias` stand for what it stood for before its present model was promoted.

        Raises `NotFoundError` for an unknown alias and `ConflictError` where there is nothing before.
        """
        self.history(alias, tenant)

        def decide(history: Sequence[Promotion]) -> Promotion:
            stack = _stack(history)
            if len(stack) < 2:
                raise ConflictError(
                    f"alias {alias!r} has stood for no model before {stack[-1]}; promote another one",
                    field="alias",
                    value=alias,
                )
            return self._promotion(alias, "rollback", stack[-2], stack[-1], tenant=tenant, by=by, reason=reason)

        return self._store(alias, tenant, decide)

    def _store(self, alias: str, tenant: str, decide: Callable[[Sequence[Promotion]], Promotion]) -> Promotion:
        made: list[Promotion] = []

        def remember(history: Sequence[Promotion]) -> Promotion:
            made.append(decide(history))
            return made[-1]

        self._registry.promote(remember, alias, tenant, _swap)
        return made[-1]

    def _promotion(
        self,
        alias: str,
        action: Literal["promote", "rollback"],
        model: str,
        previous: str | None,
        *,
        tenant: str,
        by: str,
        reason: str,
    ) -> Promotion:
        now = int(self._clock())
        return Promotion(new_id("prm"), tenant, alias, action, model, previous, reason, by, now)


def _swap(deployment: Deployment, model: Model) -> tuple[DeploymentSpec, DeploymentState]:
    return changed(deployment, replace(deployment.spec, model=model.id, artifact_uri=model.artifact_uri))


def changed(deployment: Deployment, spec: DeploymentSpec) -> tuple[DeploymentSpec, DeploymentState]:
    """A deployment of which something else is wanted, until the cluster has its say."""
    if spec == deployment.spec:
        return spec, deployment.state
    status = deployment.state.status
    if status in (DeploymentStatus.RUNNING, DeploymentStatus.REFUSED, DeploymentStatus.UNHEALTHY):
        status = DeploymentStatus.SWAPPING
    elif status is DeploymentStatus.FAILED:
        status = DeploymentStatus.DEPLOYING
    return spec, DeploymentState(status, "the change is being applied", deployment.state.replicas)


def _stack(history: Sequence[Promotion]) -> list[str]:
    """Models that the alias has stood for and could be rolled back to, the present one last."""
    stack: list[str] = []
    for promotion in history:
        if promotion.action == "promote":
            stack.append(promotion.model)
        else:
            stack.pop()
    return stack


def _no_model(name: str) -> InvalidInputError:
    return InvalidInputError(
        f"model is {name!r}: there is no such model; a `mdl_` id, the `job_` id of a job that succeeded, or an alias "
        "that a model was promoted to would do",
        field="model",
        value=name,
    )


# Comparing

_STUDENT = ".student"
"""Ends the name of a student's score on a task."""
_BETTER: Mapping[str, Literal["lower", "higher"]] = {
    "distilled.perplexity": "lower",
    "distilled.kl": "lower",
    "distilled.top1_agreement": "higher",
    "prefill_flops_ratio": "lower",
    "kv_bytes_ratio": "lower",
}
"""Figures of `evaluation.json` that two models are compared by."""
_SAME = ("teacher", "revision", "data_fingerprint")
"""Parts of the lineage that must agree for quality to be comparable."""


@dataclass(frozen=True)
class Figure:
    """One figure of two models."""

    name: str
    a: float | None
    b: float | None
    better: Literal["a", "b"] | None
    """The better of the two; None where they are equal or one does not have it."""


@dataclass(frozen=True)
class Comparison:
    a: Model
    b: Model
    figures: Sequence[Figure]
    differences: Mapping[str, tuple[Any, Any]]
    """Differences in lineage: where teacher, revision or data differ, quality was not measured alike."""
    spec_differences: Mapping[str, tuple[Any, Any]]
    """Differences by dotted path of the spec."""


def compare(a: Model, b: Model) -> Comparison:
    """Quality, prefill compute and cache of two models, and what was done differently to make them."""
    specs = [_flat(model.lineage.get("spec") or {}) for model in (a, b)]
    return Comparison(
        a,
        b,
        [_figure(name, a, b) for name in [*_BETTER, *_task_scores(a, b)]],
        _different({name: a.lineage.get(name) for name in _SAME}, {name: b.lineage.get(name) for name in _SAME}),
        _different(*specs),
    )


def _figure(name: str, a: Model, b: Model) -> Figure:
    figures = _flat(a.metrics)
    first, second = _number(figures.get(name)), _number(_flat(b.metrics).get(name))
    less_is_better = (
        _BETTER.get(name) == "lower" or figures.get(f"{name.removesuffix(_STUDENT)}.higher_is_better") is False
    )
    better: Literal["a", "b"] | None = None
    if first is not None and second is not None and first != second:
        better = "a" if (first < second) == less_is_better else "b"
    return Figure(name, first, second, better)


def _task_scores(a: Model, b: Model) -> list[str]:
    """Scores of tasks that both have answered."""
    flat = [_flat(model.metrics) for model in (a, b)]
    return sorted(name for name in flat[0].keys() & flat[1].keys() if name.endswith(_STUDENT))


def _flat(document: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in document.items():
        if isinstance(value, Mapping):
            flat.update(_flat(value, f"{prefix}{name}."))
        elif name == "tasks" and all(isinstance(each, Mapping) and "task" in each for each in value):
            flat.update(_flat({each["task"]: each for each in value}, f"{prefix}{name}."))
        else:
            flat[f"{prefix}{name}"] = value
    return flat


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _different(a: Mapping[str, Any], b: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    return {name: (a.get(name), b.get(name)) for name in sorted({*a, *b}) if a.get(name) != b.get(name)}
