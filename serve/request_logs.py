"""One line for each request: what was asked of which model, what it took, how it ended. No text unless it is wanted."""

from __future__ import annotations

from typing import Any

from swiftkv_platform.errors import SwiftKVError
from swiftkv_platform.logs import get_logger
from swiftkv_platform.serve.access import Caller
from swiftkv_platform.serve.answers import Answers
from swiftkv_platform.serve.current import ModelCard
from swiftkv_platform.serve.schemas import Timings, Usage


class RequestLog:
    """Writes to the process's log.

    Args:
        with_text: prompts and answers too. They are the callers' own: off unless an operator wants them.
    """

    def __init__(self, *, with_text: bool = False) -> None:
        self._with_text = with_text

    def closed(self, answers: Answers, card: ModelCard) -> None:
        """An answer that was begun has ended, one way or another."""
        outputs = answers.outputs
        fields: dict[str, Any] = {
            "request_id": answers.id,
            "tenant": answers.context.caller.tenant,
            "path": answers.context.caller.path,
            "model": card.model,
            "manifest_digest": card.manifest_digest,
            "outcome": answers.outcome,
            "finish_reasons": [output.finish_reason for output in outputs],
        }
        if answers.context.ignored_fields:
            fields["ignored_fields"] = answers.context.ignored_fields
        if outputs:
            fields |= Usage.of(outputs).model_dump() | Timings.of(outputs).model_dump()
        if self._with_text:
            fields |= {"prompts": answers.prompts, "texts": [output.text for output in outputs]}
        get_logger().info("request", **fields)

    def refused(self, error: SwiftKVError, caller: Caller, card: ModelCard) -> None:
        """A request was not admitted."""
        fields = {"tenant": caller.tenant, "path": caller.path, "model": card.model}
        get_logger().info("request", **fields, outcome=error.code, field=error.field)
