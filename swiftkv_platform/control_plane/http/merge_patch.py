"""Changes by JSON merge patches (RFC 7396): how to apply one, where two contradict each other, and bodies of `PATCH`,
derived from a spec. Knows no route.

Each field that may be changed has the same bounds as in the spec; fields that a body leaves out keep their value.
"""

from __future__ import annotations

import re
import typing
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import NoneType, UnionType
from typing import Annotated, Any, TypeVar, Union

from fastapi import Depends, Header, Response
from pydantic import BaseModel, Field, create_model
from pydantic.fields import FieldInfo

from swiftkv_platform.errors import InvalidInputError, PreconditionFailedError
from swiftkv_platform.frozen import FiniteModel
from swiftkv_platform.specs.deployment import Change

Path = tuple[str, ...]


def apply_merge_patch(target: Any, patch: Any) -> Any:
    """Apply `patch` to `target`: null removes a member, and a patch that is no object replaces the whole value."""
    if not isinstance(patch, Mapping):
        return patch
    result = dict(target) if isinstance(target, Mapping) else {}
    for name, value in patch.items():
        if value is None:
            result.pop(name, None)
        else:
            result[name] = apply_merge_patch(result.get(name), value)
    return result


def find_conflict(patch: Mapping[str, Any], base: Mapping[str, Any], current: Mapping[str, Any]) -> Path | None:
    """Return the path of the first member of `patch` that changed from `seen` to `present`, but to another value; None
    if none did."""
    for path, wanted in _walk_leaves(patch):
        now = _get_value(current, path)
        if now != wanted and now != _get_value(base, path):
            return path
    return None


def _walk_leaves(patch: Mapping[str, Any], above: Path = ()) -> Iterator[tuple[Path, Any]]:
    for name, value in patch.items():
        if isinstance(value, Mapping):
            yield from _walk_leaves(value, (*above, name))
        else:
            yield (*above, name), value


def _get_value(document: Any, path: Path) -> Any:
    """Return the value at a path; None where there is nothing."""
    for name in path:
        document = document.get(name) if isinstance(document, Mapping) else None
    return document


@dataclass(frozen=True)
class ExpectedVersions:
    """Versions to which a change may be applied, from `If-Match`."""

    versions: frozenset[int] | None
    """Versions that the condition names; None for any."""

    def check_version(self, what: str, version: int) -> None:
        """Raise `PreconditionFailedError` if `what` is at a version that the condition does not name."""
        if self.versions is not None and version not in self.versions:
            raise PreconditionFailedError(
                f"{what} is at version {version}, and If-Match names another; read it again, and name its ETag if the "
                "change still applies",
                field="If-Match",
                value=", ".join(f'"{number}"' for number in sorted(self.versions)),
            )


class MergePatch(FiniteModel, use_attribute_docstrings=False):
    """Changes of an object: those fields that a body sets."""

    def dump_set_fields(self) -> dict[str, Any]:
        return self.model_dump(exclude_unset=True)


Patch = TypeVar("Patch", bound=MergePatch)


def derive_merge_patch(spec: type[BaseModel]) -> Callable[[type[Patch]], type[Patch]]:
    """Return a class decorator that adds those fields of `spec` that may be changed."""

    def derive(patch: type[Patch]) -> type[Patch]:
        fields: dict[str, Any] = {
            name: _make_patch_field(field)
            for name, field in spec.model_fields.items()
            if _get_change_rule(field).allowed
        }
        return create_model(
            patch.__name__, __base__=patch, __module__=patch.__module__, __doc__=patch.__doc__, **fields
        )

    return derive


def _get_change_rule(field: FieldInfo) -> Change:
    return next((item for item in field.metadata if isinstance(item, Change)), Change())


def _make_patch_field(field: FieldInfo) -> Any:
    """Return the field as a patch has it. Its default is never read, and no schema shows one."""
    description = " ".join(text for text in (field.description, _get_change_rule(field).effect) if text)
    bounds = [item for item in field.metadata if not isinstance(item, Change)]
    annotation: Any = _make_partial(field.annotation)
    for bound in bounds:
        annotation = Annotated[annotation, bound]
    return annotation, Field(default_factory=NoneType, description=description or None)


def _make_partial(annotation: Any) -> Any:
    """Return an annotation in which objects may be partial, and a dictionary may also be null, as if it were empty."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is dict:
        return annotation | None
    if origin in (Union, UnionType):
        return Union[tuple(_make_partial(argument) for argument in arguments)]  # noqa: UP007  # of a tuple
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        name = annotation.__name__.removesuffix("Spec") + "Change"
        fields: dict[str, Any] = {key: _make_patch_field(field) for key, field in annotation.model_fields.items()}
        doc = f"Changes of a {name.removesuffix('Change').lower()}, or the fields of a new one."
        return create_model(name, __base__=MergePatch, __module__=__name__, __doc__=doc, **fields)
    return annotation


_ETAG = re.compile(r'(?:W/)?"(\d{1,18})"')
"""Weak tags are accepted, since a proxy that compresses answers makes them weak; the version is the same."""


def set_etag(response: Response, version: int) -> None:
    """Set the answer's `ETag` to the version."""
    response.headers["ETag"] = f'"{version}"'


def parse_if_match(
    value: Annotated[str | None, Header(alias="If-Match", description="`ETag` of the version to change")] = None,
) -> ExpectedVersions | None:
    """Return the versions that `If-Match` accepts; None without that header. Raises `InvalidInputError`."""
    if value is None:
        return None
    if value.strip() == "*":
        return ExpectedVersions(None)
    found = [_ETAG.fullmatch(item.strip()) for item in value.split(",")]
    versions = frozenset(int(match[1]) for match in found if match is not None)
    if None in found:
        raise InvalidInputError(
            f'If-Match is {value!r}; expected the `ETag` of an earlier answer, such as "3" with its quotation marks, '
            "or *",
            field="If-Match",
            value=value,
        )
    return ExpectedVersions(versions)


IfMatch = Annotated[ExpectedVersions | None, Depends(parse_if_match)]
