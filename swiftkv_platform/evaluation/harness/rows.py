"""Tasks of own rows (`evaluation.rows`) for lm-evaluation-harness, which runs them as it runs its own.

Prompts are rendered as in serving, with tools, before the harness sees them. Labels are compared by log-likelihood, so
that a model's wording does not matter and every row has a prediction.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from swiftkv_platform.contract.row_results import (
    ModeResult,
    RowResult,
    make_keys_unique,
    shorten_answer,
    shorten_prompt,
)
from swiftkv_platform.data.chat import ChatRenderer
from swiftkv_platform.data.evaluation_rows import (
    EvaluationRow,
    compile_schema,
    contains_answer,
    find_label,
    get_message_text,
    is_close,
    is_valid_json,
    matches_exactly,
    read_evaluation_rows,
)
from swiftkv_platform.data.formats import Content, Conversation
from swiftkv_platform.data.messages import Message, RowError
from swiftkv_platform.data.source_rows import RemoteFiles
from swiftkv_platform.errors import DataError
from swiftkv_platform.evaluation.harness.builtin import build_generation_task, make_dataset
from swiftkv_platform.evaluation.harness.tasks import Generate, Task, check_harness_installed
from swiftkv_platform.sources import UNRESTRICTED, Access
from swiftkv_platform.specs import EvaluationSpec, RowTaskSpec, TaskSpec

ROW_KEY = "row_key"
"""Field of a document that holds the key of its row."""
ROW_PROMPT = "row_prompt"
"""Field of a document that holds the last message of its row, or its text."""
ROW_EXPECTED = "row_expected"
"""Field of a document: its expected answer; empty without one."""


def build_row_tasks(
    spec: EvaluationSpec,
    tokenizer: PreTrainedTokenizerBase,
    *,
    context_length: int,
    remote: RemoteFiles | None,
    access: Access = UNRESTRICTED,
) -> list[Task]:
    """Return the tasks of own rows. Rows are read when a task runs, on the first worker only.

    Args:
        context_length: max tokens of a prompt with its answer.
        remote: required for `s3://` sources and uploaded files only.
        access: the job's read permissions.
    """
    builders = _make_builders(spec, tokenizer, context_length, remote, access)
    return [
        Task(TaskSpec(name=builder.spec.name, chat_template=False), {}, build=builder.build) for builder in builders
    ]


def check_row_tasks(
    spec: EvaluationSpec,
    tokenizer: PreTrainedTokenizerBase,
    *,
    context_length: int,
    remote: RemoteFiles | None,
    access: Access = UNRESTRICTED,
) -> None:
    """Read all rows before a run, without a model. Raises `DataError` with the line of the first row that lacks what
    its metric needs, or whose prompt the chat template refuses or the context cannot hold."""
    for builder in _make_builders(spec, tokenizer, context_length, remote, access):
        builder.read_documents()


def _make_builders(
    spec: EvaluationSpec,
    tokenizer: PreTrainedTokenizerBase,
    context_length: int,
    remote: RemoteFiles | None,
    access: Access,
) -> list[_RowTaskBuilder]:
    if spec.rows:
        check_harness_installed("evaluation.rows")
    return [
        _RowTaskBuilder(task, index, spec.task_limit, tokenizer, context_length, remote, access)
        for index, task in enumerate(spec.rows)
    ]


@dataclass(frozen=True)
class _RowTaskBuilder:
    """Builds the harness's configuration of one task."""

    spec: RowTaskSpec
    index: int
    limit: int | None
    """Max rows, the first ones; None: all."""
    tokenizer: PreTrainedTokenizerBase
    context_length: int
    remote: RemoteFiles | None
    access: Access

    def build(self, generate: Generate) -> dict[str, Any]:
        """Return the configuration. `generate`: generates the teacher's answers to prompts."""
        spec, documents = self.spec, self.read_documents()
        if spec.metric == "likelihood":
            documents = self._add_teacher_answers(documents, generate)
        dataset = {
            "custom_dataset": partial(make_dataset, lambda: [self.make_dataset_row(each) for each in documents]),
            "doc_to_text": _get_context,
        }
        if spec.metric == "likelihood":
            return _build_likelihood_task(spec, dataset)
        if spec.metric == "classification":
            return _build_classification_task(spec, dataset)
        return build_generation_task(
            spec.name,
            ROW_EXPECTED,
            partial(_score_answer, spec.metric, _make_scorer(spec)),
            {spec.metric: "mean"},
            until=list(spec.stop),
            max_tokens=spec.max_tokens,
            **dataset,
        )

    def read_documents(self) -> list[_Document]:
        rows = read_evaluation_rows(self.spec, self.index, remote=self.remote, access=self.access)
        return [self._make_document(row) for row in islice(rows, self.limit)]

    def _make_document(self, row: EvaluationRow) -> _Document:
        spec = self.spec
        try:
            document = _Document(row, self._render_prompt(row.prompt))
            if spec.metric == "likelihood" and row.answer is not None:
                document = self._add_answer(document, row.answer)
            elif spec.metric == "classification":
                document = replace(document, continuations=self._render_labels(row.prompt, document.context))
            self._check_length(document)
        except RowError as error:
            raise row.source.make_error(error, f"evaluation.rows[{self.index}].source") from error
        return document

    def _render_prompt(self, prompt: Content) -> str:
        """Return the text before the answer. Where no chat template writes BOS, the harness adds it."""
        return prompt if isinstance(prompt, str) else ChatRenderer(self.tokenizer).render_prompt(prompt)

    def _render_labels(self, prompt: Content, context: str) -> tuple[str, ...]:
        """Return the labels as they follow the prompt: after a text without white space at its end, a space."""
        space = " " if isinstance(prompt, str) and not context[-1].isspace() else ""
        return tuple(f"{space}{label}" for label in self.spec.labels)

    def _add_answer(self, document: _Document, answer: Message) -> _Document:
        """Add the answer whose likelihood is computed, with the end of its message as in training."""
        prompt, text = document.row.prompt, get_message_text(answer)
        if isinstance(prompt, str):
            space = " " if not (prompt[-1].isspace() or text[:1].isspace()) else ""
            return replace(document, expected=text, continuations=(f"{space}{text}",))
        # Of all answers in the conversation, only the last one is a target.
        others = [{**message, "weight": 0} for message in prompt.messages]
        talk = Conversation([*others, {**answer, "weight": 1}], prompt.tools)
        for rendered in ChatRenderer(self.tokenizer).render_for_training(talk, "assistant"):
            if rendered.loss_spans:
                begin, end = rendered.loss_spans[0][0], rendered.loss_spans[-1][1]
                continuation = rendered.text[begin:end]
                return replace(document, context=rendered.text[:begin], expected=text, continuations=(continuation,))
        raise RowError("the chat template does not render the row's answer; use plain text as the answer")

    def _check_length(self, document: _Document) -> None:
        """Raise `RowError` if prompt and answer exceed the context, of which the harness would drop the beginning."""
        tokens = self._count_tokens(document.context)
        needed = max((self._count_answer_tokens(document.context, each) for each in document.continuations), default=0)
        needed = needed or self.spec.max_tokens
        if tokens + needed + 1 > self.context_length:  # some tokenizers add BOS
            raise RowError(
                f"its prompt has {tokens:,} tokens and its answer up to {needed:,}, but the model's context has "
                f"{self.context_length:,}; shorten the prompt, lower max_tokens, or leave the row out"
            )

    def _count_answer_tokens(self, context: str, continuation: str) -> int:
        """Count the tokens whose likelihood the harness sums: white space at the end of a context is one of them."""
        return self._count_tokens(context + continuation) - self._count_tokens(context.rstrip())

    def _count_tokens(self, text: str) -> int:
        return len(self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])

    def _add_teacher_answers(self, documents: list[_Document], generate: Generate) -> list[_Document]:
        """Give documents without an answer that of the teacher; those whose answer is empty are left out. Raises
        `DataError` if none is left."""
        missing = [i for i, document in enumerate(documents) if not document.continuations]
        prompts = [documents[i].context for i in missing]
        answers = generate(prompts, max_tokens=self.spec.max_tokens, until=list(self.spec.stop)) if prompts else []
        found: dict[int, _Document | None] = {
            i: self._add_answer(documents[i], {"role": "assistant", "content": answer}) if answer.strip() else None
            for i, answer in zip(missing, answers, strict=True)
        }
        left = [each for i, document in enumerate(documents) if (each := found.get(i, document)) is not None]
        if not left:
            field = f"evaluation.rows[{self.index}].source"
            raise DataError(
                f"{field}: the teacher's answers to all rows are empty; add rows with an answer", field=field
            )
        return left

    def make_dataset_row(self, document: _Document) -> dict[str, str]:
        """Return the columns of a document, all of them texts."""
        prompt, answer = document.row.prompt, document.row.expected
        expected = answer if document.expected is None else document.expected
        num_tokens = [self._count_answer_tokens(document.context, each) for each in document.continuations[:1]]
        return {
            ROW_KEY: document.row.key,
            ROW_PROMPT: prompt if isinstance(prompt, str) else prompt.messages[-1]["content"] or "",
            ROW_EXPECTED: "" if expected is None else expected,
            "context": document.context,
            "continuations": json.dumps(document.continuations),
            "num_tokens": str(max(*num_tokens, 1)) if num_tokens else "",
            "schema": json.dumps(document.row.schema),
        }


