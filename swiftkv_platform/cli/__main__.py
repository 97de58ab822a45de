"""`python -m swiftkv_platform.cli` runs the `swiftkv` command without its script on PATH."""

from swiftkv_platform.cli import main

main()
