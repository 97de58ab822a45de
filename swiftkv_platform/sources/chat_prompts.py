"""Built-in prompts for a chat model, made from templates and words in this file, the same on every machine.

They have no answers: the teacher writes those (`data.sources[].complete`). Knows text only.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator, Sequence
from itertools import product

HELD_OUT_TOPICS = 5
"""One topic in this many is held out, with every prompt about it."""

_TOPICS = (
    "bees", "volcanoes", "the Moon", "bicycles", "bread", "the human heart", "rivers", "glass", "maps", "dolphins",
    "coffee", "earthquakes", "photosynthesis", "the Roman Empire", "jazz", "chess", "bridges", "deserts", "libraries",
    "electric cars", "owls", "tea", "the printing press", "gravity", "rainbows", "football", "the Arctic", "soap",
    "clocks", "penguins", "cheese", "lightning", "trains", "gardening", "the ocean", "paper", "sleep", "magnets",
    "wolves", "chocolate", "telescopes", "vaccines", "mountains", "swimming", "the alphabet", "robots", "salt",
    "museums", "birds", "pottery", "wind turbines", "the brain", "honey", "cities", "whales", "violins", "recycling",
    "money", "butterflies", "the Sun", "rice", "submarines", "castles", "batteries", "dogs", "the internet", "apples",
    "cartoons", "forests", "hospitals", "wool", "sharks", "fireworks", "the Nile", "elections", "ice cream", "horses",
    "lighthouses", "dinosaurs", "satellites", "olive oil", "marathons", "cameras", "ants", "snow", "theatre",
)  # fmt: skip
_REQUESTS = (
    "Explain {} to a ten-year-old.",
    "What are three interesting facts about {}?",
    "Write a short story about {}.",
    "Write a poem of eight lines about {}.",
    "Why do people care about {}?",
    "Give me a list of five questions a student might ask about {}.",
    "Summarize what is most important to know about {} in two sentences.",
    "What is a common mistake people make when they think about {}?",
    "Write an email to a friend who wants to learn about {}.",
    "Describe {} without using the word itself.",
    "How has {} changed the way people live?",
    "Write a title and an opening paragraph for an article about {}.",
    "Compare {} with something from everyday life.",
    "What should a teacher prepare for a lesson about {}?",
    "Answer in JSON with the keys \"topic\" and \"summary\": what is {}?",
    "Write a dialogue between two people who disagree about {}.",
    "List the advantages and disadvantages of spending a day on {}.",
    "Explain step by step how you would research {}.",
    "Is it worth reading a whole book about {}? Give reasons.",
    "Write a quiz of three questions about {}, with the answers.",
)  # fmt: skip
_OTHER_REQUESTS = (
    "My neighbour keeps talking about {}. Where would I start if I knew nothing at all?",
    "Invent a riddle whose answer is {}.",
    "Pretend you are a museum guide and introduce {} to your visitors.",
    "Could the world do without {}? Argue both ways.",
    "Which misunderstanding around {} annoys experts most?",
    "Draft a short radio advertisement featuring {}.",
    "Name five verbs that go well with {}, each in its own sentence.",
    "Tell me something surprising concerning {} that fits on a postcard.",
    "If {} could speak, how might it complain?",
    "Turn {} into a metaphor for patience.",
    "Propose a science fair project involving {}, including materials.",
    "Translate into plain words: who first wrote down anything on {}, as far as anybody knows?",
)  # fmt: skip
_NAMES = ("Anna", "Ben", "Chloe", "David", "Emma", "Farid", "Grace", "Hugo", "Ines", "Jonas", "Kofi", "Lena")
_ITEMS = ("apples", "pencils", "books", "tickets", "stickers", "eggs", "coins", "cards")
_FUNCTIONS = (
    "returns the largest number of a list",
    "counts the vowels of a string",
    "tells whether a number is prime",
    "reverses the words of a sentence",
    "adds the digits of a number",
    "removes duplicates from a list",
    "finds the longest word of a text",
    "converts Celsius to Fahrenheit",
    "merges two sorted lists",
    "counts the lines of a file",
)
_LANGUAGES = ("Python", "JavaScript", "Java", "C")


def chat_prompts(*, held_out: bool) -> list[str]:
    """Return the training or held-out prompts, in an order (by hash) that is the same on every machine."""
    prompts = [text for key, text in _all() if _is_held_out(key) is held_out]
    return sorted(prompts, key=lambda text: hashlib.sha256(text.encode()).digest())


def unseen_chat_prompts() -> list[str]:
    """Return prompts about the held-out topics made from templates that no training or held-out prompt uses."""
    prompts = [request.format(topic) for topic in _TOPICS if _is_held_out(topic) for request in _OTHER_REQUESTS]
    return sorted(prompts, key=lambda text: hashlib.sha256(text.encode()).digest())


def _is_held_out(key: str) -> bool:
    """Whether a topic is held out, so that held-out prompts share no subject with others."""
    return int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "big") % HELD_OUT_TOPICS == 0


def _all() -> Iterator[tuple[str, str]]:
    """Yield (key that decides the side, prompt) for all prompts."""
    for topic, request in product(_TOPICS, _REQUESTS):
        yield topic, request.format(topic)
    for function, language in product(_FUNCTIONS, _LANGUAGES):
        yield function, f"Write a {language} function that {function}."
        yield function, f"Explain with a short {language} example how one {function}."
    for number in range(400):
        yield f"sum {number}", _arithmetic(random.Random(f"sum {number}"))  # noqa: S311 (no secret)
    for number in range(300):
        yield f"text {number}", _reading(random.Random(f"text {number}"))  # noqa: S311 (no secret)


def _arithmetic(rng: random.Random) -> str:
    first, second = rng.sample(_NAMES, 2)
    item, many, few, times = rng.choice(_ITEMS), rng.randint(20, 90), rng.randint(2, 15), rng.randint(2, 6)
    return rng.choice(
        (
            f"{first} has {many} {item} and gives {few} of them to {second}. How many {item} does {first} have left?",
            f"{first} buys {times} boxes with {few} {item} each. {second} takes {times} of them. How many are left?",
            f"One of the {item} costs {few} dollars. How much do {times} cost, and how much change is there from "
            f"{times * few + many} dollars?",
            f"{first} and {second} share {times * 2 * few} {item} equally, then {first} finds {times} more. How many "
            f"does {first} have?",
        )
    )


def _reading(rng: random.Random) -> str:
    first, second = rng.sample(_NAMES, 2)
    topic, other = rng.sample(_TOPICS, 2)
    passage = " ".join(_sentences(rng, first, second, topic, other))
    question = rng.choice(
        (
            f"What did {first} do first?",
            f"Why did {second} leave?",
            "Summarize the text in one sentence.",
            "Give the text a title.",
            "Rewrite the text in the first person.",
            "List the people of the text and what each of them did.",
        )
    )
    return f"{passage}\n\n{question}"


def _sentences(rng: random.Random, first: str, second: str, topic: str, other: str) -> Sequence[str]:
    return (
        f"On {rng.choice(('Monday', 'Friday', 'Sunday'))} {first} went to the library to read about {topic}.",
        f"After an hour {second} arrived and asked about {other} instead.",
        f"They talked for {rng.randint(2, 9)} hours and forgot the time.",
        f"{second} left because the last {rng.choice(('bus', 'train', 'ferry'))} was at {rng.randint(6, 11)} o'clock.",
        f"{first} stayed and wrote {rng.randint(3, 30)} pages.",
    )
