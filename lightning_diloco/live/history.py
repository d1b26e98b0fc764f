"""History of a run, its curves and events, in bounded memory.

1. Curves keep at most MAX_ROWS rows. When they are full, every other row is dropped and the sampling rate is halved, so
   that a run of any length is covered at the resolution of a page.
2. The past comes from the tape, if there is one. Later rows come from the syncer's answers.
3. Tape and answers stamp an event at slightly different times. Equal sentences within _SAME_S are therefore one event.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any

from lightning_diloco.transport.base import Json

MAX_ROWS, MAX_EVENTS = 360, 200
_MIN_PAUSE_S = 0.5
_SAME_S = 1.0


class Curves:
    """Rows of time, tokens, goodput, bytes and the losses by learner."""

    def __init__(self) -> None:
        self.rows: list[Json] = []
        self._pause_s = _MIN_PAUSE_S

    def add(self, t: float, status: Mapping[str, Any]) -> None:
        """Add a status, or a progress note of the tape, at this time (unix seconds)."""
        if self.rows and t - self.rows[-1]["t"] < self._pause_s:
            return
        losses = {learner["id"]: _losses(learner) for learner in status["learners"]}
        figures = {name: status[name] for name in ("fleet_tokens", "goodput", "bytes_up", "bytes_down")}
        self.rows.append({"t": round(t, 2), **figures, "losses": losses})
        if len(self.rows) == MAX_ROWS:
            del self.rows[1:-1:2]
            self._pause_s = (self.rows[-1]["t"] - self.rows[0]["t"]) / len(self.rows)


class Events:
    """The latest events, each as a sentence with a level: "good", "info", "warn" or "bad"."""

    def __init__(self) -> None:
        self.latest: deque[Json] = deque(maxlen=MAX_EVENTS)
        self._known: deque[tuple[float, str]] = deque(maxlen=MAX_EVENTS)

    def add(self, lines: Iterable[Mapping[str, Any]]) -> None:
        """Add events of the tape or of a status, except known events and those without a sentence."""
        for line in lines:
            if (told := sentence(line)) is not None and not self._is_known(t := line["t"], text := told[1]):
                self._known.append((t, text))
                self.latest.append({"t": t, "level": told[0], "text": text})

    def _is_known(self, t: float, text: str) -> bool:
        return any(text == known and abs(t - at) < _SAME_S for at, known in self._known)

    def say(self, t: float, text: str) -> None:
        """Add the first line of a message about the run's processes."""
        first = text.partition("\n")[0]
        level = "bad" if " died " in first or "gave up" in first or "restarts used up" in first else "info"
        self.latest.append({"t": t, "level": level, "text": first})


def sentence(event: Mapping[str, Any]) -> tuple[str, str] | None:
    """Return level and text of an event; None for events that are not shown."""
    who = event.get("learner", "")
    match event["event"]:
        case "seeded":
            return "good", "the first learner's parameters became the anchors"
        case "join":
            again = f" again, as incarnation {event['incarnation']}" if event["incarnation"] > 1 else ""
            return "good", f"{who} joined{again}"
        case "leave":
            return ("info" if event["reason"] == "finished" else "warn"), f"{who} left: {event['reason']}"
        case "lapse":
            return "bad", f"{who} lapsed after {event['silent_s']:.1f} s of silence; the others continue"
        case "return":
            return "good", f"{who} is back"
        case "rejected":
            return "warn", f"{who} was rejected: {event['text']}"
        case "refused":
            return "warn", f"a contribution of {who} to fragment {event['fragment']} was refused: {event['reason']}"
        case "quarantine":
            return "bad", f"{who} is in quarantine; its contributions are not merged: {event['reason']}"
        case "release":
            return "good", f"{who} is out of quarantine"
        case "suspended":
            return "bad", f"commits are suspended: {event['reason']}"
        case "resumed":
            return "good", "commits have resumed"
        case "regenerated":
            return "warn", "the syncer's disk was rolled back; learners adopt the restored anchors"
        case "stood still":
            return "warn", f"the syncer's process was suspended for {event['for_s']:.1f} s; all leases are renewed"
        case "restarted":
            return "info", f"the syncer started with its state on disk: {_restored(event)}"
        case "took over":
            nth = f", takeover {event['reign']} of the run"
            return "warn", f"the syncer at {event['address']} took over from {event['primary']}{nth}"
        case "standby joined":
            return "good", f"the standby at {event['standby']} has all decisions, and follows"
        case "standby lost":
            return "bad", f"the standby at {event['standby']} does not answer; the syncer continues alone"
        case "shard away":
            return "bad", f"shard {event['shard']} is away; its fragments wait for it"
        case "shard back":
            return "good", f"shard {event['shard']} is back"
        case "evaluated" if event["eval_loss"] is not None:
            return "good", f"the final anchor's loss is {event['eval_loss']:.4f}"
        case "evaluated":
            return "warn", f"the final anchor has no loss: {event['reason']}"
    return None


def _restored(event: Mapping[str, Any]) -> str:
    num = event["num_records"]
    records = f"{num} record{'s' * (num != 1)} of the log"
    return records if event["snapshot_lsn"] is None else f"a snapshot and {records}"


def _losses(learner: Mapping[str, Any]) -> list[float | None]:
    """Return the training loss, and the anchor's loss if this learner validated it."""
    told = learner.get("metrics", learner)
    return [told.get("loss"), told.get("eval_loss")]
