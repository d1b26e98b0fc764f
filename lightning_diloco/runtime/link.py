"""A learner's link to its syncer: the protocol machine, driven by the training thread and four threads beside it.

1. The training thread enters in `step`, `set_evaluating` and `finish`. It takes the machine's lock, which others hold
   for microseconds, and does nothing but snapshots and landings.
2. sender: control messages. listener: what the syncer says. worker: encoding, decoding, staging. carrier: uploads and
   downloads. None of them touches live parameters.
3. While the syncer cannot be reached, control messages are dropped: all of them are said again after the hello.
4. An error in any thread surfaces at the training thread's next call; none is swallowed.
"""

from __future__ import annotations

import logging
import os
import queue
import secrets
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_diloco import errors
from lightning_diloco.config import PROTOCOL_VERSION, LearnerConfig, RunConfig
from lightning_diloco.core.fragments import FragmentPlan
from lightning_diloco.core.quantize import wire_nbytes
from lightning_diloco.core.schedule import fragment_due
from lightning_diloco.devices.base import FragmentDevice, Update
from lightning_diloco.errors import ConfigError, CorruptMessageError, DiLoCoError, TransportError
from lightning_diloco.protocol import LearnerState, actions, codec, events, messages
from lightning_diloco.runtime.anchors import bytes_of
from lightning_diloco.runtime.embedded import start_embedded_syncer
from lightning_diloco.runtime.joining import BULK_S, Joined, Joining, MakeDevice
from lightning_diloco.runtime.model import ModelDescription
from lightning_diloco.runtime.report import STALL
from lightning_diloco.runtime.stopwatch import Stopwatch
from lightning_diloco.transport.address import JoinAddress
from lightning_diloco.transport.base import Bulk, Json
from lightning_diloco.transport.flight import FlightConnection

log = logging.getLogger(__name__)

POLL_S = 2.0
TICK_S = 0.1
RECONNECT_S = (0.1, 2.0)
LEAVE_S = 10.0
NUM_SLOTS = 64


@dataclass(slots=True)
class _Kept:
    """An encoded contribution whose fate has not landed."""

    payload: Tensor
    norm: float
    relative_error: float


