"""The `swiftkv` command. Its modules import Ray and torch only inside functions, so `swiftkv --help` is fast."""


def main() -> None:
    """Run the `swiftkv` console script."""
    from swiftkv_platform.cli.app import app

    app(prog_name="swiftkv")
