"""Checks of requests to a student before vLLM queues them: prompt log-probabilities are refused.

Skipped prompt tokens have no logits, and vLLM would fail only in the model runner, which kills the engine. vLLM's hook
for a request's parameters is a logits processor; these do not change logits. Model runner V2, which vLLM uses if Triton
is available, as on GPUs, has its own class of them. A server's frontend imports this module too, so it must not import
the runners.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm import SamplingParams
from vllm.exceptions import VLLMValidationError
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor
from vllm.v1.worker.gpu.sample import logits_processor as v2


def refuse_prompt_logprobs(params: SamplingParams) -> None:
    """Raise `VLLMValidationError` (HTTP 400) for a request of prompt log-probabilities."""
    if params.prompt_logprobs is not None:
        raise VLLMValidationError(
            f"prompt_logprobs is {params.prompt_logprobs}, but a SwiftKV model skips prompt tokens and has no logits "
            "for them; leave it out, or serve the teacher with hf_overrides={'swiftkv': false}",
            parameter="prompt_logprobs",
            value=params.prompt_logprobs,
        )


def require_one_token(params: SamplingParams) -> None:
    """Raise `VLLMValidationError` (HTTP 400) unless a request to a prefill-only server is for one token."""
    refuse_prompt_logprobs(params)
    if params.max_tokens != 1 or params.logprobs is not None:
        raise VLLMValidationError(
            f"max_tokens is {params.max_tokens} and logprobs {params.logprobs}, but this is a prefill-only server; "
            "send max_tokens 1 without logprobs, and the prompt to a server that decodes",
            parameter="max_tokens",
            value=params.max_tokens,
        )


class PromptLogprobsCheck(LogitsProcessor):
    """A logits processor that only validates parameters."""

    validate_params = staticmethod(refuse_prompt_logprobs)

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        pass

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        return logits

    def is_argmax_invariant(self) -> bool:
        return True

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        pass


class OneTokenCheck(PromptLogprobsCheck):
    """Check of requests to a prefill-only server, whose single token signals the end of the prefill."""

    validate_params = staticmethod(require_one_token)


class V2PromptLogprobsCheck(v2.LogitsProcessor):
    """`PromptLogprobsCheck` for model runner V2."""

    validate_params = staticmethod(refuse_prompt_logprobs)

    def add_request(self, _slot: int, _params: SamplingParams) -> bool:
        return False

    def apply(self, logits: torch.Tensor, _context: v2.LogitsContext) -> torch.Tensor:
        return logits


class V2OneTokenCheck(V2PromptLogprobsCheck):
    """`OneTokenCheck` for model runner V2."""

    validate_params = staticmethod(require_one_token)
