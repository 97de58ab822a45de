"""Operations on deployments that routes offer, within the limits of the operator and the tenant's quotas."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from pydantic import ValidationError

from swiftkv_platform.contract.attempts import ADAPTER_LINEAGE
from swiftkv_platform.contract.traffic import TrafficDeletion, make_traffic_prefix
from swiftkv_platform.control_plane.access.tenants import Demand, get_source_access
from swiftkv_platform.control_plane.base import Caller, new_id
from swiftkv_platform.control_plane.components import Components
from swiftkv_platform.control_plane.deployments.repository import (
    Deployment,
    DeploymentState,
    DeploymentStatus,
    apply_change,
)
from swiftkv_platform.control_plane.merge_patch import ExpectedVersions, apply_merge_patch, find_conflict
from swiftkv_platform.control_plane.models.registry import RegistryService
from swiftkv_platform.errors import (
    ForbiddenError,
    InvalidInputError,
    OverQuotaError,
    QuotaExceededError,
    StaleVersionError,
    suggest_name,
)
from swiftkv_platform.settings import Settings
from swiftkv_platform.specs.deployment import DeploymentSpec, ResolvedDeployment
from swiftkv_platform.specs.engine import EngineConfig
from swiftkv_platform.storage.object_store import join_object_key
from swiftkv_platform.storage.traffic import TrafficStore

MAX_PREFIX_CHARS = 200
"""Max characters of a route prefix, its tenant's part included."""
_TENANTS_SEGMENT = "t"
_RESERVED_SEGMENT = "-"
"""First segment of paths that Serve's proxies answer themselves, such as `/-/healthz`."""


