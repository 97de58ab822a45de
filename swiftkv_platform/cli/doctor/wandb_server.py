"""Check of Weights & Biases, where a key is configured: reachable, and the key known."""

from __future__ import annotations

import os

import httpx

from swiftkv_platform.cli.doctor.findings import Finding, Surroundings, one_line

_OFFLINE = ("offline", "disabled", "dryrun")
_CLOUD = "https://api.wandb.ai"
_VIEWER = {"query": "query { viewer { username } }"}


def examine_wandb(surroundings: Surroundings) -> Finding:
    """Ask the server who the key belongs to. Jobs go on without it, so that nothing here is a failure."""
    key, mode = os.environ.get("WANDB_API_KEY"), os.environ.get("WANDB_MODE", "online")
    if not key:
        return Finding("ok", "WANDB_API_KEY is not set; jobs keep their runs offline.")
    if mode in _OFFLINE:
        return Finding("ok", f"WANDB_MODE is {mode}; nothing is sent.")
    server = os.environ.get("WANDB_BASE_URL", _CLOUD).rstrip("/")
    try:
        timeout_s = surroundings.timeout_s / 2
        answer = httpx.post(f"{server}/graphql", json=_VIEWER, auth=("api", key), timeout=timeout_s)
    except (httpx.TransportError, httpx.InvalidURL) as error:
        advice = "correct WANDB_BASE_URL or the network, or set WANDB_MODE=offline"
        return Finding("warning", f"{server} does not answer: {one_line(error)}; jobs go on without it.", advice)
    if answer.is_success and (answer.json().get("data") or {}).get("viewer"):
        return Finding("ok", f"{server} knows the key.")
    message = f"{server} does not know the key in WANDB_API_KEY (HTTP {answer.status_code}); jobs go on without it."
    return Finding("warning", message, "make a new key on its page, or unset WANDB_API_KEY")
