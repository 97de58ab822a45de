"""Memory and time of converting a sharded checkpoint: file by file against in memory, each in a process of its own.

    python -m benchmarks.convert [--layers 8 --hidden-size 4096 ...] [--output convert.json]

The peak is the process's highest resident memory, mapped file pages included, above what it had before it began.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.reports import benchmark_parser
from swiftkv_platform.model import convert, convert_checkpoint
from swiftkv_platform.model.directories import ShardWriter, write_index

_MIB = 1 << 20
WAYS = ("streamed", "in_memory")


def write_teacher(args: argparse.Namespace, directory: Path) -> int:
    """A bfloat16 checkpoint of zeros, written tensor by tensor; returns its bytes."""
    config = LlamaConfig(
        vocab_size=args.vocab_size,
        hidden_size=args.hidden_size,
        intermediate_size=args.intermediate_size,
        num_hidden_layers=args.layers,
        num_attention_heads=args.heads,
        num_key_value_heads=args.kv_heads,
    )
    config.dtype = torch.bfloat16
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(directory)
    with torch.device("meta"):
        shapes = {name: tensor.shape for name, tensor in LlamaForCausalLM(config).state_dict().items()}
    writer = ShardWriter(directory, "model", args.shard_mib * _MIB)
    num_bytes = 0
    for name, shape in shapes.items():
        tensor = torch.zeros(shape, dtype=torch.bfloat16)
        num_bytes += tensor.nbytes
        writer.add(name, tensor)
    writer.flush()
    write_index(directory, writer.shards, num_bytes)
    return num_bytes


def measure(way: str, source: Path, target: Path, args: argparse.Namespace) -> None:
    """Convert, in a process of its own, and print what it took."""
    save_file({"warm": torch.zeros(1)}, target.parent / f"{way}.safetensors")  # loads what converting would load
    before, began = _peak(), time.perf_counter()
    shape = {"num_key_value_layers": args.layers // 2, "key_value_group_size": 2}
    if way == "streamed":
        convert_checkpoint(source, target, **shape, max_shard_bytes=args.shard_mib * _MIB)
    else:
        convert(source, **shape).save_pretrained(target, max_shard_size=args.shard_mib * _MIB)
    print(json.dumps({"peak_mib": (_peak() - before) / _MIB, "seconds": time.perf_counter() - began}))


def _peak() -> int:
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    return int(status.split("VmHWM:")[1].split()[0]) * 1024


def main() -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden-size", type=int, default=4096)
    parser.add_argument("--intermediate-size", type=int, default=14336)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--vocab-size", type=int, default=32000)
    parser.add_argument("--shard-mib", type=int, default=256)
    parser.add_argument("--measure", nargs=3, metavar=("WAY", "SOURCE", "TARGET"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        measure(args.measure[0], Path(args.measure[1]), Path(args.measure[2]), args)
        return
    with tempfile.TemporaryDirectory(prefix="convert-") as directory:
        source = Path(directory) / "teacher"
        source.mkdir()
        report: dict[str, object] = {"checkpoint_mib": write_teacher(args, source) / _MIB, "shard_mib": args.shard_mib}
        for way in WAYS:
            own = ["--measure", way, str(source), str(Path(directory) / way)]
            command = [sys.executable, "-m", "benchmarks.convert", *sys.argv[1:], *own]
            result = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
            report[way] = json.loads(result.stdout.splitlines()[-1])
    text = json.dumps(report, indent=2)
    print(text)
    if args.output is not None:
        args.output.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
