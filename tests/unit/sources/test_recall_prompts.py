"""Requests about a text, which the package ships: the same everywhere, and a split that shares no person."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable

import pytest

from swiftkv_platform.evaluation.harness import needle
from swiftkv_platform.sources import recall_prompts as source
from swiftkv_platform.sources.recall_prompts import long_recall_prompts, recall_prompts

Prompts = Callable[..., list[str]]
BOTH = pytest.mark.parametrize("prompts", [recall_prompts, long_recall_prompts])


@pytest.mark.parametrize(
    ("prompts", "expected"),
    [
        (recall_prompts, {False: "d2d3adcf1ed19aa0", True: "3629167de1f40f17"}),
        (long_recall_prompts, {False: "ce3bf0c52f40baa0", True: "5345325241b0ad40"}),
    ],
)
def test_every_machine_makes_the_same_requests(prompts: Prompts, expected: dict[bool, str]) -> None:
    digests = {
        side: hashlib.sha256("\n".join(prompts(held_out=side)).encode()).hexdigest()[:16] for side in (False, True)
    }
    assert digests == expected


@BOTH
def test_the_sides_share_no_person(prompts: Prompts) -> None:
    training, held_out = ("\n".join(prompts(held_out=side)) for side in (False, True))
    for people, absent in ((source._PEOPLE[False], held_out), (source._PEOPLE[True], training)):
        assert not [person for person in people if re.search(rf"\b{person}\b", absent)]


@pytest.mark.parametrize(
    ("prompts", "number", "characters"),
    [(recall_prompts, 2200, range(30, 2048)), (long_recall_prompts, 1100, range(1500, 8192))],
)
def test_what_is_asked_for_stands_in_the_text(prompts: Prompts, number: int, characters: range) -> None:
    found = prompts(held_out=False) + prompts(held_out=True)
    assert len(set(found)) == len(found) == number
    assert min(map(len, found)) in characters
    assert max(map(len, found)) in characters
    asked = [match for prompt in found if (match := re.search(r"Which ticket code does (\w+) have\?", prompt))]
    assert len(asked) > 100
    assert all(f"The ticket code of {match[1]} is " in match.string for match in asked)


@BOTH
def test_needles_that_judge_a_student_are_made_of_other_words(prompts: Prompts) -> None:
    """A student that was trained on these has still to find what it never was asked for."""
    ours = " ".join(prompts(held_out=False)).lower()
    assert "secret" not in ours
    assert not [place for place in needle._PLACES if place in ours]
