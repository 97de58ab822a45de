"""Chat and tools on the built-in model, whose template its artifacts carry."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import openai
from transformers import AutoTokenizer

from swiftkv_platform.engine import AsyncLLMEngine, EngineConfig, LLMEngine
from swiftkv_platform.model.directories import copy_companions
from swiftkv_platform.serve.current import Current, ModelCard, Version
from swiftkv_platform.serve.http import create_http_app
from swiftkv_platform.sources.teacher_config import builtin_teacher
from swiftkv_platform.specs.job import BUILTIN_TEACHER

SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Oslo"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOLS: Any = [{"type": "function", "function": {"name": "get_weather", "parameters": SCHEMA}}]
MESSAGES: list[Any] = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Is it warm in Rome?"}]
CALL = {"id": "a", "type": "function", "function": {"name": "get_weather", "arguments": {"city": "Rome", "days": 1}}}


def test_a_students_directory_gets_the_template_and_it_marks_what_the_assistant_says(tmp_path: Path) -> None:
    copy_companions(builtin_teacher(BUILTIN_TEACHER), tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    turns = [
        *MESSAGES,
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "a", "content": "22"},
        {"role": "assistant", "content": "Yes."},
    ]
    marked = tokenizer.apply_chat_template(turns, tools=TOOLS, return_dict=True, return_assistant_tokens_mask=True)
    said = zip(marked["input_ids"], marked["assistant_masks"], strict=True)
    assert tokenizer.decode([token for token, is_said in said if is_said]) == (
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome", "days": 1}}\n</tool_call></s>Yes.</s>'
    )
    whole = tokenizer.decode(marked["input_ids"])
    assert whole.startswith("<s><|im_start|>system\nBe brief.\n\nThese functions may be called:\n<tools>\n{")
    assert "<|im_start|>tool\n<tool_response>\n22\n</tool_response></s>\n" in whole
    assert tokenizer.apply_chat_template(MESSAGES[1:], tokenize=False, add_generation_prompt=True) == (
        "<s><|im_start|>user\nIs it warm in Rome?</s>\n<|im_start|>assistant\n"
    )


async def test_the_built_in_model_chats_and_calls() -> None:
    config = EngineConfig(max_num_seqs=2, kv_cache_bytes=32 << 20, grammar_timeout_s=60.0)
    engine = AsyncLLMEngine(LLMEngine.from_pretrained(builtin_teacher(BUILTIN_TEACHER), config))
    card = ModelCard(deployment="dep_1", model="m", manifest_digest=None, swiftkv=None, max_model_len=2048)
    transport = httpx.ASGITransport(create_http_app(Current(Version(engine, card, created=1))))
    async with httpx.AsyncClient(transport=transport) as http:
        client: Any = openai.AsyncOpenAI(api_key="none", base_url="http://serve/v1", http_client=http, max_retries=0)
        chat = client.chat.completions.create
        answer = await chat(model="m", messages=MESSAGES, tools=TOOLS, max_tokens=4, temperature=0.0)
        assert answer.choices[0].message.role == "assistant"
        answer = await chat(
            model="m",
            messages=MESSAGES,
            tools=TOOLS,
            tool_choice="required",
            temperature=0.0,
            parallel_tool_calls=False,
        )
        assert answer.choices[0].finish_reason == "tool_calls"
        [call] = answer.choices[0].message.tool_calls
        jsonschema.validate(json.loads(call.function.arguments), SCHEMA)
    await engine.aclose()
