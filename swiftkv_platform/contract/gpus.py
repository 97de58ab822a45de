"""Hide the GPUs that a Ray process has not reserved.

By default Ray leaves all GPUs of a machine visible to a process that reserves none. Tenants are charged for what they
reserve, but `device: auto` uses what is visible.
"""

from __future__ import annotations

import os

HIDE_UNRESERVED = {"RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "1"}
"""Environment with which Ray hides GPUs from processes that reserve none."""


def hide_unreserved() -> None:
    """Hide the machine's GPUs from this process if it has reserved none, whatever the environment of its node. Call it
    before CUDA is initialised."""
    import ray

    if not ray.get_runtime_context().get_accelerator_ids()["GPU"]:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
