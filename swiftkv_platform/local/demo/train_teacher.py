"""Train the demo's teacher: a small, deep Llama on the Python standard library's sources.

    python -m swiftkv_platform.local.demo.train_teacher --output DIR [--hours 1.5]

Writes a Hugging Face directory (bf16 safetensors, tokenizer) and `training.json` (arguments, seed, loss curve, held-out
perplexity of the teacher and of its rewired copy). Uses plain transformers and torch, nothing of SwiftKV except the
rewired perplexity that it reports.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from swiftkv_platform.sources.corpus import Module, standard_library_modules

VOCAB_SIZE = 4096
BOS, EOS = "<s>", "</s>"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def train_tokenizer(modules: list[Module]) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE of `VOCAB_SIZE` tokens with Llama 3's word pattern (keeps runs of indentation whole)."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_WORDS), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[BOS, EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((module.text for module in modules), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=BOS, eos_token=EOS, clean_up_tokenization_spaces=False
    )


def encode(tokenizer: PreTrainedTokenizerFast, modules: list[Module]) -> list[np.ndarray]:
    """Return the token ids of each module: BOS, text, EOS."""
    encoded = tokenizer([module.text for module in modules], add_special_tokens=False)["input_ids"]
    return [np.array([tokenizer.bos_token_id, *ids, tokenizer.eos_token_id], dtype=np.int32) for ids in encoded]


def batches(documents: list[np.ndarray], length: int, size: int, rng: np.random.Generator) -> Iterator[torch.Tensor]:
    """Yield endless [size, length + 1] batches; each epoch joins the documents in a new order, at a new offset."""
    while True:
        stream = np.concatenate([documents[i] for i in rng.permutation(len(documents))])
        stream = stream[rng.integers(length) :]
        rows = (len(stream) - 1) // length
        windows = np.stack([stream[i * length : i * length + length + 1] for i in range(rows)])
        windows = windows[rng.permutation(rows)]
        for start in range(0, rows - size + 1, size):
            yield torch.from_numpy(windows[start : start + size].astype(np.int64))


def rewire(model: LlamaForCausalLM, num_key_value_layers: int) -> list[torch.utils.hooks.RemovableHandle]:
    """Add hooks by which layers >= l take K and V from the hidden state after layer l - 1 (copied, g = 1)."""
    layers = model.model.layers
    shared: dict[str, torch.Tensor] = {}

    def remember(_module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        hidden = args[0] if args else kwargs["hidden_states"]
        shared["hidden"] = layers[num_key_value_layers].input_layernorm(hidden)

    def replace(_module: Any, _args: tuple[Any, ...]) -> tuple[torch.Tensor]:
        return (shared["hidden"],)

    handles = [layers[num_key_value_layers].register_forward_pre_hook(remember, with_kwargs=True)]
    for layer in layers[num_key_value_layers:]:
        handles += [p.register_forward_pre_hook(replace) for p in (layer.self_attn.k_proj, layer.self_attn.v_proj)]
    return handles


@torch.no_grad()
def perplexity(model: LlamaForCausalLM, documents: list[np.ndarray], length: int) -> float:
    """Return exp of the mean next-token loss over windows of `length` tokens that never cross a document."""
    total, count = 0.0, 0
    for document in documents:
        for start in range(0, len(document) - 1, length):
            window = torch.from_numpy(document[start : start + length + 1].astype(np.int64))[None]
            logits = model(window[:, :-1]).logits.float()
            total += torch.nn.functional.cross_entropy(logits[0], window[0, 1:], reduction="sum").item()
            count += window.shape[1] - 1
    return math.exp(total / count)


def evaluate(model: LlamaForCausalLM, documents: list[np.ndarray], length: int) -> dict[str, float]:
    """Return the held-out perplexity of the teacher and of its copy rewired at half depth, and their ratio."""
    model.eval()
    teacher = perplexity(model, documents, length)
    handles = rewire(model, model.config.num_hidden_layers // 2)
    try:
        rewired = perplexity(model, documents, length)
    finally:
        for handle in handles:
            handle.remove()
    model.train()
    return {"perplexity": teacher, "rewired_perplexity": rewired, "rewired_ratio": rewired / teacher}


def build_model(args: argparse.Namespace) -> LlamaForCausalLM:
    torch.manual_seed(args.seed)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=args.hidden_size,
        intermediate_size=args.intermediate_size,
        num_hidden_layers=args.layers,
        num_attention_heads=args.hidden_size // args.head_dim,
        num_key_value_heads=args.kv_heads,
        max_position_embeddings=2048,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=1,
    )
    model = LlamaForCausalLM(config)
    model.set_attn_implementation("eager")  # faster than the fused kernel on CPU at 256 tokens
    for layer in model.model.layers:  # a residual stream that starts as the embedding lets depth train faster
        torch.nn.init.zeros_(layer.self_attn.o_proj.weight)
        torch.nn.init.zeros_(layer.mlp.down_proj.weight)
    return model


def replan(model: LlamaForCausalLM, start: dict[str, torch.Tensor], plan: str) -> None:
    """Load `start` into `model` layer by layer. `plan`: comma-separated layer indices of `start`, `+` for a new
    identity layer.

    A plan that moves the induction layers above the middle makes the upper half matter.
    """
    places = plan.split(",")
    if len(places) != model.config.num_hidden_layers:
        raise SystemExit(f"--layer-plan names {len(places)} layers, the model has {model.config.num_hidden_layers}")
    renamed = {name: tensor for name, tensor in start.items() if ".layers." not in name}
    for target, source in enumerate(places):
        prefix = f"model.layers.{source}."
        renamed |= {
            f"model.layers.{target}.{name.removeprefix(prefix)}": tensor
            for name, tensor in start.items()
            if name.startswith(prefix)
        }
    model.load_state_dict(renamed, strict=False)


def build_optimizers(model: LlamaForCausalLM, args: argparse.Namespace) -> list[torch.optim.Optimizer]:
    """Return Muon for the layers' matrices, and AdamW for the embedding and the norms."""
    matrices = [p for p in model.model.layers.parameters() if p.ndim == 2]
    others = [p for p in model.parameters() if not any(p is m for m in matrices)]
    return [
        torch.optim.Muon(matrices, lr=args.muon_lr, momentum=0.95, weight_decay=args.weight_decay),
        torch.optim.AdamW(others, lr=args.adam_lr, betas=(0.9, 0.95), weight_decay=0.0),
    ]