class Link:
    """One learner's part in a run.

    Args:
        run_options: explicit `RunConfig` options.
        learner: this learner's own options.
        root_dir: where an embedded syncer's run directory goes.
    """

    def __init__(self, run_options: dict[str, Any], learner: LearnerConfig, root_dir: Path) -> None:
        self._run_options = run_options
        self._learner = learner
        self._root_dir = root_dir
        self._session = secrets.token_hex(16)
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._stopping = threading.Event()
        self._error: BaseException | None = None
        self._outgoing: queue.SimpleQueue[messages.FromLearner | None] = queue.SimpleQueue()
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._freight: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._kept: dict[tuple[int, int], _Kept] = {}
        self._staged: dict[int, tuple[Any, Tensor | None]] = {}
        self._threads: list[threading.Thread] = []
        self._watch = Stopwatch()
        self._offline_since_s: float | None = None
        self._offline_s = 0.0
        self._num_connections = 1
        self._tokens = 0
        self._unit: str | None = None
        self._left: actions.Left | None = None
        self._has_verdict = False
        self._last_norm = self._last_error = 0.0
        self._loss: float | None = None
        self._connection: FlightConnection | None = None
        self._state: LearnerState | None = None

    # --------------------------------------------------------------------------------------------------- training thread

    def start(self, model: ModelDescription, make_device: MakeDevice) -> None:
        """Join: block until this learner has seeded the run or adopted its anchors, and may step.

        Raises:
            JoinError: the syncer cannot be reached, or refused.
            AuthError: wrong token or certificate.
            ConfigError: an explicit option contradicts the run's.
            PlanMismatchError: another model than the run's.
        """
        address = self._address()
        self._connection = FlightConnection(address)
        self.learner_id = self._learner.learner or os.environ.get("DILOCO_LEARNER") or _own_id()
        joining = Joining(
            self._connection,
            address,
            session=self._session,
            learner=self.learner_id,
            options=self._run_options,
            model=model,
            make_device=make_device,
        )
        joined = joining.run()
        self.plan: FragmentPlan = joined.plan
        self.config: RunConfig = joined.config
        self.device: FragmentDevice[Any, Any] = joined.device
        self._unit = joined.welcome.manifest["token_unit"]  # type: ignore[assignment]
        self._state = _machine(self.learner_id, joined, self._learner)
        self._cursor, self._slot = joined.cursor, joined.welcome.slot
        log.info("learner %s takes part in %s as incarnation %d", self.learner_id, address, joined.welcome.incarnation)
        for name, run in (
            ("sender", self._send_loop),
            ("listener", self._listen_loop),
            ("worker", partial(self._job_loop, self._work)),
            ("carrier-up", partial(self._job_loop, self._freight)),
        ):
            self._threads.append(
                threading.Thread(target=self._guarded, args=(run,), name=f"diloco-{name}", daemon=True)
            )
        for thread in self._threads:
            thread.start()
        self._handle(events.FromTheSyncer(joined.active))

    @property
    def data_part(self) -> tuple[int, int] | None:
        """(part, parts) of the data this learner reads; None where no split was agreed."""
        parts = self.config.data_parts
        if parts is None or parts == 1:
            return None
        return (self._slot % parts, parts)

    def step(self, tokens: int, unit: str) -> None:
        """An inner step is done. Never waits for the network.

        Args:
            tokens: in this step's batches.
            unit: what was counted, "tokens" or "samples".

        Raises:
            DiLoCoError: an error that a thread beside met since the last call.
        """
        entered_s = time.perf_counter()
        self._raise_error()
        self._check_unit(unit)
        self._tokens += tokens
        self._watch.entered(entered_s, tokens)
        state = self._machine
        with self._lock:
            state.step_s, state.tokens_per_s = self._watch.step_s, self._watch.tokens_per_s
            state.metrics = self._reported()
            num_exchanges = self._handle(events.StepDone(state.step + 1, self._tokens))
        self._watch.left(entered_s, time.perf_counter(), num_exchanges=num_exchanges)

    def set_evaluating(self, evaluating: bool) -> None:
        """Validation, or a trial that must not be exchanged, begins or ends."""
        self._raise_error()
        self._watch.interrupted()
        self._handle(events.Evaluating(evaluating))

    def set_loss(self, loss: float) -> None:
        """What people see beside this learner."""
        self._loss = loss

    def finish(self) -> bool:
        """Drain and leave; blocks at most `drain_s` and a little.

        Returns:
            Whether this was the last learner; it is then expected to `report` on the final anchor.
        """
        self._raise_error()
        self._watch.interrupted()
        self._machine.metrics = self._reported()
        self._handle(events.Finish("finished"))
        return self._wait_for_leave(self._learner.drain_s + LEAVE_S)

    def report(self, eval_loss: float | None, reason: str | None = None) -> None:
        """The last leaver's verdict on the final anchor."""
        self._has_verdict = True
        self._send_now(messages.Evaluated(eval_loss, reason))

    def close(self) -> None:
        """Let go of the run; without `finish`, leave at once. Idempotent."""
        if self._connection is None or self._stopping.is_set():
            return
        try:
            if self._state is not None and self._left is None and self._error is None:
                self._handle(events.Finish("failed", drain=False))
                self._wait_for_leave(2.0)
            if self._left is not None and self._left.is_last and not self._has_verdict:
                self.report(None, "the last learner ended without validating the anchor")
        finally:
            self._stopping.set()
            for line in (self._outgoing, self._work, self._freight):
                line.put(None)
            self._connection.close()

    def metrics(self) -> dict[str, float]:
        """What goes to loggers, by name."""
        with self._lock:
            state = self._machine
            return {
                STALL: self._watch.stall_s,
                "diloco/exchange_p95_s": self._watch.exchange_p95_s,
                "diloco/num_exchanges": float(self._watch.num_exchanges),
                "diloco/staleness_versions": float(state.staleness_versions),
                "diloco/pseudo_gradient_norm": self._last_norm,
                "diloco/quantization_error": self._last_error,
                "diloco/offline_s": self._offline_total_s(),
                "perf/tokens_per_s": self._watch.tokens_per_s,
                "perf/step_s": self._watch.step_s,
            }

    # --------------------------------------------------------------------------------------------------- the machine

    @property
    def _machine(self) -> LearnerState:
        assert self._state is not None, "start() comes first"
        return self._state

    def _handle(self, event: events.LearnerEvent) -> int:
        """Tell the machine, and do what it says; returns how many snapshots and landings there were."""
        num_exchanges = 0
        with self._changed:
            for action in self._machine.handle(event, time.monotonic()):
                num_exchanges += self._do(action)
            self._changed.notify_all()
        return num_exchanges

    def _do(self, action: actions.LearnerAction) -> int:
        match action:
            case actions.Say():
                self._outgoing.put(self._completed(action.message))
            case actions.Snapshot():
                snapshot = self.device.snapshot(action.ready.fragment)
                self._work.put(partial(self._encode, action.ready, snapshot))
                return 1
            case actions.Upload():
                self._freight.put(partial(self._upload, action.ready))
            case actions.Fetch():
                self._freight.put(partial(self._fetch, action))
            case actions.Land():
                self._land(action.fragment)
                return 1
            case actions.Forget():
                self._kept.pop((action.fragment, action.seq), None)
            case actions.Fail():
                self._fail(getattr(errors, action.error)(action.text))
            case actions.Left():
                self._left = action
        return 0

    def _land(self, p: int) -> None:
        staged, adopted = self._staged.pop(p)
        if adopted is not None:
            self.device.adopt(p, adopted)
        else:
            self.device.land(p, staged)

    def _completed(self, message: messages.FromLearner) -> messages.FromLearner:
        if isinstance(message, messages.Hello):
            return replace(message, protocol=PROTOCOL_VERSION, where=f"{socket.gethostname()}:{os.getpid()}")
        return message

    # --------------------------------------------------------------------------------------------------- other threads

    def _guarded(self, run: Callable[[], None]) -> None:
        try:
            run()
        except BaseException as error:
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        """Keep the first error for the training thread."""
        with self._changed:
            if self._error is None and not self._stopping.is_set():
                self._error = error
                log.error("the link stops: %s", error)
            self._changed.notify_all()

    def _send_loop(self) -> None:
        """Control messages, in order; time passes here, too."""
        next_tick_s = 0.0
        while not self._stopping.is_set():
            batch = self._take_batch()
            if batch and self._offline_since_s is None:
                try:
                    self._send(batch)
                except TransportError as error:
                    self._went_offline(error)
            if time.monotonic() >= next_tick_s:
                next_tick_s = time.monotonic() + TICK_S
                self._handle(events.Tick())

    def _take_batch(self) -> list[messages.FromLearner]:
        batch: list[messages.FromLearner] = []
        try:
            message = self._outgoing.get(timeout=TICK_S)
            while message is not None and len(batch) < NUM_SLOTS:
                batch.append(message)
                message = self._outgoing.get_nowait()
        except queue.Empty:
            pass
        return batch

    def _send(self, batch: Sequence[messages.FromLearner]) -> None:
        assert self._connection is not None
        self._connection.send(self._session, [messages.encode(message) for message in batch])

    def _listen_loop(self) -> None:
        assert self._connection is not None
        pause_s = RECONNECT_S[0]
        while not self._stopping.is_set():
            try:
                heard = self._connection.poll(self._session, self._cursor, POLL_S if self._is_online else 0.0)
            except TransportError as error:
                self._went_offline(error)
                self._stopping.wait(pause_s)
                pause_s = min(2 * pause_s, RECONNECT_S[1])
                continue
            pause_s = RECONNECT_S[0]
            self._cursor = heard.cursor
            is_new = any(values.get("kind") == "Reset" for values in heard.messages)
            if is_new or not self._is_online:
                self._came_back()
            for values in heard.messages:
                if values.get("kind") != "Reset":
                    message = messages.decode(values, messages.FromSyncer)
                    self._handle(events.FromTheSyncer(message))  # type: ignore[arg-type]

    @property
    def _is_online(self) -> bool:
        return self._offline_since_s is None

    def _went_offline(self, error: TransportError) -> None:
        with self._lock:
            if self._offline_since_s is None and not self._stopping.is_set():
                self._offline_since_s = time.monotonic()
                log.warning("the syncer cannot be reached, training on: %s", error)

    def _came_back(self) -> None:
        with self._lock:
            if self._offline_since_s is not None:
                away_s = time.monotonic() - self._offline_since_s
                self._offline_s += away_s
                self._offline_since_s = None
                log.warning("the syncer is back after %.1f s", away_s)
            self._num_connections += 1
            known = tuple(
                messages.Mark(f.generation, f.landed, self.device.digest(p))
                for p, f in enumerate(self._machine.fragments)
            )
            self._handle(events.Reconnected(self._num_connections, known))

    def _offline_total_s(self) -> float:
        since_s = self._offline_since_s
        return self._offline_s + (0.0 if since_s is None else time.monotonic() - since_s)

    def _job_loop(self, jobs: queue.SimpleQueue[Callable[[], None] | None]) -> None:
        # Many small operations on several threads collapse on a busy machine, and training needs the cores.
        torch.set_num_threads(1)
        while (job := jobs.get()) is not None:
            job()

    def _encode(self, ready: messages.Ready, snapshot: Any) -> None:
        encoded = self.device.encode(snapshot)
        with self._lock:
            self._kept[ready.fragment, ready.seq] = _Kept(encoded.payload, encoded.norm, encoded.relative_error)
            self._last_norm, self._last_error = encoded.norm, encoded.relative_error
            self._handle(events.Encoded(ready.fragment, ready.seq))

    def _upload(self, ready: messages.Ready) -> None:
        kept = self._kept.get((ready.fragment, ready.seq))
        if kept is None or self._connection is None:
            return  # decided meanwhile
        header: Json = {"what": "contribution", "session": self._session, "ready": codec.dump(ready)}
        try:
            self._connection.put(Bulk(header, bytes_of(kept.payload)), deadline_s=BULK_S)
        except TransportError as error:
            if not self._stopping.is_set():
                log.warning("an upload of fragment %d failed, its fate is asked: %s", ready.fragment, error)
                self._handle(events.UploadFailed(ready.fragment, ready.seq))
            return
        self._handle(events.Uploaded(ready.fragment, ready.seq))

    def _fetch(self, action: actions.Fetch) -> None:
        assert self._connection is not None
        asked: Json = {
            "session": self._session,
            "fragment": action.fragment,
            "generation": action.generation,
            "have": None if action.adopt else action.have,
        }
        try:
            bulk = self._connection.get(asked, deadline_s=BULK_S)
        except TransportError as error:
            if not self._stopping.is_set():
                log.warning("a download of fragment %d failed, it is tried again: %s", action.fragment, error)
                self._handle(events.FetchFailed(action.fragment))
            return
        self._work.put(partial(self._stage, action, bulk))

    def _stage(self, action: actions.Fetch, bulk: Bulk) -> None:
        p, header = action.fragment, bulk.header
        merged_seq = header["merged_seq"]
        kept = self._kept.get((p, merged_seq)) if merged_seq is not None and merged_seq == action.seq else None
        update = self._update(p, header, bulk, None if kept is None else kept.payload)
        if action.adopt:
            assert update.full is not None
            ready_to_land = (None, update.full)
        else:
            ready_to_land = (self.device.stage(p, update), None)
        with self._lock:
            self._staged[p] = ready_to_land
            seq = action.seq if kept is not None else None
            is_full = update.full is not None
            self._handle(events.Staged(p, header["generation"], header["version"], seq, is_full))

    def _update(self, p: int, header: Json, bulk: Bulk, sent: Tensor | None) -> Update:
        layout = self.plan.layout(p, self.config.block_size)
        values = torch.frombuffer(bytearray(bulk.payload), dtype=torch.uint8)
        if header["kind"] == "full":
            return Update(values.view(torch.float32), (), sent)
        size = wire_nbytes(layout.padded_numel, self.config.wire, self.config.block_size)
        num_updates = header["version"] - header["from_version"]
        if values.numel() != size * num_updates:
            raise CorruptMessageError(
                f"an update of fragment {p} came with {values.numel()} bytes; {num_updates} versions take "
                f"{size * num_updates}; do both sides run the same version?"
            )
        return Update(None, values.split(size) if num_updates else (), sent)

    # --------------------------------------------------------------------------------------------------------- helpers

    def _address(self) -> JoinAddress:
        text = self._learner.join or os.environ.get("DILOCO_JOIN")
        if text:
            return JoinAddress.parse(text)
        run_dir = self._root_dir / "diloco" / time.strftime("%Y%m%d-%H%M%S-") / secrets.token_hex(2)
        run_dir = run_dir.parent.with_name(run_dir.parent.name + run_dir.name)
        address = start_embedded_syncer(run_dir)
        log.warning(
            "started a syncer for this run at %s; others join it with DILOCO_JOIN=$(cat %s)", address, run_dir / "join"
        )
        return address

    def _check_unit(self, unit: str) -> None:
        if self._unit is None:
            self._unit = unit
        elif unit != self._unit:
            raise ConfigError(
                f"this learner counts {unit}, the run counts {self._unit}; all learners must count alike; "
                "pass token_count_fn to the strategy"
            )

    def _reported(self) -> dict[str, float]:
        reported = {STALL: self._watch.stall_s, "exchange_p95_s": self._watch.exchange_p95_s}
        return reported if self._loss is None else {**reported, "loss": self._loss}

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error

    def _wait_for_leave(self, within_s: float) -> bool:
        """The training thread has nothing else to do: it makes the boundaries at which things land."""
        until_s = time.monotonic() + within_s
        with self._changed:
            while self._left is None and self._error is None and time.monotonic() < until_s:
                self._handle(events.Pause())
                self._changed.wait(TICK_S)
        if isinstance(self._error, DiLoCoError):
            raise self._error
        return self._left is not None and self._left.is_last

    def _send_now(self, message: messages.FromLearner) -> None:
        try:
            self._send([message])
        except TransportError as error:
            log.warning("the syncer did not hear %s: %s", type(message).__name__, error)


def _machine(learner: str, joined: Joined, config: LearnerConfig) -> LearnerState:
    run, num_fragments = joined.config, joined.plan.num_fragments
    return LearnerState(
        learner=learner,
        incarnation=joined.welcome.incarnation,
        generations=joined.welcome.generations,
        versions=joined.welcome.versions,
        due=partial(fragment_due, sync_every=run.sync_every, num_fragments=num_fragments),
        sync_every=run.sync_every,
        overlap=run.overlap,
        align=config.align,
        drain_s=config.drain_s,
    )


def _own_id() -> str:
    """A learner without a name: its host, and a slot that is free on it."""
    return f"{socket.gethostname().partition('.')[0]}-{os.getpid()}"
