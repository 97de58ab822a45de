"""A serving cluster in a dictionary."""

from collections.abc import Collection, Mapping, Sequence

from swiftkv_platform.control_plane.deployments.repository import DeploymentState, DeploymentStatus
from swiftkv_platform.errors import ClusterUnavailableError
from swiftkv_platform.specs.deployment import ResolvedDeployment


class FakeServeCluster:
    """Applied deployments are `deploying` until a test changes them with `become`."""

    def __init__(self) -> None:
        self.applied: list[list[ResolvedDeployment]] = []
        """Every set that was passed to `apply`, in order."""
        self.away = False
        self._states: dict[str, DeploymentState] = {}

    def apply(self, deployments: Sequence[ResolvedDeployment], *, keep: Collection[str] = ()) -> None:
        self._answer()
        self.applied.append(list(deployments))
        wanted = {spec.id for spec in deployments} | (set(keep) & self._states.keys())
        for gone in self._states.keys() - wanted:
            self._states[gone] = DeploymentState(DeploymentStatus.DELETING)
        for new in wanted - self._states.keys():
            self._states[new] = DeploymentState(DeploymentStatus.DEPLOYING)

    def list_states(self) -> Mapping[str, DeploymentState]:
        self._answer()
        return dict(self._states)

    def become(
        self,
        deployment_id: str,
        status: DeploymentStatus,
        *,
        replicas: int = 0,
        load_seconds: Mapping[str, float] | None = None,
    ) -> None:
        self._states[deployment_id] = DeploymentState(status, replicas=replicas, load_seconds=load_seconds or {})

    def forget(self, *deployment_ids: str) -> None:
        """Forget these deployments, or all."""
        for gone in deployment_ids or list(self._states):
            del self._states[gone]

    def _answer(self) -> None:
        if self.away:
            raise ClusterUnavailableError("Ray Serve does not answer")
