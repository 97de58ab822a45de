"""The `swiftkv` command. Its modules import neither Ray nor torch, so that `swiftkv --help` answers at once."""


def main() -> None:
    """Entry point of the console script."""
    from swiftkv_platform.cli.app import app

    app(prog_name="swiftkv")
