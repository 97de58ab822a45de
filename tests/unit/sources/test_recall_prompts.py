"""Requests about a text, which the package ships: the same everywhere, and a split that shares no person."""

from __future__ import annotations

import hashlib
import re

from swiftkv_platform.evaluation.harness import needle
from swiftkv_platform.sources import recall_prompts as source
from swiftkv_platform.sources.recall_prompts import recall_prompts


def test_every_machine_makes_the_same_requests() -> None:
    digests = {
        side: hashlib.sha256("\n".join(recall_prompts(held_out=side)).encode()).hexdigest()[:16]
        for side in (False, True)
    }
    assert digests == {False: "d2d3adcf1ed19aa0", True: "3629167de1f40f17"}


def test_the_sides_share_no_person() -> None:
    training, held_out = ("\n".join(recall_prompts(held_out=side)) for side in (False, True))
    for people, absent in ((source._PEOPLE[False], held_out), (source._PEOPLE[True], training)):
        assert not [person for person in people if re.search(rf"\b{person}\b", absent)]


def test_what_is_asked_for_stands_in_the_text() -> None:
    prompts = recall_prompts(held_out=False) + recall_prompts(held_out=True)
    assert len(set(prompts)) == len(prompts) == 2200
    assert max(map(len, prompts)) < 2048
    asked = [found for prompt in prompts if (found := re.search(r"Which ticket code does (\w+) have\?", prompt))]
    assert len(asked) > 100
    assert all(f"The ticket code of {found[1]} is " in found.string for found in asked)


def test_needles_that_judge_a_student_are_made_of_other_words() -> None:
    """A student that was trained on these has still to find what it never was asked for."""
    ours = " ".join(recall_prompts(held_out=False)).lower()
    assert "secret" not in ours
    assert not [place for place in needle._PLACES if place in ours]
