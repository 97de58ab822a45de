"""`python -m swiftkv_platform.database`: bring the configured database's schema to the newest revision."""

from __future__ import annotations

from swiftkv_platform.database.session import Database
from swiftkv_platform.logs import configure_logging, get_logger
from swiftkv_platform.settings import Settings


def main() -> None:
    configure_logging()
    database = Database(Settings().resolved_database_url)
    database.upgrade()
    database.check_schema()
    get_logger().info("schema is up to date")


if __name__ == "__main__":
    main()
