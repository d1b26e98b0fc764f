"""Tensors at the syncer's door: what comes in is checked and kept until it is used, what goes out is accounted for.

1. Transport threads call this. A payload that is not what it should be becomes an event with an error, not an
   exception: the machine refuses it, and tells.
2. At most one payload per session and fragment is kept, from its arrival to the machine's word that it is not needed;
   what comes again after it was decided is not kept. Of start values, those of the one lease that was granted.
   What comes in parts is such a payload when all of them are here (`assembly.py`).
3. A reply says which contribution of the asker is part of it, as of the version it carries.
"""

from __future__ import annotations

import threading
from typing import cast

import torch
from torch import Tensor

from lightning_diloco.core.quantize import Decoder, check_fragment, wire_nbytes
from lightning_diloco.errors import CorruptMessageError
from lightning_diloco.protocol import SyncerState, actions, events, messages
from lightning_diloco.protocol.records import CommitRecord
from lightning_diloco.protocol.roster import Roster
from lightning_diloco.runtime.anchors import AnchorStore, tensor_of
from lightning_diloco.runtime.assembly import Assemblies
from lightning_diloco.transport.base import Bulk, Json

MAX_FRAGMENTS = 1 << 16
_TOO_LATE = "decided before, or not of a process that takes part now"


class BulkDesk:
    """Payloads of contributions and of the seed.

    Attributes:
        bytes_up, bytes_down: payload bytes so far.
    """

    def __init__(self) -> None:
        self._payloads: dict[tuple[str, int], tuple[int, Tensor]] = {}
        self._seed: dict[tuple[str, int, int], Tensor] = {}
        self._keeping = threading.Lock()
        self._assemblies = Assemblies()
        self._merged: dict[tuple[str, int], tuple[int, int, float]] = {}
        self._counting = threading.Lock()
        self.bytes_up = self.bytes_down = 0

    # -------------------------------------------------------------------------------------------- called by transport

    def take_contribution(
        self, session: str, bulk: Bulk, store: AnchorStore | None, state: SyncerState
    ) -> events.PayloadReceived | None:
        """Keep a contribution's payload, if it may be merged; returns what the machine is to be told, if anything."""
        payload, config = self._received(bulk), state.config
        ready = _described(bulk.header)
        if store is None or not 0 <= ready.fragment < len(store.layouts):
            raise CorruptMessageError(f"a contribution to fragment {ready.fragment}; the run has no such fragment yet")
        layout = store.layouts[ready.fragment]
        wanted = wire_nbytes(layout.padded_numel, config.wire, config.block_size)
        if bulk.header.get("error") is not None:  # the learner itself says what is wrong, and sends nothing
            return events.PayloadReceived(session, ready, str(bulk.header["error"]))
        if bulk.header.get("num_parts") is not None:
            if not state.may_merge(session, ready):
                return events.PayloadReceived(session, ready, _TOO_LATE)
            if self._has(session, ready):
                return None  # whole already
            whole = self._assemblies.add(session, ready, bulk.header, payload, numel=layout.padded_numel, config=config)
            if whole is None:
                return None
            payload = whole
        if payload.numel() != wanted:
            problem = f"{payload.numel()} bytes, fragment {ready.fragment} takes {wanted} as {config.wire}"
            return events.PayloadReceived(session, ready, problem)
        try:
            check_fragment(layout, payload, config.wire, config.block_size)
            Decoder(payload, layout.padded_numel, config.wire, config.block_size)  # all that a merge will insist on
        except (ValueError, CorruptMessageError) as error:
            return events.PayloadReceived(session, ready, str(error))
        if not state.may_merge(session, ready):
            return events.PayloadReceived(session, ready, _TOO_LATE)
        self._keep(session, ready, payload)
        return events.PayloadReceived(session, ready)

    def _keep(self, session: str, ready: messages.Ready, payload: Tensor) -> None:
        with self._keeping:
            seq, _ = self._payloads.get((session, ready.fragment), (ready.seq, payload))
            if seq != ready.seq:
                raise CorruptMessageError(
                    f"seq {ready.seq} of fragment {ready.fragment} came while seq {seq} is undecided; one is taken at "
                    "a time; nothing of it was used; ask for the fate of the other one first"
                )
            self._payloads[session, ready.fragment] = (ready.seq, payload)
        self._assemblies.drop(session, ready.fragment, ready.seq)

    def _has(self, session: str, ready: messages.Ready) -> bool:
        with self._keeping:
            return self._payloads.get((session, ready.fragment), (None,))[0] == ready.seq

    def take_seed(self, session: str, bulk: Bulk, granted: tuple[str, int] | None) -> None:
        """Keep start values of one fragment.

        Args:
            session: whose they are.
            bulk: header {"fragment", "lease"}, float32 values.
            granted: session and lease that may seed the run; the values of any other are dropped.
        """
        values = self._received(bulk)
        p, lease = bulk.header.get("fragment"), bulk.header.get("lease")
        if type(p) is not int or type(lease) is not int or values.numel() % 4:
            raise CorruptMessageError(
                f"start values with fragment={p!r}, lease={lease!r} in {values.numel()} bytes; fragment and lease must "
                "be integers, the values whole float32 numbers; do both sides run the same version?"
            )
        if granted == (session, lease) and 0 <= p < MAX_FRAGMENTS:
            self._seed = {key: kept for key, kept in self._seed.items() if key[:2] == granted}
            self._seed[session, lease, p] = values.view(torch.float32)

    def give(self, session: str, header: Json, store: AnchorStore | None) -> Bulk:
        """What brings a learner up to date: {"fragment", "generation", "have"} -> update."""
        p = header.get("fragment")
        if store is None or type(p) is not int or not 0 <= p < len(store.layouts):
            raise CorruptMessageError(
                f"fragment {p!r} was asked for; the run has none of that number, or no values yet"
            )
        have, generation = header.get("have"), header.get("generation")
        if not all(number is None or type(number) is int for number in (have, generation)):
            raise CorruptMessageError(
                f"have={have!r:.40}, generation={generation!r:.40}; both must be integers or null"
            )
        update = store.update_for(p, have, generation=generation)
        # Read after the update: a merge noted meanwhile has a higher version and is not part of it.
        seq, version, kept = self._merged.get((session, p), (None, 0, 1.0))
        now = store.anchor(p)
        is_now = (now.generation, now.version) == (update.generation, update.version)
        with self._counting:
            self.bytes_down += update.payload.nbytes
        answer = {
            "kind": update.kind,
            "generation": update.generation,
            "from_version": update.from_version,
            "version": update.version,
            "merged_seq": seq if version <= update.version else None,
            "kept": kept,
            "digest": now.digest if update.kind == "full" and is_now else None,
        }
        return Bulk(answer, update.payload)

    def _received(self, bulk: Bulk) -> Tensor:
        with self._counting:
            self.bytes_up += bulk.payload.nbytes
        return tensor_of(bulk.payload, torch.uint8)

    # ------------------------------------------------------------------------------------------- called by the service

    def payloads(self, action: actions.Merge) -> tuple[Tensor, ...]:
        """Of all contributions to a round."""
        kept = [(self._payloads[c.session, action.fragment], c.ready.seq) for c in action.contributions]
        assert all(seq == wanted for (seq, _), wanted in kept)
        return tuple(payload for (_, payload), _ in kept)

    def drop(self, action: actions.DropPayload) -> None:
        """It is not needed any more."""
        with self._keeping:
            seq, _ = self._payloads.get((action.session, action.fragment), (None, None))
            if seq == action.seq:
                del self._payloads[action.session, action.fragment]
        self._assemblies.drop(action.session, action.fragment, action.seq)

    def prune(self, state: SyncerState) -> None:
        """Drop parts whose contribution will never be whole."""
        self._assemblies.prune(state)

    def seed(self, action: actions.StoreSeed) -> list[Tensor] | None:
        """The start values of all fragments; None until all are here."""
        num_fragments = action.manifest["num_fragments"]
        assert isinstance(num_fragments, int)
        values = [self._seed.get((action.session, action.lease, p)) for p in range(num_fragments)]
        return [v for v in values if v is not None] if all(v is not None for v in values) else None

    def drop_seed(self) -> None:
        """The run has its start values."""
        self._seed.clear()

    def note_merged(self, commit: CommitRecord) -> None:
        """Before a commit is installed: its updates will say what is in them."""
        for merge in commit.merges:
            self._merged[merge.session, commit.fragment] = (merge.ready.seq, commit.version, merge.kept)

    def remember_merged(self, roster: Roster) -> None:
        """After a restart, from the fates on record."""
        for member in roster.members.values():
            for p, (seq, fate, version, _, kept) in member.fates.items():
                if fate == "merged" and version is not None:
                    self._merged[member.session, p] = (seq, version, kept)


def _described(header: Json) -> messages.Ready:
    """The description of a contribution in its header."""
    fields = header.get("ready")
    if not isinstance(fields, dict):
        raise CorruptMessageError(f"ready={fields!r:.80}; must be an object; do both sides run the same version?")
    return cast("messages.Ready", messages.decode({**fields, "kind": messages.Ready.__name__}, messages.FromLearner))
