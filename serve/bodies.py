"""Limits on the bodies of requests, by the models that are served. Knows no route."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastapi import Request

from swiftkv_platform.web.bodies import MAX_VALUES, Bodies, Sender
from swiftkv_platform.web.places import Share

if TYPE_CHECKING:
    from swiftkv_platform.serve.access import Caller
    from swiftkv_platform.serve.current import Current, Version

MAX_BODY_BYTES = 16 << 20
"""Largest body that is read, unless a deployment says otherwise; a larger one gets 413."""
BASE_BODY_BYTES = 1 << 20
"""Room for what is not a prompt: stop strings, schemas, names, spaces."""
NUM_LONGEST_PROMPTS = 8
"""Prompts of the longest text for which there is room in one body; there may be more that are shorter."""
ESCAPED_BYTES = 6
"""Most bytes that JSON takes for one byte of text."""
MAX_PROMPT_VALUES = 1 << 18
"""Token ids of one body, or those of one prompt where the context has more; other values come on top."""
MAX_BYTES_AT_ONCE = 64 << 20
"""Bytes of bodies that a replica reads and parses at a time; a tenant has half of them, a key a quarter."""


class BodySizes:
    """Limits on the bodies of an application. `max_bytes`: of the deployment; None: what the context of the served
    model needs, at most `MAX_BODY_BYTES`."""

    def __init__(self, current: Current, max_bytes: int | None = None) -> None:
        self._current = current
        self._own_max_bytes = max_bytes

    @property
    def max_bytes(self) -> int:
        """Most bytes of a body, for the models that are served now."""
        return self._own_max_bytes or max(map(_max_bytes, self._versions()), default=MAX_BODY_BYTES)

    @property
    def max_values(self) -> int:
        """Most values of a body, likewise."""
        return max(map(_max_values, self._versions()), default=MAX_VALUES + MAX_PROMPT_VALUES)

    def bodies(self) -> Bodies:
        """The reading of bodies within these limits. A prompt may hold any character, and reaches no database; once it
        is parsed, the engine bounds what waits."""
        most = max(MAX_BYTES_AT_ONCE, self._own_max_bytes or 0)
        share = Share(of_key=most // 4, of_tenant=most // 2, of_all=most)
        return Bodies(_admit, share, max_values=lambda: self.max_values, allow_nul=True, until_answered=False)

    def _versions(self) -> list[Version]:
        if self._current.is_empty:
            return []
        return [one for one in (self._current.version, self._current.version.candidate) if one is not None]


async def _admit(request: Request) -> Sender:
    """Whom the door has let in."""
    caller: Caller = request.state.caller
    return Sender(caller.tenant, caller.name)


def _max_bytes(version: Version) -> int:
    text = version.engine.reader.max_prompt_bytes * ESCAPED_BYTES * NUM_LONGEST_PROMPTS
    return min(BASE_BODY_BYTES + text, MAX_BODY_BYTES)


def _max_values(version: Version) -> int:
    max_model_len = version.engine.model.context_length
    of_all = min(max_model_len * version.engine.max_sequences, MAX_PROMPT_VALUES)
    return MAX_VALUES + max(max_model_len, of_all)
