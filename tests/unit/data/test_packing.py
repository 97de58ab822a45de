"""Packing neither loses nor mixes tokens, and the step number alone determines the position in the data."""

from collections import Counter
from itertools import chain, pairwise
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from swiftkv_platform.data import packing
from swiftkv_platform.data.packing import PackedRows, Samples, count_steps, pack, select_batch_rows, select_rank_rows

MAX_LENGTH = 16
PAD = 9999


def make_samples(lengths: list[int]) -> Samples:
    """Samples of these lengths whose tokens are all different; odd ones are counted by the loss."""
    starts = np.cumsum([0, *lengths], dtype=np.int64)
    counts = np.arange(starts[-1]) % 2 == 1
    counts[starts[1:] - 1] = False
    return Samples(np.arange(starts[-1], dtype=np.int32), counts, starts)


def packed(lengths: list[int], *, packing: bool = True) -> PackedRows:
    chosen = np.arange(len(lengths))
    return pack(make_samples(lengths), chosen, max_length=MAX_LENGTH, pad_token_id=PAD, packing=packing)


def segments(row: dict[str, np.ndarray]) -> list[dict[str, np.ndarray]]:
    """Split a row where positions restart, as attention does; the last segment includes the padding."""
    restarts = np.append(True, row["position_ids"][1:] != row["position_ids"][:-1] + 1)
    sizes = np.diff(np.append(np.flatnonzero(restarts), MAX_LENGTH)).tolist()
    parts = {name: np.split(array, np.cumsum(sizes)[:-1]) for name, array in row.items()}
    return [dict(zip(parts, values, strict=True)) for values in zip(*parts.values(), strict=True)]


def test_deep_tokens_are_counted_with_the_tails_of_their_prompts() -> None:
    """A tail ends where its sample begins. The tails of two answers may overlap, and both are counted."""
    loss_mask = np.array([0, 0, 0, 1, 1, 0, 0, 1, 0, 0, 1, 1, 0, 1, 1, 0], dtype=bool)
    samples = Samples(np.arange(16, dtype=np.int32), loss_mask, np.array([0, 9, 13, 16]))
    rows = pack(samples, np.arange(3), max_length=MAX_LENGTH, pad_token_id=PAD, packing=True)
    assert rows.count_deep_tokens(1) == rows.num_counted_tokens == 7
    assert rows.count_deep_tokens(3) == 7 + (2 + 2) + 1
    assert rows.count_deep_tokens(100) == 7 + (3 + 7) + 1


lengths_strategy = st.lists(st.integers(1, MAX_LENGTH), min_size=1, max_size=40)


@given(lengths_strategy, st.booleans())
def test_every_sample_stands_whole_in_exactly_one_place(lengths: list[int], packing: bool) -> None:
    rows, found = packed(lengths, packing=packing), []
    samples = rows.samples
    for index in range(len(rows)):
        parts = segments(rows[index])
        assert len(parts) == len(rows.get_sample_lengths(index))
        for number, segment in enumerate(parts, start=1):
            ids = segment["input_ids"]
            assert segment["position_ids"].tolist() == list(range(len(ids)))
            found.append(int(np.searchsorted(samples.starts, int(ids[0]))))
            span = slice(samples.starts[found[-1]], samples.starts[found[-1] + 1])
            length = int(rows.get_sample_lengths(index)[number - 1])
            assert ids[:length].tolist() == samples.tokens[span].tolist()
            assert segment["loss_mask"][:length].tolist() == samples.loss_mask[span].tolist()
            assert (ids[length:] == PAD).all()
            assert not segment["loss_mask"][length:].any()
            assert length == len(ids) or number == len(parts), "padding comes after the last sample"
    assert sorted(found) == list(range(len(lengths)))
    assert len(rows) == len(lengths) or packing


