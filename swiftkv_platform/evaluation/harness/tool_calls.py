"""Tool calls without a grammar: whether the model writes valid JSON and a call that the prompt's tools allow. Prompts
are generated without network, the same on every machine.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

_TOOLS: Mapping[str, tuple[str, str, tuple[str, ...]]] = {
    "get_weather": ("city", "What is the weather in {}?", ("Paris", "Oslo", "Lima", "Cairo", "Osaka")),
    "get_time": ("city", "What time is it in {}?", ("Tokyo", "London", "Nairobi", "Sydney", "Toronto")),
    "search_books": ("title", "Find the book {}.", ("Emma", "Dracula", "Ulysses", "Middlemarch", "Walden")),
    "play_song": ("title", "Play the song {}.", ("Yesterday", "Imagine", "Hurt", "Jolene", "Respect")),
    "translate_word": ("word", "Translate the word {} to French.", ("house", "water", "bread", "night", "friend")),
    "set_alarm": ("time", "Wake me at {}.", ("06:30", "07:15", "08:00", "05:45", "09:20")),
}
"""Argument, request and values of each function."""
_BEGIN = re.compile(r"\[\s*\{|\{")
_FORMAT = '<tool_call>[{"name": "function name", "arguments": {"argument name": "value"}}]</tool_call>'


def configuration() -> dict[str, Any]:
    """Return the task's configuration: one request per prompt, with several functions."""
    return {
        "task": "tool_calls",
        "custom_dataset": _dataset,
        "test_split": "test",
        "output_type": "generate_until",
        "doc_to_text": "{{prompt}}",
        "doc_to_target": "{{call}}",
        "num_fewshot": 0,
        "process_results": score,
        "generation_kwargs": {"until": ["</tool_call>"], "do_sample": False, "max_gen_toks": 96},
        "metric_list": [
            {"metric": metric, "aggregation": "mean", "higher_is_better": True}
            for metric in ("valid_json", "valid_call", "right_call")
        ],
    }


def score(document: Mapping[str, Any], results: Sequence[str]) -> dict[str, float]:
    """Score whether the answer holds JSON, a call of a function on offer, and the requested call."""
    written = first_json(results[0])
    expected = json.loads(document["call"])
    call = written[0] if isinstance(written, list) and written else written
    arguments = call.get("arguments") if isinstance(call, dict) else None
    name = call.get("name") if isinstance(call, dict) else None
    known = isinstance(name, str) and name in _TOOLS and isinstance(arguments, dict)
    valid = known and isinstance(arguments, dict) and set(arguments) == {_TOOLS[str(name)][0]}
    return {
        "valid_json": float(written is not None),
        "valid_call": float(valid),
        "right_call": float(valid and call == expected),
    }


def first_json(text: str) -> Any:
    """Parse the first object, or array of objects, in a text; None if it is incomplete or missing."""
    begin = _BEGIN.search(text)
    if begin is None:
        return None
    try:
        return json.JSONDecoder().raw_decode(text[begin.start() :])[0]
    except json.JSONDecodeError:
        return None


def prompts() -> list[tuple[str, dict[str, Any]]]:
    """Return every request with the expected call; the other functions on offer vary."""
    made = []
    for (name, (argument, request, values)), turn in product(_TOOLS.items(), range(5)):
        rng = random.Random(f"tools {name} {turn}")  # noqa: S311 (no secret)
        offered = [name, *rng.sample([other for other in _TOOLS if other != name], 2)]
        rng.shuffle(offered)
        tools = "\n".join(json.dumps({"name": other, "arguments": [_TOOLS[other][0]]}) for other in offered)
        text = (
            f"You may call one of these functions:\n{tools}\n\nAnswer with a call in exactly this form, nothing else:\n"
            f"{_FORMAT}\n\n{request.format(values[turn])}"
        )
        made.append((text, {"name": name, "arguments": {argument: values[turn]}}))
    return made


def _dataset(**_: Any) -> dict[str, Any]:
    from datasets import Dataset

    return {"test": Dataset.from_list([{"prompt": text, "call": json.dumps(call)} for text, call in prompts()])}
