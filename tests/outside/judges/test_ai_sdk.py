"""Vercel's AI SDK: five streamed turns with tools over each route for conversations, with cached prefixes."""

from __future__ import annotations

from tests.outside.judges.conftest import MODEL, NODE, Deployment, node_program, run


def test_the_client_is_content(native: Deployment) -> None:
    environment = {"SWIFTKV_JUDGED_URL": native.openai_url, "SWIFTKV_JUDGED_MODEL": MODEL}
    run([*node_program("ai"), "--test", "ai_sdk.test.mjs"], cwd=NODE, environment=environment)
