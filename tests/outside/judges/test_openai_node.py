"""OpenAI's client for Node: chats, streams, structured answers, tools and fine-tuning, by Node's own runner."""

from __future__ import annotations

import json

import pytest

from tests.outside.judges.conftest import MODEL, NODE, Deployment, node_program, run
from tests.outside.judges.fine_tuning import QUESTION, ROWS, SWIFTKV, TEACHER


@pytest.mark.parametrize("part", ["chat", "structured", "tools"])
def test_the_client_is_content(native: Deployment, part: str) -> None:
    environment = {"SWIFTKV_JUDGED_URL": native.openai_url, "SWIFTKV_JUDGED_MODEL": MODEL}
    run([*node_program("openai"), "--test", f"{part}.test.mjs"], cwd=NODE, environment=environment)


def test_a_job_from_an_uploaded_file_to_a_chat_with_the_model(platform: str) -> None:
    """`tests/integration/test_end_to_end.py` does the same with the Python client."""
    job = json.dumps({"teacher": TEACHER, "rows": ROWS, "swiftkv": SWIFTKV, "question": QUESTION})
    environment = {"SWIFTKV_JUDGED_PLATFORM": platform, "SWIFTKV_JUDGED_JOB": job}
    run([*node_program("openai"), "--test", "fine_tuning.test.mjs"], cwd=NODE, environment=environment)
