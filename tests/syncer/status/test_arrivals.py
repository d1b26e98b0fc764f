"""Events of a standby and of shards that come and go."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from lightning_diloco.syncer.status.arrivals import Arrivals


def test_each_change_of_standby_and_shards_is_told_once() -> None:
    replica = SimpleNamespace(address="a:1")
    shards = [SimpleNamespace(part=(k, 3), is_attached=True) for k in (1, 2)]
    told = list[tuple[str, dict[str, object]]]()
    arrivals = Arrivals(cast(Any, replica), cast(Any, shards), lambda event, fields: told.append((event, fields)))

    def look() -> list[tuple[str, dict[str, object]]]:
        told.clear()
        arrivals.look()
        return [*told]

    assert look() == [], "a restarted syncer knows its standby"
    replica.address = None
    assert look() == [("standby lost", {"standby": "a:1"})]
    assert look() == []
    replica.address = "b:1"
    assert look() == [("standby joined", {"standby": "b:1"})]
    replica.address = "c:1"
    assert look() == [("standby lost", {"standby": "b:1"}), ("standby joined", {"standby": "c:1"})]
    shards[1].is_attached = False
    assert look() == [("shard away", {"shard": 2})]
    shards[0].is_attached, shards[1].is_attached = False, True
    assert look() == [("shard away", {"shard": 1}), ("shard back", {"shard": 2})]
