"""The information that the syncer's state machine gives to a shard."""

from __future__ import annotations

from lightning_diloco.protocol.syncer.machine import SyncerState
from lightning_diloco.syncer.anchors import fragments_of
from lightning_diloco.syncer.payloads import merged_by
from lightning_diloco.syncer.shards.requests import Admitted, Attach, Position


def admitted(state: SyncerState) -> Admitted:
    """Return the sessions that may upload."""
    members = state.roster.in_state("joining", "confirmed", "active")
    return Admitted(tuple(member.session for member in members), state.seed_grant)


def attachment(state: SyncerState, part: tuple[int, int]) -> Attach:
    """Return the `Attach` request of a shard, without a nonce.

    Args:
        state: the state machine, which no other thread changes meanwhile.
        part: (shard, number of shards).
    """
    fragments, generation = state.rounds.fragments, state.rounds.generation
    mine = fragments_of(part, len(fragments))
    positions = None
    if state.manifest is not None:
        of_mine = [(p, fragments[p]) for p in mine]
        positions = tuple(Position(p, generation, f.version, f.digests.get(f.version, "")) for p, f in of_mine)
    merged = tuple(each for each in merged_by(state.roster.in_state("active")) if each[1] in mine)
    return Attach("", state.run, *part, state.secret, positions, merged, admitted(state))
