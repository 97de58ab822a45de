"""Memory and speed of data preparation against the size of the source: the same text, more and more of it.

    python -m benchmarks.data [--megabytes 16 64]

Each size is prepared in a process of its own, from one JSON Lines file. Memory is the peak of the process's own
(anonymous) pages above what it held before: pages of mapped files are the system's to drop.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import tempfile
import threading
import time
from itertools import cycle
from pathlib import Path

from swiftkv_platform.sources.corpus import standard_library_modules

_SAMPLING_INTERVAL_S = 0.02


def main() -> None:
    parser = argparse.ArgumentParser(description="Memory and speed of data preparation.")
    parser.add_argument("--megabytes", type=int, nargs="+", default=[16, 64])
    sizes = parser.parse_args().megabytes
    print(f"{'text MB':>8} {'tokens':>12} {'on disk MB':>11} {'peak MB':>8} {'MB/s':>6} {'rows full':>10}")
    with tempfile.TemporaryDirectory(prefix="bench-data-") as directory:
        for size in sizes:
            corpus = _write_corpus(Path(directory) / f"{size}.jsonl", size << 20)
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                result = pool.apply(_prepare, (corpus, Path(directory) / str(size)))
            print(
                f"{corpus.stat().st_size / 1e6:8.0f} {result['tokens']:12} {result['disk'] / 1e6:11.0f} "
                f"{result['peak'] / 1e6:8.0f} {corpus.stat().st_size / 1e6 / result['seconds']:6.1f} "
                f"{result['efficiency']:10.1%}"
            )


def _write_corpus(path: Path, num_bytes: int) -> Path:
    with path.open("w", encoding="utf-8") as file:
        for number, module in enumerate(cycle(standard_library_modules())):
            file.write(json.dumps({"text": f"# {number}\n{module.text}"}) + "\n")
            if file.tell() >= num_bytes:
                return path
    raise AssertionError("the cycle has no end")


def _prepare(corpus: Path, rows: Path) -> dict[str, float]:
    from transformers import AutoTokenizer

    from swiftkv_platform import sources
    from swiftkv_platform.data.preparation import prepare_data
    from swiftkv_platform.specs import DataSourceSpec, DataSpec

    rows.mkdir()
    tokenizer = AutoTokenizer.from_pretrained(Path(sources.__path__[0]) / "teacher")
    tokenizer(["warm up"])
    spec = DataSpec(sources=(DataSourceSpec(name_or_path=str(corpus)),), max_length=2048)
    before, peak, done = _anonymous_bytes(), 0, threading.Event()

    def watch() -> None:
        nonlocal peak
        while not done.wait(_SAMPLING_INTERVAL_S):
            peak = max(peak, _anonymous_bytes())

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    begun = time.perf_counter()
    data = prepare_data(spec, tokenizer, rows, seed=0)
    seconds = time.perf_counter() - begun
    done.set()
    watcher.join()
    return {
        "tokens": data.statistics.train.tokens + data.statistics.held_out.tokens,
        "disk": sum(file.stat().st_size for file in rows.iterdir()),
        "peak": peak - before,
        "seconds": seconds,
        "efficiency": data.statistics.train.packing_efficiency,
    }


def _anonymous_bytes() -> int:
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return next(int(line.split()[1]) << 10 for line in status.splitlines() if line.startswith("RssAnon:"))


if __name__ == "__main__":
    main()
