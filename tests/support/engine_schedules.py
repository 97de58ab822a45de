"""Random schedules for an engine, which must give the plain forward's tokens and leak no blocks."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from swiftkv_platform.engine import EarlyExit, EngineConfig, LLMEngine, RequestOutput, SamplingParams
from swiftkv_platform.engine.drafting import DraftCosts
from swiftkv_platform.engine.loading import LoadedModel, load_model
from swiftkv_platform.engine.memory import get_layer_shapes
from swiftkv_platform.model import load_dense
from swiftkv_platform.web.limiters import Sender
from tests.support import reference

MAX_TIE_DIFFERENCE = 1e-4
"""Two logits, or a confidence and its threshold, may go either way if they are this close."""
SHARED_PREFIXES = 3
FREE_DRAFTS = DraftCosts(lower_layers=0.0, exit_head=0.0, token=0.0, max_step_tokens=1000)
"""Draft costs with which the engine drafts everything that it may."""


@contextmanager
def make_drafts_free() -> Iterator[None]:
    """Let engines that are created in the block draft everything that they may."""
    with patch("swiftkv_platform.engine.llm_engine.estimate_draft_costs", return_value=FREE_DRAFTS):
        yield


@dataclass(frozen=True)
class ServedModel:
    """A model to serve, and a copy of it to compare with."""

    loaded: LoadedModel
    plain: Any
    """The copy, which no engine uses."""

    @classmethod
    def load(cls, directory: Path) -> ServedModel:
        student = AutoConfig.from_pretrained(directory).model_type.endswith("_swiftkv")
        plain = AutoModelForCausalLM.from_pretrained(directory) if student else load_dense(directory)
        return cls(load_model(directory, EngineConfig()), plain.eval())

    @property
    def deep_tail(self) -> int:
        return getattr(self.plain.config, "swiftkv_deep_tail", 1)

    def find_deep_tokens(self, num_prompt_tokens: int, num_tokens: int) -> torch.Tensor:
        """Return the reference's `turns` for a prompt and its answer."""
        return torch.where(torch.arange(num_tokens) >= num_prompt_tokens - self.deep_tail, 0, -1)

    @torch.no_grad()
    def logits(self, token_ids: list[int], turns: torch.Tensor | None = None, **options: Any) -> torch.Tensor:
        """Logits of the independent reference, [num_tokens, vocab_size]."""
        model, ids = self.plain, torch.tensor(token_ids)
        inv_freq = reference.frequencies(model.model.rotary_emb)
        return reference.logits(model.state_dict(), model.config, ids, inv_freq, swiftkv=True, turns=turns, **options)

    @torch.no_grad()
    def exit_logits(self, token_ids: list[int], turns: torch.Tensor) -> torch.Tensor:
        """Logits of the exit head, [num_tokens, vocab_size]."""
        entering: list[torch.Tensor] = []
        self.logits(token_ids, turns, entering=entering)
        return self.plain.exit_logits(entering[0])


@torch.no_grad()
def randomize_exit_head(student: Any) -> Any:
    """Move a student from its start, so that its exit head is sure of some tokens, right or wrong."""
    for name, parameter in student.swiftkv_parameters().items():
        parameter.add_(torch.randn_like(parameter) * (0.4 if name.startswith("exit_head") else 0.05))
    return student


@torch.no_grad()
def align_exit_head(student: Any) -> Any:
    """Make the layers from 2 on add little to x, so that the exit head agrees with the whole model often, but not
    always."""
    for name, module in student.model.layers[2:].named_modules():
        if name.endswith(("o_proj", "down_proj")):
            module.weight.mul_(0.3)
    return student


@dataclass(frozen=True)
class Arrival:
    """One request of a schedule."""

    step: int
    prompt: list[int]
    params: SamplingParams
    priority: int
    tenant: str
    abort_after: int | None
    """Steps between arrival and abort; None if it is not aborted."""


