"""Measures that instruction-tuned models have by default, and the prompts they are asked: no model."""

import json
import os
from pathlib import Path

import datasets
import pytest
from transformers import AutoTokenizer

from swiftkv_platform import sources
from swiftkv_platform.errors import DataError
from swiftkv_platform.evaluation.harness import builtin
from swiftkv_platform.evaluation.harness.builtin import choose_needle_lengths, make_needle_prompt, score_needle
from swiftkv_platform.evaluation.harness.tasks import is_instruction_tuned, resolve_tasks
from swiftkv_platform.specs import EvaluationSpec, TaskSpec
from swiftkv_platform.specs.evaluation import find_task_directory
from tests.support.fakes.tokenizers import byte_tokenizer
from tests.support.requirements import required_module

TURNS = "{% for m in messages %}<turn>{{ m.content }}{% endfor %}"


def test_models_with_markers_of_their_own_are_instruction_tuned() -> None:
    tuned = byte_tokenizer(chat_template=TURNS)
    tuned.add_special_tokens({"additional_special_tokens": ["<turn>"]})
    assert is_instruction_tuned(tuned)
    assert not is_instruction_tuned(byte_tokenizer(chat_template=TURNS)), "markers in plain text"
    assert not is_instruction_tuned(byte_tokenizer())
    base = AutoTokenizer.from_pretrained(Path(sources.__file__).parent / "teacher")
    assert base.chat_template
    assert not is_instruction_tuned(base)


def test_needles_are_looked_for_where_the_context_holds_them() -> None:
    spec = EvaluationSpec()
    assert choose_needle_lengths(spec, instruct=True, context_length=8192) == (1024, 4096)
    assert choose_needle_lengths(spec, instruct=True, context_length=2048) == (1024,)
    assert choose_needle_lengths(spec, instruct=False, context_length=8192) == ()
    assert choose_needle_lengths(EvaluationSpec(needle_lengths=(512,)), instruct=False, context_length=8192) == (512,)


def test_a_needle_prompt_has_its_length_its_needle_and_a_place_of_its_own() -> None:
    tokenizer, places = byte_tokenizer(), []
    for number in range(4):
        prompt, answer = make_needle_prompt(tokenizer, 1000, number, 4)
        assert 850 < len(prompt.encode()) <= 1000
        assert prompt.count(answer) == 1
        assert score_needle({"answer": answer}, [f"It is {answer}."]) == {"found": 1.0}
        assert score_needle({"answer": answer}, ["It is 12."]) == {"found": 0.0}
        places.append(prompt.index(answer) / len(prompt))
        assert make_needle_prompt(tokenizer, 1000, number, 4) == (prompt, answer)
    assert places == sorted(places)
    assert places[0] < 0.35 < 0.65 < places[-1]


@pytest.mark.parametrize(
    ("text", "scores"),
    [
        ('<tool_call>[{"name": "get_time", "arguments": {"city": "Oslo"}}]', (1, 1, 1)),
        ('Sure: {"name": "get_time", "arguments": {"city": "Rome"}} there', (1, 1, 0)),
        ('[{"name": "get_time", "arguments": {"town": "Oslo"}}]', (1, 0, 0)),
        ('[{"name": "fly", "arguments": {}}]', (1, 0, 0)),
        ('[{"name": ["x"], "arguments": 3}]', (1, 0, 0)),
        ("[1]", (0, 0, 0)),
        ('[{"name": "get_time", "arguments": {"city": "Oslo"}', (0, 0, 0)),
        ("Oslo is in Norway.", (0, 0, 0)),
    ],
)
def test_a_call_is_json_then_valid_then_right(text: str, scores: tuple[int, int, int]) -> None:
    document = {"call": json.dumps({"name": "get_time", "arguments": {"city": "Oslo"}})}
    assert tuple(builtin.score_tool_call(document, [text]).values()) == scores


def test_prompts_of_tool_calls_offer_what_is_asked_for() -> None:
    prompts = builtin.make_call_prompts()
    assert len({text for text, _ in prompts}) == 30
    for text, call in prompts:
        assert f'"name": "{call["name"]}"' in text
        assert next(iter(call["arguments"].values())) in text
    assert builtin.make_call_prompts() == prompts


def test_sentences_end_where_white_space_follows() -> None:
    assert builtin.split_sentences('One (1.5). "Two!" Three? four') == ["One (1.5).", '"Two!', "Three?", "four"]


