"""Tasks of this package for lm-evaluation-harness: needles in a haystack, tool calls, and IFEval and HumanEval from
their authors' files. Prompts are generated offline and are the same on every machine.
"""

from __future__ import annotations

import json
import os
import random
import re
import secrets
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cache, partial
from itertools import product
from types import SimpleNamespace
from typing import Any

from swiftkv_platform.errors import InvalidInputError
from swiftkv_platform.planning.gates import NEEDLE_LENGTHS
from swiftkv_platform.specs import EvaluationSpec
from swiftkv_platform.specs.evaluation import NEEDLE_PREFIX

Scorer = Callable[[Mapping[str, Any], Sequence[str]], Mapping[str, Any]]

MIN_TEACHER_SHARE_FOUND = 0.8
"""Minimum share of the needles that the teacher finds at a length; below it, the student has no gate there."""
MAX_ANSWER_TOKENS = 24
_PEOPLE = ("gardener", "pilot", "baker", "teacher", "doctor", "farmer", "sailor", "painter", "miller", "tailor")
_ACTIONS = ("walked to", "looked for", "wrote about", "painted", "visited", "repaired", "measured", "talked about")
_THINGS = ("bridge", "garden", "harbour", "clock", "library", "market", "railway", "orchard", "windmill", "museum")
_TIMES = ("in the morning", "after lunch", "on Sunday", "before the rain", "late at night", "in early spring")
_PLACES = ("lighthouse", "castle", "bakery", "station", "theatre", "vineyard", "monastery", "observatory")
_COLORS = ("red", "green", "yellow", "white", "grey", "purple", "silver", "brown")

_TOOL_REQUESTS: Mapping[str, tuple[str, str, tuple[str, ...]]] = {
    "get_weather": ("city", "What is the weather in {}?", ("Paris", "Oslo", "Lima", "Cairo", "Osaka")),
    "get_time": ("city", "What time is it in {}?", ("Tokyo", "London", "Nairobi", "Sydney", "Toronto")),
    "search_books": ("title", "Find the book {}.", ("Emma", "Dracula", "Ulysses", "Middlemarch", "Walden")),
    "play_song": ("title", "Play the song {}.", ("Yesterday", "Imagine", "Hurt", "Jolene", "Respect")),
    "translate_word": ("word", "Translate the word {} to French.", ("house", "water", "bread", "night", "friend")),
    "set_alarm": ("time", "Wake me at {}.", ("06:30", "07:15", "08:00", "05:45", "09:20")),
}
"""Argument, request template and argument values of each function."""
_JSON_START = re.compile(r"\[\s*\{|\{")
_TOOL_CALL_FORMAT = '<tool_call>[{"name": "function name", "arguments": {"argument name": "value"}}]</tool_call>'

_IFEVAL_METRICS = ("prompt_level_strict_acc", "inst_level_strict_acc", "prompt_level_loose_acc", "inst_level_loose_acc")
_SENTENCE_END = re.compile(r"(?<=[.!?])[\"')\]]*\s+")


def build_generation_task(
    name: str, target: str, score: Scorer, metrics: Mapping[str, Any], *, until: list[str], max_tokens: int, **data: Any
) -> dict[str, Any]:
    """Return the configuration of a task with documents that have a `prompt`.

    Args:
        metrics: aggregation by metric.
        data: the harness's fields for the documents, and others that a task has.
    """
    return {
        "task": name,
        "test_split": "test",
        "output_type": "generate_until",
        "doc_to_text": "{{prompt}}",
        **data,
        "doc_to_target": target,
        "num_fewshot": 0,
        "process_results": score,
        "generation_kwargs": {"until": until, "do_sample": False, "max_gen_toks": max_tokens},
        "metric_list": [
            {"metric": metric, "aggregation": aggregation, "higher_is_better": True}
            for metric, aggregation in metrics.items()
        ],
    }


def make_dataset(make: Callable[[], list[dict[str, str]]], **_: Any) -> dict[str, Any]:
    from datasets import Dataset

    return {"test": Dataset.from_list(make())}


