"""The memory that a GPU has left for the KV cache, as the planner counts it."""

from __future__ import annotations

import pytest

from swiftkv_platform.engine.memory import DeviceMemory
from swiftkv_platform.planning.serving import ServingSetup

GIB = 1 << 30


@pytest.mark.parametrize(
    ("memory", "expected"),
    [
        # 72 of 80 may be used; 20 are by weights and others, and the step takes 3.
        (DeviceMemory(total=80 * GIB, free=60 * GIB, allocated=18 * GIB, peak=21 * GIB), 49 * GIB),
        # A step that takes nothing leaves what the planner counts: 0.9 of the memory less the weights.
        (DeviceMemory(total=80 * GIB, free=64 * GIB, allocated=16 * GIB, peak=16 * GIB), 56 * GIB),
        # What other processes hold is not there to be taken.
        (DeviceMemory(total=80 * GIB, free=20 * GIB, allocated=16 * GIB, peak=17 * GIB), 11 * GIB),
        (DeviceMemory(total=80 * GIB, free=4 * GIB, allocated=70 * GIB, peak=74 * GIB), -8 * GIB),
    ],
)
def test_the_cache_has_what_weights_others_and_the_largest_step_leave(memory: DeviceMemory, expected: int) -> None:
    assert memory.kv_cache_bytes(ServingSetup.reserved) == expected
