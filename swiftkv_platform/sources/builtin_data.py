"""Built-in data: source files of the Python standard library, and prompts from templates in this file, the same on
every machine.

Prompts have no completions; the teacher writes them (`data.sources[].complete`). Chat prompts require knowledge of the
model, recall prompts facts from the prompt. A student distilled on chats only loses recall, since it rarely has to read
its own KV cache.
"""

from __future__ import annotations

import hashlib
import random
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count, product
from pathlib import Path

HELD_OUT_PERCENT = 5
"""Percentage of modules that are held out, by a hash of their names."""

_SKIPPED_DIRECTORIES = frozenset(
    {*("site-packages", "dist-packages", "__pycache__", "encodings", "pydoc_data"), *("test", "tests", "idle_test")}
)
"""Third-party code, packages with generated tables, and tests, which some distributions omit."""


@dataclass(frozen=True)
class LibraryModule:
    """One source file of the standard library."""

    name: str
    """Dotted module name, e.g. `email.message`."""
    text: str
    """The whole file, decoded as UTF-8."""

    @property
    def is_held_out(self) -> bool:
        return is_held_out_library_module(self.name)


def is_held_out_library_module(module_name: str) -> bool:
    """Whether a module is in the held-out split. Depends on the name only, so it is the same for every Python
    version."""
    digest = hashlib.sha256(module_name.encode()).digest()
    return int.from_bytes(digest[:8], "big") % 100 < HELD_OUT_PERCENT


def read_standard_library(*, root: Path | None = None) -> Iterator[LibraryModule]:
    """Yield the modules below `root` (default: the interpreter's standard library) in sorted order of path."""
    directory = Path(sysconfig.get_path("stdlib")) if root is None else root
    for path in sorted(directory.rglob("*.py")):
        relative = path.relative_to(directory)
        if _SKIPPED_DIRECTORIES.intersection(relative.parts[:-1]):
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue  # codec test data in another encoding is not text for this tokenizer
        if text.strip():
            yield LibraryModule(".".join(relative.with_suffix("").parts).removesuffix(".__init__"), text)


