"""`swiftkv quota`: what the caller's tenant may use, and uses."""

from __future__ import annotations

from swiftkv_platform.cli.context import Json, Url, connect
from swiftkv_platform.cli.output import print_fields, print_json


def quota(url: Url = None, json: Json = False) -> None:
    """Show what your tenant may use of the cluster, and uses; without a limit there is no line for it."""
    with connect(url) as client:
        found = client.quota()
    if json:
        print_json(found)
    else:
        print_fields(found.model_dump(mode="json", exclude={"object"}))
