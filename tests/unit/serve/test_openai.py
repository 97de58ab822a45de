"""The native engine behind OpenAI's routes."""

from __future__ import annotations

from typing import Any

from transformers import LlamaConfig

from swiftkv_platform.engine import EngineConfig, RequestOutput
from swiftkv_platform.engine.loading import ModelDescription
from swiftkv_platform.engine.outputs import RequestMetrics
from swiftkv_platform.engine.requests import InputProcessor
from swiftkv_platform.serve.openai.outputs import CompletionFormatter
from tests.contract.serving.openai_routes import *  # noqa: F403
from tests.support.fakes.tokenizers import EOS, WORDS, sentence_tokenizer


def test_an_echo_of_sentencepiece_keeps_the_space_before_the_answer() -> None:
    tokenizer = sentence_tokenizer()
    model = ModelDescription(LlamaConfig(vocab_size=len(tokenizer)), tokenizer, frozenset({EOS}), 64)
    the, cat = (258 + WORDS.index(word) for word in ("▁the", "▁cat"))
    fields: dict[str, Any] = {"logprobs": ({cat: -1.0},) * 2, "prompt_logprobs": (None,), "text_offsets": (0, 3)}
    metrics = RequestMetrics(0.0, 0.0, 0.0, 0.0)
    output = RequestOutput("a", [the], [cat, cat], "cat cat", "length", metrics, **fields)
    choices = CompletionFormatter(InputProcessor(model, EngineConfig(), num_slots=64), echo=True)
    choice = choices.format_choice(0, output)
    assert choice["text"] == "the cat cat"
    assert choice["logprobs"]["tokens"] == [" the", " cat", " cat"]
    assert choice["logprobs"]["text_offset"] == [0, 3, 7]
