"""Blocks: counted, shared by prefix within a tenant, evicted least recently used first, laid next to each other."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from swiftkv_platform.engine.kv_cache import BlockManager, BlockTable

BLOCK = 4


def manager(num_blocks: int = 16, *, caching: bool = True, fingerprint: str = "model") -> BlockManager:
    return BlockManager(num_blocks, BLOCK, enable_prefix_caching=caching, fingerprint=fingerprint)


def admit(blocks: BlockManager, tokens: list[int], *, tenant: str = "", commit: bool = True) -> tuple[BlockTable, int]:
    """Allocate a table for `tokens` and commit it; return it and the number of blocks found in the cache."""
    table = BlockTable()
    matched = blocks.match_prefix(table, tokens, tenant)
    assert blocks.can_allocate(matched, len(tokens))
    blocks.allocate(table, matched, len(tokens))
    if commit:
        blocks.cache_blocks(table, tokens, len(tokens), tenant)
    return table, len(matched)


def tokens(count: int, start: int = 0) -> list[int]:
    return list(range(start, start + count))


def test_a_prefix_is_found_again_by_whole_blocks_and_never_wholly() -> None:
    blocks = manager()
    first, hits = admit(blocks, tokens(10))
    assert hits == 0
    second, hits = admit(blocks, tokens(10))
    assert hits == 2
    assert second.blocks[:2] == first.blocks[:2]
    assert second.blocks[2] != first.blocks[2]
    assert admit(blocks, tokens(8))[1] == 1  # the last token must run, because its logits are needed
    assert admit(blocks, [99, *tokens(9)])[1] == 0
    blocks.assert_consistent([first, second, *(_held(blocks, [first, second]))])


def _held(blocks: BlockManager, known: list[BlockTable]) -> list[BlockTable]:
    """A table with every block reference that is not in the tables `known`."""
    rest = BlockTable()
    for block, count in enumerate(blocks._reference_counts):
        for _ in range(count - sum(table.blocks.count(block) for table in known)):
            rest.append_block(block)
    return [rest]


def test_what_is_discarded_or_not_committed_is_not_found() -> None:
    blocks = manager()
    table, _ = admit(blocks, tokens(12))
    blocks.free(table, discard=True)
    assert admit(blocks, tokens(12))[1] == 0
    blocks = manager()
    table, _ = admit(blocks, tokens(12), commit=False)
    blocks.cache_blocks(table, tokens(12), 7, "")
    assert admit(blocks, tokens(12))[1] == 1
    blocks = manager(caching=False)
    table, _ = admit(blocks, tokens(12))
    blocks.free(table)
    assert admit(blocks, tokens(12))[1] == 0
    blocks = manager()
    table, _ = admit(blocks, tokens(4))
    copy = BlockTable(list(table.blocks))
    blocks.free(table)
    with pytest.raises(AssertionError, match="freed twice"):
        blocks.free(copy)


@pytest.mark.parametrize("other", [{"tenant": "them"}, {"fingerprint": "other weights"}])
def test_tenants_and_models_share_nothing(other: dict[str, str]) -> None:
    blocks = manager()
    table, _ = admit(blocks, tokens(12), tenant="us")
    blocks._fingerprint = other.get("fingerprint", blocks._fingerprint)
    assert blocks.match_prefix(BlockTable(), tokens(12), other.get("tenant", "us")) == []
    blocks.assert_consistent([table])


def test_freed_prefixes_stay_until_blocks_run_out_and_the_oldest_goes_first() -> None:
    blocks = manager(24)
    old, new = tokens(32), tokens(32, 100)
    for one in (old, new):
        table, _ = admit(blocks, one)
        blocks.free(table)
    assert blocks.num_free_blocks == 24
    table, _ = admit(blocks, tokens(64, 500))  # 16 blocks, 8 are empty
    assert blocks.match_prefix(BlockTable(), [*old, 0], "") == []
    assert len(blocks.match_prefix(BlockTable(), [*new, 0], "")) == 8
    blocks.assert_consistent([table])


def test_a_hit_counts_against_the_free_blocks_it_revives() -> None:
    blocks = manager(3)
    table, _ = admit(blocks, tokens(12))
    blocks.free(table)
    matched = blocks.match_prefix(BlockTable(), tokens(16), "")
    assert len(matched) == 3
    assert not blocks.can_allocate(matched, 16)
    assert blocks.can_allocate(matched[:2], 12)
    assert not blocks.can_allocate(matched[:2], 12, num_spare=1)


def test_neighbours_grow_side_by_side() -> None:
    """Several growing sequences keep contiguous blocks while there is room between them."""
    blocks = manager(64)
    tables = [BlockTable() for _ in range(4)]
    for table in tables:
        blocks.allocate(table, [], 2 * BLOCK)
    for num_tokens in range(2 * BLOCK, 6 * BLOCK):
        for table in tables:
            assert blocks.can_extend_table(table, num_tokens)
            blocks.extend_table(table, num_tokens)
    assert [len(table.runs) for table in tables] == [1, 1, 1, 1]
    blocks.assert_consistent(tables)


class Accounting(RuleBasedStateMachine):
    """Any order of admissions, growth and releases leaves every block in exactly one state, and hits are correct."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = manager(12)
        self.live: list[tuple[BlockTable, list[int], str]] = []
        self.contents: dict[int, tuple[int, ...]] = {}

    @rule(prefix=st.integers(0, 2), size=st.integers(1, 20), tenant=st.sampled_from(["", "x"]))
    def admit(self, prefix: int, size: int, tenant: str) -> None:
        token_ids, table = tokens(size, 1000 * prefix), BlockTable()
        matched = self.blocks.match_prefix(table, token_ids, tenant)
        for index, block in enumerate(matched):
            assert self.contents[block] == (hash(tenant), *token_ids[: (index + 1) * BLOCK])
        if self.blocks.can_allocate(matched, size):
            self.blocks.allocate(table, matched, size)
            self.live.append((table, token_ids, tenant))
            self._commit(len(self.live) - 1)

    @precondition(lambda self: self.live)
    @rule(which=st.integers(0, 100), more=st.integers(1, 9))
    def extend_table(self, which: int, more: int) -> None:
        table, token_ids, _ = self.live[which % len(self.live)]
        if self.blocks.can_extend_table(table, len(token_ids) + more):
            token_ids += tokens(more, 5000 + len(token_ids))
            self.blocks.extend_table(table, len(token_ids))
            self._commit(which % len(self.live))

    @precondition(lambda self: self.live)
    @rule(which=st.integers(0, 100), discard=st.booleans())
    def free(self, which: int, discard: bool) -> None:
        self.blocks.free(self.live.pop(which % len(self.live))[0], discard=discard)

    @invariant()
    def every_block_is_accounted_for(self) -> None:
        self.blocks.assert_consistent([table for table, _, _ in self.live])
        for table, token_ids, _ in self.live:
            assert len(table.blocks) == self.blocks.count_blocks(len(token_ids))
            assert [block for start, end in table.runs for block in range(start, end)] == table.blocks

    def _commit(self, which: int) -> None:
        table, token_ids, tenant = self.live[which]
        self.blocks.cache_blocks(table, token_ids, len(token_ids), tenant)
        for index in range(len(token_ids) // BLOCK):
            self.contents[table.blocks[index]] = (hash(tenant), *token_ids[: (index + 1) * BLOCK])


TestAccounting = Accounting.TestCase
TestAccounting.settings = settings(max_examples=40, stateful_step_count=30)
