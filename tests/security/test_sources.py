"""Sources, models and tasks of a tenant stay within its roots, run no code and reach no socket."""

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from swiftkv_platform.data.source_rows import open_source
from swiftkv_platform.errors import InvalidInputError, SwiftKVError
from swiftkv_platform.evaluation.harness import trust
from swiftkv_platform.evaluation.harness.run import run_tasks
from swiftkv_platform.evaluation.harness.tasks import resolve_tasks
from swiftkv_platform.evaluation.harness.trust import find_code_risk
from swiftkv_platform.model import convert
from swiftkv_platform.sources import Access, SourceRules
from swiftkv_platform.specs import PAPER_TASKS, DataSourceSpec, EvaluationSpec, JobSpec
from tests.security.hostile_sources import (
    CANARY,
    DATA,
    MODELS,
    Listener,
    Stage,
    lay_out_hub_data,
    lay_out_hub_model,
    listening,
    ssti,
    write_rows,
    write_task,
)
from tests.support.fakes.tokenizers import byte_tokenizer

TENANT = "acme"


@pytest.fixture
def listener() -> Iterator[Listener]:
    with listening() as found:
        yield found


@pytest.fixture
def stage(tmp_path: Path, listener: Listener, tiny_teacher: Path, monkeypatch: pytest.MonkeyPatch) -> Stage:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    return Stage.build(tmp_path, listener.url, tiny_teacher)


def access(stage: Stage) -> Access:
    return SourceRules((str(stage.root),)).build_access(TENANT)


def read_rows(stage: Stage, name: Path | str, **options: Any) -> str:
    """Return the text of all rows that a job of the tenant reads from a source, once its spec is accepted."""
    source = DataSourceSpec(name_or_path=str(name), **options)
    spec = JobSpec.model_validate({"name": "t", "data": {"sources": [source]}})
    access(stage).check_spec(spec)
    tables = open_source(source, source_field="data.sources[0]", remote=None, access=access(stage))
    return "".join(str(row) for table in tables for _, row in table.read_rows(None))


def read_model(stage: Stage, name: Path | str, workspace: Path) -> str:
    """Return what the tenant's job keeps of a model, once its spec is accepted: the text of its tokenizer's files."""
    from swiftkv_platform.jobs.worker.setup import load_student, load_tokenizer, resolve_teacher

    spec = JobSpec.model_validate({"name": "t", "model": {"name_or_path": str(name), "dtype": "float32"}})
    access(stage).check_spec(spec)
    path = resolve_teacher(spec.model, workspace, access=access(stage))
    load_student(spec, path)
    load_tokenizer(spec, path).save_pretrained(workspace / "kept")
    return "".join(file.read_text(errors="replace") for file in sorted((workspace / "kept").iterdir()))


@pytest.mark.parametrize("name", DATA)
def test_a_source_neither_leaves_the_root_nor_runs_code(stage: Stage, listener: Listener, name: str) -> None:
    directory = DATA[name](stage)
    for streaming in (False, True):
        if name == "pictures":  # its text may be read, but not its pictures
            assert "own" in read_rows(stage, directory, streaming=streaming)
        else:
            with pytest.raises(SwiftKVError) as caught:
                read_rows(stage, directory, streaming=streaming)
            assert str(caught.value.field).startswith("data.sources[0]")
            assert CANARY not in str(caught.value)
    assert listener.connections == []
    assert not stage.marker.exists()


@pytest.mark.parametrize("lay_out", MODELS)
def test_a_model_neither_leaves_the_root_nor_runs_code(
    stage: Stage, tmp_path: Path, lay_out: Callable[[Stage], Path]
) -> None:
    directory = lay_out(stage)
    with pytest.raises(SwiftKVError) as caught:
        read_model(stage, directory, tmp_path / "work")
    assert caught.value.field == "model.name_or_path"
    assert not stage.marker.exists()


def test_what_is_sound_is_read(stage: Stage, tmp_path: Path) -> None:
    write_rows(stage.root / "rows.jsonl", "own")
    (stage.root / "link.jsonl").symlink_to("rows.jsonl")
    assert read_rows(stage, stage.root / "link.jsonl").count("own") == 8
    (stage.root / "out.jsonl").symlink_to(stage.outside / "canary.jsonl")
    (stage.root / "teacher").symlink_to(Path(stage.teacher), target_is_directory=True)
    with pytest.raises(SwiftKVError, match="may not read"):
        read_rows(stage, stage.root / "out.jsonl")
    with pytest.raises(SwiftKVError, match="may not read"):
        read_model(stage, stage.root / "teacher", tmp_path)


