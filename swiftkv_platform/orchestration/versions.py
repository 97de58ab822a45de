"""Versions that callers name: a change that is made of one version is refused once there is another."""

from __future__ import annotations

from dataclasses import dataclass

from swiftkv_platform.errors import PreconditionFailedError


@dataclass(frozen=True)
class Expected:
    """Versions that a change may be made of."""

    versions: frozenset[int] | None
    """Versions that the condition names; None for any."""

    def check(self, what: str, version: int) -> None:
        """Raises `PreconditionFailedError` if `what` is at another version."""
        if self.versions is not None and version not in self.versions:
            raise PreconditionFailedError(
                f"{what} is at version {version}, and If-Match names another; read it again, and name its ETag if the "
                "change still holds",
                field="If-Match",
                value=", ".join(f'"{number}"' for number in sorted(self.versions)),
            )
