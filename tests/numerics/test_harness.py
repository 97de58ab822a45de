"""lm-evaluation-harness on SwiftKV checkpoints: its log-likelihoods equal those of a plain forward in both modes, and
tasks run over local files alone."""

import gzip
import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks._yaml_loader import load_yaml
from transformers import AutoModelForCausalLM

from swiftkv_platform.errors import DataError, InvalidInputError
from swiftkv_platform.evaluation.harness.run import check_tasks, run_tasks
from swiftkv_platform.evaluation.harness.shared import HarnessModel
from swiftkv_platform.evaluation.harness.tasks import build_needle_tasks, load_task_manager, resolve_tasks
from swiftkv_platform.evaluation.parts import NoResultStore
from swiftkv_platform.model import convert
from swiftkv_platform.model.workers import Workers
from swiftkv_platform.sources import Access
from swiftkv_platform.specs import PAPER_TASKS, EvaluationSpec, TaskSpec
from tests.support import reference
from tests.support.checkpoints import save
from tests.support.fakes.tokenizers import byte_tokenizer
from tests.support.parameters import WIDE
from tests.support.tiny_models import disturb, random_teacher

QUESTIONS = [
    {"text": "The grass is", "choices": [" green", " loud", " seven"], "answer": 0},
    {"text": "Two and two make", "choices": [" blue", " four", " rain", " a tune"], "answer": 1},
    {"text": "Fire is", "choices": [" cold", " hot"], "answer": 1},
    {"text": "A day has", "choices": [" 24 hours", " 9 hours"], "answer": 0},
]
TASK = {
    "task": "trivia",
    "dataset_path": "json",
    "dataset_kwargs": {"data_files": {"test": "questions.jsonl"}},
    "test_split": "test",
    "output_type": "multiple_choice",
    "doc_to_text": "{{text}}",
    "doc_to_choice": "{{choices}}",
    "doc_to_target": "{{answer}}",
    "target_delimiter": "",
    "metric_list": [{"metric": name, "aggregation": "mean", "higher_is_better": True} for name in ("acc", "acc_norm")],
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A SwiftKV directory with grouped KV, whose two modes give different results."""
    teacher = random_teacher(initializer_range=0.3, max_position_embeddings=2048)
    student = convert(teacher, num_key_value_layers=3, key_value_group_size=2)
    return save(student, tmp_path_factory.mktemp("student"))


@pytest.fixture(scope="module")
def student(checkpoint: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(checkpoint)


@pytest.fixture(scope="module")
def task_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A custom task in a file next to its data."""
    directory = tmp_path_factory.mktemp("tasks")
    (directory / "questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in QUESTIONS))
    (directory / "trivia.yaml").write_text(yaml.safe_dump(TASK))
    return directory / "trivia.yaml"


@torch.no_grad()
def log_likelihood(model: Any, context: str, continuation: str, tokenizer: Any = None) -> tuple[float, int]:
    """Return the log-likelihood and number of tokens of a continuation, by one full forward pass without a cache."""
    tokenizer = tokenizer or byte_tokenizer()
    whole, before = tokenizer([context + continuation, context], add_special_tokens=False)["input_ids"]
    log_p = model(input_ids=torch.tensor([whole]), use_cache=False).logits[0, :-1].log_softmax(-1)
    chosen = log_p.gather(-1, torch.tensor(whole)[1:, None])[len(before) - 1 :]
    return float(chosen.sum()), len(whole) - len(before)


def naive_accuracies(model: Any) -> dict[str, float]:
    """Return acc and acc_norm (by likelihood per byte) over `QUESTIONS`."""
    right = {"acc": 0, "acc_norm": 0}
    for row in QUESTIONS:
        scores = torch.tensor([log_likelihood(model, row["text"], choice)[0] for choice in row["choices"]])
        lengths = torch.tensor([len(choice) for choice in row["choices"]])
        right["acc"] += int(scores.argmax()) == row["answer"]
        right["acc_norm"] += int((scores / lengths).argmax()) == row["answer"]
    return {name: count / len(QUESTIONS) for name, count in right.items()}


def test_log_likelihoods_are_those_of_a_full_forward(checkpoint: Path, student: Any) -> None:
    harness = HFLM(pretrained=str(checkpoint), device="cpu", batch_size=3, dtype="float32")
    pairs = [(row["text"], choice) for row in QUESTIONS for choice in row["choices"]]
    requests = [Instance("loglikelihood", {}, arguments=pair, idx=i) for i, pair in enumerate(pairs)]
    answers = []
    for mode in (False, True):
        harness.model.swiftkv(mode)
        answers.append([score for score, _ in harness.loglikelihood(requests)])
        expected = [log_likelihood(student.swiftkv(mode), *pair)[0] for pair in pairs]
        assert answers[-1] == pytest.approx(expected, rel=1e-5, abs=1e-4)
    assert abs(answers[0][0] - answers[1][0]) > 0.1, "the modes give different results"


def test_contexts_are_prompts_of_students_that_keep_their_own(student: Any) -> None:
    """With shared K and V the answers are the harness's own; with deep tokens that keep their own, they are those of
    the second implementation."""
    nothing: Any = lambda *_: None  # noqa: E731
    pairs = [(row["text"], choice) for row in QUESTIONS for choice in row["choices"]]
    pairs += [("Water", " is wet")]
    requests = [Instance("loglikelihood", {}, arguments=pair, idx=i) for i, pair in enumerate(pairs)]

    def shared(model: Any) -> HarnessModel:
        return HarnessModel(
            model.swiftkv(), byte_tokenizer(), Workers(), batch_size=4, progress=nothing, parts=NoResultStore()
        )

    def answers(model: Any) -> list[tuple[float, bool]]:
        found: list[tuple[float, bool]] = shared(model).loglikelihood(requests)
        return found

    encoded = [(pair, *shared(student)._encode_pair(*pair)) for pair in pairs]
    for mine, theirs in zip(shared(student)._score_continuations(encoded), answers(student), strict=True):
        assert mine == (pytest.approx(theirs[0], abs=1e-4), theirs[1])
    shape: dict[str, Any] = {"num_key_value_layers": 3, "key_value_group_size": 2, "decode_key_value": "own"}
    own = disturb(convert(random_teacher(initializer_range=0.3, max_position_embeddings=2048), **shape)).eval()
    for (context, continuation), (score, _) in zip(pairs, answers(own), strict=True):
        ids = torch.tensor(byte_tokenizer()(context + continuation, add_special_tokens=False)["input_ids"])
        size = len(context.encode())
        turns = torch.where(torch.arange(len(ids)) >= size - 1, 0, -1)
        with torch.no_grad():
            logits = reference.logits(
                own.state_dict(), own.config, ids, own.model.rotary_emb.inv_freq, swiftkv=True, turns=turns
            )
        wanted = logits[size - 1 : -1].log_softmax(-1).gather(1, ids[size:, None]).sum()
        assert score == pytest.approx(float(wanted), abs=1e-3)


@pytest.mark.soak("the harness loads in a process of its own, half a minute")
def test_the_command_knows_our_classes(checkpoint: Path, student: Any, task_file: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "swiftkv_platform.evaluation.lm_eval", "run", "--model", "hf", "--device", "cpu"]
    command += ["--model_args", f"pretrained={checkpoint},dtype=float32", "--tasks", "trivia"]
    command += ["--include_path", str(task_file.parent), "--output_path", str(tmp_path / "out")]
    done = subprocess.run(command, cwd=task_file.parent, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (results,) = (tmp_path / "out").rglob("results_*.json")
    row = json.loads(results.read_text())["results"]["trivia"]
    assert {name: row[f"{name},none"] for name in ("acc", "acc_norm")} == naive_accuracies(student.swiftkv(True))


@pytest.fixture(autouse=True)
def _machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail a test whose task collects the environment's packages, which takes seconds."""
    monkeypatch.setattr("torch.utils.collect_env.get_env_info", lambda: pytest.fail("the machine was asked"))


def scores(model: Any, tasks: list[Any], *, tokenizer: Any = None, **settings: Any) -> Any:
    return run_tasks(model, tokenizer or byte_tokenizer(), tasks, EvaluationSpec(**settings)).scores


def test_teacher_and_student_answer_a_local_task(student: Any, task_file: Path) -> None:
    specs = [str(task_file), TaskSpec(name=str(task_file), metric="acc_norm")]
    student.swiftkv(False).train()
    plain, normed = scores(student, resolve_tasks(specs), task_batch_size=2)
    assert student.training
    assert not student.model.swiftkv_enabled
    student.eval()
    teacher, distilled = naive_accuracies(student.swiftkv(False)), naive_accuracies(student.swiftkv(True))
    assert (plain.task, plain.metric, plain.num_fewshot, plain.num_samples) == ("trivia", "acc", 0, 4)
    assert (plain.teacher, plain.student) == (teacher["acc"], distilled["acc"])
    assert (normed.metric, normed.teacher, normed.student) == ("acc_norm", teacher["acc_norm"], distilled["acc_norm"])
    assert plain.drop == 100 * (teacher["acc"] - distilled["acc"])  # quarters
    low, high = plain.drop_interval or (math.nan, math.nan)
    assert low < plain.drop * 4 / 6 < high, "the interval adds two samples to the pairs"
    assert high - low > 50, "four samples give a wide interval"


def write_mmlu(directory: Path) -> None:
    """Write two subjects in the authors' format, with answers that a CSV reader could take for missing values."""
    directory.mkdir(exist_ok=True)
    for subject, count in (("art_history", 2), ("biology", 3)):
        for split in ("dev", "test"):
            (directory / split).mkdir(exist_ok=True)
            lines = [f'"Which, of {i}?",None,NA,"x, y",{i},B\n' for i in range(count)]
            (directory / split / f"{subject}_{split}.csv").write_text("".join(lines))


def write_gsm8k(directory: Path) -> None:
    directory.mkdir(exist_ok=True)
    for split in ("train", "test"):
        rows = ({"question": f"What is {i} and {i}?", "answer": f"It is {2 * i}.\n#### {2 * i}"} for i in range(6))
        (directory / f"gsm8k_{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_built_in_tasks_read_their_authors_files(student: Any, tmp_path: Path) -> None:
    """Tasks with the directory above their files as `data_dir`, which they share."""
    write_mmlu(tmp_path / "mmlu")
    write_gsm8k(tmp_path / "gsm8k")
    problem = {"prompt": "def zero():\n", "canonical_solution": "    return 0\n", "entry_point": "zero"}
    # The test does not look at the function, so every completion without a syntax error passes.
    problem["test"] = "def check(candidate):\n    pass"
    with gzip.open(tmp_path / "mmlu" / "HumanEval.jsonl.gz", "wt") as file:
        file.write(json.dumps(problem) + "\n")
    specs = [
        TaskSpec(name=f"builtin:{name}", data_dir=str(tmp_path), num_fewshot=shots)
        for name, shots in (("mmlu", 1), ("gsm8k", 1), ("humaneval", None))
    ]
    mmlu, gsm8k, humaneval = scores(
        student, resolve_tasks(specs, access=Access(code_tasks=True)), task_batch_size=4, task_limit=2
    )
    assert (mmlu.task, mmlu.metric, mmlu.num_fewshot, mmlu.num_samples) == ("mmlu_local", "acc", 1, 4)
    assert 0 <= mmlu.student <= 1
    assert mmlu.drop_interval is not None
    assert (gsm8k.task, gsm8k.metric, gsm8k.num_samples) == ("gsm8k_local", "exact_match,strict-match", 2)
    assert (humaneval.task, humaneval.metric, humaneval.num_samples) == ("humaneval_local", "pass@1", 1)
    assert humaneval.teacher in (0.0, 1.0)
    with pytest.raises(InvalidInputError, match=r"'builtin:humaneval' may run text, .*ALLOW_CODE_TASKS"):
        resolve_tasks(specs)


@pytest.mark.soak("the index of the harness's tasks takes seconds to read")
def test_the_papers_tasks_are_table_b1_and_known_to_the_harness() -> None:
    """The released harness computes every metric of the preset for the task or group of that name."""
    tasks = resolve_tasks(["paper"])
    assert [task.spec for task in tasks] == list(PAPER_TASKS)
    assert [(task.source, task.spec.num_fewshot) for task in tasks] == [
        ("arc_challenge_llama", 0),
        ("winogrande", 5),
        ("hellaswag", 10),
        ("truthfulqa_mc2", 0),
        ("mmlu_llama", 5),
        ("mmlu_cot_llama", 0),
        ("gsm8k_llama", 8),
    ]
    index = load_task_manager(True).task_index
    for spec in PAPER_TASKS:
        config = load_yaml(index[spec.name].yaml_path, resolve_func=False)
        filters: list[str] = [item["name"] for item in config.get("filter_list") or [{"name": "none"}]]
        metrics = [item["metric"] for item in config.get("metric_list", ())]
        for item in config.get("aggregate_metric_list", ()):
            metrics.append(item["metric"])
            filters = [item["filter_list"]] if isinstance(item["filter_list"], str) else item["filter_list"]
        known = {f"{metric},{name}" for metric in metrics for name in filters}
        assert spec.metric in known | set(metrics), (spec.name, known)


def test_what_cannot_be_resolved_is_said(tmp_path: Path) -> None:
    (tmp_path / "list.yaml").write_text("- a\n")
    (tmp_path / "nameless.yaml").write_text("dataset_path: json\n")
    (tmp_path / "group.yaml").write_text("group: both\ntask: [winogrande, gsm8k]\n")
    (tmp_path / "lost.yaml").write_text("task: lost\ndoc_to_text: !function no_module.text\n")
    here = str(tmp_path)
    cases: list[tuple[TaskSpec, type[Exception], str]] = [
        (TaskSpec(name="nowhere.yaml"), InvalidInputError, "the file 'nowhere.yaml' does not exist"),
        (TaskSpec(name="builtin:arc", data_dir="."), InvalidInputError, "builtin:gsm8k, builtin:mmlu, .* are accepted"),
        (TaskSpec(name="builtin:mmlu"), InvalidInputError, "needs data_dir"),
        (TaskSpec(name="builtin:mmlu", data_dir=here), DataError, "holds test/.*_test.csv and dev/"),
        (TaskSpec(name="builtin:gsm8k", data_dir=here), DataError, "gsm8k_train.jsonl"),
        (TaskSpec(name=f"{here}/list.yaml"), InvalidInputError, "is not a task file"),
        (TaskSpec(name=f"{here}/nameless.yaml"), InvalidInputError, "has no field `task`"),
        (TaskSpec(name=f"{here}/group.yaml"), InvalidInputError, "is a group"),
        (TaskSpec(name=f"{here}/lost.yaml"), InvalidInputError, "is not a task file: Cannot import module 'no_module'"),
    ]
    for spec, error, message in cases:
        with pytest.raises(error, match=message):
            resolve_tasks([spec])


def test_what_a_task_cannot_do_is_said(student: Any, task_file: Path) -> None:
    for changes, message in (
        ({"metric": "f1"}, "trivia has no metric 'f1'; use one of acc, acc_norm"),
        ({"chat_template": True}, "sets chat_template"),
    ):
        spec = TaskSpec.model_validate({"name": str(task_file), **changes})
        with pytest.raises(InvalidInputError, match=message):
            scores(student.swiftkv(True), resolve_tasks([spec]), task_limit=1)
        assert student.model.swiftkv_enabled
        with pytest.raises(InvalidInputError, match=message):
            check_tasks([spec], byte_tokenizer())


def test_tasks_beyond_the_time_limit_are_named(student: Any, task_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    minutes = iter([0.0, 0.9, 1.0, 9.0])  # read at the start, and before each task
    monkeypatch.setattr("swiftkv_platform.evaluation.harness.run.time.monotonic", lambda: 60.0 * next(minutes))
    tasks = [resolve_tasks([TaskSpec(name=str(task_file))])[0] for _ in range(3)]
    found = run_tasks(student, byte_tokenizer(), tasks, EvaluationSpec(max_minutes=1.0, task_limit=1))
    assert [score.task for score in found.scores] == ["trivia"]
    assert found.left_out == (str(task_file), str(task_file))


def test_tasks_and_metrics_that_the_harness_lacks_are_refused_before_anything_runs(student: Any) -> None:
    with pytest.raises(InvalidInputError, match="cannot load 'no_such_task'"):
        scores(student, resolve_tasks(["no_such_task"]))
    with pytest.raises(InvalidInputError, match=r"cannot load 'gsm9k': unknown task, similar names: .*gsm8k") as caught:
        check_tasks(["gsm9k"], byte_tokenizer())
    assert (caught.value.field, caught.value.value) == ("evaluation.tasks", "gsm9k")
    for name, metric, known in (
        ("winogrande", "acc_norm", "winogrande has no metric 'acc_norm'; use one of acc"),
        ("gsm8k", "exact_match,strict_match", "use one of exact_match,strict-match, exact_match,flexible-extract"),
        ("mmlu", "acc_norm", "mmlu has no metric 'acc_norm'; use one of acc"),
        ("ai2_arc", "f1", "arc_challenge has no metric 'f1'; use one of acc, acc_norm"),
        ("pythia", None, "pythia has no group score"),
    ):
        with pytest.raises(InvalidInputError, match=known):
            check_tasks([TaskSpec(name=name, metric=metric)], byte_tokenizer())
    check_tasks([TaskSpec(name="truthfulqa_gen", metric="anything")], byte_tokenizer())  # known only to its code


def test_tasks_that_can_run_pass_the_check(task_file: Path, tmp_path: Path) -> None:
    write_mmlu(tmp_path)
    write_gsm8k(tmp_path)
    files: list[str | TaskSpec] = [
        TaskSpec(name="builtin:mmlu", data_dir=str(tmp_path), metric="acc"),
        TaskSpec(name="builtin:gsm8k", data_dir=str(tmp_path), metric="exact_match"),
        TaskSpec(name=str(task_file), metric="acc_norm"),
    ]
    check_tasks(["paper", "ai2_arc", TaskSpec(name="wikitext", metric="word_perplexity"), *files], byte_tokenizer())


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch, task_file: Path) -> None:
    """The error names a missing task file in the object store, or the missing harness."""

    def fetch(address: str) -> Path:
        raise DataError(f"data.sources: there is no object at {address!r}", field="data.sources", value=address)

    with pytest.raises(DataError, match=r"^evaluation\.tasks: 's3://bucket/tasks/' does not exist") as caught:
        check_tasks(["s3://bucket/tasks/own.yaml"], byte_tokenizer(), fetch=fetch)
    assert caught.value.field == "evaluation.tasks"
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    check_tasks([], byte_tokenizer())
    with pytest.raises(InvalidInputError, match=r"needs lm_eval; run pip install -e .*\[eval\]"):
        check_tasks([str(task_file)], byte_tokenizer())


def test_of_a_perplexity_less_is_better(student: Any, tmp_path: Path) -> None:
    (tmp_path / "pages.jsonl").write_text(json.dumps({"page": "The grass is green."}) + "\n")
    changes = {"task": "pages", "dataset_kwargs": {"data_files": {"test": "pages.jsonl"}}}
    changes |= {"output_type": "loglikelihood_rolling", "doc_to_text": "", "doc_to_target": "{{page}}"}
    config = TASK | changes | {"metric_list": [{"metric": "byte_perplexity"}]}
    del config["doc_to_choice"]
    (tmp_path / "pages.yaml").write_text(yaml.safe_dump(config))
    unnamed, named = str(tmp_path / "pages.yaml"), TaskSpec(name=str(tmp_path / "pages.yaml"), metric="byte_perplexity")
    with pytest.raises(
        InvalidInputError, match="no metric for which higher is better; set `metric` to one of byte_perplexity"
    ):
        check_tasks([unnamed], byte_tokenizer())
    check_tasks([named], byte_tokenizer())
    (score,) = scores(student, resolve_tasks([named]), task_batch_size=1)
    assert not score.higher_is_better
    assert score.drop == pytest.approx(100 * (score.student / score.teacher - 1), abs=1e-5)


def test_needles_and_calls_of_tools_need_no_data(
    student: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """They also need no git repository, for the lack of which the harness prints an error."""
    monkeypatch.chdir(tmp_path)
    found = scores(student, build_needle_tasks((128, 256), 1, byte_tokenizer(), chat=False))
    expected = [("needle_128", "found", 1), ("needle_256", "found", 1)]
    assert [(score.task, score.metric, score.num_samples) for score in found] == expected
    assert {score.teacher for score in found} == {0.0}, "random weights answer nothing right"
    assert all(score.drop_interval is not None for score in found)
    (score,) = scores(student, resolve_tasks([TaskSpec(name="builtin:tool-calls", metric="valid_json")]), task_limit=2)
    assert (score.task, score.metric, score.num_samples) == ("tool_calls", "valid_json", 2)
    assert "not a git repository" not in capfd.readouterr().err


@pytest.mark.parametrize(
    ("tuned", "asked", "templated"),
    [(True, None, True), (False, None, False), pytest.param(True, False, False, marks=WIDE)],
    ids=["by default", "a base model", "told not to"],
)
def test_instructions_go_through_the_template_of_tuned_models(
    student: Any, tuned: bool, asked: bool | None, templated: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = byte_tokenizer()
    if tuned:
        tokenizer.chat_template = "{% for message in messages %}</s>{{ message.content }}{% endfor %}"
    generate_until, prompts = HarnessModel.generate_until, []

    def watched(self: HarnessModel, requests: list[Any], **options: Any) -> list[str]:
        prompts.extend(request.args[0] for request in requests)
        return generate_until(self, requests, **options)

    monkeypatch.setattr(HarnessModel, "generate_until", watched)
    spec = TaskSpec(name="builtin:tool-calls", chat_template=asked)
    (score,) = scores(student, resolve_tasks([spec]), tokenizer=tokenizer, task_limit=1)
    assert score.chat_template is templated
    assert len(prompts) == 2, "teacher and student"
    assert all(("</s>" in prompt) is templated for prompt in prompts)
