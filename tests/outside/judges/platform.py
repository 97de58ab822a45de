"""The whole platform, as `swiftkv up` starts it, in processes that judges reach over HTTP alone.

    python -m tests.outside.judges.platform DIRECTORY

prints one line of JSON, its address, once it is up. It ends with its standard input.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import TextIO

from swiftkv_platform.local.stack import Stack, StackOptions
from swiftkv_platform.settings import Settings


def serve(directory: Path, told: TextIO) -> None:
    """Keep the platform up until standard input ends; `told` gets the line."""
    os.environ["HOME"] = str(directory)
    stack = Stack(Settings(home=directory / "home", database_url=None, storage_uri=None))
    try:
        state = stack.up(StackOptions(port=0), lambda line: print(line, file=sys.stderr))
        told.write(json.dumps({"url": state.url}) + "\n")
        told.flush()
        sys.stdin.read()
    finally:
        stack.down()


if __name__ == "__main__":
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as standard_output:
        os.dup2(2, 1)  # libraries print what they like
        serve(Path(sys.argv[1]), standard_output)
