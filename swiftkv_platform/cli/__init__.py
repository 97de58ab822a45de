"""The `swiftkv` command. Its modules import neither Ray nor torch, so that `swiftkv --help` is fast."""


def main() -> None:
    """Entry point of the console script."""
    from swiftkv_platform.cli.app import app

    app(prog_name="swiftkv")
