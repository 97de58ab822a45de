"""`python -m tests.outside.judges.openapi_documents DIRECTORY` writes the OpenAPI documents of both applications."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from swiftkv_platform.api.app import create_app
from swiftkv_platform.serve.current import Current
from swiftkv_platform.serve.http import create_http_app
from swiftkv_platform.settings import Settings

if __name__ == "__main__":
    applications = {
        "control-plane": create_app(Settings(_env_file=None)),
        "serve": create_http_app(Current(replica="judged")),
    }
    for name, application in applications.items():
        Path(sys.argv[1], f"{name}.json").write_text(json.dumps(application.openapi(), indent=1), encoding="utf-8")
