"""A prefill server with half of the model and a decode server, connected by NIXL, give one server's text."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.outside.vllm.engines import OWN, SHAPE, expected, make_student, prompts
from tests.outside.vllm.servers import LAYERS, UPPER_BYTES, WIDE, complete, connect, pair
from tests.support.fakes.tokenizers import byte_tokenizer
from tests.support.requirements import required_module

required_module("nixl", otherwise="; `make vllm-env` has it")
pytestmark = pytest.mark.integration


CHOSEN = LAYERS | {"prefill_layers": [0, 2, 3], "decode_key_value": "own"}


TAIL = CHOSEN | {"deep_tail": 40}
"""Some prompts are whole tails."""


@pytest.mark.parametrize(
    "form", [SHAPE | LAYERS, OWN | LAYERS, CHOSEN, TAIL], ids=["shared", "own", "chosen", "chosen-tail"]
)
def test_half_a_model_reads_prompts_for_another_server(form: dict[str, Any], tmp_path: Path) -> None:
    """Answers stay correct while the prefill server is killed under load, and after it restarts."""
    student = make_student(tmp_path / "student", shape=form, **WIDE)
    byte_tokenizer().save_pretrained(student)
    batch = prompts((70, 41, 100, 5, 130, 33, 64, 97))
    wanted = expected(student, batch)
    with pair(student, tmp_path) as servers, ThreadPoolExecutor(4) as threads:
        prefill, decode = servers
        assert decode.memory() - prefill.memory() > UPPER_BYTES

        def answers() -> list[tuple[list[int], bool]]:
            return list(threads.map(lambda token_ids: complete(servers, token_ids), batch))

        connect(servers, batch[0])
        assert answers() == [(tokens, True) for tokens in wanted]

        under_load = [threads.submit(complete, servers, token_ids) for token_ids in batch * 4]
        under_load[4].result()
        prefill.kill()
        found = [future.result() for future in under_load]
        assert [tokens for tokens, _ in found] == wanted * 4
        assert not found[-1][1], "the last request was sent after the kill"

        prefill.start()
        connect(servers, batch[0])
        assert answers() == [(tokens, True) for tokens in wanted]