@dataclass(frozen=True)
class _Document:
    """A row with the texts that the harness needs."""

    row: EvaluationRow
    context: str
    """Text before the answer."""
    expected: str | None = None
    """Answer whose likelihood is computed; None: that of the row."""
    continuations: tuple[str, ...] = ()
    """Texts whose likelihood after the context is computed."""


def _get_context(document: Mapping[str, Any]) -> str:
    return str(document["context"])


def _get_continuations(document: Mapping[str, Any]) -> list[str]:
    found: list[str] = json.loads(document["continuations"])
    return found


Scorer = Callable[[Mapping[str, Any], str], bool]
"""(document, answer) -> whether the answer passes."""


def _make_scorer(spec: RowTaskSpec) -> Scorer:
    if spec.metric == "exact_match":
        return lambda row, answer: matches_exactly(answer, row[ROW_EXPECTED], ignore_case=spec.ignore_case)
    if spec.metric == "contains":
        return lambda row, answer: contains_answer(answer, row[ROW_EXPECTED], ignore_case=spec.ignore_case)
    if spec.metric == "numeric":
        absolute, relative = spec.absolute_tolerance, spec.relative_tolerance
        return lambda row, answer: is_close(answer, row[ROW_EXPECTED], absolute=absolute, relative=relative)
    assert spec.metric == "json_schema"
    return lambda row, answer: is_valid_json(answer, compile_schema(json.loads(row["schema"])))


