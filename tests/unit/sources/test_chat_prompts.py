"""Requests that the package ships: the same everywhere, and a split that shares no subject."""

from __future__ import annotations

import hashlib

from swiftkv_platform.sources.chat_prompts import _REQUESTS, _TOPICS, chat_prompts


def test_every_machine_makes_the_same_requests() -> None:
    digests = {
        side: hashlib.sha256("\n".join(chat_prompts(held_out=side)).encode()).hexdigest()[:16] for side in (False, True)
    }
    assert digests == {False: "84d1689bcfd48b54", True: "d214c2f3b64cece5"}


def test_the_sides_share_no_request_and_no_topic() -> None:
    training, held_out = set(chat_prompts(held_out=False)), set(chat_prompts(held_out=True))
    assert not training & held_out
    for topic in _TOPICS:
        requests = {request.format(topic) for request in _REQUESTS}
        assert requests <= training or requests <= held_out
    assert 0.1 < len(held_out) / len(training | held_out) < 0.3


def test_they_are_short_and_small() -> None:
    prompts = chat_prompts(held_out=False) + chat_prompts(held_out=True)
    assert len(set(prompts)) == len(prompts) > 2000
    assert max(map(len, prompts)) < 600
    assert sum(map(len, prompts)) < 1 << 20
