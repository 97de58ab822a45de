"""SwiftKV models in an unpatched vLLM: a plugin that vLLM finds by its entry point `swiftkv`.

Importing it imports neither vLLM nor torch; what vLLM needs is loaded when it asks for it.
"""

from swiftkv_platform.vllm.registration import register

__all__ = ["register"]
