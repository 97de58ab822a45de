"""JSON merge patches (RFC 7396): how to apply one, and where two of them contradict each other."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from swiftkv_platform.errors import PreconditionFailedError

Path = tuple[str, ...]


def merged(target: Any, patch: Any) -> Any:
    """Apply `patch` to `target`: null removes a member, and a patch that is no object replaces the whole value."""
    if not isinstance(patch, Mapping):
        return patch
    result = dict(target) if isinstance(target, Mapping) else {}
    for name, value in patch.items():
        if value is None:
            result.pop(name, None)
        else:
            result[name] = merged(result.get(name), value)
    return result


def contradicted(patch: Mapping[str, Any], seen: Mapping[str, Any], present: Mapping[str, Any]) -> Path | None:
    """Return the path of the first member of `patch` that changed from `seen` to `present`, but to another value; None
    if none did."""
    for path, wanted in _leaves(patch):
        now = _at(present, path)
        if now != wanted and now != _at(seen, path):
            return path
    return None


def _leaves(patch: Mapping[str, Any], above: Path = ()) -> Iterator[tuple[Path, Any]]:
    for name, value in patch.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, (*above, name))
        else:
            yield (*above, name), value


def _at(document: Any, path: Path) -> Any:
    """Return the value at a path; None where there is nothing."""
    for name in path:
        document = document.get(name) if isinstance(document, Mapping) else None
    return document


@dataclass(frozen=True)
class Expected:
    """Versions to which a change may be applied, from `If-Match`."""

    versions: frozenset[int] | None
    """Versions that the condition names; None for any."""

    def check(self, what: str, version: int) -> None:
        """Raise `PreconditionFailedError` if `what` is at a version that the condition does not name."""
        if self.versions is not None and version not in self.versions:
            raise PreconditionFailedError(
                f"{what} is at version {version}, and If-Match names another; read it again, and name its ETag if the "
                "change still applies",
                field="If-Match",
                value=", ".join(f'"{number}"' for number in sorted(self.versions)),
            )