def _score_answer(metric: str, scorer: Scorer, document: Mapping[str, Any], results: Sequence[str]) -> dict[str, float]:
    return {metric: float(scorer(document, results[0]))}


def _build_scored_task(spec: RowTaskSpec, output_type: str, **fields: Any) -> dict[str, Any]:
    return {
        "task": spec.name,
        "test_split": "test",
        "output_type": output_type,
        "num_fewshot": 0,
        "target_delimiter": "",
        "metric_list": [{"metric": spec.metric, "aggregation": "mean", "higher_is_better": True}],
        **fields,
    }


def _build_classification_task(spec: RowTaskSpec, dataset: Mapping[str, Any]) -> dict[str, Any]:
    def find_expected(document: Mapping[str, Any]) -> int:
        label = find_label(spec, document[ROW_EXPECTED])
        assert label is not None, "rows with other answers are refused"
        return label

    def score(document: Mapping[str, Any], results: Sequence[tuple[float, bool]]) -> dict[str, float]:
        likelihoods = [likelihood for likelihood, _ in results]
        return {spec.metric: float(likelihoods.index(max(likelihoods)) == find_expected(document))}

    fields = {"doc_to_choice": _get_continuations, "doc_to_target": find_expected, "process_results": score}
    return _build_scored_task(spec, "multiple_choice", **fields, **dataset)