def choose_needle_lengths(spec: EvaluationSpec, *, instruct: bool, context_length: int) -> tuple[int, ...]:
    """Return the lengths of needle prompts in tokens: the spec's, or for instruction-tuned models all `NEEDLE_LENGTHS`
    that fit into the context."""
    if spec.needle_lengths is not None:
        return spec.needle_lengths
    return tuple(length for length in NEEDLE_LENGTHS if length <= context_length) if instruct else ()


def build_needle_task(tokenizer: Any, length: int, num_samples: int) -> dict[str, Any]:
    """Return the configuration of a needle in a haystack: a prompt of `length` tokens with one sentence that has a
    number, and a question for the number."""

    def make_rows() -> list[dict[str, str]]:
        prompts = [make_needle_prompt(tokenizer, length, number, num_samples) for number in range(num_samples)]
        return [{"prompt": prompt, "answer": answer} for prompt, answer in prompts]

    data = {"custom_dataset": partial(make_dataset, make_rows)}
    name, metrics = f"{NEEDLE_PREFIX}{length}", {"found": "mean"}
    return build_generation_task(
        name, "{{answer}}", score_needle, metrics, until=["\n\n"], max_tokens=MAX_ANSWER_TOKENS, **data
    )


def score_needle(document: Mapping[str, Any], results: Sequence[str]) -> dict[str, float]:
    """Score whether the answer contains the number."""
    return {"found": float(document["answer"] in results[0])}


def make_needle_prompt(tokenizer: Any, length: int, number: int, num_samples: int) -> tuple[str, str]:
    """Return prompt `number` of `num_samples`, of at most `length` tokens, and its answer. The samples' needles are
    spread evenly from beginning to end of the prompt."""
    rng = random.Random(f"needle {length} {number}")  # noqa: S311 (no secret)
    location = f"{rng.choice(_COLORS)} {rng.choice(_PLACES)}"
    answer = str(rng.randrange(10_000, 100_000))
    needle = f"The secret number of the {location} is {answer}."
    head = "Read this text and remember the secret number in it."
    question = f"What is the secret number of the {location}? Answer with the number only."
    tokens_left = length - sum(_count_tokens(tokenizer, part) for part in (head, needle, question)) - 8  # separators
    sentences: list[str] = []
    while True:
        sentence = _make_sentence(rng)
        tokens_left -= _count_tokens(tokenizer, f" {sentence}")
        if tokens_left < 0:
            break
        sentences.append(sentence)
    sentences.insert(round(len(sentences) * (number + 0.5) / num_samples), needle)
    return f"{head}\n\n{' '.join(sentences)}\n\n{question}", answer


def _make_sentence(rng: random.Random) -> str:
    return (
        f"The {rng.choice(_PEOPLE)} {rng.choice(_ACTIONS)} the {rng.choice(_COLORS)} {rng.choice(_THINGS)} "
        f"{rng.choice(_TIMES)}."
    )


def _count_tokens(tokenizer: Any, text: str) -> int:
    return len(tokenizer(text, add_special_tokens=False)["input_ids"])


def build_tool_call_task() -> dict[str, Any]:
    """Return the configuration of tool calls without a grammar: one request per prompt, with several functions. Scores
    whether the model writes valid JSON, a valid call and the right call."""
    data = {"custom_dataset": partial(make_dataset, _make_call_rows)}
    metrics = dict.fromkeys(("valid_json", "valid_call", "right_call"), "mean")
    return build_generation_task(
        "tool_calls", "{{call}}", score_tool_call, metrics, until=["</tool_call>"], max_tokens=96, **data
    )


def _make_call_rows() -> list[dict[str, str]]:
    return [{"prompt": text, "call": json.dumps(call)} for text, call in make_call_prompts()]


