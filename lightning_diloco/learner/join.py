"""Joining a run: from the first hello until the learner may step.

Later, training waits for the syncer only for its first data leases (`lease_client.py`).

1. If the syncer cannot be reached, the learner warns and tries again until a deadline. It stops earlier if the run
   directory, on this machine or shared, says that the run has finished.
2. In an empty run one learner seeds. All others adopt the run's anchors before their first step.
3. Each message is repeated until it is answered. Repeating is safe.
"""

from __future__ import annotations

import logging
import math
import os
import socket
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, TypeVar, cast

import torch
from msgspec.structs import replace
from torch import Tensor

from lightning_diloco.config import PROTOCOL_VERSION, LearnerConfig, RunConfig
from lightning_diloco.core.buffers import bytes_of, tensor_of
from lightning_diloco.core.digest import digest
from lightning_diloco.core.fragments import FragmentPlan
from lightning_diloco.core.schedule import fragment_due
from lightning_diloco.devices.base import FragmentDevice
from lightning_diloco.errors import (
    ConfigError,
    CorruptMessageError,
    FencedError,
    JoinError,
    PlanMismatchError,
    RestoringError,
    RunOverError,
    TransportError,
)
from lightning_diloco.manifest import ModelDescription, check_model, make_manifest, plan_of
from lightning_diloco.protocol import limits, messages
from lightning_diloco.protocol.learner.machine import LearnerState
from lightning_diloco.storage import local_runs
from lightning_diloco.storage.local_runs import is_over
from lightning_diloco.transport.address import JoinAddress
from lightning_diloco.transport.base import RESET, Bulk, Json
from lightning_diloco.transport.portions import LargeConnection

log = logging.getLogger(__name__)

MakeDevice = Callable[[FragmentPlan, RunConfig], FragmentDevice[Any, Any]]
T = TypeVar("T")

REACH_S = 60.0
ANSWER_S = 900.0
BULK_S = 600.0
AGAIN_S, LONG_PAUSE_S = 1.0, 4.0
STORED_S, STORED_AGAIN_S = 3600.0, 0.02
MAX_CORRUPT = 3
RESTORING_S = 600.0  # without progress


@dataclass(frozen=True, slots=True)
class Joined:
    """The result of joining.

    Args:
        welcome: incarnation, manifest and adopted versions.
        active: open rounds.
        plan: plan of the run.
        config: options of the run.
        device: device with the adopted anchors.
        cursor: cursor of the next poll.
        transfer_s: longest time to adopt a fragment.
        proofs: proofs of the adopted versions, per fragment.
        differing: frozen parameters that differ from those of the run's first learner.
    """

    welcome: messages.Welcome
    active: messages.Active
    plan: FragmentPlan
    config: RunConfig
    device: FragmentDevice[Any, Any]
    cursor: int
    transfer_s: float
    proofs: tuple[str, ...]
    differing: Collection[str] = ()

    @property
    def run_steps(self) -> int:
        """Inner steps that the run had made at the join; each version of a fragment takes sync_every steps."""
        return max(self.welcome.versions) * self.config.sync_every

    def machine(self, learner: str, own: LearnerConfig, *, has_ranks: bool = False) -> LearnerState:
        """Return the learner's state machine."""
        return LearnerState(
            learner=learner,
            incarnation=self.welcome.incarnation,
            generations=self.welcome.generations,
            versions=self.welcome.versions,
            proofs=self.proofs,
            due=partial(fragment_due, sync_every=self.config.sync_every, num_fragments=self.plan.num_fragments),
            sync_every=self.config.sync_every,
            overlap=self.config.overlap,
            align=own.align,
            drain_s=own.drain_s,
            transfer_s=self.transfer_s,
            has_ranks=has_ranks,
        )