def schedule(progress: float, *, decay_from: float, warmup: float = 0.01) -> float:
    """Return the trapezoid factor of the learning rate: warm-up, plateau, linear decay to zero. `progress`: share of
    the time budget used."""
    return min(1.0, progress / warmup, (1.0 - progress) / (1.0 - decay_from))


def train(args: argparse.Namespace) -> None:
    modules = list(standard_library_modules(include_tests=True))
    training = [m for m in modules if not m.held_out]
    held_out = [m for m in standard_library_modules() if m.held_out]
    tokenizer = train_tokenizer(training)
    documents, held_out_documents = encode(tokenizer, training), encode(tokenizer, held_out)
    print(
        f"{sum(map(len, documents)):,} training and {sum(map(len, held_out_documents)):,} held-out tokens", flush=True
    )

    model = build_model(args)
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters", flush=True)
    if args.start_from is not None:
        replan(model, torch.load(args.start_from, weights_only=True), args.layer_plan)
    optimizers = build_optimizers(model, args)
    base_rates = [group["lr"] for optimizer in optimizers for group in optimizer.param_groups]
    rng = np.random.default_rng(args.seed)
    short = batches(documents, args.length, args.batch_tokens // args.length, rng)
    long = batches(documents, args.long_length, args.batch_tokens // args.long_length, rng)

    curve: list[dict[str, float]] = []
    args.output.mkdir(parents=True, exist_ok=True)
    begin, step, tokens, evaluated = time.monotonic(), 0, 0, 0.0
    while (progress := (time.monotonic() - begin) / (args.hours * 3600)) < 1.0:
        scale = max(schedule(progress, decay_from=args.decay_from), 0.0)
        for group, base in zip((g for o in optimizers for g in o.param_groups), base_rates, strict=True):
            group["lr"] = base * scale
        if progress > args.long_from:
            model.set_attn_implementation("sdpa")
        batch = next(long if progress > args.long_from else short)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=args.bf16):
            logits = model(batch[:, :-1], use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        step, tokens = step + 1, tokens + batch[:, 1:].numel()
        if step % 20 == 0:
            seconds = time.monotonic() - begin
            curve.append({"step": step, "tokens": tokens, "loss": round(loss.item(), 4)})
            print(
                f"{step=} {tokens=:,} loss={loss.item():.3f} {tokens / seconds:.0f} tokens/s {progress:.1%}", flush=True
            )
        if progress - evaluated > 0.1:
            evaluated = progress
            print(step, evaluate(model, held_out_documents[:12], args.length), flush=True)
            torch.save(model.state_dict(), args.output / "latest.pt")
    save(model, tokenizer, held_out_documents, curve, tokens, args)


def save(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    held_out: list[np.ndarray],
    curve: list[dict[str, float]],
    tokens: int,
    args: argparse.Namespace,
) -> None:
    model.bfloat16().save_pretrained(args.output)
    tokenizer.save_pretrained(args.output)
    report = {
        "arguments": {k: v for k, v in vars(args).items() if k not in ("output", "start_from")},
        "python": platform.python_version(),
        "tokens_trained": tokens,
        "held_out": evaluate(model.float(), held_out, args.length),
        "held_out_tokens": sum(map(len, held_out)),
        "loss_curve": curve,
    }
    (args.output / "training.json").write_text(json.dumps(report, indent=1) + "\n")
    (args.output / "latest.pt").unlink(missing_ok=True)
    print(json.dumps(report["held_out"]), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--hours", type=float, default=1.5, help="wall-clock budget of the training loop")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--hidden-size", type=int, default=192)
    parser.add_argument("--intermediate-size", type=int, default=512)
    parser.add_argument("--head-dim", type=int, default=48)
    parser.add_argument("--kv-heads", type=int, default=2)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--long-length", type=int, default=1024)
    parser.add_argument(
        "--long-from", type=float, default=0.88, help="share of the budget after which windows are long"
    )
    parser.add_argument("--decay-from", type=float, default=0.55, help="share of the budget after which rates fall")
    parser.add_argument("--batch-tokens", type=int, default=4096)
    parser.add_argument("--muon-lr", type=float, default=0.02)
    parser.add_argument("--adam-lr", type=float, default=4e-3)
    parser.add_argument("--weight-decay", type=float, default=0.01)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--bf16", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--start-from", type=Path, help="`latest.pt` of an earlier run to continue from")
    parser.add_argument(
        "--layer-plan", default=",".join(map(str, range(12))), help="layers to take from it; + adds an identity layer"
    )
    train(parser.parse_args())


if __name__ == "__main__":
    main()
