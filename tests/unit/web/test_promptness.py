"""Garbage collections leave what was loaded alone, until it is replaced."""

import gc
import sys
import weakref
from collections.abc import Iterator

import pytest
from fastapi import APIRouter, FastAPI
from fastapi.testclient import TestClient

from swiftkv_platform.web.server import SWITCH_INTERVAL_S, tune_interpreter, tune_on_startup

pytestmark = pytest.mark.slow("loads an application")


class Node:
    other: "Node"


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    interval = sys.getswitchinterval()
    yield
    gc.unfreeze()
    sys.setswitchinterval(interval)


@pytest.mark.soak("loads an application twice")
def test_what_was_loaded_is_no_collections_work_until_it_is_replaced() -> None:
    one, other = Node(), Node()
    one.other, other.other = other, one
    gone = weakref.ref(one)
    tune_interpreter()
    assert sys.getswitchinterval() == pytest.approx(SWITCH_INTERVAL_S)
    del one, other
    gc.collect()
    assert gone() is not None, "what was loaded is not looked at"
    tune_interpreter()
    assert gone() is None


def test_the_first_request_leaves_little_to_collect() -> None:
    router, app = APIRouter(), FastAPI()
    for number in range(300):
        router.add_api_route(f"/{number}", lambda: None)
    app.include_router(router)
    with TestClient(tune_on_startup(app)) as client:
        assert client.get("/299").status_code == 200
        assert len(gc.get_objects()) < 3000, "building the routes in the request leaves some 10,000"
