"""The step of an engine that takes the most memory, to be run before memory is given out. Knows no device."""

from __future__ import annotations

from swiftkv_platform.engine.block_manager import BlockManager
from swiftkv_platform.engine.kv_cache import KVCache
from swiftkv_platform.engine.loading import LoadedModel
from swiftkv_platform.engine.scheduler import ScheduledSequence
from swiftkv_platform.engine.sequence import Sequence
from swiftkv_platform.specs.engine import EngineConfig
from swiftkv_platform.specs.sampling import SamplingParams


def worst_step(loaded: LoadedModel, config: EngineConfig, cache: KVCache) -> list[ScheduledSequence]:
    """Prompts of `max_num_batched_tokens` tokens together, as long as they may be, whose log-probabilities are all
    asked for: every token goes through every layer and has logits over the whole vocabulary."""
    blocks = BlockManager(cache.num_blocks, cache.block_size, enable_prefix_caching=False)
    params = SamplingParams(max_tokens=1, prompt_logprobs=1, logprobs=1)
    scheduled: list[ScheduledSequence] = []
    left = min(config.max_num_batched_tokens, cache.num_blocks * cache.block_size)
    while left > 0 and len(scheduled) < config.max_num_seqs:
        size = min(left, loaded.context_length - 1)
        sequence = Sequence(
            f"worst-{len(scheduled)}",
            (0,) * size,
            params,
            seed=0,
            stop_token_ids=frozenset(),
            max_model_len=loaded.context_length,
        )
        blocks.allocate(sequence.block_table, [], size)
        scheduled.append(ScheduledSequence(sequence, size))
        left -= size
    return scheduled
