"""Imported objects are exempt from garbage collection, which continues afterwards."""

from __future__ import annotations

import gc

import pytest

from lightning_diloco.cli.local.collector import kept


def test_objects_of_the_block_are_exempt_from_collection() -> None:
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
