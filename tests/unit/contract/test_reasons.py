"""Reason codes: stable names, each with one meaning."""

from __future__ import annotations

from swiftkv_platform import errors
from swiftkv_platform.contract.events import ReasonCode


def test_no_reason_has_the_code_of_an_error() -> None:
    codes = {kind.code for kind in vars(errors).values() if getattr(kind, "code", None)}
    assert codes.isdisjoint(ReasonCode)


def test_a_code_is_written_as_its_name() -> None:
    assert f"{ReasonCode.NOT_PLACED}" == "not_placed"
