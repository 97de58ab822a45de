"""`python -m swiftkv_platform.api`: the control plane as a process, configured by `SWIFTKV_*` variables."""

from __future__ import annotations

import uvicorn

from swiftkv_platform.api.app import create_app
from swiftkv_platform.logs import configure_logging
from swiftkv_platform.settings import Settings

_SHUTDOWN_TIMEOUT_S = 10


def main() -> None:
    configure_logging()
    settings = Settings()
    uvicorn.run(
        create_app(settings),
        host=settings.host,
        port=settings.port,
        access_log=False,
        proxy_headers=False,  # the application looks at them itself, by its own setting
        timeout_graceful_shutdown=_SHUTDOWN_TIMEOUT_S,
    )


if __name__ == "__main__":
    main()