def _build_likelihood_task(spec: RowTaskSpec, dataset: Mapping[str, Any]) -> dict[str, Any]:
    def get_continuation(document: Mapping[str, Any]) -> str:
        return _get_continuations(document)[0]

    def score(document: Mapping[str, Any], results: Sequence[tuple[float, bool]]) -> dict[str, float]:
        return {spec.metric: results[0][0] / int(document["num_tokens"])}

    fields = {"doc_to_target": get_continuation, "process_results": score}
    return _build_scored_task(spec, "loglikelihood", **fields, **dataset)


Sample = Mapping[str, Any]
_KEY_LENGTH = 16


def collect_rows(name: str, metric: str, teacher: Mapping[str, Any], student: Mapping[str, Any]) -> list[RowResult]:
    """Return the results of a task's or group's rows.

    Args:
        metric: the harness's key, with its filter.

    Returns:
        An empty list if the harness has no number per row, or if both modes do not have the same rows.
    """
    modes = [list(_iter_samples(name, metric, answers)) for answers in (teacher, student)]
    if [sample["doc_hash"] for sample in modes[0]] != [sample["doc_hash"] for sample in modes[1]]:
        return []
    key = metric.partition(",")[0]
    if not all(isinstance(sample[key], int | float | np.number | np.bool_) for mode in modes for sample in mode):
        return []
    keys = make_keys_unique([_get_key(sample) for sample in modes[0]])
    return [
        RowResult(
            key=row_key,
            prompt=shorten_prompt(_get_prompt(ours)),
            expected=_get_expected(ours),
            teacher=ModeResult(score=float(ours[key]), answer=_get_answer(ours)),
            student=ModeResult(score=float(theirs[key]), answer=_get_answer(theirs)),
        )
        for row_key, ours, theirs in zip(keys, *modes, strict=True)
    ]


def _iter_samples(name: str, metric: str, answers: Mapping[str, Any]) -> Iterator[Sample]:
    """Yield the samples of a task, or of all tasks of a group, in order."""
    key, _, filtered = metric.partition(",")
    for leaf in dict.fromkeys((name, *iter_subtasks(name, answers))):
        samples = [row for row in answers["samples"].get(leaf, ()) if row["filter"] == filtered and key in row]
        yield from sorted(samples, key=lambda row: int(row["doc_id"]))


def iter_subtasks(name: str, answers: Mapping[str, Any]) -> Iterator[str]:
    """Yield the tasks of a group, including nested groups and their tasks."""
    for child in answers["group_subtasks"].get(name, ()):
        yield child
        yield from iter_subtasks(child, answers)


def _get_key(sample: Sample) -> str:
    """Return the key of an own row, or a hash of the harness's document."""
    own = sample["doc"].get(ROW_KEY) if isinstance(sample["doc"], Mapping) else None
    return str(own or sample["doc_hash"])[:_KEY_LENGTH]


def _get_prompt(sample: Sample) -> str:
    document = sample["doc"]
    if isinstance(document, Mapping) and ROW_PROMPT in document:
        return str(document[ROW_PROMPT])
    return str(sample["arguments"][0][0])


def _get_expected(sample: Sample) -> str | None:
    document, target = sample["doc"], sample["target"]
    if isinstance(document, Mapping) and ROW_EXPECTED in document:
        return shorten_answer(document[ROW_EXPECTED]) or None
    choices = _get_choices(sample)
    if isinstance(target, int) and 0 <= target < len(choices):
        return shorten_answer(choices[target])
    return shorten_answer(str(target)) or None


def _get_choices(sample: Sample) -> Sequence[str]:
    """Return the continuations that the harness compared by likelihood; empty for generated text."""
    return [str(arguments[1]).strip() for arguments in sample["arguments"] if isinstance(arguments[1], str)]


def _get_answer(sample: Sample) -> str | None:
    """Return the generated text, or the most likely of several continuations; None for a single likelihood."""
    found = sample["filtered_resps"]
    if isinstance(found[0], str):
        return shorten_answer(found[0])
    choices = _get_choices(sample)
    likelihoods = [each[0] for each in found if isinstance(each, tuple | list)]
    if len(choices) < 2 or len(likelihoods) != len(choices):
        return None
    return shorten_answer(choices[likelihoods.index(max(likelihoods))])
