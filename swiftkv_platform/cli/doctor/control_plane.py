"""Check of the control plane, and of the API key that this environment has for it."""

from __future__ import annotations

import os

from swiftkv_platform.cli.doctor.findings import Finding, Surroundings, one_line
from swiftkv_platform.client import APIError, Client
from swiftkv_platform.errors import SwiftKVError

_REFUSED = (401, 403)


def examine_control_plane(surroundings: Surroundings) -> Finding:
    """Ask whether it is ready, and for something that needs the key."""
    stack, given = surroundings.stack, os.environ.get("SWIFTKV_URL")
    state = stack.state()
    if given is None and state is None:
        return Finding("ok", "None is configured or started; `swiftkv up` starts one.")
    if given is None and state is not None and not state.alive("control-plane"):
        message = f"The control plane, which `swiftkv up` had started at {state.url}, has ended."
        return Finding("failed", message, f"swiftkv up; its log is {stack.logs / 'control-plane.log'}")
    url = given or (state.url if state else "")
    key = os.environ.get("SWIFTKV_API_KEY")
    try:
        with Client(url, key, max_retries=0, timeout=surroundings.timeout_s / 2) as client:
            client.ready()
            client.quota()
    except APIError as error:
        if error.status in _REFUSED:
            return Finding("failed", f"{url}: {one_line(error)}.", "set SWIFTKV_API_KEY to a key of that control plane")
        return Finding("failed", f"{url}: {one_line(error)}.", "see to what it names, then to its log")
    except SwiftKVError as error:
        return Finding("failed", one_line(error), "start it (`swiftkv up`), or correct SWIFTKV_URL")
    return Finding("ok", f"{url} is ready and lets this environment in.")
