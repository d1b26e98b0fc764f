"""The one wait: from the first hello to the moment a learner may step.

1. A learner that cannot reach the syncer says so, names it, and tries again until a deadline.
2. In an empty run one learner seeds; everybody else adopts the run's anchors before its first step.
3. The conversation is asked again until answered; every message of it may be repeated safely.
"""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NoReturn, TypeVar, cast

import torch
from torch import Tensor

from lightning_diloco.config import PROTOCOL_VERSION, RunConfig
from lightning_diloco.core.fragments import FragmentPlan
from lightning_diloco.devices.base import FragmentDevice
from lightning_diloco.errors import ConfigError, FencedError, JoinError, PlanMismatchError, TransportError
from lightning_diloco.protocol import messages
from lightning_diloco.runtime.anchors import bytes_of
from lightning_diloco.runtime.manifest import check_model, make_manifest, plan_of
from lightning_diloco.runtime.model import ModelDescription
from lightning_diloco.transport.address import JoinAddress
from lightning_diloco.transport.base import Bulk, Connection, Json

log = logging.getLogger(__name__)

MakeDevice = Callable[[FragmentPlan, RunConfig], FragmentDevice[Any, Any]]
M = TypeVar("M")

REACH_S = 60.0
ANSWER_S = 900.0
BULK_S = 600.0
AGAIN_S = 1.0
_RESET = "Reset"


@dataclass(frozen=True, slots=True)
class Joined:
    """What a learner knows when it may step.

    Args:
        welcome: incarnation, manifest and the versions that were adopted.
        active: open rounds.
        cursor: where its polls go on.
    """

    welcome: messages.Welcome
    active: messages.Active
    plan: FragmentPlan
    config: RunConfig
    device: FragmentDevice[Any, Any]
    cursor: int


class Joining:
    """One attempt of one process to take part.

    Args:
        connection: to the syncer.
        address: whom it leads to, for messages to people.
        session: this process's nonce.
        learner: learner id.
        options: explicit run options.
        model: of this learner.
        make_device: builds anchors for a plan.
    """

    def __init__(
        self,
        connection: Connection,
        address: JoinAddress,
        *,
        session: str,
        learner: str,
        options: Mapping[str, Any],
        model: ModelDescription,
        make_device: MakeDevice,
    ) -> None:
        self._connection = connection
        self._address = address
        self._session = session
        self._learner = learner
        self._options = dict(options)
        self._model = model
        self._make_device = make_device
        self._cursor = 0
        self._reached = False
        self._began_s = time.monotonic()

    def run(self) -> Joined:
        """Block until this learner may step.

        Raises:
            JoinError: the syncer cannot be reached, or refused.
            AuthError: wrong token or certificate.
            ConfigError: an explicit option contradicts the run's.
            PlanMismatchError: another model than the run's.
        """
        hello = messages.Hello(
            self._learner,
            1,
            PROTOCOL_VERSION,
            self._options,
            run=self._address.run,
            where=f"{socket.gethostname()}:{os.getpid()}",
        )
        answer = self._ask(hello, messages.Welcome | messages.SeedGrant, within_s=ANSWER_S)
        seeded = None
        if isinstance(answer, messages.SeedGrant):
            answer, seeded = self._seed(hello, answer)
        welcome = cast("messages.Welcome", answer)
        check_model(self._model, welcome.manifest)
        plan, config = plan_of(welcome.manifest)
        device = seeded or self._make_device(plan, config)
        welcome = self._adopt(welcome, plan, device)
        confirm = messages.Confirm(
            welcome.incarnation, plan.digest, dict(self._model.frozen_digest), self._model.token_unit
        )
        active = self._ask(confirm, messages.Active, within_s=ANSWER_S)
        return Joined(welcome, active, plan, config, device, self._cursor)

    def _seed(
        self, hello: messages.Hello, grant: messages.SeedGrant
    ) -> tuple[messages.Welcome, FragmentDevice[Any, Any] | None]:
        """Offer this learner's values as the start of the run."""
        options = {**grant.options, **self._options}
        manifest, plan = make_manifest(self._model, options)
        config = RunConfig.from_dict(manifest["config"])
        if config.num_fragments != RunConfig.from_dict(options).fragments_wanted:
            log.warning("the model has slices for %d fragments; that many are used", config.num_fragments)
        device = self._make_device(plan, config)
        for p in range(plan.num_fragments):
            header: Json = {"what": "seed", "session": self._session, "lease": grant.lease, "fragment": p}
            self._connection.put(Bulk(header, bytes_of(device.local_values(p))), deadline_s=BULK_S)
        self._connection.send(self._session, [messages.encode(messages.SeedPlan(grant.lease, manifest))])
        welcome = self._ask(hello, messages.Welcome, within_s=ANSWER_S)
        return welcome, device if welcome.manifest == manifest else None

    def _adopt(
        self, welcome: messages.Welcome, plan: FragmentPlan, device: FragmentDevice[Any, Any]
    ) -> messages.Welcome:
        """Take over the anchors as they are now; the versions in the answer are what was really adopted."""
        generations, versions = [], []
        for p in range(plan.num_fragments):
            header, values = fetch_full(self._connection, self._session, p)
            device.adopt(p, values)
            generations.append(header["generation"])
            versions.append(header["version"])
        return replace(welcome, generations=tuple(generations), versions=tuple(versions))

    # --------------------------------------------------------------------------------------------------- conversation

    def _ask(self, question: messages.FromLearner, wanted: Any, *, within_s: float) -> Any:
        """Say it until one of the wanted messages is heard."""
        deadline_s = time.monotonic() + within_s
        while time.monotonic() < deadline_s:
            try:
                self._connection.send(self._session, [messages.encode(question)])
                heard = self._connection.poll(self._session, self._cursor, AGAIN_S)
                self._reached = True
            except TransportError as error:
                self._not_reached(error)
                continue
            self._cursor = heard.cursor
            for values in heard.messages:
                if values.get("kind") == _RESET:
                    continue
                message = messages.decode(values, messages.FromSyncer)
                if isinstance(message, messages.Rejected):
                    _raise(message)
                if isinstance(message, wanted):
                    return message
        raise JoinError(
            f"the syncer at {self._address} answered, but not with what {type(question).__name__} asks for, within "
            f"{within_s:.0f} s; look at its log and at `diloco status`"
        )

    def _not_reached(self, error: TransportError) -> None:
        waited_s = time.monotonic() - self._began_s
        if waited_s > REACH_S and not self._reached:
            raise JoinError(
                f"no syncer was reached at {self._address} in {waited_s:.0f} s ({error}); start one there, or correct "
                "DILOCO_JOIN (or join=)"
            ) from error
        left_s = max(0.0, REACH_S - waited_s)
        log.warning("no syncer at %s yet; trying for another %.0f s (%s)", self._address, left_s, error)
        time.sleep(min(AGAIN_S, left_s))


def fetch_full(connection: Connection, session: str, p: int) -> tuple[Json, Tensor]:
    """The published values of a fragment, float32 [P], with the header of the answer."""
    asked: Json = {"session": session, "fragment": p, "have": None, "generation": None}
    bulk = connection.get(asked, deadline_s=BULK_S)
    values = torch.frombuffer(bytearray(bulk.payload), dtype=torch.float32)
    return bulk.header, values


def _raise(rejected: messages.Rejected) -> NoReturn:
    kinds = {"join": JoinError, "config": ConfigError, "plan": PlanMismatchError, "fenced": FencedError}
    raise kinds[rejected.error](rejected.text)
