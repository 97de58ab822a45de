"""`python -m swiftkv_platform.control_plane`: the control plane as a process, configured by `SWIFTKV_*` variables."""

from __future__ import annotations

import uvicorn

from swiftkv_platform.control_plane.app import create_app
from swiftkv_platform.control_plane.http.server import server_options
from swiftkv_platform.logs import configure_logging
from swiftkv_platform.settings import Settings
from swiftkv_platform.web.promptness import answering_promptly


def main() -> None:
    configure_logging()
    settings = Settings()
    uvicorn.run(answering_promptly(create_app(settings)), **server_options(settings))


if __name__ == "__main__":
    main()
