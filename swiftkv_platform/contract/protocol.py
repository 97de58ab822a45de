"""Version of what control plane and workers say to each other, and the refusal of one that does not fit. No I/O.

The control plane names its version in the driver's arguments; a driver that does not speak it ends with an `error`
event. Events, stop requests and the keys of an attempt are those of version 1, so a control plane follows attempts that
an older one has started.
"""

from __future__ import annotations

PROTOCOL = 2
"""Version of the protocol. It is raised when workers of the version before cannot do what they are asked.

1: releases up to 0.1.0, whose drivers do not know `PROTOCOL_OPTION`.
2: `attempt.json` has the tenant's rules, which workers keep (`AttemptRequest.allowed_roots` and what follows it),
uploaded files, and what the job continues from.
"""

PROTOCOL_OPTION = "--protocol"
"""Option of the driver: the control plane's version, 1 where it is not given."""

_UNKNOWN_OPTION = f"unrecognized arguments: {PROTOCOL_OPTION}"
"""Text that `argparse` prints in a driver of protocol 1."""


def refusal(*, workers: int, control_plane: int) -> str:
    """Return why workers of an older version do not work for a control plane, and what to do."""
    return (
        f"the workers' image speaks protocol {workers} and the control plane protocol {control_plane}; "
        "give the Ray cluster the image of the control plane's version, and submit the job again"
    )


def is_from_protocol_1(output: str) -> bool:
    """Whether a driver that ended with this output is one that does not know `PROTOCOL_OPTION`."""
    return _UNKNOWN_OPTION in output
