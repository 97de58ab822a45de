"""vLLM's schedulers for students whose deep tokens keep their own K and V (`swiftkv_decode_key_value: own`).

A block that holds a deep token, the last one of a prompt or one behind it, is of use to its own request alone: a prompt
that has the same text reads it from x. And of a chunk vLLM runs the last token alone through layers >= l, so that a
chunk may hold one deep token, its last. Nothing else about scheduling changes.
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
    """The scheduler that vLLM itself would take, for such a student; named by `scheduler_cls`, as a class is."""
    kind = OwnAsyncScheduler if vllm_config.scheduler_config.async_scheduling else OwnScheduler
    return kind(vllm_config=vllm_config, **arguments)


class _KeepsOwn(Scheduler):
    """The differences of both schedulers from vLLM's."""

    def add_request(self, request: Request) -> None:
        """Queue a request, its blocks named so that no other finds those with deep tokens."""
        if request.request_id not in self.requests:
            self._name_blocks(request)
        super().add_request(request)

    def _update_request_as_session(self, session: Request, update: Any) -> None:
        """Read a session's earlier answers as a prompt, as those of any other are."""
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
        """Once a request has ended, its own blocks go first: no other finds them."""
        if request.is_finished() and self.kv_cache_manager.enable_caching:
            by_group = self.kv_cache_manager.get_block_ids(request.request_id)
            for group, blocks in zip(self.kv_cache_config.kv_cache_groups, by_group, strict=True):
                shared = first_deep(request) // group.kv_cache_spec.block_size
                self.kv_cache_manager.evict_blocks(set(blocks[shared:]))
        super()._free_request_blocks(request)

    def _reserve_prefill_lookahead(self, request: Request, num_computed_tokens: int, num_new_tokens: int) -> int:
        """End a chunk with its first deep token. Generated tokens of a preempted request come one by one again."""
        count: int = super()._reserve_prefill_lookahead(request, num_computed_tokens, num_new_tokens)
        return min(count, max(first_deep(request) + 1 - num_computed_tokens, 1))


def first_deep(request: Request) -> int:
    """The first token of a request that runs through all layers: its prompt's last."""
    count: int = request.num_prompt_tokens
    return count - 1


class OwnHasher:
    """vLLM's names for blocks, with others for those that hold deep tokens: they are one request's own, which finds
    them again after a preemption."""

    def __init__(self, hasher: Callable[[Request], list[bytes]], block_size: int) -> None:
        self._hasher, self._block_size = hasher, block_size
        self._secret = os.urandom(16)

    def __call__(self, request: Request) -> list[bytes]:
        """The names of blocks that have none yet, each of the length that vLLM gave it."""
        at, shared = len(request.block_hashes), first_deep(request) // self._block_size
        return [
            name if index < shared else sha256(self._secret + name).digest()[: len(name)]
            for index, name in enumerate(self._hasher(request), at)
        ]


class OwnScheduler(_KeepsOwn):
    """vLLM's scheduler, for students whose deep tokens keep K and V of their own."""


class OwnAsyncScheduler(_KeepsOwn, AsyncScheduler):
    """vLLM's asynchronous scheduler, for the same students."""
