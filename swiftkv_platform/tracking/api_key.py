"""The API key for Weights & Biases: of the environment, else of the netrc file in which `wandb login` stores it."""

from __future__ import annotations

import netrc
import os
from urllib.parse import urlsplit

from swiftkv_platform.logs import get_logger

_API_KEY_VARIABLE = "WANDB_API_KEY"


def get_wandb_server() -> str:
    """Return the URL of the W&B server, without a slash at the end."""
    return (os.environ.get("WANDB_BASE_URL") or "https://api.wandb.ai").rstrip("/")


def find_api_key() -> str | None:
    """Return the key for the W&B server: the value of `WANDB_API_KEY`, else the password of the server's own entry in
    `$NETRC` or `~/.netrc`; None without one. A default entry, which is for other servers, does not count."""
    if key := os.environ.get(_API_KEY_VARIABLE):
        return key
    file = os.path.expanduser(os.environ.get("NETRC") or "~/.netrc")  # noqa: PTH111  # which raises without a home
    try:
        _, _, password = netrc.netrc(file).hosts.get(urlsplit(get_wandb_server()).netloc, ("", "", ""))
    except FileNotFoundError:
        return None
    except (OSError, netrc.NetrcParseError, UnicodeDecodeError) as error:
        get_logger().warning("netrc_unreadable", path=file, error=type(error).__name__)  # its text may quote a password
        return None
    return password or None
