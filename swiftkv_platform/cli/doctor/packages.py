"""Check of installed packages against the requirements of this distribution and, in a checkout, its constraints."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import swiftkv_platform
from swiftkv_platform.cli.doctor.findings import Finding, Surroundings

DISTRIBUTION = "swiftkv-platform"
_USED_ON_MACHINES = ("platform", "model", "train", "eval", "serve", "postgres")
"""Extras that commands and programs need; the others are for those who work on the code."""
_NAMED = 3
"""Packages that a message names."""


def examine_packages(_: Surroundings) -> Finding:
    """Compare versions; of extras, of those alone that are there as a whole."""
    installed = _installed()
    extras = {extra: _required(extra) for extra in _USED_ON_MACHINES}
    lacking = {extra: [each for each in wanted if each.name not in installed] for extra, wanted in extras.items()}
    complete = [extra for extra in extras if not lacking[extra]]
    needed = [*_required(""), *(each for extra in complete for each in extras[extra])]
    if wrong := [each for each in dict.fromkeys(needed) if not _fits(each, installed)]:
        return _refused(wrong, installed)
    others = _other_than_constraints(installed)
    if others:
        named = ", ".join(others[:_NAMED]) + (f" and {len(others) - _NAMED} more" if len(others) > _NAMED else "")
        message = (
            f"{len(others)} packages are of other versions than constraints.txt, which the tests ran with: {named}."
        )
        return Finding("warning", message, "`pip install -c constraints.txt ...`, or `make install`, brings those")
    partly = [f"{extra} (lacks {', '.join(each.name for each in gone)})" for extra, gone in lacking.items() if gone]
    message = f"swiftkv-platform {version(DISTRIBUTION)} with extras {', '.join(complete) or 'none'}"
    return Finding("ok", f"{message}; not complete: {', '.join(partly)}." if partly else f"{message}.")


def _required(extra: str) -> list[Requirement]:
    """Requirements of an extra alone; of the distribution itself for an empty one."""
    found = []
    for text in requires(DISTRIBUTION) or ():
        requirement = Requirement(text)
        marker = requirement.marker
        of_itself = marker is None or marker.evaluate({"extra": ""})
        wanted = of_itself if not extra else not of_itself and marker is not None and marker.evaluate({"extra": extra})
        if wanted and canonicalize_name(requirement.name) != DISTRIBUTION:
            found.append(_unmarked(requirement))
    return found


def _unmarked(requirement: Requirement) -> Requirement:
    """Without its marker and extras, so that equal ones of two extras are one."""
    return Requirement(f"{canonicalize_name(requirement.name)}{requirement.specifier}")


def _installed() -> Mapping[str, str]:
    """Versions of what is installed of all that is required or constrained, by name; as an import would find them."""
    names = {canonicalize_name(Requirement(text).name) for text in requires(DISTRIBUTION) or ()} | _constraints().keys()
    return {name: found for name in names if (found := _version(name)) is not None}


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _fits(requirement: Requirement, installed: Mapping[str, str]) -> bool:
    found = installed.get(requirement.name)
    if requirement.name == "torch" and _version("vllm") is not None:
        return True  # vLLM pins its own
    return found is not None and requirement.specifier.contains(found, prereleases=True)


def _refused(wrong: Iterable[Requirement], installed: Mapping[str, str]) -> Finding:
    faults = [
        f"{each.name} {installed[each.name]} is installed and {each} is asked for"
        if each.name in installed
        else f"{each.name} is not installed"
        for each in wrong
    ]
    return Finding("failed", "; ".join(faults) + ".", f"pip install {' '.join(repr(str(each)) for each in wrong)}")


def _constraints() -> Mapping[str, str]:
    """The pinned versions of a checkout, by name; none for an installed package."""
    path = Path(swiftkv_platform.__file__).parents[1] / "constraints.txt"
    if not path.is_file():
        return {}
    lines = (line.partition("#")[0].strip() for line in path.read_text(encoding="utf-8").splitlines())
    pins = (line.partition("==") for line in lines if "==" in line)
    return {canonicalize_name(name): pin for name, _, pin in pins}


def _other_than_constraints(installed: Mapping[str, str]) -> list[str]:
    pins = _constraints()
    return [
        f"{name} {installed[name]} (constraints: {pin})"
        for name, pin in pins.items()
        if name in installed and installed[name].partition("+")[0] != pin.partition("+")[0]
    ]
