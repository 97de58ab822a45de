"""Text that ships with the package: the same on every machine, with splits that share nothing."""

import hashlib
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from swiftkv_platform.evaluation.harness import builtin
from swiftkv_platform.sources.builtin_data import (
    _PEOPLE,
    _REQUEST_TEMPLATES,
    _TOPICS,
    _UNSEEN_REQUESTS,
    is_held_out_library_module,
    make_chat_prompts,
    make_constraint_prompts,
    make_long_recall_prompts,
    make_recall_prompts,
    make_unseen_chat_prompts,
    read_standard_library,
)

Prompts = Callable[..., list[str]]
RECALL = pytest.mark.parametrize("prompts", [make_recall_prompts, make_long_recall_prompts])


@pytest.mark.parametrize(
    ("prompts", "training", "held_out", "number", "characters"),
    [
        (make_chat_prompts, "84d1689bcfd48b54", "d214c2f3b64cece5", range(2000, 4000), range(600)),
        (make_recall_prompts, "d2d3adcf1ed19aa0", "3629167de1f40f17", [2200], range(30, 2048)),
        (make_constraint_prompts, "e8c077da233ed19e", "7527200f1c65d207", [1100], range(30, 400)),
        (make_long_recall_prompts, "992d1a3dba967b03", "bbdba7237cafc347", [1100], range(1500, 9216)),
    ],
)
def test_every_machine_makes_the_same_requests(
    prompts: Prompts, training: str, held_out: str, number: range | list[int], characters: range
) -> None:
    sides = [prompts(held_out=side) for side in (False, True)]
    assert [hashlib.sha256("\n".join(side).encode()).hexdigest()[:16] for side in sides] == [training, held_out]
    found = sides[0] + sides[1]
    assert len(set(found)) == len(found)
    assert len(found) in number
    assert {min(map(len, found)), max(map(len, found))} <= set(characters)


def test_the_sides_of_chats_share_no_topic() -> None:
    training, held_out = set(make_chat_prompts(held_out=False)), set(make_chat_prompts(held_out=True))
    for topic in _TOPICS:
        requests = {request.format(topic) for request in _REQUEST_TEMPLATES}
        assert requests <= training or requests <= held_out
    assert 0.1 < len(held_out) / len(training | held_out) < 0.3


def test_unseen_requests_share_no_subject_and_no_four_words_with_training() -> None:
    """The words of a topic itself do not count: texts may mention a topic without being asked about it."""
    training, unseen = make_chat_prompts(held_out=False), make_unseen_chat_prompts()
    assert len(set(unseen)) == len(unseen) > 150
    asked = {topic for topic in _TOPICS if any(re.search(rf"\b{topic}\b", text) for text in unseen)}
    assert not [topic for topic in asked for request in _REQUEST_TEMPLATES if request.format(topic) in training]

    def phrases(texts: list[str]) -> set[tuple[str, ...]]:
        words = [re.findall(r"[\w'-]+", text.lower()) for text in texts]
        return {tuple(each[at : at + 4]) for each in words for at in range(len(each) - 3)}

    worded = phrases([request.format("_") for request in _UNSEEN_REQUESTS])
    assert not worded & phrases(training)
    assert phrases(make_chat_prompts(held_out=True)) & phrases(training), "the sides share templates"


@RECALL
def test_the_sides_of_recall_share_no_person_and_needles_that_judge_have_other_words(prompts: Prompts) -> None:
    """A student trained on these texts must still find in needles what it was never asked for."""
    training, held_out = ("\n".join(prompts(held_out=side)) for side in (False, True))
    for people, absent in ((_PEOPLE[False], held_out), (_PEOPLE[True], training)):
        assert not set(people) & set(re.findall(r"\w+", absent))
    assert "secret" not in training.lower()
    assert not [place for place in builtin._PLACES if place in training.lower()]


@RECALL
def test_what_is_asked_for_stands_in_the_text(prompts: Prompts) -> None:
    found = prompts(held_out=False) + prompts(held_out=True)
    asked = [match for prompt in found if (match := re.search(r"Which ticket code does (\w+) have\?", prompt))]
    assert len(asked) > 100
    assert all(f"The ticket code of {match[1]} is " in match.string for match in asked)


def test_the_standard_library_is_split_by_name_alone() -> None:
    held_out = [
        name
        for name in ("plistlib", "secrets", "tty", "json.decoder", "ast", "abc")
        if is_held_out_library_module(name)
    ]
    assert held_out == ["plistlib", "secrets", "tty"]
    modules = list(read_standard_library())
    assert len(modules) > 300
    assert 0.01 < sum(module.is_held_out for module in modules) / len(modules) < 0.10
    assert not any("site-packages" in module.name for module in modules)


def test_only_modules_with_readable_text_count(tmp_path: Path) -> None:
    files = {"package/__init__.py": b"x = 1\n", "secrets.py": b"y = 2\n", "empty.py": b"\n", "latin.py": b"# \xe9\n"}
    for name, text in {**files, "test/test_x.py": b"z = 3\n"}.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(text)
    found = [(module.name, module.text) for module in read_standard_library(root=tmp_path)]
    assert found == [("package", "x = 1\n"), ("secrets", "y = 2\n")]
