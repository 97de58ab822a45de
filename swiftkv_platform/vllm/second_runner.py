"""Checks of requests for vLLM's model runner V2, which has its own class of logits processors.

vLLM uses V2 if Triton is available, as on GPUs. A server's frontend imports this module too, so it must not import the
runner.
"""

from __future__ import annotations

import torch
from vllm import SamplingParams
from vllm.v1.worker.gpu.sample.logits_processor import LogitsContext, LogitsProcessor

from swiftkv_platform.vllm.requests import refuse_prompt_logprobs, require_one_token


class PromptLogprobsCheck(LogitsProcessor):
    """A logits processor that only validates parameters."""

    validate_params = staticmethod(refuse_prompt_logprobs)

    def add_request(self, _slot: int, _params: SamplingParams) -> bool:
        return False

    def apply(self, logits: torch.Tensor, _context: LogitsContext) -> torch.Tensor:
        return logits


class OneTokenCheck(PromptLogprobsCheck):
    """Check of requests to a prefill-only server, whose single token signals the end of the prefill."""

    validate_params = staticmethod(require_one_token)
