"""`python -m swiftkv_platform.cli`: the `swiftkv` command if its script is not on the path."""

from swiftkv_platform.cli import main

main()