def score_tool_call(document: Mapping[str, Any], results: Sequence[str]) -> dict[str, float]:
    """Score whether the answer has valid JSON, a call of an offered function, and the requested call."""
    written = parse_first_json(results[0])
    expected = json.loads(document["call"])
    call = written[0] if isinstance(written, list) and written else written
    arguments = call.get("arguments") if isinstance(call, dict) else None
    name = call.get("name") if isinstance(call, dict) else None
    known = isinstance(name, str) and name in _TOOL_REQUESTS and isinstance(arguments, dict)
    valid = known and isinstance(arguments, dict) and set(arguments) == {_TOOL_REQUESTS[str(name)][0]}
    return {
        "valid_json": float(written is not None),
        "valid_call": float(valid),
        "right_call": float(valid and call == expected),
    }


def parse_first_json(text: str) -> Any:
    """Return the first JSON object, or array of objects, in a text; None if it is incomplete or missing."""
    begin = _JSON_START.search(text)
    if begin is None:
        return None
    try:
        return json.JSONDecoder().raw_decode(text[begin.start() :])[0]
    except json.JSONDecodeError:
        return None


def make_call_prompts() -> list[tuple[str, dict[str, Any]]]:
    """Return every request with its expected call; the other offered functions vary."""
    prompts = []
    for (name, (argument, request, values)), variant in product(_TOOL_REQUESTS.items(), range(5)):
        rng = random.Random(f"tools {name} {variant}")  # noqa: S311 (no secret)
        offered = [name, *rng.sample([other for other in _TOOL_REQUESTS if other != name], 2)]
        rng.shuffle(offered)
        tools = "\n".join(json.dumps({"name": other, "arguments": [_TOOL_REQUESTS[other][0]]}) for other in offered)
        text = (
            f"You may call one of these functions:\n{tools}\n\nAnswer with a call in exactly this form, nothing else:\n"
            f"{_TOOL_CALL_FORMAT}\n\n{request.format(values[variant])}"
        )
        prompts.append((text, {"name": name, "arguments": {argument: values[variant]}}))
    return prompts


def build_humaneval_task(file: str) -> dict[str, Any]:
    """Return the configuration of HumanEval, which runs the model's answers as code. `file`: its problems, for
    `datasets`."""
    return build_generation_task(
        "humaneval_local",
        "{{canonical_solution}}",
        score_code,
        {"pass@1": "mean"},
        until=list(ENDS_OF_FUNCTION),
        max_tokens=MAX_CODE_TOKENS,
        unsafe_code=True,
        **_read_json_file(file),
        **CODE_PROMPT,
    )


