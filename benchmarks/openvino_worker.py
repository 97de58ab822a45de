"""OpenVINO GenAI behind a pipe, for benchmarks that compare with it: run as a script by an interpreter that has
openvino-genai, optimum-intel and nncf.

It has the protocol of `vllm_worker.py`. The first input line is {"model", "form", "precision"}: a transformers
directory; `bfloat16`, `int8` or `int4` (groups of 128, symmetric); and OpenVINO's type of activations. The pipeline
returns whole batches only: the time of the first tokens is measured on equally long prompts with one token, and the
rest of the time is divided evenly among the other tokens.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from typing import Any, TextIO


def main() -> None:
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # for OpenVINO's own output
    import openvino
    import openvino_genai
    from optimum.intel import OVModelForCausalLM, OVWeightQuantizationConfig

    arguments = json.loads(sys.stdin.readline())
    quantization = {
        "bfloat16": None,
        "int8": OVWeightQuantizationConfig(bits=8),
        "int4": OVWeightQuantizationConfig(bits=4, group_size=128, ratio=1.0, sym=True),
    }[arguments["form"]]
    threads = int(os.environ["OMP_NUM_THREADS"])
    with tempfile.TemporaryDirectory() as directory:
        model = OVModelForCausalLM.from_pretrained(
            arguments["model"], export=True, load_in_8bit=False, quantization_config=quantization, compile=False
        )
        model.save_pretrained(directory)
        del model
        options = {"INFERENCE_PRECISION_HINT": arguments["precision"], "INFERENCE_NUM_THREADS": threads}
        pipeline = openvino_genai.LLMPipeline(directory, "CPU", **options)
    _write_response(answers, {"openvino": openvino.__version__, "threads": threads, "form": arguments["form"]})
    for line in sys.stdin:
        _write_response(answers, _time_tokens(pipeline, json.loads(line)))


def _write_response(answers: TextIO, answer: Any) -> None:
    answers.write(json.dumps(answer) + "\n")
    answers.flush()


def _time_tokens(pipeline: Any, command: dict[str, Any]) -> list[list[float]]:
    """Return the seconds until each token; prompts have equal lengths, and so do outputs."""
    (length,) = set(command["max_tokens"])
    if length == 1:
        return [[_measure_seconds(pipeline, command["prompts"], 1)]] * len(command["prompts"])
    first = _measure_seconds(
        pipeline, [prompt[::-1] for prompt in command["prompts"]], 1
    )  # the pipeline caches prefixes
    each = (_measure_seconds(pipeline, command["prompts"], length) - first) / (length - 1)
    return [[first + i * each for i in range(length)]] * len(command["prompts"])


def _measure_seconds(pipeline: Any, prompts: list[list[int]], length: int) -> float:
    import numpy as np
    import openvino
    import openvino_genai

    token_ids = np.array(prompts, dtype=np.int64)
    config = openvino_genai.GenerationConfig()
    config.max_new_tokens = config.min_new_tokens = length
    config.ignore_eos, config.do_sample = True, False
    inputs = openvino_genai.TokenizedInputs(openvino.Tensor(token_ids), openvino.Tensor(np.ones_like(token_ids)))
    start = time.perf_counter()
    pipeline.generate(inputs, config)
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
