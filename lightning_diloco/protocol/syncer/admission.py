"""Checks whether a process may join a run.

1. An explicit option that contradicts the run's is refused; the message names both values.
2. A learner id in use is refused. If its owner is silent, the id is granted to the new process: after three heartbeats,
   or after `lease_s` if the owner is still joining and so sends no heartbeats.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping

from lightning_diloco.config import PROTOCOL_VERSION
from lightning_diloco.protocol import messages as msg
from lightning_diloco.protocol.codec import Json
from lightning_diloco.protocol.syncer.roster import Roster


def contradictions(
    asked: Mapping[str, object], fixed: Mapping[str, object], reduced: Mapping[str, object] | None = None
) -> list[str]:
    """Describe each option that a process asks for and the run has with another value.

    Args:
        asked: options that the process sets explicitly.
        fixed: options of the run.
        reduced: values that the seeder asked for if its model forced others; other processes may ask for them too.
    """
    reduced = reduced or {}
    return [
        f"{name}={value!r} was asked for, the run has {name}={fixed[name]!r}"
        for name, value in sorted(asked.items())
        if name in fixed and value not in (fixed[name], reduced.get(name, fixed[name]))
    ]


def objection(
    hello: msg.Hello, run: str, fixed: Mapping[str, object], reduced: Mapping[str, object]
) -> msg.Rejected | None:
    """Return why a process can never join; None if it may."""
    if hello.protocol != PROTOCOL_VERSION:
        text = f"protocol version {hello.protocol}, the syncer speaks {PROTOCOL_VERSION}; install the same version"
        return msg.Rejected("join", text)
    if hello.run is not None and hello.run != run:
        return msg.Rejected("join", f"run {hello.run!r} was asked for, this syncer has run {run!r}")
    if found := contradictions(hello.options, fixed, reduced):
        text = "; ".join(found) + ". Leave these options out to adopt the run's, or start another run"
        return msg.Rejected("config", text)
    return None


def mismatch(confirm: msg.Confirm, manifest: Json) -> msg.Rejected | None:
    """Return why a process that has adopted the anchors cannot take part; None if it can."""
    if confirm.plan_digest != manifest["plan_digest"]:
        text = f"plan digest {confirm.plan_digest[:12]}, the run has {str(manifest['plan_digest'])[:12]}"
        return msg.Rejected("plan", text + "; the models' parameter names or shapes differ")
    frozen = manifest["frozen"]
    assert isinstance(frozen, dict)
    differing = sorted(n for n in frozen.keys() | confirm.frozen.keys() if frozen.get(n) != confirm.frozen.get(n))
    if differing:
        shown = ", ".join(differing[:8]) + (f" and {len(differing) - 8} more" if len(differing) > 8 else "")
        text = f"frozen parameters differ from the run's: {shown}; use the same base model and seed everywhere"
        return msg.Rejected("plan", text)
    if None not in (confirm.token_unit, manifest["token_unit"]) and confirm.token_unit != manifest["token_unit"]:
        text = f"token unit {confirm.token_unit!r}, the run counts {manifest['token_unit']!r}; pass token_count_fn"
        return msg.Rejected("plan", text)
    return None


def lost(
    known: tuple[msg.Mark, ...], generation: int, versions: list[int], digests: list[dict[int, str]]
) -> list[tuple[int, msg.Mark]]:
    """Return the versions that a reconnecting process holds and the syncer does not know, with their fragments.

    Versions are compared by their digests. The syncer keeps the digests of the last NUM_DIGESTS_KEPT versions. Older
    versions count as known.
    """
    if len(known) != len(versions):
        return []
    return [
        (p, mark)
        for p, mark in enumerate(known)
        if mark.generation > generation
        or (
            mark.generation == generation
            and (mark.version > versions[p] or digests[p].get(mark.version, mark.digest) != mark.digest)
        )
    ]


MAX_CONTENDERS = 256


class Contenders:
    """Processes that ask for a learner id whose owner may still be alive; the latest MAX_CONTENDERS of them."""

    def __init__(self) -> None:
        self._since_s: OrderedDict[str, float] = OrderedDict()

    def verdict(
        self, session: str, learner: str, roster: Roster, now_s: float, *, heartbeat_s: float, lease_s: float
    ) -> str | None:
        """Return None if the id is granted, "wait" if it is too early to say, else the text of a refusal."""
        owner = roster.owner(learner, session)
        if owner is None or owner.is_lapsed:
            return None
        since_s = self._since_s.setdefault(session, now_s)
        if len(self._since_s) > MAX_CONTENDERS:
            self._since_s.popitem(last=False)
        if owner.heard_s > since_s + 0.5 * heartbeat_s:
            return (
                f"learner id {learner!r} is in use by {owner.where or 'another process'}, heard "
                f"{now_s - owner.heard_s:.1f} s ago; "
                "every learner needs an id of its own: set DILOCO_LEARNER or learner="
            )
        if owner.state != "active":
            return "wait" if now_s - owner.heard_s <= lease_s else None
        if now_s - max(owner.heard_s, since_s - 2 * heartbeat_s) < 3 * heartbeat_s:
            return "wait"
        return None
