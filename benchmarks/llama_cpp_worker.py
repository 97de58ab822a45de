"""llama.cpp behind a pipe, for benchmarks that compare with it: run as a script by an interpreter that has
llama-cpp-python, gguf, safetensors and torch.

It has the protocol of `vllm_worker.py`. The first input line is {"model", "form", "max_tokens", "max_sequences"}: a
transformers directory of a Llama model, a type of llama.cpp's weights such as `q8_0`, the max number of tokens of all
sequences together, and of sequences.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, TextIO

TENSOR_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
"""GGUF's name of a tensor, or of a layer's tensor, by that of transformers."""
STEP_TOKENS = 2048
"""Max prompt tokens per step, as in our engine."""


def main() -> None:
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # for llama.cpp's own output
    arguments = json.loads(sys.stdin.readline())
    with tempfile.TemporaryDirectory() as directory:
        engine = Engine(write_model(Path(arguments["model"]), arguments["form"], Path(directory)), arguments)
    _write_response(answers, engine.settings | {"form": arguments["form"]})
    for line in sys.stdin:
        command = json.loads(line)
        _write_response(answers, engine.generate(command["prompts"], command["max_tokens"]))


def _write_response(answers: TextIO, answer: Any) -> None:
    answers.write(json.dumps(answer) + "\n")
    answers.flush()


def write_model(source: Path, form: str, directory: Path) -> Path:
    """Write a Llama model as GGUF, quantized by llama.cpp. Queries and keys keep their order, which changes the text of
    a model but not its speed."""
    import gguf
    import llama_cpp
    import torch
    from safetensors import safe_open

    config = json.loads((source / "config.json").read_text())
    written, quantized = directory / "model.gguf", directory / f"{form}.gguf"
    writer = gguf.GGUFWriter(written, "llama")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("no_vocab")
    for file in sorted(source.glob("*.safetensors")):
        with safe_open(file, "pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118  # not a dictionary
                tensor = tensors.get_tensor(name)
                of_matrix = tensor.to(torch.float32).numpy()
                writer.add_tensor(_translate_name(name), of_matrix)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    options = llama_cpp.llama_model_quantize_default_params()
    options.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{form.upper()}")
    options.nthread = int(os.environ["OMP_NUM_THREADS"])
    if status := llama_cpp.llama_model_quantize(str(written).encode(), str(quantized).encode(), options):
        raise RuntimeError(f"llama.cpp could not quantize the model to {form}: status {status}")
    return quantized


def _translate_name(name: str) -> str:
    if not name.startswith("model.layers."):
        return TENSOR_NAMES[name]
    _, _, layer, module = name.split(".", 3)
    return f"blk.{layer}.{TENSOR_NAMES[module.removesuffix('.weight')]}.weight"


class Engine:
    """A model in llama.cpp that generates greedily for several sequences at once."""

    def __init__(self, model: Path, arguments: dict[str, int]) -> None:
        import llama_cpp

        self._library = llama_cpp
        threads = int(os.environ["OMP_NUM_THREADS"])
        llama_cpp.llama_backend_init()
        options = llama_cpp.llama_model_default_params()
        options.use_mmap = False
        self._model = llama_cpp.llama_model_load_from_file(str(model).encode(), options)
        options = llama_cpp.llama_context_default_params()
        options.n_ctx, options.n_seq_max = arguments["max_tokens"], arguments["max_sequences"]
        options.n_batch = options.n_ubatch = STEP_TOKENS
        options.n_threads = options.n_threads_batch = threads
        options.kv_unified = True
        self._context = llama_cpp.llama_init_from_model(self._model, options)
        if not self._context:
            raise RuntimeError("llama.cpp could not create a context; its messages are above")
        self._vocab_size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._model))
        self.settings = {
            "llama_cpp": llama_cpp.__version__,
            "threads": threads,
            "system": llama_cpp.llama_print_system_info().decode(),
        }

    def generate(self, prompts: list[list[int]], max_tokens: list[int]) -> list[list[float]]:
        """Return the seconds until each token of each answer."""
        llama_cpp = self._library
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self._context), True)
        start = time.perf_counter()
        times: list[list[float]] = [[] for _ in prompts]
        # 1. the prompts, one after another in steps of STEP_TOKENS
        pending: list[int] = []
        for sequence, prompt in enumerate(prompts):
            for first in range(0, len(prompt), STEP_TOKENS):
                part = prompt[first : first + STEP_TOKENS]
                rows = [(token, first + i, sequence) for i, token in enumerate(part)]
                (token,) = self._run_step(rows, [len(rows) - 1])
            pending.append(token)
            times[sequence].append(time.perf_counter() - start)
        # 2. a token for each unfinished sequence per step
        while running := [i for i, length in enumerate(max_tokens) if len(times[i]) < length]:
            rows = [(pending[i], len(prompts[i]) + len(times[i]) - 1, i) for i in running]
            for i, token in zip(running, self._run_step(rows, range(len(rows))), strict=True):
                pending[i] = token
                times[i].append(time.perf_counter() - start)
        return times

    def _run_step(self, rows: list[tuple[int, int, int]], wanted: Any) -> list[int]:
        """Run (token, position, sequence) rows, and return the next tokens of the rows in `wanted`."""
        import numpy as np

        llama_cpp, wanted = self._library, list(wanted)
        batch = llama_cpp.llama_batch_init(len(rows), 0, 1)
        try:
            batch.n_tokens = len(rows)
            for i, (token, position, sequence) in enumerate(rows):
                batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.seq_id[i][0] = token, position, 1, sequence
                batch.logits[i] = i in wanted
            if status := llama_cpp.llama_decode(self._context, batch):
                raise RuntimeError(f"llama.cpp could not run a step of {len(rows)} tokens: status {status}")
            logits = [llama_cpp.llama_get_logits_ith(self._context, i) for i in wanted]
            return [int(np.ctypeslib.as_array(row, (self._vocab_size,)).argmax()) for row in logits]
        finally:
            llama_cpp.llama_batch_free(batch)


if __name__ == "__main__":
    main()
