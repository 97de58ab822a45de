"""vLLM behind a pipe, for benchmarks that compare with it: run as a script by an interpreter that has vLLM.

It imports only vLLM and the standard library, since this project may not be installed there. JSON Lines:

    in,  first: vLLM's engine arguments           out, first: vLLM's resulting settings
    in,  later: {"prompts", "max_tokens"}         out, later: the seconds until each token of each answer

`prompts` are token ids and `max_tokens` the lengths of their answers, by request; all are sent at once. It exits at the
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
    answers = _redirect_stdout()
    import torch
    import vllm

    engine = vllm.LLMEngine.from_engine_args(vllm.EngineArgs(**json.loads(sys.stdin.readline())))
    config = engine.vllm_config
    settings = {
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
    _write_response(answers, settings)
    for number, line in enumerate(sys.stdin):
        _write_response(answers, _time_tokens(engine, f"{number}", json.loads(line)))


def _redirect_stdout() -> TextIO:
    """Return a stream for responses on the real stdout; redirect all other output to standard error."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return answers


def _write_response(answers: TextIO, answer: Any) -> None:
    answers.write(json.dumps(answer) + "\n")
    answers.flush()


def _time_tokens(engine: Any, name: str, command: dict[str, Any]) -> list[list[float]]:
    from vllm import SamplingParams

    start = time.perf_counter()
    times: dict[str, list[float]] = {}
    for prompt, length in zip(command["prompts"], command["max_tokens"], strict=True):
        request_id = f"{name}-{len(times)}"
        times[request_id] = []
        params = SamplingParams(max_tokens=length, temperature=0.0, ignore_eos=True, detokenize=False)
        engine.add_request(request_id, {"prompt_token_ids": prompt}, params)
    while engine.has_unfinished_requests():
        outputs = engine.step()
        now = time.perf_counter() - start
        for output in outputs:
            seen = times[output.request_id]
            seen += [now] * (len(output.outputs[0].token_ids) - len(seen))
    return list(times.values())


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
