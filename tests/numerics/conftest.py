"""Fixtures that the numerical tests share."""

from collections.abc import Iterator

import pytest
import torch

from tests.numerics.distillation_worker import group_of_one
from tests.support.tiny_models import random_tokens


@pytest.fixture
def prompt() -> torch.Tensor:
    """A prompt of 40 tokens, longer than every sliding window in these tests."""
    return random_tokens(40)


@pytest.fixture(scope="module")
def process_group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A gloo process group that holds only this process."""
    with group_of_one(tmp_path_factory.mktemp("group")):
        yield
