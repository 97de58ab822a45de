"""Memory and arithmetic of GPUs, by Ray's names that tell them."""

from __future__ import annotations

DEVICE_MEMORY = {"B200": 180e9, "H200": 141e9, "H100": 80e9, "L40S": 48e9, "L4": 24e9, "T4": 16e9}
"""Bytes; an A100 is sold with two sizes."""

PEAK_FLOPS = {"B200": 2250e12, "H200": 989e12, "H100": 989e12, "A100": 312e12, "L40S": 362e12, "L4": 121e12}
"""Dense bfloat16 operations a second, as their maker states them."""
