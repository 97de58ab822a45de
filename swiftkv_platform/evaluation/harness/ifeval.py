"""IFEval (Zhou et al., 2023) over its authors' own file, scored by the checkers of lm-evaluation-harness.

The checkers need nltk's sentence model, which has to be downloaded. Without it, sentences are split at their
punctuation and words at white space. Both modes of a model are scored alike, but scores may differ by a few tenths of a
point from those with nltk's model.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from functools import cache
from types import SimpleNamespace
from typing import Any

from swiftkv_platform.errors import InvalidInputError

FILE = "input_data.jsonl"
_METRICS = ("prompt_level_strict_acc", "inst_level_strict_acc", "prompt_level_loose_acc", "inst_level_loose_acc")
_SENTENCE_END = re.compile(r"(?<=[.!?])[\"')\]]*\s+")


def configuration(file: str) -> dict[str, Any]:
    """Return the configuration of the task over a copy of `FILE`, given by the name that `datasets` takes. Raises
    `InvalidInputError` if the packages that the checkers need are not installed."""
    _checkers()
    return {
        "task": "ifeval_local",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": file}},
        "test_split": "test",
        "output_type": "generate_until",
        "doc_to_text": "{{prompt}}",
        "doc_to_target": "",
        "num_fewshot": 0,
        "process_results": score,
        "generation_kwargs": {"until": [], "do_sample": False, "max_gen_toks": 1280},
        "metric_list": [
            {
                "metric": metric,
                "aggregation": share_of_instructions if metric.startswith("inst") else "mean",
                "higher_is_better": True,
            }
            for metric in _METRICS
        ],
    }


def score(document: Mapping[str, Any], results: Sequence[str]) -> dict[str, Any]:
    """Return whether an answer follows its instructions, all and each of them, strictly and loosely."""
    scores: dict[str, Any] = _checkers().process_results(document, results)
    return {name: float(value) if isinstance(value, bool) else value for name, value in scores.items()}


def share_of_instructions(items: Sequence[Sequence[bool]]) -> float:
    """The share of all prompts' instructions that are followed."""
    followed = [each for item in items for each in item]
    return sum(followed) / len(followed)


def sentences(text: str) -> list[str]:
    """Split a text into sentences after `.`, `!` or `?` followed by white space."""
    return [part for part in _SENTENCE_END.split(text.strip()) if part]


@cache
def _checkers() -> Any:
    """Import the harness's IFEval module, patched to split sentences without a download."""
    import nltk

    try:
        nltk.data.find("tokenizers/punkt_tab")
        has_model = True
    except LookupError:
        has_model = False
    rank = os.environ.get("LOCAL_RANK")
    os.environ["LOCAL_RANK"] = rank if has_model and rank is not None else "1"  # any rank but 0: no download
    try:
        from lm_eval.tasks.ifeval import instructions_util, utils
    except ModuleNotFoundError as error:
        raise InvalidInputError(
            f"evaluation.tasks: builtin:ifeval needs {error.name}; use pip install 'lm_eval[ifeval]'",
            field="evaluation.tasks",
            value="builtin:ifeval",
        ) from error
    finally:
        if rank is None:
            del os.environ["LOCAL_RANK"]
        else:
            os.environ["LOCAL_RANK"] = rank
    if not has_model:
        instructions_util._get_sentence_tokenizer = lambda: SimpleNamespace(tokenize=sentences)
        instructions_util.nltk = SimpleNamespace(tokenize=nltk.tokenize, data=nltk.data, word_tokenize=str.split)
    return utils
