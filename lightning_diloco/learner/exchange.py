"""The exchange of a learner's fragments: encode and upload contributions, download and stage updates.

1. There are four threads. One uploads, one downloads, and one computes. The fourth copies snapshots, or waits until the
   device has computed them and the losses. So staging an update does not wait for a device that runs some steps behind
   (on CUDA it waits for its own stream). No thread changes live parameters. In a run with shards, there are threads for
   the uploads and downloads of each shard, so that a shard that does not answer delays only its own fragments.
2. The bytes of a contribution are kept until the state machine forgets them, so a repeated upload is identical.
3. The next download of a thread starts when its last one is staged, so it holds at most one besides the staged ones.
4. A failed call is reported to the state machine, which asks again. A contribution that is not finite is sent as an
   error without payload, because the syncer decides all refusals.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lightning_diloco.config import RunConfig
from lightning_diloco.core.buffers import bytes_of, tensor_of
from lightning_diloco.core.fragments import FragmentPlan
from lightning_diloco.core.quantize import scaled, wire_nbytes
from lightning_diloco.devices.base import FragmentDevice, Update
from lightning_diloco.errors import CorruptMessageError, DiLoCoError, NonFiniteError
from lightning_diloco.learner.join import BULK_S, full_values
from lightning_diloco.process.threads import Crew, Job, Jobs
from lightning_diloco.protocol import actions, events, limits, messages
from lightning_diloco.transport.base import Bulk, Connection, Json

log = logging.getLogger(__name__)

FETCH_AGAIN_S = 1.0
UPLOAD_AGAIN_S = 0.1


@dataclass(frozen=True, slots=True)
class _Kept:
    """A contribution that the state machine has not forgotten yet: its bytes, or its error."""

    payload: Tensor
    error: str | None = None


class FragmentExchange:
    """Exchanges the fragments of one learner.

    Args:
        connection: connection to the syncer.
        session: nonce of this process.
        device: anchors and parameters.
        plan: division of the model into fragments.
        config: options of the run.
        crew: runs the threads.
        handle: called with events for the state machine.
        is_online: returns whether the syncer can be reached.
        expect: called with a fragment and the values that it will adopt, before it adopts them.
        num_lanes: number of processes that hold the fragments.

    Attributes:
        norm: norm of the last pseudo-gradient.
        relative_error: relative error of its encoding.
        bytes_up, bytes_down: payload bytes so far.
    """

    def __init__(
        self,
        connection: Connection,
        session: str,
        device: FragmentDevice[Any, Any],
        *,
        plan: FragmentPlan,
        config: RunConfig,
        crew: Crew,
        handle: Callable[[events.LearnerEvent], object],
        is_online: Callable[[], bool],
        expect: Callable[[int, Tensor], object] = lambda p, values: None,
        num_lanes: int = 1,
    ) -> None:
        self._connection = connection
        self._session = session
        self._device = device
        self._numels = [plan.layout(p, config.block_size).padded_numel for p in range(plan.num_fragments)]
        self._config = config
        self._crew = crew
        self._handle = handle
        self._is_online = is_online
        self._expect = expect
        self._wanted: set[tuple[int, int]] = set()
        self._kept: dict[tuple[int, int], _Kept] = {}
        self._failed: dict[int, str] = {}  # last error of an upload, by fragment
        self._staged: dict[int, tuple[Any, Tensor | None]] = {}
        self._work = Jobs(crew, "worker")
        self._up, self._down = ([Jobs(crew, name) for _ in range(num_lanes)] for name in ("uploads", "downloads"))
        self._copies = Jobs(crew, "copies", yields=False)
        self._counting = threading.Lock()
        self._is_unsound = False  # the last contribution was not finite
        self.norm = self.relative_error = 0.0
        self.bytes_up = self.bytes_down = 0

    # ------------------------------------------------------------------------------- called while the machine is locked

    def encode(self, ready: messages.Ready) -> None:
        """Take a snapshot of a fragment and queue its encoding. Training thread."""
        snapshot = self._device.snapshot(ready.fragment)
        self._wanted.add((ready.fragment, ready.seq))
        self._copies.put(partial(self._collect, ready, snapshot))

    def aside(self, job: Job) -> None:
        """Run a job in the thread that may wait for the device."""
        self._copies.put(job)

    def upload(self, ready: messages.Ready) -> None:
        """Queue the upload of a contribution's bytes."""
        self._up[ready.fragment % len(self._up)].put(partial(self._upload, ready))

    def fetch(self, wanted: actions.Fetch) -> None:
        """Queue the download of an update, which is then staged."""
        self._down[wanted.fragment % len(self._down)].put(partial(self._fetch, wanted))

    def land(self, p: int) -> None:
        """Land the staged update of a fragment. Training thread."""
        staged, adopted = self._staged.pop(p)
        if adopted is not None:
            self._device.adopt(p, adopted)
        else:
            self._device.land(p, staged)

    def forget(self, p: int, seq: int) -> None:
        """Drop the bytes of a contribution."""
        self._wanted.discard((p, seq))
        self._kept.pop((p, seq), None)

    def forget_all(self) -> None:
        """Drop all bytes, after the learner has left."""
        self._wanted.clear()

    # ----------------------------------------------------------------------------------------------------------- after

    def take_final(self, p: int, generation: int, have: int) -> tuple[int, int, str]:
        """Fetch and land the newest version of a fragment's anchor, and wait for it. Call this after training.

        Returns:
            Generation and version of this anchor, and the proof of its publication.

        Raises:
            DiLoCoError: it could not be fetched.
        """
        bulk = self._get(p, have=have, generation=generation)
        final = bulk.header["generation"], bulk.header["version"], bulk.header["proof"]
        if final[:2] != (generation, have):
            staged: list[Any] = []
            self._work.do(lambda: staged.append(self._device.stage(p, self._update(p, bulk, None))))
            if staged:  # otherwise the worker has failed, and its error is raised
                self._device.land(p, staged[0])
        return final

    def stop(self) -> None:
        """Wake all threads, so that they end."""
        for jobs in (self._work, *self._up, *self._down, self._copies):
            jobs.stop()

    # ---------------------------------------------------------------------------------------------------- own threads

    def _collect(self, ready: messages.Ready, snapshot: Any) -> None:
        self._device.settle()
        self._device.collect(snapshot)
        self._work.put(partial(self._encode, ready, snapshot))

    def _encode(self, ready: messages.Ready, snapshot: Any) -> None:
        key = ready.fragment, ready.seq
        if key not in self._wanted:  # its fate was decided during the computation
            return
        try:
            encoded = self._device.encode(snapshot)
        except NonFiniteError as error:
            log.log(
                logging.DEBUG if self._is_unsound else logging.ERROR,
                "the contribution to fragment %d is not sent: %s; further ones are sent when one is finite",
                ready.fragment,
                error,
            )
            self._is_unsound = True
            kept = _Kept(torch.empty(0, dtype=torch.uint8), str(error)[: limits.MAX_CHARS])
        else:
            kept, self._is_unsound = _Kept(encoded.payload), False
            self.norm, self.relative_error = encoded.norm, encoded.relative_error
        self._kept[key] = kept
        if key not in self._wanted:  # its fate was decided meanwhile, so no later action will drop these bytes
            self._kept.pop(key, None)
            return
        self._handle(events.Encoded(ready.fragment, ready.seq))

    def _upload(self, ready: messages.Ready) -> None:
        kept = self._kept.get((ready.fragment, ready.seq))
        try:
            if kept is not None and self._is_online():  # otherwise its fate is decided, or the syncer is offline
                header: Json = {"what": "contribution", "session": self._session, "ready": messages.encode(ready)}
                header |= {"error": kept.error}
                self._connection.put(Bulk(header, bytes_of(kept.payload)), deadline_s=BULK_S)
                with self._counting:
                    self.bytes_up += kept.payload.numel()
                self._failed.pop(ready.fragment, None)
                self._handle(events.Uploaded(ready.fragment, ready.seq))
                return
        except DiLoCoError as error:
            self._upload_failed(ready.fragment, error)
        self._handle(events.UploadFailed(ready.fragment, ready.seq))

    def _upload_failed(self, p: int, error: DiLoCoError) -> None:
        if not self._crew.stopping.is_set():
            if self._failed.get(p) != str(error):  # once for a shard that is away
                self._failed[p] = str(error)
                log.warning("an upload of fragment %d failed; the syncer is asked for its fate: %s", p, error)
            self._crew.stopping.wait(UPLOAD_AGAIN_S)

    def _fetch(self, wanted: actions.Fetch) -> None:
        try:
            if self._is_online():
                have = None if wanted.adopt else wanted.have
                bulk = self._get(wanted.fragment, have=have, generation=wanted.generation)
                self._work.do(partial(self._stage, wanted, bulk))
                return
        except DiLoCoError as error:
            self._fetch_failed(wanted.fragment, error)
        self._handle(events.FetchFailed(wanted.fragment))

    def _fetch_failed(self, p: int, error: DiLoCoError) -> None:
        if not self._crew.stopping.is_set():
            log.warning("a download of fragment %d failed and is tried again: %s", p, error)
            self._crew.stopping.wait(FETCH_AGAIN_S)

    def _get(self, p: int, *, have: int | None, generation: int) -> Bulk:
        asked: Json = {"session": self._session, "fragment": p, "generation": generation, "have": have}
        bulk = self._connection.get(asked, deadline_s=BULK_S)
        with self._counting:
            self.bytes_down += bulk.payload.nbytes
        return bulk

    def _stage(self, wanted: actions.Fetch, bulk: Bulk) -> None:
        p, header = wanted.fragment, bulk.header
        # The reply names the merged contribution; the outstanding one may have changed since the request.
        mine = None if header["merged_seq"] is None else self._kept.get((p, header["merged_seq"]))
        try:
            update = self._update(p, bulk, None if mine is None else self._merged_part(p, mine, header["kept"]))
            if wanted.adopt and update.full is None:
                raise CorruptMessageError(f"fragment {p} was requested in full, but updates arrived; nothing was used")
            if wanted.adopt and update.full is not None:
                self._expect(p, update.full)
            staged = (None, update.full) if wanted.adopt else (self._device.stage(p, update), None)
        except CorruptMessageError as error:
            log.warning("an update of fragment %d is invalid and is fetched again: %s", p, error)
            self._handle(events.FetchFailed(p))
            return
        self._staged[p] = staged
        seq = None if mine is None else header["merged_seq"]
        is_full = update.full is not None
        about = (header["generation"], header["version"], seq, is_full, header["kept"], header["proof"])
        self._handle(events.Staged(p, *about))

    def _merged_part(self, p: int, mine: _Kept, kept: float) -> Tensor:
        """Return the part of the contribution that was merged, to the same bytes as at the syncer."""
        if kept == 1:
            return mine.payload
        about = {"wire": self._config.wire, "block_size": self._config.block_size}
        return scaled(mine.payload, kept, numel=self._numels[p], **about)

    def _update(self, p: int, bulk: Bulk, sent: Tensor | None) -> Update:
        header, numel = bulk.header, self._numels[p]
        if header["kind"] == "full":
            return Update(full_values(bulk, numel), (), sent)
        size = wire_nbytes(numel, self._config.wire, self._config.block_size)
        num_updates = header["version"] - header["from_version"]
        if bulk.payload.nbytes != size * num_updates:
            raise CorruptMessageError(
                f"an update of fragment {p} came with {bulk.payload.nbytes} bytes; {num_updates} versions take "
                f"{size * num_updates}; do both sides run the same version?"
            )
        values = tensor_of(bulk.payload, torch.uint8)
        return Update(None, torch.split(values, size) if num_updates else (), sent)
