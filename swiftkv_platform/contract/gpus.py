"""GPUs of a process that Ray starts: those that it has reserved, and no others.

By itself Ray leaves all GPUs of a machine visible to a process that reserves none. A tenant is charged by what is
reserved, and `device: auto` takes what is visible.
"""

from __future__ import annotations

import os

HIDE_UNRESERVED = {"RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "1"}
"""Environment with which Ray itself hides GPUs from processes that reserve none."""


def hide_unreserved() -> None:
    """Hide the machine's GPUs from this process, if it has reserved none, whatever the environment of its node. To be
    called before CUDA is."""
    import ray

    if not ray.get_runtime_context().get_accelerator_ids()["GPU"]:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
