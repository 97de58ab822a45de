"""Results of single rows: what is stored of them, and what two models' rows have in common."""

import pytest

from swiftkv_platform.contract import row_results
from swiftkv_platform.contract.row_results import (
    MAX_ANSWER_CHARACTERS,
    MAX_PROMPT_CHARACTERS,
    ModeResult,
    RowResult,
    compare_rows,
    dump_rows,
    find_shared_tasks,
    load_rows,
    make_keys_unique,
    shorten_answer,
    shorten_prompt,
)


def row(key: str, student: float, teacher: float = 1.0) -> RowResult:
    answer = ModeResult(score=student, answer=f"answer {student:g}")
    return RowResult(key=key, prompt=key, expected="x", teacher=ModeResult(score=teacher), student=answer)


def test_rows_survive_a_file_unless_they_are_too_many_or_not_finite(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [row("a", 0.0), row("\u2028b", float("-inf")), row("c\n", -1.5)]
    data, num_left_out = dump_rows(rows)
    assert load_rows(data) == [rows[0], rows[2]]
    assert num_left_out == 1
    size = len(dump_rows(rows[:1])[0])
    monkeypatch.setattr(row_results, "MAX_FILE_BYTES", size)
    assert dump_rows([row("a", 0.0), row("b", 0.0)]) == (dump_rows([row("a", 0.0)])[0], 1)


@pytest.mark.parametrize("change", [('"score":0.0', '"score":NaN'), ('"x"', f'"{"x" * 3000}"'), ('"key"', '"name"')])
def test_rows_of_other_programs_are_not_read(change: tuple[str, str]) -> None:
    data = dump_rows([row("a", 0.0)])[0].decode()
    assert load_rows(data.encode())
    assert change[0] in data
    with pytest.raises(ValueError, match=r"validation error|not finite"):
        load_rows(data.replace(*change).encode())


def test_long_texts_are_cut_where_they_matter_least() -> None:
    prompt, answer = shorten_prompt("a" * 5000 + "?"), shorten_answer("yes" + "a" * 5000)
    assert (len(prompt), prompt[0], prompt[-1]) == (MAX_PROMPT_CHARACTERS, "…", "?")
    assert (len(answer), answer[:3], answer[-1]) == (MAX_ANSWER_CHARACTERS, "yes", "…")
    assert shorten_prompt("a" * MAX_PROMPT_CHARACTERS) == "a" * MAX_PROMPT_CHARACTERS


def test_repeated_prompts_have_numbers() -> None:
    assert make_keys_unique(["a", "b", "a", "a"]) == ["a", "b", "a-2", "a-3"]


def test_flips_are_paired_by_key() -> None:
    a = [row("lost", 1.0), row("same", 1.0), row("won", 0.0), row("only-a", 1.0)]
    b = [row("won", 1.0), row("same", 1.0), row("lost", 0.0), row("only-b", 0.0), row("other", 0.0)]
    found = compare_rows(a, b)
    assert (found.num_rows, found.num_only_a, found.num_only_b) == (3, 1, 2)
    assert (found.a, found.b) == (2 / 3, 2 / 3)
    assert [(each.key, each.change) for each in found.changed] == [("lost", "worse"), ("won", "better")]
    assert (found.changed[0].a.answer, found.changed[0].b.answer) == ("answer 1", "answer 0")
    assert found.interval is not None
    assert found.interval[0] == -found.interval[1], "a loss and a gain cancel"


def test_pairs_narrow_the_interval() -> None:
    """Two models that differ on 10 of 400 rows: independent samples would hide the loss."""
    a = [row(str(i), float(i % 2)) for i in range(400)]
    b = [row(str(i), 0.0 if i in range(1, 20, 2) else float(i % 2)) for i in range(400)]
    low, high = compare_rows(a, b).interval or (0.0, 0.0)
    assert low < -10 / 400 < high < 0


def test_likelihoods_list_the_largest_losses_and_gains() -> None:
    a = [row(str(i), -1.0) for i in range(40)]
    b = [row(str(i), -1.0 + (i - 20) / 100) for i in range(40)]
    found = compare_rows(a, b)
    assert [each.key for each in found.changed[:3]] == ["0", "1", "39"]
    assert (found.count_changes("worse"), found.count_changes("better")) == (20, 19)
    low, high = found.interval or (0.0, 0.0)
    assert low < (found.b or 0) - (found.a or 0) < high
    assert compare_rows(a[:29], b[:29]).interval is None, "too few for an unbounded score"
    assert compare_rows(a, b, higher_is_better=False).changed[0].change == "better"


def test_models_without_a_common_row_say_so() -> None:
    found = compare_rows([row("a", 1.0)], [row("b", 1.0)])
    assert (found.num_rows, found.num_only_a, found.num_only_b) == (0, 1, 1)
    assert (found.a, found.b, found.interval, found.changed) == (None, None, None, ())


def test_tasks_are_shared_by_name_and_metric_if_both_have_rows() -> None:
    def report(**names: str | None) -> dict[str, object]:
        return {"tasks": [{"task": task, "metric": "acc", "row_results": name} for task, name in names.items()]}

    a = report(both="000-both", only_a="001-a", without=None, hostile="../../other/rows/x")
    b = report(both="003-both", without="000-w", hostile="000-hostile")
    assert [(x["row_results"], y["row_results"]) for x, y in find_shared_tasks(a, b)] == [("000-both", "003-both")]
    other_metric = {"tasks": [{"task": "both", "metric": "f1", "row_results": "000-both"}]}
    assert find_shared_tasks(a, other_metric) == []
    assert find_shared_tasks(a, {}) == [], "reports of earlier versions"
    for tasks in (None, "both", {"both": 1}, ["both"], [{"task": "both"}], [{**b["tasks"][0], "metric": ["acc"]}]):
        assert find_shared_tasks(a, {"tasks": tasks}) == find_shared_tasks({"tasks": tasks}, a) == []


def test_a_row_whose_expected_answer_was_corrected_is_not_compared() -> None:
    a = [row("a", 1.0), row("b", 1.0)]
    b = [row("a", 0.0).model_copy(update={"expected": "y"}), row("b", 1.0)]
    found = compare_rows(a, b)
    assert (found.num_rows, found.num_only_a, found.num_only_b, found.changed) == (1, 1, 1, ())