def test_ifeval_says_what_is_missing_or_scores_instructions(tmp_path: Path) -> None:
    required_module("langdetect")
    builtin.build_ifeval_task(str(tmp_path))
    document = {
        "key": 1,
        "prompt": "Say it in three sentences, no commas.",
        "instruction_id_list": ["punctuation:no_comma", "length_constraints:number_sentences"],
        "kwargs": [{"num_sentences": None}, {"num_sentences": 3, "relation": "at least"}],
    }
    both = builtin.score_instructions(document, ["One. Two! Three?"])
    assert (both["prompt_level_strict_acc"], both["inst_level_strict_acc"]) == (1.0, [True, True])
    one = builtin.score_instructions(document, ["One, two. Three! Four?"])
    assert (one["prompt_level_strict_acc"], one["inst_level_strict_acc"]) == (0.0, [False, True])
    assert builtin.average_over_instructions([[True, True], [False]]) == pytest.approx(2 / 3)


PROBLEM = {
    "prompt": "def add(a: int, b: int) -> int:\n",
    "entry_point": "add",
    "test": "def check(candidate):\n    assert candidate(2, 3) == 5\n    print('passed')",
}


@pytest.mark.parametrize(
    ("body", "passed"),
    [
        ("    return a + b\n", True),
        ("    print('x' * 100)\n    return a + b", True),
        ("    return a - b\n", False),
        ("    return a +\n", False),
        ("    raise SystemExit(0)\n", False),
        ("    import os\n    os._exit(0)\n", False),
        ("    return len(bytearray(1 << 31)) and a + b\n", False),
        ("    while True:\n        print('x' * 1000)\n", False),
    ],
)
def test_a_completed_function_passes_if_its_tests_run_to_their_end(body: str, passed: bool) -> None:
    assert builtin.score_code(PROBLEM, [body]) == {"pass@1": float(passed)}


def test_a_program_ends_with_what_it_has_started(tmp_path: Path) -> None:
    """The started process would hold the pipe open."""
    os.mkfifo(pipe := tmp_path / "pipe")
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    program = f"import subprocess\nsubprocess.Popen(['sleep', '1000'], stdout=open({str(pipe)!r}, 'w'))"
    assert builtin.runs_to_completion(program)
    os.set_blocking(reader, True)
    assert os.read(reader, 1) == b"", "the pipe has no writer"
    os.close(reader)


def test_a_built_in_task_finds_its_files_in_the_directory_or_one_level_below(tmp_path: Path) -> None:
    def find(name: str, directory: Path) -> Path:
        return find_task_directory(f"builtin:{name}", directory, "evaluation.tasks")

    for file in ("code/HumanEval.jsonl.gz", "math/gsm8k_train.jsonl", "math/gsm8k_test.jsonl", "half/gsm8k_test.jsonl"):
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_text("")
    assert find("humaneval", tmp_path) == find("humaneval", tmp_path / "code") == tmp_path / "code"
    assert find("gsm8k", tmp_path) == tmp_path / "math"
    with pytest.raises(DataError, match=r"neither it nor a directory in it holds input_data.jsonl, the"):
        find("ifeval", tmp_path)
    with pytest.raises(DataError, match="neither it nor"):
        find("gsm8k", tmp_path / "nowhere")
    (tmp_path / "code2").mkdir()
    (tmp_path / "code2" / "HumanEval.jsonl").write_text("")
    with pytest.raises(DataError, match=r"'code' and 'code2' in it hold HumanEval.jsonl\*; use one of them"):
        find("humaneval", tmp_path)


def test_the_name_of_a_directory_of_questions_is_no_pattern(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    for name in ("a[b]", "ab"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "questions.jsonl").write_text(json.dumps({"asked": name}) + "\n")
        task = {"task": "asked", "dataset_path": "json", "dataset_kwargs": {"data_files": {"test": "questions.jsonl"}}}
        (tmp_path / name / "task.yaml").write_text(json.dumps(task))
    [task] = resolve_tasks([TaskSpec(name=str(tmp_path / "a[b]" / "task.yaml"))])
    assert isinstance(task.source, dict)
    files = task.source["dataset_kwargs"]["data_files"]
    assert datasets.load_dataset("json", data_files=files, split="test")["asked"] == ["a[b]"]
