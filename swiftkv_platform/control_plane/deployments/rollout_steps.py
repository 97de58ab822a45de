"""Steps of rollouts, which one control plane advances, and rollbacks by callers.

waiting ──▶ candidate ──▶ promoted
   │            │             │
   ├────────────┼──▶ refused  │
   └────────────┴─────────────┴──▶ rolled_back

A step changes the deployment first and the rollout afterwards. After a crash between both, the next round finds the
deployment changed, and stores only the rollout.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, replace

from swiftkv_platform.contract.verdicts import describe_undecided_gates
from swiftkv_platform.control_plane.base import Caller
from swiftkv_platform.control_plane.components import Components
from swiftkv_platform.control_plane.deployments.repository import Deployment, DeploymentStatus
from swiftkv_platform.control_plane.deployments.rollout import Rollout, RolloutStatus
from swiftkv_platform.control_plane.deployments.service import DeploymentService
from swiftkv_platform.control_plane.loops import Leadership
from swiftkv_platform.control_plane.models.registry import RegistryService
from swiftkv_platform.errors import (
    ConflictError,
    ForbiddenError,
    InvalidInputError,
    NotFoundError,
    OverQuotaError,
    QuotaExceededError,
)
from swiftkv_platform.logs import get_logger
from swiftkv_platform.settings import Settings

_REFUSALS = (InvalidInputError, NotFoundError, ForbiddenError, OverQuotaError, QuotaExceededError)
"""Errors that refuse a rollout for good."""


@dataclass(frozen=True)
class RolloutService:
    """Changes the deployments of rollouts."""

    parts: Components
    settings: Settings

    @property
    def _deployments(self) -> DeploymentService:
        return DeploymentService(self.parts, self.settings)

    @property
    def _registry(self) -> RegistryService:
        return RegistryService(self.parts.registry, self.parts.clock, self.parts.policies)

    def roll_back(self, job_id: str, deployment_id: str, caller: Caller, reason: str) -> Rollout:
        """Undo a rollout: remove the candidate, or serve the previous model again; an alias is rolled back.

        Raises `NotFoundError`, and `ConflictError` for a rollout that has ended otherwise, or whose model the
        deployment does not serve any more.
        """
        rollout = self.parts.rollouts.get_rollout(job_id, tenant=caller.tenant, deployment_id=deployment_id)
        if rollout.status in (RolloutStatus.REFUSED, RolloutStatus.ROLLED_BACK):
            message = f"the rollout of {job_id} is {rollout.status}; only a rollout that has not ended, or whose model "
            raise ConflictError(f"{message}is served, can be rolled back", field="job_id", value=job_id)
        deployment = self.parts.deployments.get_deployment(deployment_id, tenant=caller.tenant)
        if rollout.status is RolloutStatus.PROMOTED:
            self._restore_previous(rollout, deployment, caller, reason)
        self.remove_candidate(rollout, caller)
        ended = rollout.add_step(RolloutStatus.ROLLED_BACK, self.parts.clock(), reason, by=caller.name)
        return self.parts.rollouts.update(ended)

    def _restore_previous(self, rollout: Rollout, deployment: Deployment, caller: Caller, reason: str) -> None:
        if deployment.spec.model == rollout.previous:  # an earlier call was interrupted
            return
        if deployment.spec.model != rollout.model:
            message = f"deployment {deployment.spec.id} serves {deployment.spec.model} now, not {rollout.model}; change"
            raise ConflictError(f"{message} its model instead", field="job_id", value=rollout.job_id)
        if deployment.spec.alias is not None:
            self._registry.roll_back(deployment.spec.alias, tenant=caller.tenant, by=caller.name, reason=reason)
        elif rollout.previous is not None:
            self._deployments.update(deployment.spec.id, caller, {"model": rollout.previous})
        else:  # somebody has deployed the model before the rollout began
            message = (
                f"no previous model: deployment {deployment.spec.id} served {rollout.model} before the rollout began;"
            )
            raise ConflictError(f"{message} change the deployment's model", field="job_id", value=rollout.job_id)

    def add_candidate(self, rollout: Rollout) -> None:
        """Make the model the deployment's candidate. Raises as `DeploymentService.update`."""
        candidate = {"model": rollout.model, "share": rollout.share}
        self._deployments.update(rollout.deployment, _make_caller(rollout), {"candidate": candidate})

    def remove_candidate(self, rollout: Rollout, caller: Caller | None = None) -> None:
        """Remove the deployment's candidate if it is the rollout's model."""
        deployment = self.parts.deployments.get_deployment(rollout.deployment, tenant=rollout.tenant)
        candidate = deployment.spec.candidate
        if candidate is not None and candidate.model == rollout.model:
            self._deployments.update(rollout.deployment, caller or _make_caller(rollout), {"candidate": None})

    def promote(self, rollout: Rollout, deployment: Deployment) -> None:
        """Make the model the deployment's model, by its alias if it follows one. Raises as `DeploymentService.update`
        and `RegistryService.promote`."""
        if deployment.spec.alias is None:
            self._deployments.update(
                rollout.deployment, _make_caller(rollout), {"model": rollout.model, "candidate": None}
            )
            return
        self._registry.promote(
            rollout.model,
            deployment.spec.alias,
            tenant=rollout.tenant,
            by=rollout.author,
            reason=f"candidate of {rollout.deployment} for {rollout.promote_after_s} s",
        )
        self.remove_candidate(rollout)


