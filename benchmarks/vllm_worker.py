"""vLLM behind a pipe, for benchmarks that compare with it: run as a script by an interpreter that has vLLM.

It imports only vLLM and the standard library, since this project may not be installed there. JSON Lines:

    in,  first: vLLM's engine arguments           out, first: vLLM's resulting settings
    in,  later: {"prompts", "max_tokens",         out, later: {"token_times", "idle_cpu_s"}
                 "arrivals"}

`prompts` are token ids and `max_tokens` the lengths of their answers, by request, which is sent `arrivals` seconds
after the first. `token_times` are the seconds until each token of each answer. `idle_cpu_s` is the CPU time that this
process used while idle. It exits at the end of its input.
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
        _say(answers, _generate(engine, f"{number}", command) | {"idle_cpu_s": idle_cpu_s})
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
    from vllm import SamplingParams

    start = time.perf_counter()
    times: dict[str, list[float]] = {f"{name}-{i}": [] for i in range(len(command["prompts"]))}
    requests = zip(times, command["prompts"], command["max_tokens"], command["arrivals"], strict=True)
    waiting = sorted(requests, key=lambda request: request[3], reverse=True)
    while waiting or engine.has_unfinished_requests():
        while waiting and waiting[-1][3] <= time.perf_counter() - start:
            request_id, prompt, length, _ = waiting.pop()
            params = SamplingParams(max_tokens=length, temperature=0.0, ignore_eos=True, detokenize=False)
            engine.add_request(request_id, {"prompt_token_ids": prompt}, params)
        if not engine.has_unfinished_requests():
            time.sleep(max(waiting[-1][3] - (time.perf_counter() - start), 0.0))
            continue
        outputs = engine.step()
        now = time.perf_counter() - start
        for output in outputs:
            seen = times[output.request_id]
            seen += [now] * (len(output.outputs[0].token_ids) - len(seen))
    return {"token_times": list(times.values())}


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
