"""Check of each request to a student before vLLM queues it: prompt log-probabilities are refused.

Skipped prompt tokens have no logits. vLLM itself would fail only in the model runner, which kills the engine. A logits
processor is the hook that sees a request's parameters; these change no logits. They are for the first model runner;
`second_runner.py` has those for the second one.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm import SamplingParams
from vllm.exceptions import VLLMValidationError
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor


def refuse_prompt_logprobs(params: SamplingParams) -> None:
    """Raise `VLLMValidationError`, which vLLM's server answers with HTTP 400, if prompt log-probabilities are asked."""
    if params.prompt_logprobs is not None:
        raise VLLMValidationError(
            f"prompt_logprobs is {params.prompt_logprobs}, but a SwiftKV model skips prompt tokens and has no logits "
            "for them; leave it out, or serve the teacher with hf_overrides={'swiftkv': false}",
            parameter="prompt_logprobs",
            value=params.prompt_logprobs,
        )


def require_one_token(params: SamplingParams) -> None:
    """Raise `VLLMValidationError` (HTTP 400) unless a request to a prefill-only server asks for one plain token."""
    refuse_prompt_logprobs(params)
    if params.max_tokens != 1 or params.logprobs is not None:
        raise VLLMValidationError(
            f"max_tokens is {params.max_tokens} and logprobs {params.logprobs}, but this server prefills only; send "
            "max_tokens 1 without logprobs, and the prompt to a server that decodes",
            parameter="max_tokens",
            value=params.max_tokens,
        )


class RefusePromptLogprobs(LogitsProcessor):
    """A logits processor that validates parameters and does nothing else."""

    validate_params = staticmethod(refuse_prompt_logprobs)

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        pass

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        return logits

    def is_argmax_invariant(self) -> bool:
        return True

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        pass


class OneToken(RefusePromptLogprobs):
    """Check of requests to a prefill-only server, whose one token signals that the prompt is done."""

    validate_params = staticmethod(require_one_token)
