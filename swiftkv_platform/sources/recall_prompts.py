"""Requests to find or copy what a text says, which every machine has: made of templates and words of this file.

Chats ask a model for what it knows; these ask for what it read. A student that is distilled on chats alone hardly has
to read its own cache, and forgets how. They carry no answers: the teacher writes those (`data.sources[].complete`). It
knows text alone.
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
"""People of the training texts and of those that are held out: the two share none."""
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
"""Kinds of facts: how a text states one, how one is asked for, what is mentioned, and what is told."""
_LETTERS = "ABCDEFGHJKLMNPQRSTUVWXYZ23456789"
_MOST_COPIED = 12
_REMARKS_OF_TEXT, _REMARKS_OF_LONG = (0, 2, 5, 10, 18, 24), (40, 60, 80, 100, 120, 160)


def recall_prompts(*, held_out: bool) -> list[str]:
    """The requests of one side of the split, in an order that no machine changes: for a fact of a text, for all of its
    facts, or for the text itself; up to some 400 tokens long."""
    people, seed = _PEOPLE[held_out], "held out" if held_out else "train"
    prompts = []
    for number in range(_NUM_PROMPTS[held_out]):
        rng = random.Random(f"recall {seed} {number}")  # noqa: S311 (no secret)
        sentences, questions = _text(rng, people, _REMARKS_OF_TEXT)
        copied = rng.choice(("Repeat this text word for word:", "Copy the following text exactly:"))
        prompts.append(rng.choice((*questions, f"{copied}\n\n{' '.join(sentences[:_MOST_COPIED])}")))
    return prompts


def long_recall_prompts(*, held_out: bool) -> list[str]:
    """Requests for a fact of a long text, or for all of its facts; some 500 to 2,100 tokens long."""
    people, seed = _PEOPLE[held_out], "held out" if held_out else "train"
    prompts = []
    for number in range(_NUM_LONG[held_out]):
        rng = random.Random(f"long recall {seed} {number}")  # noqa: S311 (no secret)
        _, questions = _text(rng, people, _REMARKS_OF_LONG)
        prompts.append(rng.choice(questions))
    return prompts


def _text(rng: random.Random, people: Sequence[str], remarks: Sequence[int]) -> tuple[list[str], tuple[str, str, str]]:
    """The sentences of a text of one of these numbers of remarks, and what may be asked of it, with it."""
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
