"""No page of a server loads anything from another host: machines without network show them whole."""

from collections.abc import Callable
from html.parser import HTMLParser
from urllib.parse import urljoin, urlsplit

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from swiftkv_platform.control_plane.app import create_app
from swiftkv_platform.settings import Settings
from swiftkv_platform.web.swagger import add_docs


class Links(HTMLParser):
    """A parser that collects the addresses that a page loads when it opens."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.addresses: list[str] = []
        self.inline_scripts = 0
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        loaded = values.get("href") if tag == "link" else values.get("src")
        self.inline_scripts += tag == "script" and loaded is None
        if loaded is not None and not loaded.startswith("data:"):
            self.addresses.append(loaded)


def prefixed() -> FastAPI:
    """An application behind a route prefix, as in Ray Serve."""
    served, outer = FastAPI(docs_url=None, redoc_url=None), FastAPI(docs_url=None, redoc_url=None)
    add_docs(served)
    outer.mount("/dep_1", served)
    return outer


def control_plane() -> FastAPI:
    return create_app(Settings(_env_file=None))


@pytest.mark.parametrize(
    ("make_app", "path"), [(control_plane, "/"), (control_plane, "/docs"), (prefixed, "/dep_1/docs")]
)
def test_a_page_and_all_it_loads_come_from_its_own_server(make_app: Callable[[], FastAPI], path: str) -> None:
    client = TestClient(make_app(), base_url="http://127.0.0.1")
    page = client.get(path)
    assert page.status_code == 200
    policy = page.headers["Content-Security-Policy"].replace(";", " ").split()
    assert {word for word in policy if not word.endswith("-src")} == {
        "'self'", "'unsafe-inline'", "data:", "base-uri", "form-action", "frame-ancestors", "'none'",
    }  # fmt: skip
    links = Links(page.text)
    assert links.inline_scripts == 0, "the policy allows no inline script"
    assert len(links.addresses) > 1
    for address in links.addresses:
        loaded = client.get(urljoin(str(page.url), address))
        assert urlsplit(address).netloc == "", address
        assert loaded.status_code == 200, address


def test_swagger_ui_reads_the_document_beside_it() -> None:
    client = TestClient(prefixed())
    assert 'url: "openapi.json"' in client.get("/dep_1/docs/assets/start.js").text
    assert client.get("/dep_1/openapi.json").json()["openapi"].startswith("3.")
    assert client.get("/dep_1/redoc").status_code == 404
