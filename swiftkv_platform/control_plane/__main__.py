"""`python -m swiftkv_platform.control_plane`: the control plane as a process, configured by `SWIFTKV_*` variables."""

from __future__ import annotations

import uvicorn

from swiftkv_platform.control_plane.app import create_app
from swiftkv_platform.logs import configure_logging
from swiftkv_platform.settings import Settings
from swiftkv_platform.web.server import ConnectionLimits, make_server_options, tune_on_startup


def main() -> None:
    configure_logging()
    settings = Settings()
    options = make_server_options(ConnectionLimits.from_settings(settings))
    uvicorn.run(tune_on_startup(create_app(settings)), host=settings.host, port=settings.port, **options)


if __name__ == "__main__":
    main()
