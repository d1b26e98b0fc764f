"""What is found about this machine."""

from __future__ import annotations

import sys

import pytest

from lightning_diloco.process.machine import interface_of


@pytest.mark.skipif(sys.platform != "linux", reason="the interface is found on Linux only")
def test_the_interface_of_an_address_is_found() -> None:
    assert interface_of("127.0.0.1") == "lo"


@pytest.mark.parametrize("ip", ["203.0.113.1", "::1"])
def test_an_address_of_no_interface_has_none(ip: str) -> None:
    assert interface_of(ip) is None