HELD_OUT_TOPIC_DIVISOR = 5
"""One in 5 topics is held out, with all of its prompts."""

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
_REQUEST_TEMPLATES = (
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
_UNSEEN_REQUESTS = (
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
_FUNCTION_DESCRIPTIONS = (
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


def make_chat_prompts(*, held_out: bool) -> list[str]:
    """Return the training or held-out chat prompts, ordered by hash."""
    prompts = [text for key, text in _make_prompts_by_topic() if _is_held_out_topic(key) is held_out]
    return sorted(prompts, key=lambda text: hashlib.sha256(text.encode()).digest())


def make_unseen_chat_prompts() -> list[str]:
    """Return prompts about held-out topics from templates that no other prompt uses."""
    prompts = [request.format(topic) for topic in _TOPICS if _is_held_out_topic(topic) for request in _UNSEEN_REQUESTS]
    return sorted(prompts, key=lambda text: hashlib.sha256(text.encode()).digest())


def _is_held_out_topic(key: str) -> bool:
    """Whether a topic is held out, so that held-out prompts share no subject with others."""
    return int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "big") % HELD_OUT_TOPIC_DIVISOR == 0


def _make_prompts_by_topic() -> Iterator[tuple[str, str]]:
    """Yield (topic or other key that decides the split, prompt) for all chat prompts."""
    for topic, request in product(_TOPICS, _REQUEST_TEMPLATES):
        yield topic, request.format(topic)
    for function, language in product(_FUNCTION_DESCRIPTIONS, _LANGUAGES):
        yield function, f"Write a {language} function that {function}."
        yield function, f"Explain with a short {language} example how one {function}."
    for number in range(400):
        yield f"sum {number}", _make_arithmetic_prompt(random.Random(f"sum {number}"))  # noqa: S311 (no secret)
    for number in range(300):
        yield f"text {number}", _make_reading_prompt(random.Random(f"text {number}"))  # noqa: S311 (no secret)


def _make_arithmetic_prompt(rng: random.Random) -> str:
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


def _make_reading_prompt(rng: random.Random) -> str:
    first, second = rng.sample(_NAMES, 2)
    topic, other = rng.sample(_TOPICS, 2)
    passage = " ".join(_make_sentences(rng, first, second, topic, other))
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


def _make_sentences(rng: random.Random, first: str, second: str, topic: str, other: str) -> Sequence[str]:
    return (
        f"On {rng.choice(('Monday', 'Friday', 'Sunday'))} {first} went to the library to read about {topic}.",
        f"After an hour {second} arrived and asked about {other} instead.",
        f"They talked for {rng.randint(2, 9)} hours and forgot the time.",
        f"{second} left because the last {rng.choice(('bus', 'train', 'ferry'))} was at {rng.randint(6, 11)} o'clock.",
        f"{first} stayed and wrote {rng.randint(3, 30)} pages.",
    )


_NUM_PROMPTS = {False: 2000, True: 200}
_NUM_LONG_PROMPTS = {False: 1000, True: 100}
_PEOPLE = {
    False: (
        "Alma", "Bruno", "Clara", "Dario", "Elif", "Greta", "Kavya", "Leon", "Mira", "Nadia", "Omar", "Petra", "Quinn",
        "Rosa", "Sven", "Tomas", "Ulla", "Viktor", "Wanda", "Yusuf", "Zoe",
    ),
    True: ("Agnes", "Boris", "Diego", "Esra", "Felix", "Hanna", "Ivan", "Judith", "Karim", "Lucia", "Malik", "Noor"),
}  # fmt: skip
"""Names of people in training texts and, disjoint from them, in held-out texts."""
_OBJECTS = (
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
_FACT_TEMPLATES = (
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
_MAX_COPIED_SENTENCES = 12
_NUM_REMARKS, _NUM_LONG_REMARKS = (0, 2, 5, 10, 18, 24), (40, 60, 80, 100, 120, 160)


def make_recall_prompts(*, held_out: bool) -> list[str]:
    """Return the training or held-out recall prompts, of up to about 400 tokens. Each asks for one fact of a text, for
    all of its facts, or for a copy of the text."""
    people, seed = _PEOPLE[held_out], "held out" if held_out else "train"
    prompts = []
    for number in range(_NUM_PROMPTS[held_out]):
        rng = random.Random(f"recall {seed} {number}")  # noqa: S311 (no secret)
        sentences, questions = _make_recall_text(rng, people, _NUM_REMARKS)
        copied = rng.choice(("Repeat this text word for word:", "Copy the following text exactly:"))
        prompts.append(rng.choice((*questions, f"{copied}\n\n{' '.join(sentences[:_MAX_COPIED_SENTENCES])}")))
    return prompts


def make_long_recall_prompts(*, held_out: bool) -> list[str]:
    """Return prompts of about 500 to 2,100 tokens that ask for one fact of a text, or for all of its facts."""
    people, seed = _PEOPLE[held_out], "held out" if held_out else "train"
    numbers = range(_NUM_LONG_PROMPTS[held_out])
    rngs = (random.Random(f"long recall {seed} {number}") for number in numbers)  # noqa: S311 (no secret)
    return [rng.choice(_make_recall_text(rng, people, _NUM_LONG_REMARKS)[1]) for rng in rngs]


def _make_recall_text(
    rng: random.Random, people: Sequence[str], num_remarks: Sequence[int]
) -> tuple[list[str], tuple[str, str, str]]:
    """Draw a text. `num_remarks`: numbers of filler sentences to choose from. Returns (sentences,
    three prompts that contain the text)."""
    statement, question, subject, value_kind = rng.choice(_FACT_TEMPLATES)
    named = rng.sample(people, rng.choice((1, 2, 3, 4, 6)))
    sentences = [_make_remark(rng, people) for _ in range(rng.choice(num_remarks))]
    for person in named:
        value = _make_code(rng) if value_kind == "code" else str(rng.randrange(10 ** rng.randint(2, 6)))
        sentences.insert(rng.randint(0, len(sentences)), statement.format(person=person, value=value))
    text, prompt = " ".join(sentences), question.format(person=rng.choice(named))
    everyone = f"List every person whose {subject} is mentioned, each with the {value_kind}."
    return sentences, (f"{text}\n\n{prompt}", f"{prompt} Look it up in these notes.\n\n{text}", f"{text}\n\n{everyone}")


def _make_remark(rng: random.Random, people: Sequence[str]) -> str:
    return rng.choice(_REMARKS).format(person=rng.choice(people), item=rng.choice(_OBJECTS), room=rng.choice(_ROOMS))


def _make_code(rng: random.Random) -> str:
    return "".join(rng.choice(_LETTERS) for _ in range(rng.randint(4, 7)))


_NUM_CONSTRAINT_PROMPTS = {False: 1000, True: 100}
_WRITING_TASKS = (
    "Write a blog post about {}.",
    "Write a letter to a newspaper about {}.",
    "Draft a speech for a school assembly about {}.",
    "Review an imaginary book about {}.",
    "Plan a one-week course on {}.",
    "Tell the history of {} as a diary entry.",
    "Describe a day on which everything is about {}.",
    "Write the script of a radio interview about {}.",
    "Advertise a festival devoted to {}.",
    "Argue for or against a tax on {}.",
    "Give advice to someone who is afraid of {}.",
    "Write song lyrics about {}.",
)
_WORDS = ("river", "patience", "copper", "morning", "neighbor", "engine", "quiet", "harbor", "seven", "garden", "paint")
_CLOSINGS = (
    "That is all I have to say.",
    "Thank you for reading this far.",
    "Now it is your turn.",
    "So ends my report.",
)
_CONSTRAINTS: tuple[tuple[str, ...], ...] = (
    (
        "Use at least {many} words.",
        "Stay below {many} words.",
        "Write exactly {few} paragraphs, with a blank line between them.",
        "Use no more than {few} sentences.",
    ),
    (
        "Write in lowercase letters only.",
        "Write in capital letters only.",
        "Do not use commas anywhere.",
        "Answer in Spanish only.",
        "Answer in French only.",
        "Answer in German only.",
    ),
    (
        "Use the words {first} and {second}.",
        "Never use the word {first}.",
        "Use the word {first} at least {few} times.",
        "Let the letter q appear at least once.",
    ),
    (
        "Give the text a title in <<double angle brackets>>.",
        "Put everything in a list of exactly {few} bullet points that begin with an asterisk.",
        "Mark at least {few} phrases with *asterisks*.",
        "Return a JSON object and nothing else.",
        "Begin each of {few} parts with PART and its number.",
    ),
    (
        "The last sentence has to be: {closing}",
        "Enclose the whole answer in double quotation marks.",
        "Add a postscript that begins with P.S.",
        "Repeat this request word for word before you answer it.",
        "Leave at least {few} blanks such as [name] to fill in.",
    ),
)
"""Constraints on an answer by kind: length, spelling and language, words, format, and frame."""


def make_constraint_prompts(*, held_out: bool) -> list[str]:
    """Return the training or held-out writing requests, each with one to three constraints of different kinds. The
    sides share no topic. None of them is a prompt of IFEval, whose rules check some of the same kinds."""
    side = "held out" if held_out else "train"
    topics = [topic for topic in _TOPICS if _is_held_out_topic(topic) is held_out]
    rngs = (random.Random(f"constraints {side} {number}") for number in count())  # noqa: S311 (no secret)
    found = (_make_constraint_prompt(rng, rng.choice(topics)) for rng in rngs)
    prompts: dict[str, None] = {}
    while len(prompts) < _NUM_CONSTRAINT_PROMPTS[held_out]:
        prompts[next(found)] = None
    return list(prompts)


def _make_constraint_prompt(rng: random.Random, topic: str) -> str:
    first, second = rng.sample(_WORDS, 2)
    values = {
        "many": rng.choice((50, 100, 150, 200, 300, 400)),
        "few": rng.randint(2, 6),
        "first": first,
        "second": second,
        "closing": rng.choice(_CLOSINGS),
    }
    kinds = rng.sample(_CONSTRAINTS, rng.choice((1, 1, 2, 3)))
    constraints = [rng.choice(kind).format(**values) for kind in kinds]
    return " ".join([rng.choice(_WRITING_TASKS).format(topic), *constraints])