@dataclass
class DeploymentService:
    """Creates, changes and deletes deployments for callers."""

    parts: Components
    settings: Settings
    """Without API keys or issuers in them, a tenant is not confined to paths below `/t/{tenant}` and the prefixes that
    its policy grants, and needs no grant to set a chat template."""

    def create(self, caller: Caller, wanted: DeploymentSpec) -> Deployment:
        """Store a deployment; the reconciler starts it. An alias as its `model` is followed from then on.

        Raises `InvalidInputError` for an unknown model, `QuotaExceededError` if the tenant has too many deployments,
        `ConflictError` for a route prefix that is taken or interferes with another deployment's, and as `resolve_route`
        and `check_limits`.
        """
        deployment_id = new_id("dep")
        spec = _validate_document(
            {
                **self._resolve_names(wanted.model_dump(), deployment_id, caller),
                "id": deployment_id,
                "route_prefix": self.resolve_route(wanted.route_prefix, caller.tenant),
                "tenant": caller.tenant,
            }
        )
        self._check_adapters(spec, caller.tenant)

        def admit(used: Demand) -> None:
            self.check_limits(spec, caller.tenant, used)

        deployment = Deployment(spec, caller.tenant, int(self.parts.clock()))
        policy = self.parts.policies.get(caller.tenant)
        return self.parts.deployments.create_deployment(deployment, policy=policy, admit=admit)

    def update(
        self,
        deployment_id: str,
        caller: Caller,
        changes: Mapping[str, Any],
        *,
        expected: ExpectedVersions | None = None,
    ) -> Deployment:
        """Change a deployment's wanted `model`, `engine`, number of replicas or other fields.

        The reconciler applies the change to the cluster, where another model or engine is loaded next to the one that
        serves, and swapped in. Concurrent changes of different fields both take effect.

        Args:
            changes: a JSON merge patch; within `engine` and `candidate` too, only given fields change.
            expected: versions of the deployment that may be changed. None: the present one, or a later one that differs
                in other fields.

        Raises `NotFoundError`, `InvalidInputError` for an unknown model or options that would be refused,
        `PreconditionFailedError` for a deployment at another version than `expected`, `StaleVersionError` if a field is
        changed to another value at the same time, `ConflictError` for a deployment that is being deleted, as
        `check_limits`, and `StorageError` if captured traffic cannot be deleted at once; retention then deletes it.
        """
        loaded = self.parts.deployments.get_deployment(deployment_id, tenant=caller.tenant)
        patch = self._resolve_names(changes, deployment_id, caller)
        merged = apply_merge_patch(loaded.spec.model_dump(), patch)
        if merged.get("adapters") and patch.keys() & {"model", "adapters"}:
            self._check_adapters(_validate_document(merged), caller.tenant)

        def change(present: Deployment, used: Demand) -> tuple[ResolvedDeployment, DeploymentState]:
            if expected is None:
                _check_conflicts(patch, loaded, present)
            else:
                expected.check_version(f"deployment {deployment_id}", present.version)
            spec = _validate_document(apply_merge_patch(present.spec.model_dump(), patch))
            self.check_limits(spec, caller.tenant, used, previous_spec=present.spec)
            return apply_change(present, spec)

        policy = self.parts.policies.get(caller.tenant)
        changed = self.parts.deployments.change_deployment(deployment_id, change, tenant=caller.tenant, policy=policy)
        if loaded.spec.capture is not None and changed.spec.capture is None:
            # Hides the traffic at once, also if it is captured again before retention has removed it.
            now = self.parts.clock()
            prefix = make_traffic_prefix(caller.tenant, deployment_id)
            TrafficStore(self.parts.objects, prefix).delete(TrafficDeletion(requested_at=now, before=now))
        return changed

    def resolve_route(self, route_prefix: str, tenant: str) -> str:
        """Return the prefix that `tenant` gets for `route_prefix`: the same, or the same below its own.

        Raises `ForbiddenError` for a prefix below another tenant's, and `InvalidInputError` for a reserved or too long
        path.
        """
        segments = route_prefix.split("/")[1:]
        if "." in segments or ".." in segments or segments[0] == _RESERVED_SEGMENT:
            raise InvalidInputError(
                f"route_prefix is {route_prefix!r}; the segments '.' and '..', and '-' as the first one, are reserved; "
                "use another name",
                field="route_prefix",
                value=route_prefix,
            )
        if not self.settings.requires_credentials or route_prefix in self.parts.policies.get(tenant).route_prefixes:
            return route_prefix
        home = f"/{_TENANTS_SEGMENT}/{tenant}"
        if route_prefix == home or route_prefix.startswith(f"{home}/"):
            return route_prefix
        if route_prefix.startswith(f"/{_TENANTS_SEGMENT}/"):
            raise ForbiddenError(
                f"route_prefix is {route_prefix!r}, but routes of tenant {tenant!r} are below {home}; use e.g. "
                f"'/chat', which becomes {home}/chat",
                field="route_prefix",
                value=route_prefix,
            )
        placed = home + route_prefix.rstrip("/")
        if len(placed) > MAX_PREFIX_CHARS:
            raise InvalidInputError(
                f"route_prefix would be {placed!r}, {len(placed)} characters; at most {MAX_PREFIX_CHARS} are accepted",
                field="route_prefix",
                value=route_prefix,
            )
        return placed

    def check_limits(
        self, spec: ResolvedDeployment, tenant: str, used: Demand, *, previous_spec: ResolvedDeployment | None = None
    ) -> None:
        """Refuse a deployment that requests more than `previous_spec`, if the increase exceeds a limit. `used`: demand
        of the tenant's jobs and other deployments.

        Raises `InvalidInputError` above the operator's limit, `ForbiddenError` for a chat template without the grant,
        `OverQuotaError` if the deployment alone exceeds its tenant's quota, and `QuotaExceededError` if it does
        together with `used`.
        """
        policy = self.parts.policies.get(tenant)
        had_template = None if previous_spec is None else previous_spec.chat_template
        if (
            self.settings.requires_credentials
            and spec.chat_template not in (None, had_template)
            and not policy.chat_templates
        ):
            raise ForbiddenError(
                f"chat_template is given, but tenant {tenant!r} may not set one: the operator grants it with "
                "chat_templates: true in the tenants file; leave it out to use the model's own",
                field="chat_template",
            )
        wanted = Demand.for_deployment(spec)
        more = wanted if previous_spec is None else wanted.subtract_clamped(Demand.for_deployment(previous_spec))
        max_replicas = self.settings.max_deployment_replicas
        if max_replicas is not None and more.replicas and spec.max_replicas > max_replicas:
            raise InvalidInputError(
                f"max_replicas is {spec.max_replicas}; the operator allows {max_replicas} per deployment "
                "(SWIFTKV_MAX_DEPLOYMENT_REPLICAS)",
                field="max_replicas",
                value=spec.max_replicas,
            )
        alone = wanted.find_exceeded_limit(policy, adding=more)
        if alone is not None:
            name, requested, limit = alone
            raise OverQuotaError(
                f"the deployment requests {requested:g}, and the quota {name} of tenant {tenant!r} is {limit:g}: it "
                "can never run; lower max_replicas or use smaller replicas",
                field=name,
                value=requested,
            )
        together = (used + wanted).find_exceeded_limit(policy, adding=more)
        if together is not None:
            name, requested, limit = together
            raise QuotaExceededError(
                f"quota {name} reached: with this deployment, tenant {tenant!r} would use {requested:g} of {limit:g}; "
                "lower max_replicas, or wait for other jobs and deployments to end",
                field=name,
                value=requested,
            )

    def _resolve_names(self, changes: Mapping[str, Any], deployment_id: str, caller: Caller) -> dict[str, Any]:
        """Return the changes with ids and artifact addresses of the models that they name, and the address of captured
        traffic."""
        patch = dict(changes)
        if "model" in changes:
            found, alias = self._find_model(changes["model"], caller.tenant, "model")
            patch |= {**found, "alias": alias}
        if changes.get("adapters"):
            adapters = [{"model": each} if isinstance(each, str) else each for each in changes["adapters"]]
            patch["adapters"] = [
                {**each, **self._find_model(each["model"], caller.tenant, f"adapters[{number}]")[0]}
                for number, each in enumerate(adapters)
            ]
        candidate = changes.get("candidate")
        if candidate is not None and "model" in candidate:
            patch["candidate"] = {
                **candidate,
                **self._find_model(candidate["model"], caller.tenant, "candidate.model")[0],
            }
        if (capture := changes.get("capture")) is not None:
            uri = join_object_key(self.parts.objects.uri, make_traffic_prefix(caller.tenant, deployment_id))
            patch["capture"] = {**capture, "uri": uri}
        return patch

    def _check_adapters(self, spec: ResolvedDeployment, tenant: str) -> None:
        """Raise `InvalidInputError` unless all adapters are adapters of one base, that of the deployment's model.
        Replicas compare the base of a model that is no adapter, whose digest the registry does not know."""
        bases: dict[str, str] = {}
        for model in (spec.model, *(each.model for each in spec.adapters or ())):
            digest = self.parts.registry.get_model(model, tenant=tenant).lineage.get(ADAPTER_LINEAGE)
            if digest is not None:
                bases[model] = str(digest)
            elif model != spec.model:
                raise InvalidInputError.for_field(
                    "adapters", model, ", a full model; publish it with publish.adapter: true, or deploy it separately"
                )
        if spec.adapters and len(set(bases.values())) > 1:
            first, *_ = bases
            other = next(model for model in bases if bases[model] != bases[first])
            raise InvalidInputError.for_field(
                "adapters",
                other,
                f", whose base has the digest {bases[other]}, but the base of {first} has {bases[first]}; adapters of "
                "one deployment share one base: deploy the others separately",
            )

    def _find_model(self, name: str, tenant: str, field: str) -> tuple[dict[str, str], str | None]:
        """Return (id and artifact address of the model that a field names, alias); the alias is None if `name` is none.

        Raises `InvalidInputError` for an unknown model, and for an adapter whose base model the tenant may not, or no
        longer, read.
        """
        try:
            model, alias = RegistryService(self.parts.registry, self.parts.clock, self.parts.policies).resolve_model(
                name, tenant
            )
        except InvalidInputError as error:
            message = error.message if field == "model" else f"{field.removesuffix('.model')}: {error.message}"
            raise InvalidInputError(message, field=field, value=name) from error
        if ADAPTER_LINEAGE in model.lineage:
            access = get_source_access(self.settings, self.parts.policies, tenant)
            access.parse_model(str(model.lineage["teacher"]), f"{field}.base")
        return {"model": model.id, "artifact_uri": model.artifact_uri}, alias

    def delete(self, deployment_id: str, caller: Caller) -> Deployment:
        """Mark a deployment for deletion; repeating is harmless. Raises `NotFoundError` once it is gone."""
        deployment = self.parts.deployments.get_deployment(deployment_id, tenant=caller.tenant)
        deleting = DeploymentState(DeploymentStatus.DELETING)
        self.parts.deployments.set_deployment_state(deployment_id, deleting)
        return replace(deployment, state=deleting)


