"""Request checks for vLLM's second model runner (V2), which has its own class of logits processors.

vLLM uses that runner wherever Triton runs, which is on GPUs. It has fast prefill from 0.30 on and these processors from
0.32 on; before, a student that needs one gets the first runner. A server's frontend imports this module too, so it must
not import the runner itself.
"""

from __future__ import annotations

import torch
from vllm import SamplingParams
from vllm.v1.worker.gpu.sample.logits_processor import LogitsContext, LogitsProcessor

from swiftkv_platform.vllm.requests import refuse_prompt_logprobs, require_one_token


class RefusePromptLogprobs(LogitsProcessor):
    """A logits processor that validates parameters and does nothing else."""

    validate_params = staticmethod(refuse_prompt_logprobs)

    def add_request(self, _slot: int, _params: SamplingParams) -> bool:
        return False

    def apply(self, logits: torch.Tensor, _context: LogitsContext) -> torch.Tensor:
        return logits


class OneToken(RefusePromptLogprobs):
    """Check of requests to a prefill-only server, whose one token signals that the prompt is done."""

    validate_params = staticmethod(require_one_token)