class Joining:
    """One attempt of a process to join.

    Args:
        connection: connection to the syncer.
        address: address of the syncer, for messages to users.
        session: nonce of this process.
        learner: learner id.
        options: explicit run options.
        model: description of this learner's model.
        make_device: makes the device for a plan.
        run_dir: RUN_DIR, if it is on this machine.
    """

    def __init__(
        self,
        connection: LargeConnection,
        address: JoinAddress,
        *,
        session: str,
        learner: str,
        options: Mapping[str, Any],
        model: ModelDescription,
        make_device: MakeDevice,
        run_dir: Path | None = None,
    ) -> None:
        self._connection = connection
        self._address = address
        self._session = session
        self._learner = learner
        self._options = dict(options)
        self._model = model
        self._make_device = make_device
        self._run_dir = run_dir
        self._cursor = 0
        self._num_resets = 0
        self._transfer_s = 0.0
        self._proofs: tuple[str, ...] = ()
        self._offered: Json | None = None

    def run(self) -> Joined:
        """Block until this learner may step.

        Raises:
            JoinError: the syncer cannot be reached, or refused the join.
            RunOverError: the run has ended.
            AuthError: wrong token or certificate.
            ConfigError: an explicit option contradicts the run's.
            PlanMismatchError: the model is not the run's.
        """
        hello = located(messages.Hello(self._learner, 1, PROTOCOL_VERSION, self._options, run=self._address.run))
        answer = self._ask(hello, messages.Welcome | messages.SeedGrant)
        seeded = None
        while isinstance(answer, messages.SeedGrant):
            answer, seeded = self._seed(hello, answer)
        welcome = cast("messages.Welcome", answer)
        check_model(self._model, welcome.manifest)
        plan, config = plan_of(welcome.manifest)
        device = seeded if seeded is not None and welcome.manifest == self._offered else self._make_device(plan, config)
        welcome = self._adopt(welcome, plan, config, device)
        frozen = welcome.manifest["frozen"]
        confirm = messages.Confirm(
            welcome.incarnation, plan.digest, self._model.confirmed(frozen), self._model.token_unit
        )
        active = self._ask(confirm, messages.Active)
        differing = self._model.differing(frozen)
        return Joined(welcome, active, plan, config, device, self._cursor, self._transfer_s, self._proofs, differing)

    def _seed(
        self, hello: messages.Hello, grant: messages.SeedGrant
    ) -> tuple[messages.Welcome | messages.SeedGrant, FragmentDevice[Any, Any]]:
        """Send this learner's values as start values. If the answer is a SeedGrant, they must be sent again."""
        options = {**grant.options, **self._options}
        self._offered, plan = make_manifest(self._model, options)
        config = RunConfig.from_dict(self._offered["config"])
        if (wanted := RunConfig.from_dict(options).fragments_wanted) != plan.num_fragments:
            level = logging.WARNING if "num_fragments" in options else logging.INFO
            log.log(level, "the model has slices for %d fragments, not %d", plan.num_fragments, wanted)
        device = self._make_device(plan, config)
        num_resets = self._num_resets
        for p in range(plan.num_fragments):
            header: Json = {"what": "seed", "session": self._session, "lease": grant.lease, "fragment": p}
            values = Bulk(header, bytes_of(device.local_values(p)))
            self._insist(partial(self._connection.put, values, deadline_s=BULK_S))
        seed_plan = messages.encode(messages.SeedPlan(grant.lease, self._offered))
        offered_s, pause_s = time.monotonic(), STORED_AGAIN_S
        while True:
            self._insist(partial(self._connection.send, self._session, [seed_plan]))
            answer = self._ask(hello, messages.Welcome | messages.SeedGrant)
            # The same grant again means that the values are still being stored. After a reset they are lost.
            if answer != grant or self._num_resets > num_resets:
                return answer, device
            if (waited_s := time.monotonic() - offered_s) >= STORED_S:
                raise JoinError(
                    f"the syncer at {self._address} has not stored the start values that it was given {waited_s:.0f} s "
                    "ago; look at its log and at `diloco status`; its disk must take three times the run's state"
                )
            time.sleep(pause_s)  # shorter than lease_s, after which a silent seeder loses the seed lease
            pause_s = min(2 * pause_s, AGAIN_S)

    def _adopt(
        self, welcome: messages.Welcome, plan: FragmentPlan, config: RunConfig, device: FragmentDevice[Any, Any]
    ) -> messages.Welcome:
        """Adopt the current anchors; returns the welcome with the versions that were adopted."""
        generations, versions, proofs = [], [], []
        for p in range(plan.num_fragments):
            numel, began_s = plan.layout(p, config.block_size).padded_numel, time.monotonic()
            header, values_P = self._insist(partial(self._full, p, numel))
            device.adopt(p, values_P)
            self._transfer_s = max(self._transfer_s, time.monotonic() - began_s)
            generations.append(header["generation"])
            versions.append(header["version"])
            proofs.append(header["proof"])
        self._proofs = tuple(proofs)
        return replace(welcome, generations=tuple(generations), versions=tuple(versions))

    def _full(self, p: int, numel: int) -> tuple[Json, Tensor]:
        asked: Json = {"session": self._session, "fragment": p, "have": None, "generation": None}
        bulk = self._connection.get(asked, deadline_s=BULK_S)
        return bulk.header, full_values(bulk, numel)

    # --------------------------------------------------------------------------------------------------- conversation

    def _ask(self, question: messages.FromLearner, wanted: Any) -> Any:
        """Repeat a message until one of the expected answers arrives; of several answers, the newest counts."""
        deadline_s = time.monotonic() + ANSWER_S
        while time.monotonic() < deadline_s:
            heard = self._insist(partial(self._converse, question))
            for message in heard:
                if isinstance(message, messages.Rejected):
                    _raise(message)
            for message in reversed(heard):
                if isinstance(message, wanted):
                    return message
        raise JoinError(
            f"the syncer at {self._address} did not answer {type(question).__name__} within {ANSWER_S:.0f} s, "
            f"but answers other calls; look at its log and at `diloco status`"
        )

    def _converse(self, question: messages.FromLearner) -> list[messages.FromLearner | messages.FromSyncer]:
        self._connection.send(self._session, [messages.encode(question)])
        polled = self._connection.poll(self._session, self._cursor, AGAIN_S)
        self._cursor = polled.cursor
        heard = [messages.decode(said, messages.FromSyncer) for said in polled.messages if said != RESET]
        self._num_resets += len(heard) < len(polled.messages)
        return heard

    def _insist(self, call: Callable[[], T]) -> T:
        return reached(call, self._address, self._run_dir, lambda: self._connection.heard_s)