def _read_json_file(file: str) -> dict[str, Any]:
    """Return the harness's fields for documents in a JSON lines file."""
    return {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": file}}}


def build_ifeval_task(file: str) -> dict[str, Any]:
    """Return the configuration of IFEval (Zhou et al., 2023), scored by the harness's checkers. `file`: its prompts,
    for `datasets`. Raises `InvalidInputError` if the checkers need a package that is not installed.

    The checkers use nltk's sentence model, which is a download. Without it, text is split into sentences at punctuation
    and into words at white space, so scores of both modes may differ by a few tenths of a point from those with nltk.
    """
    _load_ifeval_checkers()
    metrics = {name: average_over_instructions if name.startswith("inst") else "mean" for name in _IFEVAL_METRICS}
    return build_generation_task(
        "ifeval_local", "", score_instructions, metrics, until=[], max_tokens=1280, **_read_json_file(file)
    )


def score_instructions(document: Mapping[str, Any], results: Sequence[str]) -> dict[str, Any]:
    """Score whether an answer follows its prompt's instructions: all of them and each one, strictly and loosely."""
    scores: dict[str, Any] = _load_ifeval_checkers().process_results(document, results)
    return {name: float(value) if isinstance(value, bool) else value for name, value in scores.items()}


def average_over_instructions(items: Sequence[Sequence[bool]]) -> float:
    """Return the share of followed instructions over all prompts."""
    followed = [each for item in items for each in item]
    return sum(followed) / len(followed)


def split_sentences(text: str) -> list[str]:
    """Split a text into sentences after `.`, `!` or `?` before white space."""
    return [part for part in _SENTENCE_END.split(text.strip()) if part]


@contextmanager
def set_environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables, and restore them afterwards."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@cache
def _load_ifeval_checkers() -> Any:
    """Import the harness's IFEval module, patched to split sentences without a download."""
    import nltk

    try:
        nltk.data.find("tokenizers/punkt_tab")
        has_model = True
    except LookupError:
        has_model = False
    rank = os.environ.get("LOCAL_RANK", "1") if has_model else "1"  # any rank but 0: no download
    try:
        with set_environment({"LOCAL_RANK": rank}):
            from lm_eval.tasks.ifeval import instructions_util, utils
    except ModuleNotFoundError as error:
        raise InvalidInputError(
            f"evaluation.tasks: builtin:ifeval needs {error.name}; run `pip install 'lm_eval[ifeval]'`",
            field="evaluation.tasks",
            value="builtin:ifeval",
        ) from error
    if not has_model:
        instructions_util._get_sentence_tokenizer = lambda: SimpleNamespace(tokenize=split_sentences)
        instructions_util.nltk = SimpleNamespace(tokenize=nltk.tokenize, data=nltk.data, word_tokenize=str.split)
    return utils


MAX_CODE_TOKENS = 512
_PROBLEM = "```python\n{{prompt}}"
# Text and start of the answer are those of the harness's `humaneval_instruct`.
CODE_PROMPT = {
    "doc_to_text": "Write a solution to the following problem and make sure that it passes the tests:\n"
    f"{_PROBLEM}\n```\n",
    "gen_prefix": f"Here is the completed function:\n{_PROBLEM}",
    "target_delimiter": "",
}
"""Fields of the harness's configuration that make the prompt."""
ENDS_OF_FUNCTION = ("```", "\nclass", "\ndef", "\n#", "\nif", "\nprint")
"""Texts that only come after the function's end."""

_CPU_SECONDS = 10
_ELAPSED_SECONDS = 60.0
_MEMORY_BYTES = 1 << 30
_OUTPUT_BYTES = 1 << 20
_LIMITED_RUN = f"""
import resource, sys
for kind, most in (
    (resource.RLIMIT_CPU, {_CPU_SECONDS}),
    (resource.RLIMIT_AS, {_MEMORY_BYTES}),
    (resource.RLIMIT_FSIZE, {_OUTPUT_BYTES}),
    (resource.RLIMIT_CORE, 0),
):
    resource.setrlimit(kind, (most, most))
exec(compile(sys.stdin.read(), "program", "exec"), {{"__name__": "__main__"}})
"""
"""A program that limits its own process, and then runs the one that it reads."""


def score_code(document: Mapping[str, Any], results: Sequence[str]) -> dict[str, float]:
    """Score whether the problem's tests pass with the model's completion of the function."""
    program = f"{document['prompt']}{results[0]}\n\n{document['test']}\n\ncheck({document['entry_point']})\n"
    return {"pass@1": float(runs_to_completion(program))}


def runs_to_completion(program: str) -> bool:
    """Whether a program runs to its end within limits of time, memory and output, in its own process and directory.

    The limits stop mistakes, not attacks: a program may read what this process may read, and use the network.
    """
    # A program that ends early, whatever its exit code, does not write the token.
    token = secrets.token_hex(16)
    with tempfile.TemporaryDirectory() as directory, tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            [sys.executable, "-I", "-c", _LIMITED_RUN],
            cwd=directory,
            env={"HOME": directory, "TMPDIR": directory},
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        with suppress(subprocess.TimeoutExpired):
            process.communicate(f"{program}\nprint({token!r})\n".encode(), _ELAPSED_SECONDS)
        with suppress(ProcessLookupError):  # the group has ended
            os.killpg(process.pid, signal.SIGKILL)  # with what the program has started
        process.wait()
        output.seek(0)
        return output.read().rstrip().endswith(token.encode())
