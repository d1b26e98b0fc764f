"""What is imported is kept from the collector of garbage, which works on afterwards."""

from __future__ import annotations

import gc

import pytest

from lightning_diloco.cli.local.collector import kept


def test_what_a_block_makes_is_never_looked_at_again() -> None:
    with kept():
        assert not gc.isenabled()
        made = [[] for _ in range(1000)]
    assert gc.isenabled()
    looked_at = {id(thing) for thing in gc.get_objects()}
    assert made
    assert not looked_at & {id(made), *map(id, made)}


def test_a_block_that_fails_leaves_the_collector_on() -> None:
    with pytest.raises(ImportError), kept():
        raise ImportError
    assert gc.isenabled()
