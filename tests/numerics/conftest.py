"""Set-up that the tests of numbers share."""

from collections.abc import Iterator

import pytest
import torch

from tests.numerics.distillation_worker import group_of_one
from tests.tiny_models import random_tokens


@pytest.fixture
def prompt() -> torch.Tensor:
    """40 tokens, more than sliding windows are long."""
    return random_tokens(40)


@pytest.fixture(scope="module")
def process_group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A group of this process alone."""
    with group_of_one(tmp_path_factory.mktemp("group")):
        yield
