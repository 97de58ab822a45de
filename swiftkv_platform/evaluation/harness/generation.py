"""Answers to the harness's generative requests from this project's engine, in the student's current mode.

`read_settings` and `Prompt.is_served` sort out the requests that transformers' `generate()` has to answer: beams and
other searches or constraints that `SamplingParams` lacks, a `max_length`, empty prompts, and those so long that
LongRoPE or dynamic RoPE changes its factors.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import psutil

from swiftkv_platform.engine import EngineConfig, LLMEngine, SamplingParams
from swiftkv_platform.engine.memory import cache_bytes
from swiftkv_platform.engine.modes import engine_of, keeps_rotary_factors
from swiftkv_platform.model.conversion import dense_config
from swiftkv_platform.model.workers import Workers
from swiftkv_platform.specs.base import MAX_STOP_LENGTH, MAX_STOPS

_MAX_NUM_SEQS = 256
"""Prompts answered at a time if the spec gives no number; fewer if the KV cache is too small."""
_TOKENS_PER_STEP = 2048
_MEMORY_SHARE = 4
"""Divisor of a worker's free host memory: the KV cache takes at most one part."""
_TOP_K = 50
"""Default of `generate()` if neither task nor model sets it."""
_FILLER = "filler"
_READ_HERE = frozenset({"do_sample", "temperature", "top_k", "top_p", "min_p", "repetition_penalty"})
_WITHOUT_EFFECT = frozenset(
    {"eos_token_id", "bos_token_id", "pad_token_id", "max_length", "use_cache", "cache_implementation"}
    | {"transformers_version", "_from_model_config", "return_dict_in_generate"}
    | {"output_attentions", "output_hidden_states", "output_logits", "output_scores"}
)
"""Fields of a model's generation configuration that change no token, or that the harness overrides."""

Progress = Callable[[], None]
"""Called after each answer."""


@dataclass(frozen=True)
class Prompt:
    """A prompt and its sampling parameters."""

    token_ids: tuple[int, ...]
    params: SamplingParams

    @property
    def num_tokens(self) -> int:
        """Most tokens of prompt and answer together."""
        return len(self.token_ids) + self.params.max_tokens

    def is_served(self, config: Any) -> bool:
        """Whether the engine can answer it with a model of configuration `config`."""
        return bool(self.token_ids) and keeps_rotary_factors(config, self.num_tokens)


def read_settings(
    settings: Mapping[str, Any], shipped: Any, *, until: Sequence[str], max_tokens: int, seed: int
) -> SamplingParams | None:
    """Translate a harness request into the engine's parameters; None if the engine lacks a setting.

    Args:
        settings: the request's, without `until` and the number of tokens.
        shipped: the model's own generation configuration, for settings left open, as in `generate()`.
        until: texts that end the answer. The engine ignores those that are too long or too many; answers are cut at
            them afterwards.
        seed: seed of sampled answers.
    """
    asked = {**_stated(shipped, _WITHOUT_EFFECT), **{k: v for k, v in settings.items() if v is not None}}
    if not asked.keys() <= _READ_HERE | {"use_cache"}:
        return None
    drawn = bool(asked.get("do_sample")) and float(asked.get("temperature", 1.0)) > 0.0
    choice: dict[str, Any] = {"temperature": 0.0}
    if drawn:
        choice = {name: asked[name] for name in ("temperature", "top_p", "min_p") if name in asked}
        choice["top_k"] = int(asked.get("top_k", _TOP_K))
    return SamplingParams(
        max_tokens=max_tokens,
        repetition_penalty=float(asked.get("repetition_penalty", 1.0)),
        stop=tuple([text for text in until if 0 < len(text) <= MAX_STOP_LENGTH][:MAX_STOPS]),
        skip_special_tokens=False,  # a stop may be the text of a special token
        seed=seed,
        **choice,
    )


def _stated(shipped: Any, but: frozenset[str]) -> dict[str, Any]:
    """Return the settings of a generation configuration that differ from the defaults, without those in `but`."""
    defaults = shipped._get_default_generation_params()
    stated = shipped.to_diff_dict().items()
    return {k: v for k, v in stated if k not in but and v is not None and v != defaults.get(k)}


def digest(prompts: Sequence[Prompt]) -> str:
    """Return a digest of prompts and their parameters."""
    written = json.dumps([[prompt.token_ids, asdict(prompt.params)] for prompt in prompts], sort_keys=True)
    return hashlib.sha256(written.encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Writer:
    """Engine that answers prompts with a student, on every worker that holds it.

    Args:
        max_num_seqs: prompts that a worker answers at a time; None: as many as fit.
    """

    student: Any
    tokenizer: Any
    workers: Workers
    max_num_seqs: int | None = None

    def write(self, prompts: Sequence[Prompt], *, swiftkv: bool, progress: Progress) -> list[list[int] | str]:
        """Return this worker's answers: their tokens, end tokens included, or an error message. Collective if the
        workers run in step: each takes as many engine steps as the others."""
        context_length = max((prompt.num_tokens for prompt in prompts), default=2)
        config = self._config(prompts, context_length, swiftkv=swiftkv)
        with engine_of(self.student, self.tokenizer, config, swiftkv=swiftkv, context_length=context_length) as engine:
            return self._run(engine, prompts, progress)

    def _run(self, engine: LLMEngine, prompts: Sequence[Prompt], progress: Progress) -> list[list[int] | str]:
        for index, prompt in enumerate(prompts):
            engine.add_request(prompt.token_ids, prompt.params, str(index))
        answers: dict[str, list[int] | str] = {}
        while self._goes_on(engine):
            for output in engine.step():
                if output.finished and output.request_id != _FILLER:
                    answers[output.request_id] = output.error or output.token_ids
                    progress()
        return [answers[str(index)] for index in range(len(prompts))]

    def _goes_on(self, engine: LLMEngine) -> bool:
        """Whether this worker has a step to run. In step with others it may be a filler request without an answer."""
        if not self.workers.in_step:
            return engine.has_unfinished_requests
        if not any(self.workers.gather(engine.has_unfinished_requests)):
            return False
        if not engine.has_unfinished_requests:
            engine.add_request([0], SamplingParams(max_tokens=1, temperature=0.0), _FILLER)
        return True

    def _config(self, prompts: Sequence[Prompt], context_length: int, *, swiftkv: bool) -> EngineConfig:
        num_seqs = self.max_num_seqs or _MAX_NUM_SEQS
        return EngineConfig(
            max_num_seqs=num_seqs,
            # In step each pass has to run all layers: if the longest text fits, one of a step reaches its end.
            max_num_batched_tokens=max(_TOKENS_PER_STEP, context_length),
            kv_cache_bytes=self._kv_cache_bytes([prompt.num_tokens for prompt in prompts], num_seqs, swiftkv=swiftkv),
        )

    def _kv_cache_bytes(self, lengths: Sequence[int], num_seqs: int, *, swiftkv: bool) -> int | None:
        """Return the bytes for as many of the longest texts as run at a time, within this worker's share of host
        memory; None on a GPU, where the engine measures free memory. Collective."""
        num_local = self.workers.num_local()
        if self.student.device.type == "cuda":
            return None
        config = self.student.config if swiftkv else dense_config(self.student.config)
        longest = sorted(lengths, reverse=True)[:num_seqs] or [2]
        all_of_them, one = (cache_bytes(config, self.student.dtype, some) for some in (longest, longest[:1]))
        available: int = psutil.virtual_memory().available
        return max(one, min(all_of_them, available // _MEMORY_SHARE // num_local))