def _check_conflicts(patch: Mapping[str, Any], loaded: Deployment, present: Deployment) -> None:
    if present.version == loaded.version:
        return
    path = find_conflict(patch, loaded.spec.model_dump(), present.spec.model_dump())
    if path is not None:
        field = ".".join(path)
        raise StaleVersionError(
            f"{field} was changed at the same time, and deployment {present.spec.id} is at version {present.version} "
            "now; read it, and send the change again if it still applies",
            field=field,
            value=present.version,
        )


def _validate_document(document: Mapping[str, Any]) -> ResolvedDeployment:
    """Return the document as a spec. Raises `InvalidInputError` for fields that do not fit together."""
    check_engine_options(document.get("engine", {}))
    candidate = document.get("candidate")
    if candidate is not None and "model" not in candidate:
        message = "candidate.model is missing, and there is no candidate to change; name its model"
        raise InvalidInputError(message, field="candidate.model")
    try:
        return ResolvedDeployment.model_validate(document)
    except ValidationError as error:
        first = error.errors()[0]
        context = first.get("ctx", {})
        field = context.get("field", ".".join(map(str, first["loc"])))
        raise InvalidInputError(first["msg"], field=field, value=context.get("value", first["input"])) from error


def check_engine_options(options: Mapping[str, Any]) -> None:
    """Raise `InvalidInputError` for the first unknown option, or the first invalid value."""
    try:
        EngineConfig.model_validate(options)
    except ValidationError as error:
        first = error.errors()[0]
        options_known = sorted(EngineConfig.model_fields)
        nearest = suggest_name(str(first["loc"][-1]), options_known)
        known = f"unknown option{nearest}; accepted here: {', '.join(options_known)}"
        place = ".".join(["engine", *map(str, first["loc"])])
        why = known if first["type"] == "extra_forbidden" else first["msg"]
        raise InvalidInputError(f"{place}: {why}", field=place, value=first["input"]) from error
