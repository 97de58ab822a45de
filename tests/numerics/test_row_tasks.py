"""Own rows on a real model: every metric in both modes, with stored results of single rows."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from swiftkv_platform.contract.row_results import RowResult, load_rows
from swiftkv_platform.data.chat import ChatRenderer
from swiftkv_platform.data.evaluation_rows import (
    compile_schema,
    contains_answer,
    is_close,
    is_valid_json,
    matches_exactly,
)
from swiftkv_platform.data.formats import Conversation
from swiftkv_platform.errors import DataError
from swiftkv_platform.evaluation.harness.rows import build_row_tasks, check_row_tasks
from swiftkv_platform.evaluation.harness.run import TaskScore, run_tasks
from swiftkv_platform.evaluation.harness.tasks import build_needle_tasks, resolve_tasks
from swiftkv_platform.model import convert
from swiftkv_platform.specs import EvaluationSpec, RowTaskSpec
from tests.numerics.test_harness import log_likelihood
from tests.numerics.test_harness_generation import KeptParts
from tests.support.fakes.tokenizers import byte_tokenizer
from tests.support.tiny_models import disturb, random_teacher

TEMPLATE = (
    "{% if tools %}<tools>{{ tools | tojson }}</tools>{% endif %}{% for message in messages %}<s>{{ message.role }}: "
    "{{ message.content or '' }}{% if message.tool_calls %}{{ message.tool_calls | tojson }}{% endif %}</s>"
    "{% endfor %}{% if add_generation_prompt %}<s>assistant: {% endif %}"
)
QUESTIONS = ("The grass is", "Two and two make", "Fire is", "A day has", "Water is", "The sky is")


class Kept(KeptParts):
    """Keeps rows too; a part named `killed_at` kills the evaluation before it is stored."""

    def __init__(self, killed_at: str | None = None) -> None:
        super().__init__()
        self.rows: dict[str, bytes] = {}
        self.killed_at = killed_at

    def store_result(self, name: str, data: bytes) -> None:
        if name == self.killed_at:
            raise KeyboardInterrupt
        super().store_result(name, data)

    def store_rows(self, name: str, data: bytes) -> None:
        self.rows[name] = data


@pytest.fixture(scope="module")
def student() -> Any:
    teacher = random_teacher(initializer_range=0.3, max_position_embeddings=1024)
    model = disturb(convert(teacher, num_key_value_layers=3, key_value_group_size=2)).eval()
    model.generation_config.eos_token_id = None
    return model


def make_task(path: Path, rows: Sequence[dict[str, Any]], metric: str, **more: Any) -> RowTaskSpec:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = {"name": path.stem, "source": {"name_or_path": str(path)}, "metric": metric, **more}
    return RowTaskSpec.model_validate(settings)


def run(
    student: Any, *specs: RowTaskSpec, tokenizer: Any = None, parts: Kept | None = None, **settings: Any
) -> tuple[list[TaskScore], list[list[RowResult]]]:
    parts = Kept() if parts is None else parts
    tokenizer = tokenizer or byte_tokenizer(chat_template=TEMPLATE)
    spec = EvaluationSpec(rows=specs, **settings)
    tasks = build_row_tasks(spec, tokenizer, context_length=1024, remote=None)
    scores = run_tasks(student, tokenizer, tasks, spec, parts=parts).scores
    return list(scores), [load_rows(parts.rows[str(score.row_results)]) for score in scores]


def test_generated_answers_are_scored_and_stored_row_by_row(student: Any, tmp_path: Path) -> None:
    """Each metric scores exactly the stored answers; some expected answers are what the models say."""
    probe = make_task(tmp_path / "probe.jsonl", [{"prompt": q} for q in QUESTIONS], "likelihood", max_tokens=12)
    _, [said] = run(student, probe)
    expected = [row.expected if i % 2 else "42" for i, row in enumerate(said)]
    rows = [{"prompt": q, "completion": f"{e}"} for q, e in zip(QUESTIONS, expected, strict=True)]
    numbers = [{"prompt": q, "gold": i} for i, q in enumerate(QUESTIONS)]
    specs = [
        make_task(tmp_path / "exact.jsonl", rows, "exact_match", max_tokens=12),
        make_task(tmp_path / "part.jsonl", rows, "contains", max_tokens=12, ignore_case=True),
        make_task(tmp_path / "number.jsonl", numbers, "numeric", max_tokens=12, answer_column="gold"),
        make_task(tmp_path / "json.jsonl", numbers, "json_schema", max_tokens=12, json_schema={"type": "number"}),
    ]
    scores, results = run(student, *specs)
    assert [(score.task, score.metric, score.num_samples) for score in scores] == [
        (spec.name, spec.metric, len(QUESTIONS)) for spec in specs
    ]

    number = compile_schema({"type": "number"})
    passes = (
        matches_exactly,
        lambda answer, wanted: contains_answer(answer, wanted, ignore_case=True),
        is_close,
        lambda answer, _wanted: is_valid_json(answer, number),
    )
    for score, found, rule in zip(scores, results, passes, strict=True):
        for mode in ("teacher", "student"):
            given = [getattr(row, mode) for row in found]
            assert [each.score for each in given] == [
                float(rule(each.answer or "", row.expected or "")) for each, row in zip(given, found, strict=True)
            ]
            assert getattr(score, mode) == pytest.approx(sum(each.score for each in given) / len(given))
        assert [row.prompt for row in found] == list(QUESTIONS)
        assert score.drop_interval is not None
    exact = results[0]
    assert {row.teacher.score for row in exact} == {0.0, 1.0}, "the teacher's own answers pass, others do not"
    assert [row.key for row in exact] == [row.key for row in results[2]], "keys are those of the prompts"
    assert any(row.teacher.answer != row.student.answer for row in exact)


def test_likelihoods_are_those_of_the_answer_as_it_is_trained(student: Any, tmp_path: Path) -> None:
    """With tools and earlier turns; a call as the answer counts as the template renders it."""
    tokenizer = byte_tokenizer(chat_template=TEMPLATE)
    tools = [{"type": "function", "function": {"name": "add", "description": "", "parameters": {}}}]
    ask = [
        {"role": "user", "content": "2?"},
        {"role": "assistant", "content": "two"},
        {"role": "user", "content": "3?"},
    ]
    call = {"role": "assistant", "tool_calls": [{"function": {"name": "add", "arguments": {"a": 2}}}]}
    rows = [
        {"messages": [*ask, {"role": "assistant", "content": "three"}], "tools": tools},
        {"messages": [*ask, call], "tools": tools},
    ]
    [score], [results] = run(student, make_task(tmp_path / "own.jsonl", rows, "likelihood", max_tokens=8))
    prompt = ChatRenderer(tokenizer).render_prompt(Conversation(ask, tools))
    assert "<tools>" in prompt
    assert results[1].expected is not None
    assert "add" in results[1].expected
    for mode in ("teacher", "student"):
        student.swiftkv(mode == "student")
        # The harness counts white space at the end of a context as part of the continuation.
        total, count = log_likelihood(student, prompt.rstrip(), " three</s>", tokenizer)
        assert getattr(results[0], mode).score == pytest.approx(total / count, rel=1e-4)
        assert getattr(results[0], mode).answer is None
    assert score.teacher == pytest.approx(sum(row.teacher.score for row in results) / 2)
    assert score.higher_is_better
    assert score.chat_template
    assert not score.uses_percentage_points


def test_the_teachers_answer_stands_in_for_a_missing_one(student: Any, tmp_path: Path) -> None:
    rows = [{"prompt": "The grass is"}, {"prompt": "Fire is", "completion": "hot"}, {"text": "A day has"}]
    gold = [{**row, "gold": "x"} for row in rows]
    said = make_task(tmp_path / "said.jsonl", gold, "contains", max_tokens=8, answer_column="gold")
    _, [results, answers] = run(
        student, make_task(tmp_path / "own.jsonl", rows, "likelihood", max_tokens=8, stop=["\n"]), said
    )
    assert [row.key for row in results] == [row.key for row in answers]
    spoken = [str(row.teacher.answer).partition("\n")[0] for row in answers]
    assert [row.expected for row in results] == [spoken[0], "hot", spoken[2]]
    assert all(row.teacher.score < 0 and row.student.score < 0 for row in results)


def test_the_most_likely_label_is_the_answer(student: Any, tmp_path: Path) -> None:
    labels = ["billing", "login", "none of these"]
    rows = [{"prompt": q, "completion": labels[i % 3]} for i, q in enumerate(QUESTIONS)]
    rows_of_text = [{"text": q, "gold": labels[i % 3]} for i, q in enumerate(QUESTIONS)]
    chats = make_task(tmp_path / "chats.jsonl", rows, "classification", labels=labels)
    texts = make_task(tmp_path / "texts.jsonl", rows_of_text, "classification", labels=labels, answer_column="gold")
    tokenizer = byte_tokenizer(chat_template=TEMPLATE)
    _, results = run(student, chats, texts)
    for found, render, space in (
        (results[0], lambda q: f"<s>user: {q}</s><s>assistant:", " "),
        (results[1], lambda q: q, " "),
    ):
        for row, question in zip(found, QUESTIONS, strict=True):
            for mode in ("teacher", "student"):
                student.swiftkv(mode == "student")
                likely = [log_likelihood(student, render(question), space + each, tokenizer)[0] for each in labels]
                result = getattr(row, mode)
                assert result.answer == labels[likely.index(max(likely))]
                assert result.score == float(result.answer == row.expected)


def test_an_interrupted_evaluation_repeats_no_answer(
    student: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [{"prompt": q, "completion": "42"} for q in QUESTIONS]
    specs = [make_task(tmp_path / f"{name}.jsonl", rows, "contains", max_tokens=8) for name in ("one", "two")]
    whole = run(student, *specs)
    parts = Kept(killed_at="task-001")
    with pytest.raises(KeyboardInterrupt):
        run(student, *specs, parts=parts)
    assert "task-000" in parts.kept
    parts.killed_at = None
    monkeypatch.setattr(
        "swiftkv_platform.evaluation.harness.shared.EngineGenerator.generate",
        lambda *_, **__: pytest.fail("an answer was generated again"),
    )
    assert run(student, *specs, parts=parts) == whole


def test_the_harnesss_tasks_store_their_rows_too(student: Any, tmp_path: Path) -> None:
    questions = [{"text": q, "choices": [" hot", " green"], "answer": i % 2} for i, q in enumerate(QUESTIONS)]
    (tmp_path / "questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in questions))
    (tmp_path / "trivia.yaml").write_text(
        "task: trivia\ndataset_path: json\ndataset_kwargs: {data_files: {test: questions.jsonl}}\ntest_split: test\n"
        "output_type: multiple_choice\ndoc_to_text: '{{text}}'\ndoc_to_choice: '{{choices}}'\n"
        "doc_to_target: '{{answer}}'\ntarget_delimiter: ''\n"
        "metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]\n"
    )
    parts, tokenizer = Kept(), byte_tokenizer()
    tasks = [*resolve_tasks([str(tmp_path / "trivia.yaml")]), *build_needle_tasks([256], 4, tokenizer, chat=False)]
    trivia, needles = run_tasks(student, tokenizer, tasks, EvaluationSpec(), parts=parts).scores
    found = load_rows(parts.rows[str(trivia.row_results)])
    assert [(row.prompt, row.expected) for row in found] == [
        (each["text"], str(each["choices"][each["answer"]]).strip()) for each in questions
    ]
    assert {row.student.answer for row in found} <= {"hot", "green"}
    assert trivia.student == sum(row.student.score for row in found) / len(found)
    hidden = load_rows(parts.rows[str(needles.row_results)])
    assert len(hidden) == 4
    assert "What is the secret number" in hidden[0].prompt


def test_rows_that_do_not_fit_are_refused_before_anything_runs(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer(chat_template=TEMPLATE)

    def check(rows: list[dict[str, Any]], metric: str = "contains", length: int = 1024, **more: Any) -> None:
        spec = make_task(tmp_path / "own.jsonl", rows, metric, **more)
        check_row_tasks(EvaluationSpec(rows=(spec,)), tokenizer, context_length=length, remote=None)

    row = {"prompt": "a" * 100, "completion": "b" * 50}
    check([row])
    with pytest.raises(DataError, match=r"own.jsonl, line 2.*prompt has 1\d\d tokens .* up to 256.*lower max_tokens"):
        check([{"prompt": "a", "completion": "b"}, row], length=300)
    check([row], "likelihood", length=300)
    with pytest.raises(DataError, match="its answer up to 5"):
        check([row], "likelihood", length=120)
    raising = byte_tokenizer(chat_template="{{ raise_exception('only users') }}")
    spec = make_task(tmp_path / "own.jsonl", [row], "contains")
    with pytest.raises(DataError, match=r"line 1.*only users"):
        check_row_tasks(EvaluationSpec(rows=(spec,)), raising, context_length=1024, remote=None)
