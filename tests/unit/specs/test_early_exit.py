"""Early exit options: what they are by default, how they may be spelled, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from swiftkv_platform.errors import InvalidInputError
from swiftkv_platform.specs.early_exit import EarlyExit


@pytest.mark.parametrize(
    ("spelling", "meaning"),
    [
        (None, EarlyExit("off", 0.95, 4)),
        ("threshold", EarlyExit("threshold", 0.95, 4)),
        ({"mode": "lossless", "num_draft_tokens": 2}, EarlyExit("lossless", 0.0, 2)),
        ({"mode": "lossless", "threshold": 0.7}, EarlyExit("lossless", 0.7, 4)),
        ({"mode": "threshold", "threshold": 1}, EarlyExit("threshold", 1.0, 4)),
        (EarlyExit("threshold", 0.0), EarlyExit("threshold", 0.0, 4)),
    ],
)
def test_spellings(spelling: Any, meaning: EarlyExit) -> None:
    assert EarlyExit.parse(spelling) == meaning


@pytest.mark.parametrize(
    ("spelling", "field", "accepted"),
    [
        ("always", "early_exit.mode", "off, threshold or lossless"),
        ({"mode": "threshold", "threshold": 1.01}, "early_exit.threshold", "from 0 to 1"),
        ({"mode": "threshold", "threshold": -0.1}, "early_exit.threshold", "from 0 to 1"),
        ({"mode": "threshold", "threshold": float("nan")}, "early_exit.threshold", "from 0 to 1"),
        ({"mode": "threshold", "threshold": "0.9"}, "early_exit.threshold", "from 0 to 1"),
        ({"mode": "threshold", "threshold": True}, "early_exit.threshold", "from 0 to 1"),
        ({"mode": "lossless", "num_draft_tokens": 0}, "early_exit.num_draft_tokens", "at least 1"),
        ({"modes": "threshold"}, "early_exit", "num_draft_tokens"),
        (0.9, "early_exit", "threshold"),
    ],
)
def test_refusals_name_the_field_and_what_would_do(spelling: Any, field: str, accepted: str) -> None:
    with pytest.raises(InvalidInputError, match=accepted) as caught:
        EarlyExit.parse(spelling)
    assert caught.value.field == field
