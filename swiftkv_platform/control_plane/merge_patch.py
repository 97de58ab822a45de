"""JSON merge patches (RFC 7396): applying them, detecting conflicts, bodies of `PATCH` derived from a spec, and
`ETag`s.

A patch's fields have the same bounds as in the spec; missing fields keep their value.
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
from swiftkv_platform.frozen import FiniteBaseModel
from swiftkv_platform.specs.deployment import PatchRule

Path = tuple[str, ...]


def apply_merge_patch(target: Any, patch: Any) -> Any:
    """Apply `patch` to `target`: null removes a member; a patch that is not an object replaces the whole value."""
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
    """Return the path of the first member of `patch` that has changed from `base` to `current`, but not to the
    patch's value; None without a conflict."""
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
    """Return the value at a path; None if missing."""
    for name in path:
        document = document.get(name) if isinstance(document, Mapping) else None
    return document


@dataclass(frozen=True)
class ExpectedVersions:
    """Versions that `If-Match` allows to change."""

    versions: frozenset[int] | None
    """None for any."""

    def check_version(self, subject: str, version: int) -> None:
        """Raise `PreconditionFailedError` unless the version of `subject` is allowed."""
        if self.versions is not None and version not in self.versions:
            raise PreconditionFailedError(
                f"{subject} is at version {version}, which If-Match does not list; read it again, and send its ETag if "
                "the change still applies",
                field="If-Match",
                value=", ".join(f'"{number}"' for number in sorted(self.versions)),
            )


class MergePatch(FiniteBaseModel, use_attribute_docstrings=False):
    """Changes of an object: the fields that a body sets."""

    def dump_set_fields(self) -> dict[str, Any]:
        return self.model_dump(exclude_unset=True)


Patch = TypeVar("Patch", bound=MergePatch)


def derive_merge_patch(spec: type[BaseModel]) -> Callable[[type[Patch]], type[Patch]]:
    """Return a class decorator that adds the changeable fields of `spec`."""

    def derive(patch: type[Patch]) -> type[Patch]:
        fields: dict[str, Any] = {
            name: _make_patch_field(field)
            for name, field in spec.model_fields.items()
            if _get_field_patch_rule(field).allowed
        }
        return create_model(
            patch.__name__, __base__=patch, __module__=patch.__module__, __doc__=patch.__doc__, **fields
        )

    return derive


def _get_field_patch_rule(field: FieldInfo) -> PatchRule:
    """Return whether `PATCH` may change a field, and with which effect. Without metadata it may."""
    return next((item for item in field.metadata if isinstance(item, PatchRule)), PatchRule())


def _make_patch_field(field: FieldInfo) -> Any:
    """Return the field of a patch. Its default is never read and appears in no schema."""
    description = " ".join(text for text in (field.description, _get_field_patch_rule(field).effect) if text)
    bounds = [item for item in field.metadata if not isinstance(item, PatchRule)]
    annotation: Any = _make_partial(field.annotation)
    for bound in bounds:
        annotation = Annotated[annotation, bound]
    return annotation, Field(default_factory=NoneType, description=description or None)


def _make_partial(annotation: Any) -> Any:
    """Return an annotation whose objects may be partial and whose dictionaries may be null, which means empty."""
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
"""Weak tags are accepted: a proxy that compresses responses makes tags weak, but the version is the same."""


def set_etag(response: Response, version: int) -> None:
    """Set the `ETag` header to the version."""
    response.headers["ETag"] = f'"{version}"'


def parse_if_match(
    value: Annotated[str | None, Header(alias="If-Match", description="`ETag` of the version to change")] = None,
) -> ExpectedVersions | None:
    """Parse `If-Match`; None without that header. Raises `InvalidInputError`."""
    if value is None:
        return None
    if value.strip() == "*":
        return ExpectedVersions(None)
    found = [_ETAG.fullmatch(item.strip()) for item in value.split(",")]
    versions = frozenset(int(match[1]) for match in found if match is not None)
    if None in found:
        raise InvalidInputError(
            f'If-Match is {value!r}; expected the `ETag` of an earlier response, such as "3" with its quotation marks, '
            "or *",
            field="If-Match",
            value=value,
        )
    return ExpectedVersions(versions)


IfMatch = Annotated[ExpectedVersions | None, Depends(parse_if_match)]
