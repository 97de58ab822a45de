"""vLLM behind a pipe, for benchmarks that compare with it: run as a script by an interpreter that has vLLM.

It imports only vLLM and the standard library, since this project may not be installed there. JSON Lines:

    in,  first: vLLM's engine arguments           out, first: vLLM's resulting settings
    in,  later: {"prompts", "max_tokens",         out, later: {"token_times", "idle_cpu_s"} or
                 "arrivals", "logprobs"}                       {"token_ids", "logprobs", "idle_cpu_s"}

`prompts` are token ids and `max_tokens` the lengths of their answers, by request, which is sent `arrivals` seconds
after the first. `token_times` are the seconds until each token of each answer; with `logprobs` true its tokens and
their log-probabilities come instead. `idle_cpu_s` is the CPU time that this process used while idle. It exits at the
end of its input.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from typing import Any, TextIO


def main() -> None:
    answers = _claim_stdout()
    import torch
    import vllm

    engine = vllm.LLMEngine.from_engine_args(vllm.EngineArgs(**json.loads(sys.stdin.readline())))
    config = engine.vllm_config
    made = {
        "vllm": vllm.__version__,
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "platform": type(vllm.platforms.current_platform).__name__,
        "enforce_eager": config.model_config.enforce_eager,
        "compilation_mode": config.compilation_config.mode.name,
        "block_size": config.cache_config.block_size,
        "num_blocks": config.cache_config.num_gpu_blocks,
        "max_num_batched_tokens": config.scheduler_config.max_num_batched_tokens,
        "max_num_seqs": config.scheduler_config.max_num_seqs,
    }
    _say(answers, made)
    resting_since = time.process_time()
    for number, line in enumerate(sys.stdin):
        command = json.loads(line)
        idle_cpu_s = time.process_time() - resting_since
        answers_of = _score if command["logprobs"] else _generate
        _say(answers, answers_of(engine, f"{number}", command) | {"idle_cpu_s": idle_cpu_s})
        resting_since = time.process_time()


def _claim_stdout() -> TextIO:
    """Return a file for answers only; everything vLLM prints goes to standard error."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return answers


def _say(answers: TextIO, answer: dict[str, Any]) -> None:
    answers.write(json.dumps(answer) + "\n")
    answers.flush()


def _generate(engine: Any, name: str, command: dict[str, Any]) -> dict[str, Any]:
    """Send each request when it is due, and record when its tokens arrive."""
    start = time.perf_counter()
    times: dict[str, list[float]] = {f"{name}-{i}": [] for i in range(len(command["prompts"]))}
    requests = zip(times, command["prompts"], command["max_tokens"], command["arrivals"], strict=True)
    waiting = sorted(requests, key=lambda request: request[3], reverse=True)
    while waiting or engine.has_unfinished_requests():
        while waiting and waiting[-1][3] <= time.perf_counter() - start:
            request_id, prompt, length, _ = waiting.pop()
            engine.add_request(request_id, {"prompt_token_ids": prompt}, _params(length))
        if not engine.has_unfinished_requests():
            time.sleep(max(waiting[-1][3] - (time.perf_counter() - start), 0.0))
            continue
        outputs = engine.step()
        now = time.perf_counter() - start
        for output in outputs:
            seen = times[output.request_id]
            seen += [now] * (len(output.outputs[0].token_ids) - len(seen))
    return {"token_times": list(times.values())}


def _score(engine: Any, name: str, command: dict[str, Any]) -> dict[str, Any]:
    """Return the tokens of all answers and their log-probabilities, without timing."""
    answers: dict[str, Any] = {}
    for i, (prompt, length) in enumerate(zip(command["prompts"], command["max_tokens"], strict=True)):
        answers[f"{name}-{i}"] = None
        engine.add_request(f"{name}-{i}", {"prompt_token_ids": prompt}, _params(length, logprobs=0))
    while engine.has_unfinished_requests():
        for output in engine.step():
            answers[output.request_id] = output.outputs[0]
    return {
        "token_ids": [list(answer.token_ids) for answer in answers.values()],
        "logprobs": [
            [row[token].logprob for row, token in zip(answer.logprobs, answer.token_ids, strict=True)]
            for answer in answers.values()
        ],
    }


def _params(max_tokens: int, **options: Any) -> Any:
    from vllm import SamplingParams

    return SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True, detokenize=False, **options)


if __name__ == "__main__":
    try:
        main()
    except Exception:
        traceback.print_exc()
        status = 1
    else:
        status = 0
    sys.stderr.flush()
    os._exit(status)  # a regular exit prints pages about leaks, which would hide a traceback
