"""SwiftKV models in an unpatched vLLM: a plugin that vLLM finds by its entry point `swiftkv`.

Importing it imports neither vLLM nor torch; vLLM loads the other modules by name when it needs them.
"""

from swiftkv_platform.vllm.registration import register

__all__ = ["register"]
