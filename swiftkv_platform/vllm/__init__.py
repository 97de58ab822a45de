"""SwiftKV models in an unpatched vLLM: a plugin whose entry point `swiftkv` vLLM calls at start. It registers
configurations, model classes and load-time checks by name; vLLM loads the other modules when it needs them. Importing
this one imports neither torch nor vLLM.

vLLM calls it in each of its processes, in some more than once. An untested version of vLLM is checked only when a
SwiftKV model is loaded, so that it keeps serving other models. vLLM's engine core does not notice when its frontend is
killed, and would keep the model's memory while a new frontend starts. So it watches the frontend and exits with it.
"""

from __future__ import annotations

import os
import select
import threading


def register() -> None:
    """Make vLLM read, check and serve SwiftKV directories; calling it again changes nothing. Raises `ModelError`: vLLM
    is too old, or lacks the interfaces that the plugin registers with."""
    import vllm

    from swiftkv_platform import configs
    from swiftkv_platform.families import FAMILIES
    from swiftkv_platform.vllm.versions import is_tested, untested

    follow_frontend()
    try:
        from vllm import ModelRegistry
        from vllm.model_executor.models.config import MODELS_CONFIG_MAP

        from swiftkv_platform.vllm.checks import SwiftKVChecks
    except ImportError as error:
        if is_tested(vllm.__version__):
            raise
        raise untested(vllm.__version__, [str(error)]) from error
    configs.register()
    for name in (family.student_class_name for family in FAMILIES.values()):
        ModelRegistry.register_model(name, f"swiftkv_platform.vllm.causal_lm:{name}")
        MODELS_CONFIG_MAP[name] = SwiftKVChecks


FRONTEND_PID = "SWIFTKV_VLLM_FRONTEND_PID"
"""Environment variable with the id of the process with which vLLM's processes exit; unset: vLLM's own handling."""
_WATCHER = "swiftkv-frontend"


def announce_frontend() -> None:
    """Make the processes that vLLM starts from this one exit when it does, even if it is killed."""
    os.environ[FRONTEND_PID] = str(os.getpid())


def follow_frontend() -> None:
    """Exit this process when the frontend does; a second call changes nothing. No-op in the frontend itself."""
    frontend = os.environ.get(FRONTEND_PID)
    if frontend in (None, str(os.getpid())) or any(thread.name == _WATCHER for thread in threading.enumerate()):
        return
    try:
        handle = os.pidfd_open(int(frontend or 0))
    except ProcessLookupError:
        os._exit(1)
    threading.Thread(target=_exit_behind, args=(handle,), name=_WATCHER, daemon=True).start()


def _exit_behind(handle: int) -> None:
    waiting = select.poll()
    waiting.register(handle, select.POLLIN)
    waiting.poll()
    os._exit(1)
