"""Captured requests as rows: which requests a source uses, their content, and the keys of their conversations.

Clients send a conversation again with each of its turns, so most requests contain earlier ones. Memory holds hashes of
requests, and one request at a time.
"""

from __future__ import annotations

import hashlib
import json
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from swiftkv_platform.contract.traffic import CapturedRequest
from swiftkv_platform.data.formats import FORMATS, PROMPT_FORMATS, Content, Conversation, RowReader, hash_content
from swiftkv_platform.data.messages import Message, RowError

Hashes = npt.NDArray[np.uint64]

MESSAGES, TEXT = "messages", "text"
"""Row formats of captured requests."""
_READERS = {
    with_answers: RowReader(
        next(each for each in formats if each.name == MESSAGES), required=("messages",), columns=("messages", "tools")
    )
    for with_answers, formats in ((True, FORMATS), (False, PROMPT_FORMATS))
}
_CUT_OFF = "length"
"""Finish reason of an answer from which a student would learn to stop too early."""
_HASHES_PER_MERGE = 1 << 20


@dataclass(frozen=True)
class TrafficRow:
    """A captured request as a sample, or as a prompt."""

    number: int
    """Line in the file, from 1."""
    content: Content
    conversation: int
    """See `hash_conversation`."""
    request: CapturedRequest

    @property
    def texts(self) -> dict[str, str]:
        """`prompt` and `completion` of a text; empty for a conversation."""
        request = self.request
        return {} if request.prompt is None else {"prompt": request.prompt, "completion": request.completion or ""}

    @property
    def format(self) -> str:
        return TEXT if isinstance(self.content, str) else MESSAGES


@dataclass(frozen=True)
class TrafficRows:
    """Distinct captured requests of a file."""

    file: Path
    """JSON Lines of `CapturedRequest`."""
    with_answers: bool
    hashes: Hashes
    """Sorted hashes of the distinct requests."""
    cut_off: Hashes
    """Sorted hashes of the requests with cut-off answers only."""
    left_out: Counter[str]
    """Number of other requests by reason."""

    def read_rows(self, hashes: Hashes) -> Iterator[TrafficRow]:
        """Yield the first request with each of these sorted hashes, in the order of the file."""
        is_read = np.zeros(len(hashes), dtype=np.bool_)
        for number, request, content in _read_requests(self.file, Counter(), with_answers=self.with_answers):
            beginnings = np.array(_hash_beginnings(content), dtype=np.uint64)
            index = int(np.searchsorted(hashes, beginnings[-1]))
            if index < len(hashes) and hashes[index] == beginnings[-1] and not is_read[index]:
                is_read[index] = True
                self._exclude_cut_off_answers(content, beginnings)
                yield TrafficRow(number, content, hash_conversation(request, content), request)

    def _exclude_cut_off_answers(self, content: Content, beginnings: Hashes) -> None:
        """Exclude answers of earlier turns from the loss if they were cut off."""
        if isinstance(content, str) or not len(self.cut_off):
            return
        answers = [message for message in content.messages if message["role"] == "assistant"]
        indices = np.minimum(np.searchsorted(self.cut_off, beginnings), len(self.cut_off) - 1)
        # Messages that do not end with an answer have one beginning more.
        for message, is_cut_off in zip(answers, self.cut_off[indices] == beginnings, strict=False):
            if is_cut_off:
                message["weight"] = 0


def select_requests(file: Path, *, with_answers: bool) -> TrafficRows:
    """Select the distinct requests of a file.

    Args:
        with_answers: whether the recorded answers are used. If so, requests with cut-off answers, and those whose
            messages are the beginning of another request's, are left out. Otherwise prompts are compared.
    """
    left_out = Counter[str]()
    wholes, cut_off, pending, beginnings = array("Q"), array("Q"), array("Q"), np.empty(0, dtype=np.uint64)
    for _, request, content in _read_requests(file, left_out, with_answers=with_answers):
        *parts, whole = _hash_beginnings(content)
        if with_answers and request.finish_reason == _CUT_OFF:
            cut_off.append(whole)
            continue
        wholes.append(whole)
        pending.extend(parts if with_answers else ())
        if len(pending) >= _HASHES_PER_MERGE:
            beginnings, pending = _merge_hashes(beginnings, pending), array("Q")
    distinct = np.unique(np.array(wholes, dtype=np.uint64))
    hashes = np.setdiff1d(distinct, _merge_hashes(beginnings, pending), assume_unique=True)
    left_out["cut off"] = len(cut_off)
    left_out["repeated"] = len(wholes) - len(distinct)
    left_out["contained in later ones"] = len(distinct) - len(hashes)
    return TrafficRows(
        file, with_answers, hashes, np.setdiff1d(np.array(cut_off, dtype=np.uint64), distinct), +left_out
    )


def hash_conversation(request: CapturedRequest, content: Content) -> int:
    """Return the key of a request's conversation: a 64-bit hash of its messages up to the first of the user, or of a
    text's prompt. Requests with the same key belong to the same split, with and without their answers."""
    if isinstance(content, str):
        return hash_content(request.prompt or "")
    end = next((number for number, each in enumerate(content.messages, start=1) if each["role"] == "user"), None)
    return hash_content(
        Conversation([{"role": each["role"], "content": each["content"]} for each in content.messages[:end]])
    )


def _read_requests(
    file: Path, left_out: Counter[str], *, with_answers: bool
) -> Iterator[tuple[int, CapturedRequest, Content]]:
    """Yield (line, request, content) of the usable requests; count the others in `left_out`. Nobody can correct what a
    caller has sent, so that a message that no row may have is no error."""
    with file.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            request = CapturedRequest.model_validate_json(line)
            try:
                content = _parse_content(request, with_answers=with_answers)
            except RowError:
                left_out["with unusable messages"] += 1
                continue
            yield number, request, content


def _parse_content(request: CapturedRequest, *, with_answers: bool) -> Content:
    if request.messages is None:
        return (request.prompt or "") + ((request.completion or "") if with_answers else "")
    return _READERS[with_answers]({"messages": request.messages, "tools": request.tools})


def _hash_beginnings(content: Content) -> list[int]:
    """Return 64-bit hashes of the beginnings of a conversation that end with an answer, and of the whole, which is the
    last. A text has no such beginnings."""
    if isinstance(content, str):
        return [hash_content(content)]
    hasher = hashlib.blake2b(json.dumps(content.tools, sort_keys=True).encode(), digest_size=8)
    found = []
    for number, message in enumerate(_renumber_call_ids(content.messages), start=1):
        hasher.update(json.dumps(message, sort_keys=True).encode() + b"\n")
        if message["role"] == "assistant" or number == len(content.messages):
            found.append(int.from_bytes(hasher.digest(), "big"))
    return found or [int.from_bytes(hasher.digest(), "big")]


def _renumber_call_ids(messages: Iterable[Message]) -> Iterator[dict[str, Any]]:
    """Yield the messages with the numbers of calls as their ids, since the ids that replicas choose are random."""
    numbers: dict[str, int] = {}

    def find_number(call_id: str) -> int:
        return numbers.setdefault(call_id, len(numbers))

    for message in messages:
        numbered = dict(message)
        if calls := message.get("tool_calls"):
            numbered["tool_calls"] = [{**call, "id": find_number(call["id"])} for call in calls]
        if (answered := message.get("tool_call_id")) is not None:
            numbered["tool_call_id"] = find_number(answered)
        yield numbered


def _merge_hashes(merged: Hashes, others: array[int]) -> Hashes:
    return np.union1d(merged, np.array(others, dtype=np.uint64))