@pytest.fixture
def hub_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The hub's cache on a machine that cannot reach the hub."""
    import huggingface_hub.constants
    import transformers.utils.hub

    cache = tmp_path / "hub"
    cache.mkdir()
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(transformers.utils.hub.constants, "HF_HUB_CACHE", str(cache))
    return cache


def test_neither_a_model_nor_a_card_of_the_hub_leads_elsewhere(
    stage: Stage, hub_cache: Path, listener: Listener, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(SwiftKVError) as caught:
        read_model(stage, lay_out_hub_model(stage, hub_cache), tmp_path / "work")
    assert caught.value.field == "model.name_or_path"
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.setattr("datasets.config.HF_ENDPOINT", "http://127.0.0.1:1")
    with pytest.raises(SwiftKVError, match=r"README\.md") as caught:
        read_rows(stage, lay_out_hub_data(stage, hub_cache))
    assert caught.value.field is not None
    assert listener.connections == []


@pytest.fixture
def quiet(tmp_path: Path, tiny_teacher: Path) -> Stage:
    return Stage.build(tmp_path, "http://127.0.0.1:1", tiny_teacher)


def job(task: str | dict[str, Any]) -> JobSpec:
    return JobSpec.model_validate({"name": "t", "evaluation": {"tasks": [task]}})


def accept(quiet: Stage, spec: JobSpec) -> None:
    SourceRules((str(quiet.root),)).build_access(TENANT).check_spec(spec)


def answer(quiet: Stage, spec: JobSpec) -> None:
    """Run the tasks of a spec as a worker does, without checking that it was accepted."""
    student = convert(quiet.teacher, num_key_value_layers=3)
    run_tasks(
        student, byte_tokenizer(), resolve_tasks(spec.evaluation.tasks), EvaluationSpec(task_batch_size=1, task_limit=1)
    )


@pytest.mark.parametrize("where", ["absolute", "relative", "home"])
def test_a_file_of_the_job_is_no_task(quiet: Stage, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    monkeypatch.chdir(quiet.root)
    monkeypatch.setenv("HOME", str(quiet.root))
    for name in ("notes.txt", "config.json", "task", "task.YAML", "task.yaml"):
        file = write_task(quiet.root / name, quiet)
        named = {"absolute": str(file), "relative": f"./{name}", "home": f"~/{name}"}[where]
        with pytest.raises(InvalidInputError) as caught:
            accept(quiet, job(named))
        assert caught.value.field == "evaluation.tasks[0]"


def test_plain_names_of_the_harness_are_accepted_alone(quiet: Stage) -> None:
    for name in ("gsm8k", "mmlu_llama", "egymmlu_arabic_language_(general)", "paper"):
        accept(quiet, job({"name": name, "num_fewshot": 0}))
    for name in ("a/b", "..", "../task", "task\\x", "s3://bucket/acme/task", "*", " gsm8k", "-n"):
        with pytest.raises(InvalidInputError) as caught:
            accept(quiet, job(name))
        assert caught.value.field == "evaluation.tasks[0]"


@pytest.mark.slow("the harness takes seconds to import and to read its index")
def test_a_worker_opens_no_file_that_is_called_like_a_task(quiet: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(quiet.root)
    for name in ("innocent", "teacher"):
        write_task(quiet.root / name, quiet)
        accept(quiet, job(name))  # as a name it is accepted
        with pytest.raises(SwiftKVError, match="unknown task") as caught:
            answer(quiet, job(name))
        assert caught.value.field == "evaluation.tasks"
    assert not quiet.marker.exists(), "its code has run"


@pytest.mark.slow("the harness takes seconds to import and to read its index")
def test_templates_of_the_harness_are_rendered_in_a_sandbox(quiet: Stage) -> None:
    """Templates of a task's file run in a sandbox even where the operator allows such files."""
    file = write_task(quiet.root / "task.yaml", quiet)
    text = "".join(line for line in file.read_text().splitlines(keepends=True) if "!function" not in line)
    file.write_text(text)
    assert ssti(quiet.marker) in text
    with pytest.raises(SwiftKVError) as caught:
        answer(quiet, job(str(file)))
    assert not quiet.marker.exists(), "its template has run a command"
    assert "unsafe" in caught.value.message


@pytest.mark.slow("the harness takes seconds to import and to read its index")
def test_tasks_that_run_generated_code_are_the_operators_to_allow() -> None:
    for name in ("humaneval", "mbpp_plus", "cruxeval_input_cot"):
        with pytest.raises(InvalidInputError, match="SWIFTKV_ALLOW_CODE_TASKS") as caught:
            resolve_tasks([name], access=SourceRules(()).build_access(TENANT))
        assert caught.value.value == name
        [task] = resolve_tasks([name], access=SourceRules((), code_tasks=True).build_access(TENANT))
        assert task.runs_code


TRUSTED = (
    *("mmlu", "gsm8k", "hellaswag", "winogrande", "ai2_arc", "truthfulqa_mc2", "truthfulqa_gen", "bbh", "mmlu_pro"),
    *("gpqa", "drop", "triviaqa", "wikitext", "lambada", "squad_completion", "ifeval", "mgsm_direct"),
    *(task.name for task in PAPER_TASKS),
)
UNTRUSTED = {
    **dict.fromkeys(("minerva_math", "math_word_problems"), "minerva_math/utils.py imports"),
    **dict.fromkeys(("leaderboard_math_hard", "leaderboard"), "leaderboard/math/utils.py imports sympy"),
    "putnam_axiom": "putnam_axiom/utils.py imports sympy",
    "non_greedy_robustness_math_algebra": "score/math/math_grader.py imports sympy",
    "squadv2": "squadv2/task.py imports evaluate",
    "xquad_de": "xquad/utils.py imports evaluate",
    "wmt-ro-en-t5-prompt": "its metric 'wer' is downloaded as code",
    "afrimmlu_direct_amh_prompt_1": "its metric 'f1' is downloaded as code",
    "pisa": "pisa/utils.py imports openai",
    "humaneval": "marks it as unsafe",
}
RUNS_CODE = re.compile(
    r"^\s*(import|from) (sympy|math_verify|latex2sympy|subprocess|pickle|openai|evaluate|multiprocessing)\b"
    r"|evaluate\.load\(|[^.\w](exec|eval)\(|os\.system\(",
    re.MULTILINE,
)


@pytest.mark.slow("the harness takes seconds to import and to read its index")
def test_tasks_are_trusted_by_what_their_scorers_import() -> None:
    """The harness itself marks only a few of the tasks that run text as code."""
    from swiftkv_platform.evaluation.harness.tasks import load_task_manager

    found = {name: find_code_risk(name, load_task_manager(True)) for name in (*TRUSTED, *UNTRUSTED)}
    assert {name: why for name, why in found.items() if name in TRUSTED and why} == {}
    assert {name: why for name, why in found.items() if name in UNTRUSTED and UNTRUSTED[name] not in str(why)} == {}


@pytest.mark.slow("the harness takes seconds to import and to read its index")
def test_no_file_of_the_installed_harness_that_runs_text_is_trusted() -> None:
    import lm_eval.tasks

    root = Path(lm_eval.tasks.__path__[0])
    files = [file for file in root.rglob("*.py") if file.parent != root and RUNS_CODE.search(file.read_text())]
    assert len(files) > 20
    assert [file for file in files if trust._find_file_risk(file) is None] == []


@pytest.mark.slow("the harness takes seconds to import and to read its index")
def test_a_group_runs_code_if_one_of_its_tasks_does() -> None:
    from swiftkv_platform.evaluation.harness.tasks import load_task_manager

    index, longproc = load_task_manager(True).task_index, "longproc_countdown_2k"
    tags = [name for name, entry in index.items() if "humaneval" in entry.tags or "mbpp" in entry.tags][:1]
    groups = [name for name, entry in index.items() if entry.cfg and longproc in str(entry.cfg.get("task"))]
    found = [name for name in (*tags, *groups) if name != longproc]
    assert found, "the harness has a group with such a task"
    for name in found:
        with pytest.raises(InvalidInputError, match="SWIFTKV_ALLOW_CODE_TASKS"):
            resolve_tasks([name])
    assert not any(task.runs_code for task in resolve_tasks(["gsm8k", "mmlu"]))


def test_only_allowed_servers_are_asked_as_teachers() -> None:
    def spec(endpoint: str) -> JobSpec:
        source = {"name_or_path": "builtin:chat-prompts", "complete": {"endpoint": endpoint, "model": "m"}}
        return JobSpec.model_validate({"name": "t", "data": {"sources": [source]}})

    access = SourceRules((), teacher_origins=("https://llm.example", "http://*.internal:8000")).build_access("acme")
    for endpoint in ("https://llm.example/v1", "http://vllm.internal:8000/v1"):
        access.check_spec(spec(endpoint))
        with pytest.raises(InvalidInputError, match="SWIFTKV_TEACHER_ORIGINS"):
            SourceRules((), teacher_origins=()).build_access("acme").check_spec(spec(endpoint))
        SourceRules(None).build_access("acme").check_spec(spec(endpoint))
    for endpoint in (
        "http://llm.example/v1",
        "https://llm.example.evil/v1",
        "http://internal:8000",
        "http://a.internal",
    ):
        with pytest.raises(InvalidInputError, match="which the operator does not allow") as caught:
            access.check_spec(spec(endpoint))
        assert (caught.value.field, caught.value.value) == ("data.sources[0].complete.endpoint", endpoint)
