"""vLLM's second model runner (V2) on a CPU: Triton's interpreter runs its kernels.

vLLM takes that runner wherever Triton has a backend, which is on GPUs, and its CPU build looks for one named `cpu`. The
interpreter needs none, so a name is enough.
"""

from __future__ import annotations

import os
from typing import Any

_MASK = {"create_masked_load": 1, "create_masked_store": 2}
"""Place of the mask among the arguments."""
SECOND_RUNNER = os.environ.get("SWIFTKV_TEST_VLLM_RUNNER") == "v2"
"""Whether the tests of this directory run with it: from vLLM 0.32 on, which has it in its CPU build."""


class _Driver:
    @staticmethod
    def is_active() -> bool:
        return True


def take_second_runner() -> None:
    """Have vLLM, which is not imported yet, run on the second model runner."""
    os.environ["TRITON_INTERPRET"] = "1"
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "1"
    from triton import backends

    backends.backends["cpu"] = backends.Backend(compiler=None, driver=_Driver)
    import vllm.triton_utils

    assert vllm.triton_utils.HAS_TRITON
    del backends.backends["cpu"]  # PyTorch's compiler would ask it for more
    for name in ("create_masked_load", "create_masked_store"):
        _take_integer_masks(name)


def _take_integer_masks(name: str) -> None:
    """Some kernels mask by a product of conditions, an integer, which the interpreter does not take by itself."""
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    inner = getattr(InterpreterBuilder, name)

    def masked(builder: Any, *arguments: Any) -> Any:
        taken = [
            TensorHandle(one.data.astype(bool), one.dtype) if at == _MASK[name] else one
            for at, one in enumerate(arguments)
        ]
        return inner(builder, *taken)

    setattr(InterpreterBuilder, name, masked)
