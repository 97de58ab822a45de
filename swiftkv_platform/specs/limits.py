"""The most that one request may ask for. What depends on the model or its configuration is in `EngineConfig`.

Each limit bounds work that is done before anything of the request can be refused for its meaning, or at each of its
tokens, so that no caller can slow down the others by what it sends.
"""

from __future__ import annotations

MAX_SEED = (1 << 63) - 1
"""Largest seed a request or an engine accepts."""
MAX_N = 64
"""Most answers to one prompt."""
MAX_PROMPTS = 256
"""Most prompts of one HTTP request; its prompts times `n` are also bounded by what the engine runs and lets wait."""
MAX_MESSAGES = 4096
"""Most turns of a conversation."""
MAX_LOOKUP_TOKENS = 64
"""Most tokens drafted from the text at a time."""
MAX_TOP_K = (1 << 31) - 1
"""Largest `top_k`, more than any vocabulary has."""
MAX_LOGPROBS = 100
"""Most log-probabilities a token is given."""
MAX_PROMPT_LOGPROBS = 1 << 18
"""Most log-probabilities that the tokens of a prompt are given together."""
MAX_STREAM_INTERVAL_S = 10.0
"""Longest time for which tokens are collected."""
MIN_TEMPERATURE = 1e-5
"""Lowest temperature that is sampled at; below it logits over temperature leave the range of float32, and the most
probable token is taken, as at 0."""
MAX_STOPS = 32
"""Most stop strings; each is looked for at every token."""
MAX_STOP_LENGTH = 1024
"""Characters of the longest stop string; as many may be held back from a stream."""
MAX_STOP_TOKEN_IDS = 1024
"""Most stop token ids."""
MAX_LOGIT_BIAS = 1024
"""Most tokens whose logits are changed."""
MAX_GRAMMAR_BYTES = 1 << 16
"""Longest schema, expression or grammar, or choices together, that is safe to compile: see `engine/grammars.py`."""
MAX_CHOICES = 4096
"""Most choices of a structured output."""
MAX_SCHEMA_DEPTH = 64
"""Objects and lists within each other in a JSON schema."""
MAX_BYTES_PER_TOKEN = 16
"""Bytes of text a token may stand for, on average over a whole context, where `max_prompt_bytes` is not given. A
vocabulary's longest token may be longer (runs of spaces), text that is written is several times denser."""
