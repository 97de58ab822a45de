"""OpenAI's clients for Python and Node: a fine-tuning job from an uploaded file to a chat with the model."""

from __future__ import annotations

import json

from tests.outside.judges.conftest import NODE, node_program, run
from tests.outside.judges.fine_tuning import QUESTION, ROWS, SWIFTKV, TEACHER, tune_and_chat


def test_the_client_for_python_is_content(platform: str) -> None:
    tune_and_chat(platform)


def test_the_client_for_node_is_content(platform: str) -> None:
    environment = {
        "SWIFTKV_JUDGED_PLATFORM": platform,
        "SWIFTKV_JUDGED_JOB": json.dumps({"teacher": TEACHER, "rows": ROWS, "swiftkv": SWIFTKV, "question": QUESTION}),
    }
    run([*node_program("openai"), "--test", "fine_tuning.test.mjs"], cwd=NODE, environment=environment)