def make_random_config(draw: random.Random, subject: ServedModel, arrivals: list[Arrival]) -> EngineConfig:
    """Return a config so small that sequences wait and preempt each other."""
    block_size = draw.choice([1, 3, 8, 16])
    largest = max(len(arrival.prompt) + arrival.params.max_tokens for arrival in arrivals)
    num_blocks = -(-largest // block_size) + draw.randrange(0, 12)
    token = sum(2 * shape.num_heads * shape.dim for shape, _ in get_layer_shapes(subject.plain.config)) * 4
    return EngineConfig(
        max_num_seqs=draw.choice([1, 2, 4, 8]),
        max_num_batched_tokens=draw.choice([1, 3, 10, 32, 128]),
        kv_cache_bytes=num_blocks * block_size * token,
        block_size=block_size,
        enable_prefix_caching=draw.random() < 0.7,
        seed=draw.randrange(1000),
    )


def make_random_arrivals(draw: random.Random, vocab_size: int, *, exits: bool) -> list[Arrival]:
    prefixes = [[draw.randrange(vocab_size) for _ in range(draw.randrange(10, 40))] for _ in range(SHARED_PREFIXES)]
    arrivals = []
    for _ in range(draw.randrange(3, 9)):
        own = [draw.randrange(vocab_size) for _ in range(draw.choice([1, 2, 7, 30]))] * draw.choice([1, 1, 3])
        prompt = draw.choice([own, draw.choice(prefixes) + own, draw.choice(prefixes)])
        exit_mode = draw.choice(["off", "threshold", "lossless", "lossless"]) if exits else "off"
        params = SamplingParams(
            max_tokens=draw.choice([1, 2, 5, 12]),
            temperature=draw.choice([0.0, 0.0, 0.0, 1.0]),
            n=draw.choice([1, 1, 1, 2]),
            ignore_eos=True,
            logprobs=draw.choice([None, None, 2]),
            prompt_logprobs=draw.choice([None, None, None, 1]),
            early_exit=EarlyExit(exit_mode, draw.choice([0.0, 0.2, 0.5]), draw.choice([1, 2, 4, 8])),
            num_lookup_tokens=draw.choice([0, 1, 8]) if exit_mode != "threshold" else 0,
        )
        arrivals.append(
            Arrival(
                step=draw.randrange(12),
                prompt=prompt,
                params=params,
                priority=draw.choice([0, 0, 0, 1]),
                tenant=draw.choice(["", "", "other"]),
                abort_after=draw.randrange(20) if draw.random() < 0.15 else None,
            )
        )
    return arrivals


def run_schedule(engine: LLMEngine, arrivals: list[Arrival]) -> dict[str, list[RequestOutput]]:
    """Run the schedule, check blocks after every step, and return the finished outputs by index of the arrival."""
    finished: dict[str, list[RequestOutput]] = {str(number): [] for number in range(len(arrivals))}
    step, last = 0, max(arrival.step for arrival in arrivals)
    while step <= last or engine.has_unfinished_requests:
        for number, arrival in enumerate(arrivals):
            if arrival.step == step:
                wanted = arrival.params.structured_outputs
                engine.add_tokenized_request(
                    engine.input_processor.tokenize(arrival.prompt, arrival.params),
                    str(number),
                    priority=arrival.priority,
                    sender=Sender(arrival.tenant),
                    constraint=wanted and engine.grammar_compiler.compile(wanted),
                )
            if arrival.abort_after is not None and arrival.step + arrival.abort_after == step:
                engine.abort(str(number))
        for output in engine.step():
            if output.finished:
                finished[output.request_id].append(output)
        engine.assert_consistent()
        step += 1
    assert engine.num_free_blocks == engine.num_blocks, "blocks leaked"
    return finished


def count_events(outputs: list[RequestOutput]) -> Counter[str]:
    """Count the events of a schedule."""
    seen: Counter[str] = Counter()
    for output in outputs:
        seen["cached"] += output.num_cached_tokens
        seen["exited"] += output.num_exited_tokens
        seen["full"] += len(output.token_ids) - output.num_exited_tokens
        seen["accepted"] += output.num_accepted_tokens
        seen["rejected"] += output.num_draft_tokens - output.num_accepted_tokens
        seen["prompt logprobs"] += output.prompt_logprobs is not None
    return seen


def check_outputs(subject: ServedModel, arrivals: list[Arrival], finished: dict[str, list[RequestOutput]]) -> None:
    """Assert that every answer that was not aborted is complete and equals the reference's."""
    for number, arrival in enumerate(arrivals):
        outputs = finished[str(number)]
        assert arrival.abort_after is not None or len(outputs) == arrival.params.n
        for output in outputs:
            assert output.finish_reason == "length"
            assert len(output.token_ids) == arrival.params.max_tokens
            _check_tokens(subject, arrival.params, output)
            _check_prompt_logprobs(subject, output)


def _check_tokens(subject: ServedModel, params: SamplingParams, output: RequestOutput) -> None:
    """Assert that each greedy token is the reference's best; in mode `threshold`, the exit head's where it is sure."""
    if params.temperature:
        return
    prompt, answer = list(output.prompt_token_ids), list(output.token_ids)
    whole = prompt + answer[:-1]
    below = subject.find_deep_tokens(len(prompt), len(whole))
    turns = below.clone()  # tokens that exit are not deep
    margins = torch.full((len(answer),), -1.0)
    heads = torch.empty(0)
    if params.early_exit.mode == "threshold":
        heads = subject.exit_logits(whole, below)[len(prompt) - 1 :]
        margins = heads.softmax(-1).amax(-1) - params.early_exit.threshold
        if subject.deep_tail > 1:  # the prompt's last token does not exit
            margins[0] = -1.0
        turns[len(prompt) - 1 :][margins > 0] = -1
    full = subject.logits(whole, turns, below=below)[len(prompt) - 1 :]
    sources = [[logits] for logits in full]  # for each token, the logits that may have chosen it
    num_exits = [0, 0]  # at least, at most
    if params.early_exit.mode == "threshold":
        for at, (head, margin) in enumerate(zip(heads, margins.tolist(), strict=True)):
            sources[at] = (
                [head]
                if margin > MAX_TIE_DIFFERENCE
                else [full[at]]
                if margin < -MAX_TIE_DIFFERENCE
                else [head, full[at]]
            )
            num_exits[0] += margin > MAX_TIE_DIFFERENCE
            num_exits[1] += margin > -MAX_TIE_DIFFERENCE
    for at, token in enumerate(answer):
        gaps = [float(logits.max() - logits[token]) for logits in sources[at]]
        assert min(gaps) < MAX_TIE_DIFFERENCE, (
            f"token {at} of {output.request_id} is {token}, {min(gaps)} below the best"
        )
    assert num_exits[0] <= output.num_exited_tokens <= num_exits[1]


def _check_prompt_logprobs(subject: ServedModel, output: RequestOutput) -> None:
    if output.prompt_logprobs is None:
        return
    prompt = list(output.prompt_token_ids)
    expected = subject.logits(prompt, subject.find_deep_tokens(len(prompt), len(prompt))).log_softmax(-1)
    assert output.prompt_logprobs[0] is None
    assert len(output.prompt_logprobs) == len(prompt)
    for at, found in enumerate(output.prompt_logprobs[1:], start=1):
        for token, value in found.items():
            assert abs(value - float(expected[at - 1, token])) < 1e-3
        assert prompt[at] in found
        assert max(found.values()) > float(expected[at - 1].max()) - 1e-3
