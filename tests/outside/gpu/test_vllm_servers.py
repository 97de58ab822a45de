"""A prefill server with half of the model and a decode server on one GPU, connected by NIXL through GPU memory."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path

import pytest

if find_spec("vllm") is None or find_spec("nixl") is None:
    pytest.skip("this interpreter has no vLLM, or no NIXL", allow_module_level=True)

from tests.outside.gpu.device import needs_gpu
from tests.outside.gpu.test_vllm import FORMS
from tests.outside.vllm.engines import expected, make_student, prompts
from tests.outside.vllm.servers import LAYERS, UPPER_BYTES, WIDE, complete, connect, pair
from tests.support.fakes.tokenizers import byte_tokenizer

pytestmark = needs_gpu
OPTIONS = ["--attention-backend=TRITON_ATTN", "--gpu-memory-utilization=0.05", f"--kv-cache-memory-bytes={64 << 20}"]


def loaded_bytes(log: Path) -> float:
    """Return the bytes of GPU memory that the weights took, by the server's log."""
    (gib,) = re.findall(r"Model loading took ([\d.]+) GiB", log.read_text())
    return float(gib) * 2**30


@pytest.mark.parametrize("form", ["shared", "own"])
def test_half_a_model_reads_prompts_for_another_server(form: str, tmp_path: Path) -> None:
    student = make_student(tmp_path / "student", shape=FORMS[form] | LAYERS, **WIDE, head_dim=64)
    byte_tokenizer().save_pretrained(student)
    batch = prompts((70, 41, 100, 5, 130, 33, 64, 97))
    with pair(student, tmp_path, *OPTIONS, buffer="cuda") as servers, ThreadPoolExecutor(4) as threads:
        connect(servers, batch[0])
        found = list(threads.map(lambda token_ids: complete(servers, token_ids), batch))
    assert found == [(tokens, True) for tokens in expected(student, batch)]
    assert loaded_bytes(tmp_path / "decode.log") - loaded_bytes(tmp_path / "prefill.log") > UPPER_BYTES
