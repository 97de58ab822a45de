"""Bring the configured database's schema to the newest revision, or back to an earlier one.

Run as `python -m swiftkv_platform.control_plane.database`.
"""

from __future__ import annotations

import argparse

from swiftkv_platform.control_plane.database.session import open_database
from swiftkv_platform.logs import configure_logging, get_logger
from swiftkv_platform.settings import Settings


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m swiftkv_platform.control_plane.database", description=__doc__)
    parser.add_argument("--back-to", metavar="REVISION", help="undo the migrations after REVISION, such as 0005")
    options = parser.parse_args()
    configure_logging()
    database = open_database(Settings())
    if options.back_to is not None:
        database.downgrade(options.back_to)
        get_logger().info("schema downgraded", revision=options.back_to)
        return
    database.upgrade()
    database.check_schema()
    get_logger().info("schema is up to date")


if __name__ == "__main__":
    main()
