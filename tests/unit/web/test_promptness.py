"""Garbage collections leave what was loaded alone, until it is replaced."""

import gc
import sys
import weakref

import pytest

from swiftkv_platform.web.promptness import SWITCH_INTERVAL_S, answer_promptly


class Node:
    other: "Node"


def test_what_was_loaded_is_no_collections_work_until_it_is_replaced() -> None:
    interval = sys.getswitchinterval()
    one, other = Node(), Node()
    one.other, other.other = other, one
    gone = weakref.ref(one)
    try:
        answer_promptly()
        assert sys.getswitchinterval() == pytest.approx(SWITCH_INTERVAL_S)
        del one, other
        gc.collect()
        assert gone() is not None, "it is not looked at"
        answer_promptly()
        assert gone() is None
    finally:
        gc.unfreeze()
        sys.setswitchinterval(interval)
