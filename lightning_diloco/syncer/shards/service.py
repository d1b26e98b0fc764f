"""The service of a shard's process: learners exchange its fragments, and the syncer controls it.

1. Before a syncer attaches, and after each `Attach`, the shard has no payloads. Learners upload them again.
2. The arrival of a payload is an event for the syncer, which polls for it with the nonce of its `Attach`.
3. Uploads are kept only for sessions that the syncer admits. An upload that arrives before the syncer's admission waits
   for up to ADMIT_S.
4. One computation runs at a time. `Attach` waits for it, so no computation for an earlier syncer ends later.
5. The shard of a standby is not attached. It follows the primary's shard with the same number (`copying.py`), until the
   standby takes over and attaches.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import cast

from torch import Tensor

from lightning_diloco.config import PROTOCOL_VERSION, RunConfig
from lightning_diloco.core.buffers import bytes_of
from lightning_diloco.core.encoded import Measured
from lightning_diloco.errors import (
    AuthError,
    ConfigError,
    CorruptLogError,
    CorruptMessageError,
    RestoringError,
    TransportError,
)
from lightning_diloco.protocol import codec, messages
from lightning_diloco.protocol.syncer.proofs import proof_of_version
from lightning_diloco.storage.files import Faults, no_faults
from lightning_diloco.storage.log_frames import Record
from lightning_diloco.syncer import replacement
from lightning_diloco.syncer.anchors import AnchorStore, fragments_of
from lightning_diloco.syncer.contribution_archive import Recorder
from lightning_diloco.syncer.outbox import Outbox
from lightning_diloco.syncer.payloads import Payloads, made_up
from lightning_diloco.syncer.shards import requests as ask
from lightning_diloco.syncer.shards.copying import ShardCopy, is_copied, no_copy_any_more
from lightning_diloco.syncer.shards.shard import OwnShard, Prepared
from lightning_diloco.syncer.shards.store import ShardStore
from lightning_diloco.syncer.standby import requests as standby
from lightning_diloco.syncer.standby.invitation import Invitation
from lightning_diloco.syncer.standby.origin import Asked, Origin, is_the_key
from lightning_diloco.syncer.standby.requests import STANDBY
from lightning_diloco.syncer.standby.source import Source
from lightning_diloco.transport.base import Bulk, Json, Polled

log = logging.getLogger(__name__)

_COMPUTATIONS = (ask.Measure, ask.Merge, ask.Prepare, ask.Regenerate, ask.StoreSeed)
ADMIT_S = 5.0
SILENT_S = 5.0
_EMPTY = memoryview(b"")


class ShardService:
    """Implements the transport's `Handler`.

    Args:
        directory: directory of this shard.
        part: (shard, number of shards).
        key: key that the syncer must send.
        connect: connects to the shard of a primary, which this one follows.
        faults: hook at named points, for crash tests.

    Attributes:
        is_over: whether the run has finished.
        error: why the process must end and be started again; None: it need not.
    """

    def __init__(
        self,
        directory: Path,
        part: tuple[int, int],
        key: str,
        *,
        connect: Callable[[Invitation], Source] = Source,
        faults: Faults = no_faults,
    ) -> None:
        self.part = part
        self._directory, self._key, self._faults = directory, key, faults
        replacement.install(directory, replacement.OF_A_SHARD)
        self._open()
        self._copy = ShardCopy(directory, connect)
        self._desk = Payloads(part)
        self._own = OwnShard(self._desk, Recorder(directory.parent.parent / "contributions"))
        self._own.anchors = self._disk.anchors
        self._attached: ask.Attach | None = None
        self._num_attached, self._followed = 0, ""
        self._polled_s = 0.0
        self.is_over = False
        self.error: BaseException | None = None
        self._admitted = ask.Admitted()
        self._measured: dict[int, tuple[tuple[Tensor, ...], Measured]] = {}
        self._prepared: dict[int, Prepared] = {}
        self._events = Outbox()
        self._working, self._changing, self._copying = threading.RLock(), threading.Condition(), threading.Lock()
        self._is_stopping = False
        self._answers: dict[type[ask.Request], Callable[..., Bulk]] = {
            ask.Admit: self._admit,
            ask.Drop: self._drop,
            ask.Measure: self._measure,
            ask.Merge: self._merge,
            ask.Prepare: self._prepare,
            ask.Install: self._install,
            ask.Regenerate: self._regenerate,
            ask.SizeOfSeed: self._size_of_seed,
            ask.StoreSeed: self._store_seed,
            ask.Over: self._over,
            ask.Figures: lambda request: Bulk(self._figures(), _EMPTY),
        }

    def _open(self) -> None:
        self._disk = ShardStore(self._directory, self.part, faults=self._faults)
        self._origin = Origin(self._directory, self._disk.snapshots.directory, self._disk.log)

    def _close(self) -> None:
        self._origin.close()
        self._disk.close()

    @property
    def is_polled(self) -> bool:
        """Whether a syncer is attached and has asked for events within SILENT_S."""
        return self._attached is not None and time.monotonic() - self._polled_s < SILENT_S

    def stop(self) -> None:
        """Refuse calls, and close the files after the present computation."""
        self._is_stopping = True
        self._events.close()
        with self._working:
            if self.error is None:
                self._close()

    # -------------------------------------------------------------------------------------------- called by transport

    def on_send(self, session: str, messages_: Sequence[Json]) -> Json:
        """Refuse control messages: they go to the syncer."""
        raise CorruptMessageError(
            f"a control message came to shard {self.part[0]}; the syncer takes them; nothing was used"
        )

    def on_poll(self, session: str, cursor: int, wait_s: float) -> Polled:
        """Return events for the attached syncer."""
        self._attachment(session)
        self._polled_s = time.monotonic()
        return self._events.poll(session, cursor, wait_s)

    def on_put(self, bulk: Bulk) -> Json:
        """Accept a contribution or a part of the seed; discard bytes that only measure a link."""
        if bulk.header.get("what") == "probe":
            return {"missing": []}
        session = str(bulk.header.get("session"))
        attached = self._attachment()
        if bulk.header.get("what") == "seed":
            if self._own.anchors is not None:  # the run already has its start values
                return {"missing": []}
            return {"missing": self._desk.take_seed(session, bulk, self._seeder(bulk.header.get("lease")))}
        self._await(lambda: session in self._admitted.sessions)
        event, missing = self._desk.take_contribution(session, bulk, self._own.anchors, self)
        if event is not None:
            told = {"session": event.session, "ready": messages.encode(event.ready), "error": event.error}
            self._events.put(attached.nonce, told)
        return {"missing": missing}

    def on_get(self, header: Json) -> Bulk:
        """Answer the syncer or a standby; or return the update that a learner needs, or bytes that measure a link."""
        if header.get("what") == ask.SHARD:
            return self._answer(header)
        if header.get("what") == STANDBY:
            return self._give_standby(header)
        if header.get("what") == "probe":
            return made_up(header)
        session, attached = str(header.get("session")), self._attachment()

        def proof(p: int, generation: int, version: int, digest: str) -> str:
            return proof_of_version(attached.secret, p, messages.Mark(generation, version, digest, ""))

        is_known = session in self._admitted.sessions
        return self._desk.give(session, header, self._own.anchors, is_known=is_known, proof=proof)

    def on_status(self) -> Json:
        """Return the values that `diloco doctor` compares, and a shard's figures for users."""
        return {"protocol": PROTOCOL_VERSION, "shard": self.part[0], "num_shards": self.part[1], **self._figures()}

    # ------------------------------------------------------------------------------------------------------ admission

    @property
    def config(self) -> RunConfig:
        """See `Admission`."""
        return RunConfig() if self._own.anchors is None else self._own.store.config

    def may_merge(self, session: str, ready: messages.Ready) -> bool:
        """See `Admission`. The syncer drops contributions that it has already decided."""
        return session in self._admitted.sessions

    def _await(self, condition: Callable[[], bool]) -> None:
        with self._changing:
            if not self._changing.wait_for(condition, ADMIT_S):
                raise TransportError(
                    "the syncer has not announced this session to its shard yet; nothing was used; try again"
                )

    def _seeder(self, lease: object) -> tuple[str, int] | None:
        """Return session and number of the seed lease, when this one or a later one was granted."""

        def is_announced() -> bool:
            granted = self._admitted.seeder
            return granted is not None and not (isinstance(lease, int) and lease > granted[1])

        self._await(is_announced)
        return self._admitted.seeder

    # ------------------------------------------------------------------------------------------- called by the syncer

    def _attachment(self, nonce: str | None = None) -> ask.Attach:
        """Return the attached syncer's `Attach`; refuse calls of another syncer."""
        if self._is_stopping:
            raise TransportError(f"shard {self.part[0]} is stopping; nothing of the call was used; try again")
        attached = self._attached
        if attached is None:
            raise RestoringError(f"shard {self.part[0]} waits for its syncer; nothing of the call was used")
        if nonce is not None and attached.nonce != nonce:
            raise TransportError(f"another syncer has attached to shard {self.part[0]}; nothing of the call was used")
        return attached

    def _answer(self, header: Json) -> Bulk:
        if not is_the_key(header.get("key"), self._key):
            raise AuthError(f"a request to shard {self.part[0]} came without the key of RUN_DIR/standby")
        request = ask.decode(header.get("request"))
        if isinstance(request, ask.Attach):
            return self._attach(request)
        if isinstance(request, ask.Follow):
            return self._follow(request)
        if isinstance(request, ask.Over) and self._attached is None:  # of a standby
            return self._over(request)
        self._attachment(str(header.get("nonce")))
        if (answer := self._answers.get(type(request))) is None:
            raise CorruptMessageError(f"{type(request).__name__} is a request to the syncer, not to a shard")
        if isinstance(request, _COMPUTATIONS):
            with self._working:
                self._attachment(str(header.get("nonce")))  # a syncer may have attached meanwhile
                return answer(request)
        return answer(request)

    def _give_standby(self, header: Json) -> Bulk:
        if not is_the_key(header.get("key"), self._key):
            raise AuthError(f"a request to shard {self.part[0]} came without the key of RUN_DIR/standby")
        request = standby.decode(header.get("request"))
        if self._is_stopping or not isinstance(request, Asked):
            raise TransportError(f"shard {self.part[0]} does not answer {type(request).__name__}; try again")
        return self._origin.give(request, header)

    def _check_part(self, request: ask.Attach | ask.Follow) -> None:
        if (request.shard, request.num_shards) != self.part:
            raise ConfigError(
                f"this is shard {self.part[0]} of {self.part[1]}; the syncer wants {request.shard} of "
                f"{request.num_shards}; start both with the same --shards"
            )

    def _detach(self) -> None:
        """Drop the state of the attached syncer. Needs `_working`."""
        self._attached = None
        self._measured.clear()
        self._prepared.clear()
        self._own.forget_gradients()
        self._desk.clear()

    def _follow(self, request: ask.Follow) -> Bulk:
        """Copy from the primary's shard. The network is used without `_working`, so that a syncer can attach."""
        self._check_part(request)
        with self._copying:
            with self._working:
                if self._is_stopping or self.is_polled or request.following == self._followed:
                    raise TransportError(f"shard {self.part[0]} does not follow any more")
                if self._attached is not None:
                    self._detach()
                self._own.anchors, num_attached = None, self._num_attached
                for each in request.decided:
                    self._disk.decided(each.fragment, each.version)
                self._disk.snapshot_if_due()
            copied: list[Record] = []
            is_new = False
            if is_copied(self._directory):
                copied = self._copy.records_after(self._disk.log.last_lsn, request.invitation, request.wait_s)
            else:
                is_new = self._copy.fetch(request.invitation)
            with self._working:
                if self._is_stopping or self._num_attached != num_attached:
                    raise TransportError(f"shard {self.part[0]} does not follow any more")
                if is_new:
                    self._replace()
                with self._ends_if_broken():
                    self._disk.copy(copied)
                lsn = self._disk.log.last_lsn if is_copied(self._directory) else None
                has_all = lsn is not None and not copied and not is_new
                return Bulk({"lsn": lsn, "has_all": has_all, "undecided": len(self._disk.undecided)}, _EMPTY)

    def _replace(self) -> None:
        """Open the files of a new copy."""
        try:
            self._close()
            self._disk.anchors = None  # they take as much memory as the new ones
            self._disk.undecided.clear()
            self._copy.install()
            self._open()
        except BaseException as error:
            self.error = error
            raise

    @contextlib.contextmanager
    def _ends_if_broken(self) -> Iterator[None]:
        """End the process if the block fails and leaves records in the log that are not in memory."""
        before = self._disk.log.last_lsn
        try:
            yield
        except BaseException as error:
            if self._disk.log.last_lsn != before:
                self.error = error
            raise

    def _attach(self, request: ask.Attach) -> Bulk:
        self._check_part(request)
        with self._working, self._disk.changing:
            self._num_attached, self._followed = self._num_attached + 1, request.following
            self._detach()
            positions = {each.fragment: each.version for each in request.positions or ()}
            if positions and self._disk.anchors is not None:
                self._disk.check(positions)  # before the log goes its own way
            no_copy_any_more(self._directory)
            self._desk.remember_merged(request.merged)
            if request.positions is None:
                self._disk.forget()
            elif self._disk.anchors is None:
                raise ConfigError(
                    f"shard {self.part[0]} has no files of run {request.run}, which has start values; restore its "
                    "directory, or begin a new run"
                )
            else:
                self._disk.settle(positions)
                if (generation := max(each.generation for each in request.positions)) != self._disk.generation:
                    self._disk.regenerate(generation)
            digests = {} if self._disk.anchors is None else _digests(self._disk.anchors)
            self._check_digests(request.positions or (), digests)
            self._disk.snapshot_if_due()  # while the syncer's disk is full, each attempt leaves a gradient in the log
            self._own.anchors = self._disk.anchors
            self._admit(ask.Admit(request.admitted))
            self._attached, self._polled_s = request, time.monotonic()
            self._origin.wake()
        log.info("shard %d of %d works for run %s", *self.part, request.run)
        return Bulk({"digests": digests}, _EMPTY)

    def _check_digests(self, positions: Sequence[ask.Position], found: Mapping[str, str]) -> None:
        """Check the digests of the versions that were settled. Raises `CorruptLogError`."""
        for each in positions:
            if each.digest not in ("", found[str(each.fragment)]):
                raise CorruptLogError(
                    f"shard {self.part[0]} has other values of fragment {each.fragment}, version {each.version}, than "
                    "the run; restore the syncer's directory and those of all shards as of one moment"
                )

    def _admit(self, request: ask.Admit) -> Bulk:
        with self._changing:
            self._admitted = request.admitted
            self._changing.notify_all()
        self._desk.prune(self)
        return Bulk({}, _EMPTY)

    def _drop(self, request: ask.Drop) -> Bulk:
        self._desk.drop(request.session, request.fragment, request.seq)
        self._desk.prune(self)
        self._disk.snapshot_if_due()  # drops follow each commit
        return Bulk({}, _EMPTY)

    def _measure(self, request: ask.Measure) -> Bulk:
        p = request.fragment
        payloads = self._desk.payloads(p, request.payloads)
        measured = self._own.store.measure(p, payloads)
        self._measured[p] = payloads, measured
        gram_EMM = measured.gram_EMM
        return Bulk({"shape": list(gram_EMM.shape)}, bytes_of(gram_EMM.flatten()))

    def _merge(self, request: ask.Merge) -> Bulk:
        p = request.fragment
        payloads, measured = self._measured.pop(p)
        found = self._own.merge_payloads(
            p,
            payloads,
            request.shares,
            max_norms=ask.floats(request.max_norms),
            measured=measured,
            number=request.round,
        )
        report = found.report
        norms, kept, cosines = (ask.numbers(values) for values in (report.norms, report.kept, report.cosines))
        merged = ask.Merged(norms, kept, cosines, ask.numbers([report.merged_norm])[0], found.is_finite)
        return Bulk(codec.dump(merged), _EMPTY)

    def _prepare(self, request: ask.Prepare) -> Bulk:
        commit = request.commit
        gradient = self._own.gradient(commit)
        prepared = self._own.prepare(commit, request.recording)
        with prepared.hashing():
            lsn = self._disk.write(commit, gradient)
        self._origin.wake()
        self._prepared[commit.fragment] = prepared
        return Bulk({"digest": prepared.digest, "lr": prepared.lr, "lsn": lsn}, _EMPTY)

    def _install(self, request: ask.Install) -> Bulk:
        commit = request.commit
        with self._disk.changing:
            prepared = self._prepared.pop(commit.fragment, None)
            if prepared is not None:  # otherwise a syncer has attached meanwhile, which has installed it
                self._own.install(commit, prepared)
                del self._disk.undecided[commit.fragment]
        return Bulk({}, _EMPTY)

    def _regenerate(self, request: ask.Regenerate) -> Bulk:
        if self._disk.undecided:
            raise TransportError("a version is undecided; attach again")
        if self._own.anchors is not None and request.generation > self._disk.generation:
            self._disk.regenerate(request.generation)
        return Bulk({}, _EMPTY)

    def _size_of_seed(self, request: ask.SizeOfSeed) -> Bulk:
        values = self._desk.seed(request.session, request.lease, fragments_of(self.part, request.num_fragments))
        num_values = None if values is None else sum(each.numel() for each in values.values())
        return Bulk({"num_values": num_values}, _EMPTY)

    def _store_seed(self, request: ask.StoreSeed) -> Bulk:
        mine = fragments_of(self.part, cast("int", request.manifest["num_fragments"]))
        values = self._desk.seed(request.session, request.lease, mine)
        if values is None:
            raise TransportError(f"shard {self.part[0]} has lost start values; send them again")
        store = self._disk.store_seed(request.manifest, values, request.num_values)
        if request.is_recorded:
            self._own.recorder.keep_seed(store)
        self._own.anchors = store
        self._desk.drop_seed()
        return Bulk({"digests": _digests(store)}, _EMPTY)

    def _over(self, request: ask.Over) -> Bulk:
        self.is_over = True
        return Bulk({}, _EMPTY)

    def _figures(self) -> Json:
        return {"pid": os.getpid(), "bytes_up": self._desk.bytes_up, "bytes_down": self._desk.bytes_down}


def _digests(store: AnchorStore) -> dict[str, str]:
    """Return digests by fragment; the keys are texts, as in JSON."""
    return {str(p): digest for p, digest in zip(store.mine, store.digests(), strict=True)}
