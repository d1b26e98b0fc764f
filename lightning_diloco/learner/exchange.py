"""A learner's tensors on their way: encoded and uploaded, downloaded and staged.

1. Four threads: one uploads, one downloads, so that neither waits for the other, one computes, and one copies what was
   just snapshotted, or waits until the device has computed it (losses, too): who computes waits for nothing, or
   updates would be staged only when a device some steps behind has got as far as a snapshot (on CUDA it still waits for
   its own stream). None of them changes live parameters.
2. A contribution's bytes are kept until the machine forgets them: whatever is sent again is identical.
3. At most one download is held beside the staged ones: the next begins when the last is staged.
4. A call that fails, for whatever reason the syncer or the wire has, is reported to the machine, which asks again.
   A contribution that is not finite is uploaded as a bare complaint, so that its refusal is decided in one place.
"""

from __future__ import annotations

import logging
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


@dataclass(frozen=True, slots=True)
class _Kept:
    """A contribution whose fate has not landed: its bytes, or what is wrong with it."""

    payload: Tensor
    error: str | None = None


class FragmentExchange:
    """Carries the fragments of one learner.

    Args:
        connection: to the syncer.
        session: this process's nonce.
        device: anchors and parameters.
        plan: how the model is cut.
        config: of the run.
        crew: runs the threads.
        handle: takes the machine's events.
        is_online: whether it is worth trying.
        expect: told of values that will be adopted, before that is possible.

    Attributes:
        norm: of the last pseudo-gradient.
        relative_error: of its encoding.
        bytes_up, bytes_down: payloads so far.
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
        self._staged: dict[int, tuple[Any, Tensor | None]] = {}
        self._work, self._up, self._down = (Jobs(crew, name) for name in ("worker", "uploads", "downloads"))
        self._copies = Jobs(crew, "copies", yields=False)
        self.norm = self.relative_error = 0.0
        self.bytes_up = self.bytes_down = 0

    # ------------------------------------------------------------------------------- called while the machine is locked

    def encode(self, ready: messages.Ready) -> None:
        """Training thread: snapshot this fragment, and have it encoded."""
        snapshot = self._device.snapshot(ready.fragment)
        self._wanted.add((ready.fragment, ready.seq))
        self._copies.put(partial(self._collect, ready, snapshot))

    def aside(self, job: Job) -> None:
        """Have this done by the thread that may wait for the device."""
        self._copies.put(job)

    def upload(self, ready: messages.Ready) -> None:
        """Have its kept bytes sent."""
        self._up.put(partial(self._upload, ready))

    def fetch(self, wanted: actions.Fetch) -> None:
        """Have an update fetched and staged."""
        self._down.put(partial(self._fetch, wanted))

    def land(self, p: int) -> None:
        """Training thread: the staged update becomes current."""
        staged, adopted = self._staged.pop(p)
        if adopted is not None:
            self._device.adopt(p, adopted)
        else:
            self._device.land(p, staged)

    def forget(self, p: int, seq: int) -> None:
        """These bytes will not be asked for again."""
        self._wanted.discard((p, seq))
        self._kept.pop((p, seq), None)

    def forget_all(self) -> None:
        """This learner has left: nothing will be asked for again."""
        self._wanted.clear()

    # ----------------------------------------------------------------------------------------------------------- after

    def take_final(self, p: int, generation: int, have: int) -> None:
        """Training is over: bring this fragment's anchor to the newest version, and wait for it.

        Raises:
            DiLoCoError: it could not be fetched.
        """
        bulk = self._get(p, have=have, generation=generation)
        if (bulk.header["generation"], bulk.header["version"]) != (generation, have):
            staged: list[Any] = []
            self._work.do(lambda: staged.append(self._device.stage(p, self._update(p, bulk, None))))
            if staged:  # else the worker failed, and that error is told
                self._device.land(p, staged[0])

    def stop(self) -> None:
        """Wake all threads, so that they see that the crew ends."""
        for jobs in (self._work, self._up, self._down, self._copies):
            jobs.stop()

    # ---------------------------------------------------------------------------------------------------- own threads

    def _collect(self, ready: messages.Ready, snapshot: Any) -> None:
        self._device.settle()
        self._device.collect(snapshot)
        self._work.put(partial(self._encode, ready, snapshot))

    def _encode(self, ready: messages.Ready, snapshot: Any) -> None:
        if (ready.fragment, ready.seq) not in self._wanted:  # decided while a device was still computing it
            return
        try:
            encoded = self._device.encode(snapshot)
        except NonFiniteError as error:
            log.error("the contribution to fragment %d is not sent: %s", ready.fragment, error)
            kept = _Kept(torch.empty(0, dtype=torch.uint8), str(error)[: limits.MAX_CHARS])
        else:
            kept = _Kept(encoded.payload)
            self.norm, self.relative_error = encoded.norm, encoded.relative_error
        self._kept[ready.fragment, ready.seq] = kept
        self._handle(events.Encoded(ready.fragment, ready.seq))

    def _upload(self, ready: messages.Ready) -> None:
        kept = self._kept.get((ready.fragment, ready.seq))
        try:
            if kept is not None and self._is_online():  # else decided meanwhile, or no use in trying
                header: Json = {"what": "contribution", "session": self._session, "ready": messages.encode(ready)}
                header |= {"error": kept.error}
                self._connection.put(Bulk(header, bytes_of(kept.payload)), deadline_s=BULK_S)
                self.bytes_up += kept.payload.numel()
                self._handle(events.Uploaded(ready.fragment, ready.seq))
                return
        except DiLoCoError as error:
            if not self._crew.stopping.is_set():
                log.warning("an upload of fragment %d failed, its fate is asked: %s", ready.fragment, error)
        self._handle(events.UploadFailed(ready.fragment, ready.seq))

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
            log.warning("a download of fragment %d failed, it is tried again: %s", p, error)
            self._crew.stopping.wait(FETCH_AGAIN_S)

    def _get(self, p: int, *, have: int | None, generation: int) -> Bulk:
        asked: Json = {"session": self._session, "fragment": p, "generation": generation, "have": have}
        bulk = self._connection.get(asked, deadline_s=BULK_S)
        self.bytes_down += bulk.payload.nbytes
        return bulk

    def _stage(self, wanted: actions.Fetch, bulk: Bulk) -> None:
        p, header = wanted.fragment, bulk.header
        # By what was merged, not by what was outstanding when it was asked: that may have been sent in between.
        mine = None if header["merged_seq"] is None else self._kept.get((p, header["merged_seq"]))
        try:
            update = self._update(p, bulk, None if mine is None else self._merged_part(p, mine, header["kept"]))
            if wanted.adopt and update.full is None:
                raise CorruptMessageError(f"fragment {p} was asked for in full; updates came; nothing of it was used")
            if wanted.adopt and update.full is not None:
                self._expect(p, update.full)
            staged = (None, update.full) if wanted.adopt else (self._device.stage(p, update), None)
        except CorruptMessageError as error:
            log.warning("an update of fragment %d is not usable, it is fetched again: %s", p, error)
            self._handle(events.FetchFailed(p))
            return
        self._staged[p] = staged
        seq = None if mine is None else header["merged_seq"]
        is_full = update.full is not None
        about = (header["generation"], header["version"], seq, is_full, header["kept"], header["proof"])
        self._handle(events.Staged(p, *about))

    def _merged_part(self, p: int, mine: _Kept, kept: float) -> Tensor:
        """What the syncer merged of my contribution: the same bytes, where the norm guard scaled it down."""
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
