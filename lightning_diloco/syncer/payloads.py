"""Payloads at the syncer: check received payloads, keep them until they are used, and send updates.

1. Transport threads call this module. An invalid payload becomes an event with an error, not an exception. The state
   machine then refuses it and sends the reason to the learner.
2. At most one payload per session and fragment is kept, until the state machine drops it. A payload is not kept again
   if its fate is decided. Start values are kept only for the granted seed lease. A payload in parts or portions is
   complete when all of them have arrived (`assembly.py`, `transport/portions.py`).
3. An update that is sent in portions stays unchanged until all portions were sent, or until GIVING_S after the last
   request. There is one such update per session.
4. A reply names the learner's contribution that is part of the update, as of the version of the update.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from lightning_diloco.core.buffers import tensor_of
from lightning_diloco.core.quantize import Decoder, check_fragment, wire_nbytes
from lightning_diloco.errors import CorruptMessageError, JoinError
from lightning_diloco.process.machine import memory_here
from lightning_diloco.protocol import events, limits, messages
from lightning_diloco.protocol.intervals import Ranges
from lightning_diloco.protocol.syncer import manifests
from lightning_diloco.protocol.syncer.records import CommitRecord
from lightning_diloco.protocol.syncer.roster import Member
from lightning_diloco.syncer.anchors import WHOLE, AnchorStore
from lightning_diloco.syncer.assembly import Admission, Assemblies
from lightning_diloco.transport import portions
from lightning_diloco.transport.base import Bulk, Json
from lightning_diloco.transport.frames import MAX_PROBE_BYTES

Merged = tuple[str, int, int, int, float]  # session, fragment, seq, version, kept

GIVING_S = 600.0
_TOO_LATE = "already decided, or from a process that is not active"


@dataclass(slots=True)
class _Seed:
    """Start values of one fragment, float32 as bytes."""

    values: Tensor
    received: portions.Received


@dataclass(slots=True)
class _Given:
    """An update that is being sent to a session."""

    mark: str
    answer: Json
    payload: memoryview
    asked_s: float
    num_sent: int = 0  # bytes


def made_up(header: Json) -> Bulk:
    """Return `num_bytes` zeros, so that a machine can measure its link.

    Raises:
        CorruptMessageError: the header is invalid.
    """
    num_bytes = header.get("num_bytes")
    if type(num_bytes) is not int or not 0 <= num_bytes <= MAX_PROBE_BYTES:
        raise CorruptMessageError(f"num_bytes={num_bytes!r:.40}; must be an integer from 0 to {MAX_PROBE_BYTES}")
    return Bulk({}, memoryview(bytes(num_bytes)))


class Payloads:
    """Payloads of contributions and of the seed.

    Args:
        part: (shard, number of shards), of whose fragments payloads are kept.

    Attributes:
        bytes_up, bytes_down: payload bytes received and sent so far.
    """

    def __init__(self, part: tuple[int, int] = WHOLE) -> None:
        self._part = part
        self._payloads: dict[tuple[str, int], tuple[int, Tensor]] = {}
        self._seed: dict[tuple[str, int, int], _Seed] = {}
        self._given: dict[str, _Given] = {}
        self._keeping, self._giving = threading.Lock(), threading.Lock()
        self._assemblies = Assemblies()
        self._merged: dict[tuple[str, int], tuple[int, int, float]] = {}
        self._counting = threading.Lock()
        self.bytes_up = self.bytes_down = 0

    # -------------------------------------------------------------------------------------------- called by transport

    def take_contribution(
        self, session: str, bulk: Bulk, store: AnchorStore | None, state: Admission
    ) -> tuple[events.PayloadReceived | None, Ranges]:
        """Keep a contribution's payload, if it may be merged.

        Args:
            session: the sender.
            bulk: the payload, a part of it, or an error instead.
            store: the anchors, if there are any.
            state: says what may be merged.

        Returns:
            The event for the state machine, if any; and the bytes of this part that must still be sent.
        """
        self._count_up(bulk)
        config, ready = state.config, _described(bulk.header)
        if store is None or ready.fragment not in store.mine:
            raise CorruptMessageError(f"a contribution to fragment {ready.fragment}, which is not held here")
        layout, (_, of) = store.layouts[ready.fragment], portions.place(bulk)
        if (error := bulk.header.get("error")) is not None:  # the learner reports an error instead of a payload
            if not isinstance(error, str) or len(error) > limits.MAX_CHARS:
                raise CorruptMessageError(
                    f"error={error!r:.80}; must be a text of at most {limits.MAX_CHARS} characters"
                )
            return events.PayloadReceived(session, ready, error), []
        if bulk.header.get("num_parts") is None and of == bulk.payload.nbytes:
            payload = tensor_of(bulk.payload, torch.uint8)
        else:
            if not state.may_merge(session, ready):
                return events.PayloadReceived(session, ready, _TOO_LATE), []
            if self._has(session, ready):
                return events.PayloadReceived(session, ready), []  # complete; the state machine may have forgotten it
            missing, whole = self._assemblies.add(session, ready, bulk, numel=layout.padded_numel, config=config)
            if whole is None:
                return None, missing
            payload = whole
        try:
            if payload.numel() != (wanted := wire_nbytes(layout.padded_numel, config.wire, config.block_size)):
                raise CorruptMessageError(
                    f"{payload.numel()} bytes, fragment {ready.fragment} takes {wanted} as {config.wire}"
                )
            check_fragment(layout, payload, config.wire, config.block_size)
            Decoder(
                payload, layout.padded_numel, config.wire, config.block_size
            )  # raises an error for every payload that a merge would refuse
        except (ValueError, CorruptMessageError) as error:
            return events.PayloadReceived(session, ready, str(error)), []
        if not state.may_merge(session, ready):
            return events.PayloadReceived(session, ready, _TOO_LATE), []
        self._keep(session, ready, payload)
        return events.PayloadReceived(session, ready), []

    def _keep(self, session: str, ready: messages.Ready, payload: Tensor) -> None:
        with self._keeping:
            seq, _ = self._payloads.get((session, ready.fragment), (ready.seq, payload))
            if seq != ready.seq:
                raise CorruptMessageError(
                    f"seq {ready.seq} of fragment {ready.fragment} came while seq {seq} is undecided; only one may be "
                    "undecided; nothing of it was used; ask for the fate of the other one first"
                )
            self._payloads[session, ready.fragment] = (ready.seq, payload)
        self._assemblies.drop(session, ready.fragment, ready.seq)

    def _has(self, session: str, ready: messages.Ready) -> bool:
        with self._keeping:
            return self._payloads.get((session, ready.fragment), (None,))[0] == ready.seq

    def take_seed(self, session: str, bulk: Bulk, granted: tuple[str, int] | None) -> Ranges:
        """Keep start values of one fragment.

        Args:
            session: the sender.
            bulk: header {"fragment", "lease"} and float32 values, or a portion of them.
            granted: session and number of the seed lease; values of others are dropped.

        Returns:
            The bytes of the values that must still be sent.

        Raises:
            CorruptMessageError: the header is invalid.
            JoinError: the values take more than the memory of this machine.
        """
        self._count_up(bulk)
        p, lease, (at, of) = bulk.header.get("fragment"), bulk.header.get("lease"), portions.place(bulk)
        if type(p) is not int or type(lease) is not int or of % 4:
            raise CorruptMessageError(
                f"start values with fragment={p!r}, lease={lease!r} in {of} bytes; fragment and lease must "
                "be integers, the values whole float32 numbers; do both sides run the same version?"
            )
        if p % self._part[1] != self._part[0]:
            raise CorruptMessageError(f"start values of fragment {p}, which is not held here; send them to its shard")
        if granted != (session, lease) or not 0 <= p < manifests.MAX_FRAGMENTS:
            return []
        if of > (there := memory_here()):
            raise JoinError(
                f"the start values of fragment {p} take {of} bytes; the syncer's machine has {there} bytes of memory; "
                "run the syncer on a larger one: it takes 12 bytes for each parameter of the model"
            )
        with self._keeping:
            self._seed = {key: kept for key, kept in self._seed.items() if key[:2] == granted}
            seed = self._seed.get((session, lease, p))
            if seed is None or seed.values.nbytes != of:
                seed = _Seed(torch.empty(of, dtype=torch.uint8), portions.Received(of))
                self._seed[session, lease, p] = seed
            if seed.received.missing:
                seed.values.numpy()[at : at + bulk.payload.nbytes] = bulk.payload
                seed.received.add(at, bulk.payload.nbytes)
            return seed.received.missing

    def give(
        self,
        session: str,
        header: Json,
        store: AnchorStore | None,
        *,
        is_known: bool = False,
        proof: Callable[[int, int, int, str], str] = lambda *_: "",
    ) -> Bulk:
        """Return the update that a learner needs, or a portion of it.

        Args:
            session: the learner's session.
            header: {"fragment", "generation", "have"}; and {"mark", "span", "at"} for a portion, see `portions`.
            store: the anchors, if there are any.
            is_known: whether the session has joined; only then an update may be kept until all of it was sent.
            proof: returns the proof of a version, see `SyncerState.proof`.

        Raises:
            CorruptMessageError: the header is invalid, or the run has no such fragment.
        """
        mark = header.get("mark", "")
        if not isinstance(mark, str) or len(mark) > limits.MAX_CHARS:
            raise CorruptMessageError(f"mark={mark!r:.40}; must be a text of at most {limits.MAX_CHARS} characters")
        with self._giving:
            given = self._given.pop(session, None)
            if given is None or given.mark != mark:
                given = self._new(session, header, store, proof, mark)
            num_bytes = given.payload.nbytes
            start, stop = portions.asked_range(header, num_bytes)
            given.num_sent, given.asked_s = given.num_sent + stop - start, time.monotonic()
            if is_known and given.num_sent < num_bytes:
                self._given[session] = given
        with self._counting:
            self.bytes_down += stop - start
        return Bulk({**given.answer, "at": start, "of": num_bytes}, given.payload[start:stop])

    def _new(
        self,
        session: str,
        header: Json,
        store: AnchorStore | None,
        proof: Callable[[int, int, int, str], str],
        mark: str,
    ) -> _Given:
        p = header.get("fragment")
        if store is None or type(p) is not int or p not in store.mine:
            raise CorruptMessageError(f"fragment {p!r} was asked for; it is not held here, or has no values yet")
        have, generation = header.get("have"), header.get("generation")
        if not all(number is None or type(number) is int for number in (have, generation)):
            raise CorruptMessageError(
                f"have={have!r:.40}, generation={generation!r:.40}; both must be integers or null"
            )
        update = store.update_for(p, have, generation=generation)
        # Read after the update. A merge that is noted in between has a higher version, and is not part of the update.
        seq, version, kept = self._merged.get((session, p), (None, 0, 1.0))
        answer = {
            "kind": update.kind,
            "generation": update.generation,
            "from_version": update.from_version,
            "version": update.version,
            "merged_seq": seq if version <= update.version else None,
            "kept": kept,
            "digest": update.digest if update.kind == "full" else None,
            "proof": proof(p, update.generation, update.version, update.digest),
        }
        return _Given(mark, answer, update.payload, time.monotonic())

    def _count_up(self, bulk: Bulk) -> None:
        with self._counting:
            self.bytes_up += bulk.payload.nbytes

    # ------------------------------------------------------------------------------------------- called by the service

    def payloads(self, p: int, wanted: Sequence[tuple[str, int]]) -> tuple[Tensor, ...]:
        """Return the payloads of contributions to a fragment, given by session and seq."""
        kept = [(self._payloads[session, p], seq) for session, seq in wanted]
        assert all(seq == wanted_seq for (seq, _), wanted_seq in kept)
        return tuple(payload for (_, payload), _ in kept)

    def drop(self, session: str, p: int, seq: int) -> None:
        """Drop a payload that is no longer needed."""
        with self._keeping:
            if self._payloads.get((session, p), (None, None))[0] == seq:
                del self._payloads[session, p]
        self._assemblies.drop(session, p, seq)

    def prune(self, state: Admission) -> None:
        """Drop parts of contributions that can no longer be merged, and updates that no learner fetches."""
        self._assemblies.prune(state)
        for session, given in self._given.copy().items():
            if time.monotonic() - given.asked_s > GIVING_S:
                self._given.pop(session, None)

    def seed(self, session: str, lease: int, fragments: Collection[int]) -> dict[int, Tensor] | None:
        """Return the start values of these fragments; None until all have arrived."""
        found = {p: self._seed.get((session, lease, p)) for p in fragments}
        seeds = {p: seed for p, seed in found.items() if seed is not None and not seed.received.missing}
        return {p: seed.values.view(torch.float32) for p, seed in seeds.items()} if len(seeds) == len(found) else None

    def clear(self) -> None:
        """Drop all payloads and start values."""
        with self._keeping:
            self._payloads.clear()
            self._seed.clear()
        self._assemblies.clear()

    def drop_seed(self) -> None:
        """Drop received start values."""
        self._seed.clear()

    def note_merged(self, commit: CommitRecord) -> None:
        """Record the contributions in a commit, before it is installed and sent as an update."""
        for merge in commit.merges:
            self._merged[merge.session, commit.fragment] = (merge.ready.seq, commit.version, merge.kept)

    def remember_merged(self, merged: Iterable[Merged]) -> None:
        """Restore the merged contributions after a restart."""
        self._merged = {(session, p): (seq, version, kept) for session, p, seq, version, kept in merged}


def merged_by(members: Iterable[Member]) -> list[Merged]:
    """Return the merged contributions of the recorded fates of these sessions."""
    return [
        (member.session, p, seq, version, kept)
        for member in members
        for p, (seq, fate, version, _, kept) in member.fates.items()
        if fate == "merged" and version is not None
    ]


def _described(header: Json) -> messages.Ready:
    """Decode the description of a contribution in a header."""
    fields = header.get("ready")
    if not isinstance(fields, dict):
        raise CorruptMessageError(f"ready={fields!r:.80}; must be an object; do both sides run the same version?")
    return cast("messages.Ready", messages.decode({**fields, "kind": messages.Ready.__name__}, messages.FromLearner))