def reached(
    call: Callable[[], T], address: JoinAddress, run_dir: Path | None, heard_s: Callable[[], float] = lambda: -math.inf
) -> T:
    """Repeat a call until the syncer answers.

    The call is repeated only after network failures. The error of a corrupt message is raised after MAX_CORRUPT times
    in a row, and any other error at once. If the syncer is restoring its run, this waits while the syncer makes
    progress.

    Args:
        call: the call, which may be repeated.
        address: address of the syncer, for messages to users.
        run_dir: RUN_DIR, if it is on this machine.
        heard_s: returns when the syncer was last heard from, on the monotonic clock.

    Raises:
        JoinError: the syncer has not been reached for REACH_S.
        RunOverError: the run has ended.
    """
    num_corrupt, failing_since_s, pause_s = 0, math.inf, AGAIN_S
    restoring_s, said, said_s = STORED_AGAIN_S, "", time.monotonic()
    while True:
        try:
            return call()
        except RestoringError as error:
            failing_since_s, restoring_s = math.inf, min(2 * restoring_s, AGAIN_S)
            if str(error) != said:
                said, said_s = str(error), time.monotonic()
                log.log(logging.INFO if restoring_s < AGAIN_S else logging.WARNING, "%s: %s", address, error)
            if time.monotonic() - said_s >= RESTORING_S:
                raise JoinError(
                    f"the syncer at {address} has reported for {RESTORING_S:.0f} s: {error}; look at its log and disk"
                ) from error
            time.sleep(restoring_s)
        except TransportError as error:
            known_dir = run_dir or local_runs.find(address.run)
            if known_dir is not None and is_over(known_dir, address.run):
                raise RunOverError(
                    f"run {address.run} has finished, nothing is left to train; its summary is "
                    f"{known_dir}/summary.json; a new run needs a new directory"
                ) from error
            num_corrupt = num_corrupt + 1 if isinstance(error, CorruptMessageError) else 0
            if num_corrupt == MAX_CORRUPT:
                raise
            now_s = time.monotonic()
            failing_since_s = max(min(failing_since_s, now_s), heard_s())
            waited_s = now_s - failing_since_s
            if waited_s >= REACH_S:
                raise JoinError(
                    f"no syncer was reached at {address} in {waited_s:.0f} s ({error}); start one there, or "
                    "correct DILOCO_JOIN (or join=)"
                ) from error
            if pause_s == AGAIN_S:  # only once
                log.warning("no syncer at %s yet; trying for %.0f s; is the run still on?", address, REACH_S)
            time.sleep(min(pause_s, REACH_S - waited_s))
            pause_s = min(2 * pause_s, LONG_PAUSE_S)


def full_values(bulk: Bulk, numel: int) -> Tensor:
    """Return the published values in the syncer's answer.

    Args:
        bulk: the syncer's answer.
        numel: size of the padded fragment.

    Returns:
        float32 (P,), in the payload's memory if that is writable.

    Raises:
        CorruptMessageError: the number of values or their digest is wrong.
    """
    header = bulk.header
    if header["kind"] != "full" or bulk.payload.nbytes != 4 * numel:
        raise CorruptMessageError(
            f"found an answer of kind {header['kind']} with {bulk.payload.nbytes} bytes; a full fragment has "
            f"{4 * numel}; nothing of it was used; do both sides run the same version?"
        )
    values_P = tensor_of(bulk.payload, torch.float32)
    if header["digest"] not in (None, found := digest(values_P)):
        raise CorruptMessageError(
            f"found values with digest {found[:16]} where the syncer has {header['digest'][:16]}; they must be equal; "
            "nothing of them was used, they are fetched again"
        )
    return values_P


def located(hello: messages.Hello) -> messages.Hello:
    """Add host, process id and site of this process to a hello."""
    site = os.environ.get("DILOCO_SITE", "")[: limits.MAX_CHARS]
    return replace(hello, where=f"{socket.gethostname()}:{os.getpid()}", site=site)


def _raise(rejected: messages.Rejected) -> NoReturn:
    kinds = {"join": JoinError, "config": ConfigError, "plan": PlanMismatchError, "fenced": FencedError}
    raise kinds[rejected.error](rejected.text)
