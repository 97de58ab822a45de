"""vLLM's second model runner (V2) on a CPU, with Triton's interpreter for its kernels.

vLLM uses that runner when Triton has a backend, as on GPUs; its CPU build looks for a backend named `cpu`. The
interpreter needs no backend, so registering the name is enough.
"""

from __future__ import annotations

import os
from typing import Any

_MASK = {"create_masked_load": 1, "create_masked_store": 2}
"""Index of the mask among the arguments."""
SECOND_RUNNER = os.environ.get("SWIFTKV_TEST_VLLM_RUNNER") == "v2"
"""Whether the tests of this directory use that runner, which vLLM's CPU build has since version 0.32."""


class _Driver:
    @staticmethod
    def is_active() -> bool:
        return True


def take_second_runner() -> None:
    """Make vLLM, which must not be imported yet, use the second model runner."""
    os.environ["TRITON_INTERPRET"] = "1"
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "1"
    from triton import backends

    backends.backends["cpu"] = backends.Backend(compiler=None, driver=_Driver)
    import vllm.triton_utils

    assert vllm.triton_utils.HAS_TRITON
    del backends.backends["cpu"]  # PyTorch's compiler would use it
    for name in ("create_masked_load", "create_masked_store"):
        _take_integer_masks(name)


def _take_integer_masks(name: str) -> None:
    """Let masks be integers: some kernels multiply conditions, and the interpreter only takes booleans."""
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    inner = getattr(InterpreterBuilder, name)

    def masked(builder: Any, *arguments: Any) -> Any:
        taken = [
            TensorHandle(one.data.astype(bool), one.dtype) if at == _MASK[name] else one
            for at, one in enumerate(arguments)
        ]
        return inner(builder, *taken)

    setattr(InterpreterBuilder, name, masked)
