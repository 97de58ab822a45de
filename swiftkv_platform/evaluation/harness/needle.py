"""A needle in a haystack: one sentence with a number in a prompt of a given length, and a question for the number.
Prompts are generated without network, the same on every machine.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from swiftkv_platform.contract.verdicts import NEEDLE
from swiftkv_platform.evaluation.harness.tasks import Task
from swiftkv_platform.specs import TaskSpec

TEACHER_FINDS = 0.8
"""Share of the needles that the teacher has to find at a length for the student to be judged there."""
ANSWER_TOKENS = 24
_PEOPLE = ("gardener", "pilot", "baker", "teacher", "doctor", "farmer", "sailor", "painter", "miller", "tailor")
_ACTIONS = ("walked to", "looked for", "wrote about", "painted", "visited", "repaired", "measured", "talked about")
_THINGS = ("bridge", "garden", "harbour", "clock", "library", "market", "railway", "orchard", "windmill", "museum")
_TIMES = ("in the morning", "after lunch", "on Sunday", "before the rain", "late at night", "in early spring")
_PLACES = ("lighthouse", "castle", "bakery", "station", "theatre", "vineyard", "monastery", "observatory")
_COLOURS = ("red", "green", "yellow", "white", "grey", "purple", "silver", "brown")


def needle_tasks(lengths: Sequence[int], num_samples: int, tokenizer: Any, *, chat: bool) -> list[Task]:
    """A task for each length.

    Args:
        lengths: tokens of a prompt without the chat template's.
        chat: prompt through the chat template.
    """
    return [
        Task(
            TaskSpec(name=f"{NEEDLE}{length}", chat_template=chat),
            {
                "task": f"{NEEDLE}{length}",
                "custom_dataset": partial(_dataset, tokenizer, length, num_samples),
                "test_split": "test",
                "output_type": "generate_until",
                "doc_to_text": "{{prompt}}",
                "doc_to_target": "{{answer}}",
                "process_results": found,
                "generation_kwargs": {"until": ["\n\n"], "do_sample": False, "max_gen_toks": ANSWER_TOKENS},
                "metric_list": [{"metric": "found", "aggregation": "mean", "higher_is_better": True}],
                "num_fewshot": 0,
            },
        )
        for length in lengths
    ]


def found(document: Mapping[str, Any], results: Sequence[str]) -> dict[str, float]:
    """Score whether the answer contains the number."""
    return {"found": float(document["answer"] in results[0])}


def needle_prompt(tokenizer: Any, length: int, number: int, num_samples: int) -> tuple[str, str]:
    """Return prompt `number` of `num_samples`, of about but at most `length` tokens, and the number asked for. Over the
    samples, needles are spread evenly from beginning to end."""
    rng = random.Random(f"needle {length} {number}")  # noqa: S311 (no secret)
    place = f"{rng.choice(_COLOURS)} {rng.choice(_PLACES)}"
    answer = str(rng.randrange(10_000, 100_000))
    needle = f"The secret number of the {place} is {answer}."
    head = "Read this text and remember the secret number in it."
    question = f"What is the secret number of the {place}? Answer with the number only."
    room = length - sum(_count(tokenizer, part) for part in (head, needle, question)) - 8  # separators
    sentences: list[str] = []
    while True:
        sentence = _sentence(rng)
        room -= _count(tokenizer, f" {sentence}")
        if room < 0:
            break
        sentences.append(sentence)
    sentences.insert(round(len(sentences) * (number + 0.5) / num_samples), needle)
    return f"{head}\n\n{' '.join(sentences)}\n\n{question}", answer


def _sentence(rng: random.Random) -> str:
    return (
        f"The {rng.choice(_PEOPLE)} {rng.choice(_ACTIONS)} the {rng.choice(_COLOURS)} {rng.choice(_THINGS)} "
        f"{rng.choice(_TIMES)}."
    )


def _count(tokenizer: Any, text: str) -> int:
    return len(tokenizer(text, add_special_tokens=False)["input_ids"])


def _dataset(tokenizer: Any, length: int, num_samples: int, **_: Any) -> dict[str, Any]:
    from datasets import Dataset

    prompts = [needle_prompt(tokenizer, length, number, num_samples) for number in range(num_samples)]
    return {"test": Dataset.from_list([{"prompt": prompt, "answer": answer} for prompt, answer in prompts])}
