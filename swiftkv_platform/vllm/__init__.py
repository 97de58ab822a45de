"""SwiftKV models in an unpatched vLLM: a plugin whose entry point `swiftkv` vLLM calls at start. It registers
configurations, model classes and load-time checks by name; vLLM imports the other modules when it needs them. Importing
this module imports neither torch nor vLLM.

vLLM calls the entry point in each of its processes, in some more than once. An untested version of vLLM is checked only
when a SwiftKV model is loaded, so that other models are not affected. vLLM's engine core does not notice that its
frontend was killed, and keeps the model's memory while a new frontend starts. So it watches the frontend and exits with
it.
"""

from __future__ import annotations

import os
import select
import threading
from importlib.util import find_spec

ARCTIC_VARIABLE = "ARCTIC_INFERENCE_ENABLED"
"""Environment variable that lets the package arctic-inference patch vLLM."""


def register() -> None:
    """Make vLLM read, check and serve SwiftKV directories. Idempotent. Raises `ModelError`: vLLM lacks the interfaces
    for registration, or arctic-inference patches it."""
    _refuse_arctic_patches()
    import vllm

    from swiftkv_platform import configs
    from swiftkv_platform.families import FAMILIES
    from swiftkv_platform.vllm.versions import is_tested, make_untested_error

    exit_with_frontend()
    try:
        from vllm import ModelRegistry
        from vllm.model_executor.models.config import MODELS_CONFIG_MAP

        from swiftkv_platform.vllm.checks import SwiftKVChecks
    except ImportError as error:
        if is_tested(vllm.__version__):
            raise
        raise make_untested_error(vllm.__version__, [str(error)]) from error
    configs.register_configs()
    for name in (family.student_class_name for family in FAMILIES.values()):
        ModelRegistry.register_model(name, f"swiftkv_platform.vllm.causal_lm:{name}")
        MODELS_CONFIG_MAP[name] = SwiftKVChecks


def _refuse_arctic_patches() -> None:
    from swiftkv_platform.errors import ModelError

    if os.environ.get(ARCTIC_VARIABLE) == "1" and find_spec("arctic_inference") is not None:
        raise ModelError(
            f"{ARCTIC_VARIABLE} is 1: arctic-inference replaces parts of vLLM and registers its own SwiftKV models. "
            "Unset the variable to serve SwiftKV models with this plugin, or set VLLM_PLUGINS=arctic_inference to "
            "leave this plugin out",
            field=ARCTIC_VARIABLE,
            value="1",
        )


FRONTEND_PID_VARIABLE = "SWIFTKV_VLLM_FRONTEND_PID"
"""Environment variable with the process id of vLLM's frontend; if it is unset, vLLM's processes do not watch it."""
_THREAD_NAME = "swiftkv-frontend"


def export_frontend_pid() -> None:
    """Make vLLM's child processes exit with this process, even if it is killed."""
    os.environ[FRONTEND_PID_VARIABLE] = str(os.getpid())


def exit_with_frontend() -> None:
    """Exit this process when the frontend exits. Idempotent. Does nothing in the frontend itself."""
    frontend = os.environ.get(FRONTEND_PID_VARIABLE)
    if frontend in (None, str(os.getpid())) or any(thread.name == _THREAD_NAME for thread in threading.enumerate()):
        return
    try:
        handle = os.pidfd_open(int(frontend or 0))
    except ProcessLookupError:
        os._exit(1)
    threading.Thread(target=_exit_after, args=(handle,), name=_THREAD_NAME, daemon=True).start()


def _exit_after(handle: int) -> None:
    poller = select.poll()
    poller.register(handle, select.POLLIN)
    poller.poll()
    os._exit(1)
