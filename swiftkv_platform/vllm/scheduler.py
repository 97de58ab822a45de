"""vLLM's schedulers for students whose deep tokens keep their own K and V (`LayerMap.deep_leaders`).

A block with a deep token (one of a prompt's last m, or a generated one) is of use only to its own request: in another
prompt with the same text these tokens have K and V from x. Scheduling is unchanged otherwise.
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

from swiftkv_platform.student_shape import find_deep_start


def make_scheduler(vllm_config: VllmConfig, **arguments: Any) -> Scheduler:
    """Make the synchronous or asynchronous scheduler, by vLLM's configuration; vLLM calls it by `scheduler_cls`."""
    kind = OwnKVAsyncScheduler if vllm_config.scheduler_config.async_scheduling else OwnKVScheduler
    return kind(vllm_config=vllm_config, **arguments)


class _OwnKVScheduling(Scheduler):
    def _find_deep_start(self, request: Request) -> int:
        """Return the position of a request's first deep token."""
        config: Any = self.vllm_config.model_config.hf_config
        return find_deep_start(int(request.num_prompt_tokens), config.layer_map.deep_tail)

    def add_request(self, request: Request) -> None:
        """Queue a request. Its blocks with deep tokens get private hashes."""
        if request.request_id not in self.requests:
            self._hash_blocks(request)
        super().add_request(request)

    def _update_request_as_session(self, session: Request, update: Any) -> None:
        """Recompute a session; its earlier completions become part of the prompt."""
        super()._update_request_as_session(session, update)
        self._free_request_blocks(session)
        session.num_computed_tokens = 0
        self._hash_blocks(session)

    def _hash_blocks(self, request: Request) -> None:
        hasher = request._block_hasher
        if hasher is None:  # prefix caching is off
            return
        if not isinstance(hasher, PrivateBlockHasher):
            request._block_hasher = hasher = PrivateBlockHasher(hasher, self.hash_block_size, self._find_deep_start)
        request.block_hashes.clear()
        request.update_block_hashes()

    def _update_waiting_for_remote_kv(self, request: Request) -> None:
        """Accept a prompt's caches from another server, except for deep tokens: if that server has half of the model,
        their K and V are from x."""
        request.num_computed_tokens = min(request.num_computed_tokens, self._find_deep_start(request))
        super()._update_waiting_for_remote_kv(request)
        if request.num_computed_tokens == 0:  # scheduled like a new request, which has no blocks
            self.kv_cache_manager.free(request)

    def _free_request_blocks(self, request: Request) -> None:
        """Evict a finished request's blocks with deep tokens from the prefix cache, since no other request finds
        them."""
        if request.is_finished() and self.kv_cache_manager.enable_caching:
            by_group = self.kv_cache_manager.get_block_ids(request.request_id)
            for group, blocks in zip(self.kv_cache_config.kv_cache_groups, by_group, strict=True):
                num_shared = self._find_deep_start(request) // group.kv_cache_spec.block_size
                self.kv_cache_manager.evict_blocks(set(blocks[num_shared:]))
        super()._free_request_blocks(request)


class PrivateBlockHasher:
    """vLLM's block hashes, with private ones for blocks with deep tokens: only their own request finds them again,
    after a preemption."""

    def __init__(
        self, hasher: Callable[[Request], list[bytes]], block_size: int, find_deep_start: Callable[[Request], int]
    ) -> None:
        self._hasher, self._block_size, self._find_deep_start = hasher, block_size, find_deep_start
        self._secret = os.urandom(16)

    def __call__(self, request: Request) -> list[bytes]:
        """Return the hashes of the next blocks, as long as vLLM's."""
        first, num_shared = len(request.block_hashes), self._find_deep_start(request) // self._block_size
        return [
            block_hash if index < num_shared else sha256(self._secret + block_hash).digest()[: len(block_hash)]
            for index, block_hash in enumerate(self._hasher(request), first)
        ]


class OwnKVScheduler(_OwnKVScheduling):
    """vLLM's synchronous scheduler, for these students."""


class OwnKVAsyncScheduler(_OwnKVScheduling, AsyncScheduler):
    """vLLM's asynchronous scheduler, for these students."""
