"""Memory and speed of data preparation by the size of the source: growing amounts of the same text.

    python -m benchmarks.data [--megabytes 16 64]

Each size is prepared in its own process, from one JSON Lines file. Memory is the peak of the process's anonymous pages
above the initial amount: pages of mapped files can be dropped by the system.
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

from swiftkv_platform.sources.builtin_data import standard_library_modules


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, nargs="+", default=[16, 64])
    print(f"{'text MB':>8} {'tokens':>12} {'on disk MB':>11} {'peak MB':>8} {'MB/s':>6} {'rows full':>10}")
    for size in parser.parse_args().megabytes:
        with (
            tempfile.TemporaryDirectory(prefix="bench-data-") as directory,
            multiprocessing.get_context("spawn").Pool(1) as pool,
        ):
            print(pool.apply(prepare, (Path(directory), size << 20)))


def prepare(directory: Path, num_bytes: int) -> str:
    """Make rows of `num_bytes` of text; returns the line of the table."""
    from transformers import AutoTokenizer

    from swiftkv_platform import sources
    from swiftkv_platform.data.preparation import prepare_data
    from swiftkv_platform.specs import DataSourceSpec, DataSpec

    corpus, rows = directory / "corpus.jsonl", directory / "rows"
    rows.mkdir()
    with corpus.open("w", encoding="utf-8") as file:
        for number, module in enumerate(cycle(standard_library_modules())):
            file.write(json.dumps({"text": f"# {number}\n{module.text}"}) + "\n")
            if file.tell() >= num_bytes:
                break
    tokenizer = AutoTokenizer.from_pretrained(Path(sources.__path__[0]) / "teacher")
    tokenizer(["warm up"])
    spec = DataSpec(sources=(DataSourceSpec(name_or_path=str(corpus)),), max_length=2048)
    before, peak, done = anonymous_bytes(), 0, threading.Event()

    def watch() -> None:
        nonlocal peak
        while not done.wait(0.02):
            peak = max(peak, anonymous_bytes())

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    begun = time.perf_counter()
    statistics = prepare_data(spec, tokenizer, rows, seed=0).statistics
    seconds = time.perf_counter() - begun
    done.set()
    watcher.join()
    megabytes = corpus.stat().st_size / 1e6
    on_disk = sum(file.stat().st_size for file in rows.iterdir()) / 1e6
    return (
        f"{megabytes:8.0f} {statistics.train.tokens + statistics.held_out.tokens:12} {on_disk:11.0f} "
        f"{(peak - before) / 1e6:8.0f} {megabytes / seconds:6.1f} {statistics.train.packing_efficiency:10.1%}"
    )


def anonymous_bytes() -> int:
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return next(int(line.split()[1]) << 10 for line in status.splitlines() if line.startswith("RssAnon:"))


if __name__ == "__main__":
    main()
