"""vLLM's schedulers for students whose deep tokens keep their own K and V (`LayerMap.deep_leaders`).

A block that holds a deep token (a prompt's last token or a later one) is useful to its own request only: in another
prompt with the same text these tokens have K and V from x. And since vLLM runs only the last token of a chunk through
layers >= l, a chunk may hold one deep token, its last. Nothing else about scheduling changes.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from hashlib import sha256
from typing import Any

from vllm.config import VllmConfig
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request


def make_scheduler(vllm_config: VllmConfig, **arguments: Any) -> Scheduler:
    """Make the synchronous or asynchronous scheduler, as vLLM would choose; vLLM calls it by `scheduler_cls`."""
    kind = OwnAsyncScheduler if vllm_config.scheduler_config.async_scheduling else OwnScheduler
    return kind(vllm_config=vllm_config, **arguments)


class _KeepsOwn(Scheduler):
    """Overrides common to both schedulers."""

    def add_request(self, request: Request) -> None:
        """Queue a request; its blocks with deep tokens get hashes that no other request finds."""
        if request.request_id not in self.requests:
            self._name_blocks(request)
        super().add_request(request)

    def _update_request_as_session(self, session: Request, update: Any) -> None:
        """Recompute a session with its earlier answers as part of the prompt, like any other prompt."""
        super()._update_request_as_session(session, update)
        self._free_request_blocks(session)
        session.num_computed_tokens = 0
        self._name_blocks(session)

    def _name_blocks(self, request: Request) -> None:
        hasher = request._block_hasher
        if hasher is None:  # prefix caching is off
            return
        if not isinstance(hasher, OwnHasher):
            request._block_hasher = hasher = OwnHasher(hasher, self.hash_block_size)
        request.block_hashes.clear()
        request.update_block_hashes()

    def _free_request_blocks(self, request: Request) -> None:
        """Evict a finished request's blocks with deep tokens from the prefix cache: no other request finds them."""
        if request.is_finished() and self.kv_cache_manager.enable_caching:
            by_group = self.kv_cache_manager.get_block_ids(request.request_id)
            for group, blocks in zip(self.kv_cache_config.kv_cache_groups, by_group, strict=True):
                shared = first_deep(request) // group.kv_cache_spec.block_size
                self.kv_cache_manager.evict_blocks(set(blocks[shared:]))
        super()._free_request_blocks(request)

    def _reserve_prefill_lookahead(self, request: Request, num_computed_tokens: int, num_new_tokens: int) -> int:
        """End a chunk at its first deep token. A preempted request's generated tokens are recomputed one per step."""
        count: int = super()._reserve_prefill_lookahead(request, num_computed_tokens, num_new_tokens)
        return min(count, max(first_deep(request) + 1 - num_computed_tokens, 1))


def first_deep(request: Request) -> int:
    """Return the position of a request's first deep token: its prompt's last."""
    count: int = request.num_prompt_tokens
    return count - 1


class OwnHasher:
    """vLLM's block hashes, replaced for blocks that hold deep tokens by hashes that only their request knows, so that
    it finds them again after a preemption."""

    def __init__(self, hasher: Callable[[Request], list[bytes]], block_size: int) -> None:
        self._hasher, self._block_size = hasher, block_size
        self._secret = os.urandom(16)

    def __call__(self, request: Request) -> list[bytes]:
        """Return the hashes of blocks that have none yet, of the same length as vLLM's."""
        at, shared = len(request.block_hashes), first_deep(request) // self._block_size
        return [
            name if index < shared else sha256(self._secret + name).digest()[: len(name)]
            for index, name in enumerate(self._hasher(request), at)
        ]


class OwnScheduler(_KeepsOwn):
    """vLLM's scheduler, for students whose deep tokens keep their own K and V."""


class OwnAsyncScheduler(_KeepsOwn, AsyncScheduler):
    """vLLM's asynchronous scheduler, for the same students."""