def _make_caller(rollout: Rollout) -> Caller:
    return Caller(rollout.tenant, rollout.author)


@dataclass(frozen=True)
class RolloutReconciler:
    """Advances the rollouts that have not ended, one step per round. `lease`: to hold for any change."""

    parts: Components
    settings: Settings
    lease: Leadership

    def tick(self) -> None:
        """Advance every open rollout. Raises `DatabaseUnavailableError` and `LeaseLostError`."""
        for rollout in self.parts.rollouts.list_open():
            self.lease.check_leading()
            try:
                self._advance(rollout)
            except (ConflictError, *_REFUSALS) as error:
                get_logger(loop="rollouts").info("rollout not advanced", job=rollout.job_id, reason=error.message)

    def _advance(self, rollout: Rollout) -> None:
        try:
            deployment = self.parts.deployments.get_deployment(rollout.deployment, tenant=rollout.tenant)
            if deployment.state.status is DeploymentStatus.DELETING:
                self._end(rollout, RolloutStatus.REFUSED, "the deployment is being deleted")
                return
            if deployment.spec.model == rollout.model:
                self._service.remove_candidate(rollout)
                self._end(rollout, RolloutStatus.PROMOTED)
                return
            if deployment.spec.model != rollout.previous:
                # Stored before any change, so that it is known after a crash, and if somebody promotes the model.
                rollout = self.parts.rollouts.update(replace(rollout, previous=deployment.spec.model))
            if rollout.status is RolloutStatus.WAITING:
                self._start(rollout, deployment)
            else:
                self._watch(rollout, deployment)
        except _REFUSALS as error:
            self._refuse(rollout, error.message)

    @property
    def _service(self) -> RolloutService:
        return RolloutService(self.parts, self.settings)

    def _start(self, rollout: Rollout, deployment: Deployment) -> None:
        """Make the model the candidate, instead of that of an earlier rollout; a candidate of somebody stays."""
        undecided = describe_undecided_gates(
            self.parts.registry.get_model(rollout.model, tenant=rollout.tenant).metrics
        )
        if undecided:
            self._end(rollout, RolloutStatus.REFUSED, f"inconclusive quality gates: {'; '.join(undecided)}")
            return
        candidate, earlier = deployment.spec.candidate, None
        if candidate is not None and candidate.model != rollout.model:
            earlier = self._find_open_rollout(rollout, candidate.model)
            if earlier is None:
                self._report_wait(
                    rollout, f"waiting: the deployment has candidate {candidate.model}; remove that candidate"
                )
                return
        self._service.add_candidate(rollout)
        if earlier is not None:
            self._end(earlier, RolloutStatus.REFUSED, f"superseded by the model of {rollout.job_id}")
        self.parts.rollouts.update(rollout.add_step(RolloutStatus.CANDIDATE, self.parts.clock()))

    def _watch(self, rollout: Rollout, deployment: Deployment) -> None:
        """Wait until the candidate has served for long enough, then promote it."""
        now, candidate, state = self.parts.clock(), deployment.spec.candidate, deployment.state
        if candidate is None or candidate.model != rollout.model:
            self._end(rollout, RolloutStatus.REFUSED, "the candidate was removed or replaced")
        elif state.status is DeploymentStatus.REFUSED:
            self._refuse(rollout, state.message)
        elif state.status is DeploymentStatus.RUNNING and state.unknown_since is None:
            if rollout.serving_since is None:
                rollout = self.parts.rollouts.update(replace(rollout, serving_since=int(now)))
            if rollout.promote_at is not None and now >= rollout.promote_at:
                self._service.promote(rollout, deployment)
                self._end(rollout, RolloutStatus.PROMOTED)

    def _find_open_rollout(self, rollout: Rollout, model: str) -> Rollout | None:
        """Return the open rollout of another model to the same deployment, if there is one."""
        same = (each for each in self.parts.rollouts.list_open() if each.deployment == rollout.deployment)
        return next((each for each in same if each.model == model and each.tenant == rollout.tenant), None)

    def _report_wait(self, rollout: Rollout, message: str) -> None:
        if rollout.steps[-1].message != message:
            self.parts.rollouts.update(rollout.add_step(RolloutStatus.WAITING, self.parts.clock(), message))

    def _refuse(self, rollout: Rollout, message: str) -> None:
        """End a rollout without a promotion, and remove its candidate."""
        with suppress(NotFoundError):  # the deployment is gone
            self._service.remove_candidate(rollout)
        # The steps before the refusal may have stored a later version.
        present = self.parts.rollouts.get_rollout(rollout.job_id, tenant=rollout.tenant)
        self._end(present, RolloutStatus.REFUSED, message)

    def _end(self, rollout: Rollout, status: RolloutStatus, message: str = "") -> None:
        self.parts.rollouts.update(rollout.add_step(status, self.parts.clock(), message))
        get_logger(loop="rollouts").info("rollout ended", job=rollout.job_id, status=status.value, reason=message)
