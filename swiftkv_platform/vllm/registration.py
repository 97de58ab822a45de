"""Entry point that vLLM calls at start: registers configurations, model classes and load-time checks by name. Imports
neither torch nor vLLM until it is called.

vLLM calls it in each of its processes, some of them more than once. A vLLM that was not tested is looked at when a
SwiftKV model is loaded, so that it keeps serving other models. vLLM's engine core does not notice that its frontend was
killed: it would stay, with the model's memory, beside the frontend that takes the old one's place; so it follows it.
"""

from __future__ import annotations

import os
import select
import threading


def register() -> None:
    """Make vLLM read, check and serve SwiftKV directories; calling it again changes nothing. Raises `ModelError`: a
    vLLM that is too old, or that lacks what the plugin registers with."""
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
    for name in (family.student_class for family in FAMILIES.values()):
        ModelRegistry.register_model(name, f"swiftkv_platform.vllm.causal_lm:{name}")
        MODELS_CONFIG_MAP[name] = SwiftKVChecks


FRONTEND_PID = "SWIFTKV_VLLM_FRONTEND_PID"
"""Environment variable with the process whose end is the end of vLLM's; unset: vLLM's own ways."""
_WATCHER = "swiftkv-frontend"


def announce_frontend() -> None:
    """Make the processes that vLLM starts from here end with this one, however it ends."""
    os.environ[FRONTEND_PID] = str(os.getpid())


def follow_frontend() -> None:
    """End this process when the frontend has; a second call changes nothing. The frontend itself follows no process."""
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
