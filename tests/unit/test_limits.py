"""SECURITY.md shows the table of limits, `swiftkv_platform/limits.py`, and every limit has the setting it names."""

from pathlib import Path

import pytest

from swiftkv_platform.control_plane.access.tenants import TenantPolicy
from swiftkv_platform.limits import Limit, list_limits
from swiftkv_platform.serve.args import ReplicaArgs
from swiftkv_platform.settings import Settings
from swiftkv_platform.specs.deployment import DeploymentSpec
from swiftkv_platform.specs.engine import EngineConfig

PAGE = Path("SECURITY.md")
HEAD = ["| limit | default | setting |", "|---|---|---|"]


def rows(limits: tuple[Limit, ...]) -> list[str]:
    """Return the rows of the table: one for each resource, with its limits by scope."""
    shown = []
    for resource in dict.fromkeys(limit.resource for limit in limits):
        same = [limit for limit in limits if limit.resource == resource]
        defaults = ", ".join(f"{amount(limit)} per {limit.scope}" for limit in same)
        settings = ", ".join(dict.fromkeys(f"`{limit.setting}`" for limit in same if limit.setting))
        shown.append(f"| {resource} | {defaults} | {settings or 'fixed'} |")
    return shown


def amount(limit: Limit) -> str:
    """Return a limit as the page shows it: bytes in binary units, other numbers with separators."""
    units = ("", "KiB", "MiB", "GiB", "TiB")
    value, power = limit.default, 0
    while limit.resource.startswith("bytes") and value % 1024 == 0 and power < len(units) - 1:
        value, power = value // 1024, power + 1
    return f"{value:,} {units[power]}".rstrip()


def test_the_page_shows_every_limit() -> None:
    text = PAGE.read_text(encoding="utf-8")
    named = [(limit.scope, limit.resource) for limit in list_limits()]
    assert len(named) == len(set(named))
    expected = "\n".join([*HEAD, *rows(list_limits())])
    assert expected in text, f"replace the table of {PAGE} by:\n{expected}"


@pytest.mark.parametrize("limit", list_limits(), ids=lambda limit: limit.resource)
def test_a_limit_is_finite_and_its_setting_exists(limit: Limit) -> None:
    assert 0 < limit.default < 1 << 50
    if limit.setting is not None:
        fields = {
            *(f"SWIFTKV_{name.upper()}" for name in Settings.model_fields),
            *TenantPolicy.model_fields,
            *DeploymentSpec.model_fields,
            *ReplicaArgs.model_fields,
            *(f"engine.{name}" for name in EngineConfig.model_fields),
        }
        assert limit.setting in fields, limit.setting
