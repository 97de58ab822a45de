"""Answers as JSON, written beside the event loop where that takes long. Knows no route."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from swiftkv_platform.engine import RequestOutput
    from swiftkv_platform.serve.current import Version

T = TypeVar("T")

_BYTES_PER_TOKEN = 64
"""About what a log-probability takes in an answer, so that long ones go where long texts do."""


async def rendered(
    version: Version, render: Callable[[], T], outputs: Sequence[RequestOutput], *, echo: bool = False
) -> T:
    """Return what `render` returns. Log-probabilities and echoed prompts, of which each token is decoded, are rendered
    where texts are read; the rest takes no time."""
    if not echo and all(output.logprobs is None and output.prompt_logprobs is None for output in outputs):
        return render()
    num_tokens = sum(len(output.prompt_token_ids) + len(output.token_ids) for output in outputs)
    return await version.engine.readers.run(render, num_tokens * _BYTES_PER_TOKEN)