@given(lengths_strategy, st.integers(1, 7), st.data())
def test_rows_end_to_end_are_their_samples(lengths: list[int], multiple: int, data: st.DataObject) -> None:
    rows = packed(lengths)
    chosen = data.draw(st.lists(st.integers(0, len(rows) - 1), min_size=1, max_size=4))
    num_counted = data.draw(st.integers(0, len(chosen)))
    batch, found = rows.make_padding_free_batch(chosen, multiple=multiple, num_counted=num_counted)
    per_row = [rows.get_sample_lengths(index).tolist() for index in chosen]
    assert list(found) == [length for row in per_row for length in row]
    num_tokens = sum(found)
    assert {array.shape for array in batch.values()} == {(1, -(-num_tokens // multiple) * multiple)}
    for name, array in batch.items():
        laid_out = [rows[index][name][: sum(row)] for index, row in zip(chosen, per_row, strict=True)]
        if name == "loss_mask":
            laid_out[num_counted:] = [np.zeros_like(part) for part in laid_out[num_counted:]]
        assert array[0, :num_tokens].tolist() == np.concatenate(laid_out).tolist()
    assert not batch["loss_mask"][0, num_tokens:].any()
    assert (batch["input_ids"][0, num_tokens:] == PAD).all()


@given(lengths_strategy)
def test_rows_are_counted_and_no_two_could_be_one(lengths: list[int]) -> None:
    """Best fit opens a row only if no other has room, so no two rows would fit into one."""
    rows = packed(lengths)
    batch = rows.make_padded_batch(range(len(rows)))
    filled = sorted((batch["input_ids"] != PAD).sum(axis=1).tolist())
    assert all(filled[0] + other > MAX_LENGTH for other in filled[1:])
    assert dict(rows.sample_length_histogram) == Counter(lengths)
    assert rows.num_tokens == sum(filled)
    assert rows.num_counted_tokens == int(batch["loss_mask"].sum())
    assert rows.packing_efficiency == rows.num_tokens / batch["input_ids"].size


def test_the_tightest_row_is_taken() -> None:
    rows = packed([12, 10, 4])
    assert [rows.members[begin:end].tolist() for begin, end in pairwise(rows.row_starts)] == [[0, 2], [1]]


def test_a_batch_has_the_types_a_model_takes() -> None:
    rows = packed([5, 16, 9])
    batch = rows.make_padded_batch([1, 0])
    assert {array.shape for array in batch.values()} == {(2, MAX_LENGTH)}
    types = {"input_ids": np.int64, "position_ids": np.int64, "loss_mask": np.bool_}
    assert {name: array.dtype for name, array in batch.items()} == types
    assert np.array_equal(batch["input_ids"][0], rows[1]["input_ids"])
    with pytest.raises(IndexError, match="row 2 of 2"):
        rows[2]


def test_a_sample_may_be_repeated_or_left_out() -> None:
    rows = pack(make_samples([4, 4, 4]), np.array([2, 2, 0]), max_length=4, pad_token_id=PAD)
    assert sorted(rows[i]["input_ids"][0].item() for i in range(len(rows))) == [0, 8, 8]
    none = pack(make_samples([4]), np.empty(0, dtype=np.int64), max_length=4, pad_token_id=PAD)
    assert (len(none), none.num_tokens, none.packing_efficiency) == (0, 0, 0.0)


def make_samples_of_prompts(prompts: list[list[int]], num_targets: int = 2) -> Samples:
    """Make samples that begin with these prompts, followed by tokens that are all different. `num_targets` of each are
    counted: the prompt's last token is the first one."""
    targets = np.arange(len(prompts) * num_targets).reshape(-1, num_targets) + 100
    tokens = [np.array([*prompt, *own], dtype=np.int32) for prompt, own in zip(prompts, targets, strict=True)]
    counts = [
        np.array([False] * (len(prompt) - 1) + [True] * num_targets + [False]) for prompt in prompts if len(prompt)
    ]
    return Samples(np.concatenate(tokens), np.concatenate(counts), np.cumsum([0, *map(len, tokens)]))


def share(samples: Samples, chosen: list[int] | None = None, *, max_length: int = MAX_LENGTH) -> PackedRows:
    with patch.object(packing, "MIN_PREFIX_LENGTH", 4):
        members = np.arange(len(samples)) if chosen is None else np.array(chosen)
        return pack(samples, members, max_length=max_length, pad_token_id=PAD, share_prefixes=True)


def unfold(rows: PackedRows, index: int) -> list[tuple[list[int], list[int]]]:
    """Return the tokens of a row's samples, with their shared prefixes, and those that the row counts, from the arrays
    that a training step gets."""
    batch, lengths = rows.make_padding_free_batch([index])
    positions, samples = batch["position_ids"][0].tolist(), list[tuple[list[int], list[int]]]()
    starts = [at for at, (before, here) in enumerate(pairwise([-9, *positions])) if here != before + 1]
    assert lengths is None or [*lengths] == np.diff([*starts, len(positions)]).tolist()
    for begin, end in pairwise([*starts, len(positions)]):
        own, counted = batch["input_ids"][0, begin:end], batch["loss_mask"][0, begin:end]
        samples.append(((samples[-1][0] if samples else [])[: positions[begin]] + own.tolist(), own[counted].tolist()))
    return samples


@given(st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=12), min_size=1, max_size=30))
def test_samples_share_prefixes_and_each_target_counts_once(prompts: list[list[int]]) -> None:
    samples = make_samples_of_prompts(prompts)
    rows, separate = share(samples), pack(samples, np.arange(len(prompts)), max_length=MAX_LENGTH, pad_token_id=PAD)
    found = sorted(chain.from_iterable(unfold(rows, index) for index in range(len(rows))))
    parts = pairwise(samples.starts)
    assert found == sorted(
        (samples.tokens[begin:end].tolist(), samples.tokens[begin:end][samples.loss_mask[begin:end]].tolist())
        for begin, end in parts
    )
    num_tokens = [int((rows.make_padding_free_batch([i])[0]["input_ids"]).size) for i in range(len(rows))]
    assert max(num_tokens) <= MAX_LENGTH
    assert sum(num_tokens) == rows.num_tokens == sum(length * count for length, count in rows.sample_length_histogram)
    assert rows.num_counted_tokens == separate.num_counted_tokens
    assert rows.num_tokens <= separate.num_tokens
    for index, row in enumerate(pairwise(rows.row_starts)):
        whole = rows.get_unshared_samples(index)
        assert set(whole) <= set(rows.members[slice(*row)])
        assert (rows[index]["input_ids"] != PAD).sum() == samples.lengths[whole].sum()


def test_samples_with_a_long_common_prompt_share_it() -> None:
    """The third has the first's prompt of 6 tokens. The last token of a prompt is counted, so it is not shared."""
    samples = make_samples_of_prompts([[1, 2, 3, 4, 5, 6], [1, 2, 3], [1, 2, 3, 4, 5, 6], [1, 2, 3, 9, 9, 9]])
    rows = share(samples)
    assert rows.prefix_lengths is not None
    assert (rows.members.tolist(), rows.prefix_lengths.tolist()) == ([0, 2, 1, 3], [0, 5, 0, 0])
    assert rows.num_tokens == 3 * 8 + 5 - 5
    again = share(samples)
    assert np.array_equal(again.prefix_lengths, rows.prefix_lengths)
    assert np.array_equal(again.row_starts, rows.row_starts)


def test_a_counted_prompt_is_not_shared() -> None:
    samples = make_samples_of_prompts([[1] * 6] * 2)
    assert share(samples).prefix_lengths is not None
    samples.loss_mask[[2, 10]] = True
    assert share(samples).prefix_lengths is None


def test_a_prompt_is_repeated_where_its_samples_need_several_rows() -> None:
    rows = share(make_samples_of_prompts([[1] * 9] * 5), max_length=16)
    assert [len(rows.get_unshared_samples(index)) for index in range(len(rows))] == [1, 1, 1]
    assert [len(rows.get_sample_indices(index)) for index in range(len(rows))] == [2, 2, 1]


def test_repeats_of_a_sample_stay_apart() -> None:
    """A source of weight 2 has two passes over its samples, not twice the gradient in one step."""
    rows = share(make_samples_of_prompts([[1] * 6, [1] * 6]), [0, 1, 0, 1], max_length=11)
    assert [sorted(rows.get_sample_indices(index)) for index in range(len(rows))] == [[0, 1], [0, 1]]


@given(st.integers(1, 30), st.integers(1, 12), st.integers(0, 3), st.integers(1, 4))
def test_every_epoch_takes_every_row_once(num_rows: int, batch_size: int, seed: int, epochs: int) -> None:
    steps = count_steps(num_rows, batch_size=batch_size, num_epochs=epochs, max_steps=None)
    taken = [
        row for step in range(steps) for row in select_batch_rows(num_rows, batch_size=batch_size, seed=seed, step=step)
    ]
    assert num_rows * epochs <= len(taken) < num_rows * epochs + batch_size
    for epoch in range(epochs):
        assert sorted(taken[epoch * num_rows : (epoch + 1) * num_rows]) == list(range(num_rows))
    assert count_steps(num_rows, batch_size=batch_size, num_epochs=epochs, max_steps=3) == 3


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    pairs = [(0, 0), (0, 1), (1, 0), (1, 1)]
    orders = {tuple(select_batch_rows(100, batch_size=100, seed=seed, step=epoch)) for seed, epoch in pairs}
    assert len(orders) == 4


@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
def test_workers_share_a_batch_without_overlap_whatever_their_number(world_size: int) -> None:
    batch = select_batch_rows(50, batch_size=8, seed=3, step=5)
    shares = [select_rank_rows(batch, rank, world_size) for rank in range(world_size)]
    assert {len(share) for share in shares} <= {8 // world_size, -(-8 // world_size)}
    assert sorted(chain.from_iterable(shares)) == sorted(batch)
