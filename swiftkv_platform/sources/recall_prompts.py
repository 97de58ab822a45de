"""Built-in prompts to find facts in a text or to copy it, made from templates and words in this file.

Chats ask a model for what it knows; these ask for what it has read. A student distilled on chats only rarely has to
read its own KV cache, and forgets how. They have no answers: the teacher writes those (`data.sources[].complete`).
Knows text only.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

_NUM_PROMPTS = {False: 2000, True: 200}
_NUM_LONG = {False: 1000, True: 100}
_PEOPLE = {
    False: (
        "Alma", "Bruno", "Clara", "Dario", "Elif", "Greta", "Kavya", "Leon", "Mira", "Nadia", "Omar", "Petra", "Quinn",
        "Rosa", "Sven", "Tomas", "Ulla", "Viktor", "Wanda", "Yusuf", "Zoe",
    ),
    True: ("Agnes", "Boris", "Diego", "Esra", "Felix", "Hanna", "Ivan", "Judith", "Karim", "Lucia", "Malik", "Noor"),
}  # fmt: skip
"""Names of people in training texts and, disjoint from them, in held-out texts."""
_ITEMS = (
    "umbrella", "suitcase", "bicycle", "parcel", "violin", "laptop", "camera", "blanket", "lantern", "ticket", "folder",
    "helmet", "kettle", "ladder", "mirror", "necklace",
)  # fmt: skip
_ROOMS = ("kitchen", "basement", "attic", "office", "hallway", "garage", "cellar", "classroom", "workshop", "pantry")
_REMARKS = (
    "{person} left the {item} in the {room}.",
    "Nobody in the {room} had seen the {item} before {person} asked.",
    "At noon {person} cleaned the {room}, and then it rained.",
    "It was {person} who sold the old {item} to a neighbour.",
    "In the {room} there was a smell of coffee and paint.",
    "{person} hummed a song while carrying the {item}.",
)
_KINDS = (
    ("{person}'s locker opens with {value}.", "With which digits does {person}'s locker open?", "locker", "digits"),
    ("The ticket code of {person} is {value}.", "Which ticket code does {person} have?", "ticket", "code"),
    ("{person} paid {value} coins.", "How many coins did {person} pay?", "payment", "coins"),
    (
        "{person} can be reached at extension {value}.",
        "At which extension can {person} be reached?",
        "phone",
        "extension",
    ),
)
"""Kinds of facts: statement in the text, question, subject, and kind of value."""
_LETTERS = "ABCDEFGHJKLMNPQRSTUVWXYZ23456789"
_MOST_COPIED = 12
_REMARKS_OF_TEXT, _REMARKS_OF_LONG = (0, 2, 5, 10, 18, 24), (40, 60, 80, 100, 120, 160)


def recall_prompts(*, held_out: bool) -> list[str]:
    """Return the training or held-out prompts, the same on every machine. Each asks for one fact of a text, for all of
    its facts, or for a copy of the text; up to about 400 tokens long."""
    people, seed = _PEOPLE[held_out], "held out" if held_out else "train"
    prompts = []
    for number in range(_NUM_PROMPTS[held_out]):
        rng = random.Random(f"recall {seed} {number}")  # noqa: S311 (no secret)
        sentences, questions = _text(rng, people, _REMARKS_OF_TEXT)
        copied = rng.choice(("Repeat this text word for word:", "Copy the following text exactly:"))
        prompts.append(rng.choice((*questions, f"{copied}\n\n{' '.join(sentences[:_MOST_COPIED])}")))
    return prompts


def long_recall_prompts(*, held_out: bool) -> list[str]:
    """Return prompts for one fact of a long text, or for all of its facts; about 500 to 2,100 tokens long."""
    people, seed = _PEOPLE[held_out], "held out" if held_out else "train"
    prompts = []
    for number in range(_NUM_LONG[held_out]):
        rng = random.Random(f"long recall {seed} {number}")  # noqa: S311 (no secret)
        _, questions = _text(rng, people, _REMARKS_OF_LONG)
        prompts.append(rng.choice(questions))
    return prompts


def _text(rng: random.Random, people: Sequence[str], remarks: Sequence[int]) -> tuple[list[str], tuple[str, str, str]]:
    """Draw a text. `remarks`: numbers of filler sentences to choose from. Returns its sentences, and three prompts that
    contain it."""
    statement, question, subject, told = rng.choice(_KINDS)
    named = rng.sample(people, rng.choice((1, 2, 3, 4, 6)))
    sentences = [_remark(rng, people) for _ in range(rng.choice(remarks))]
    for person in named:
        value = _code(rng) if told == "code" else str(rng.randrange(10 ** rng.randint(2, 6)))
        sentences.insert(rng.randint(0, len(sentences)), statement.format(person=person, value=value))
    text, asked = " ".join(sentences), question.format(person=rng.choice(named))
    everyone = f"List every person whose {subject} is mentioned, each with the {told}."
    return sentences, (f"{text}\n\n{asked}", f"{asked} Look it up in these notes.\n\n{text}", f"{text}\n\n{everyone}")


def _remark(rng: random.Random, people: Sequence[str]) -> str:
    return rng.choice(_REMARKS).format(person=rng.choice(people), item=rng.choice(_ITEMS), room=rng.choice(_ROOMS))


def _code(rng: random.Random) -> str:
    return "".join(rng.choice(_LETTERS) for _ in range(rng.randint(4, 7)))
