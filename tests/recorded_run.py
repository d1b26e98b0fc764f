"""Checks a run from its recorded files alone: `python -m tests.recorded_run RUN_DIR`.

This shares no code with the package. It reads the frames of the redo log, after the oldest snapshot if the log was cut,
and does its own set arithmetic on ranges of tokens (`recorded_books.py`):

1. Each fragment's versions are 1, 2, 3, ...; a learner contributes to a version only while it takes part.
2. No token of a learner is merged twice into a fragment. A contribution has one number, and one fate.
3. Sessions join, lapse, return, leave and are replaced in an order that is possible, each with its last report. A
   report agrees with the commits that the learner has landed.
4. Of each session that is over, seen = merged + discarded, in token x fragment; each term is counted from records.
5. A range of leased data has one holder, is done once per epoch, and only if its known tokens are merged in all
   fragments. A learner that lapses, leaves or is replaced holds none.
6. All terms of the summary that the log allows to count are those counted.

The log does not hold the following, so it is not checked:

- The last report of a learner that still trained when the syncer was stopped. What it saw and lost may only be more
  than the log says. A run that has finished has no such learner.
- The range of a contribution that was refused or superseded, and the landing rule of a learner. Its tokens "refused",
  "superseded", "overwritten" and "restored" are as its last report says. For each but "overwritten", the log must have
  a cause: such a contribution, or a new generation. Not each such contribution must have tokens.
- Reports in heartbeats, which `ledger_exact` includes.
- Progress in leases, apart from what merged contributions say of it; rounds without a commit; times, bytes and losses.
- What came before a log that was cut. It is as the snapshot says, which the package has computed.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from tests.recorded_books import CAUSES, Leases, Session, minus, size, told_of
from tests.recorded_log import Json, UnreadableError, reading, records


class Check:
    """Check of the log of a run against the rules.

    Attributes:
        problems: one sentence for each rule that is broken, or for a file that cannot be read.
        seen, merged, discarded: totals, in token x fragment.
        live: sessions that still trained when the syncer was stopped.
    """

    def __init__(self, run_dir: Path) -> None:
        self.problems: list[str] = []
        self.seen = self.merged = 0
        self.discarded: Counter[str] = Counter()
        self.live: list[str] = []
        self._sessions: dict[str, Session] = {}
        self._leases = Leases()
        self._config: Json | None = None
        self._versions: list[int] = []
        self._counts: Counter[str] = Counter()
        self._committed = set[int]()
        self._quarantined: dict[str, str] = {}
        self._generation = 0
        self._stopped = self._ending = None
        self._is_exact = self._is_whole = self._is_strict = True
        try:
            state, log = records(run_dir)
            self._is_whole = self._is_strict = state is None
            if state is not None:
                with reading("the snapshot"):
                    self._begin_with(state)
            for record in log:
                with reading(f"record {record['lsn']}"):
                    self._apply(record)
            with reading("the sum of its records"):
                self._total()
            with reading(run_dir / "summary.json"):
                self._compare(json.loads((run_dir / "summary.json").read_text()))
        except UnreadableError as error:
            self.problems.append(str(error))

    def _begin_with(self, state: Json) -> None:
        if state["manifest"] is not None:  # a standby may begin before the run has start values
            self._config, self._versions = state["manifest"]["config"], state["versions"]
        self._generation, self._stopped, self._quarantined = state["generation"], state["stopped"], state["quarantined"]
        for name in ("joins", "lapses", "commits", "contributors", "stepping"):
            self._counts[name] = state[f"num_{name}"]
        accounts = {(each["learner"], each["incarnation"]): each for each in state["accounts"]}
        for saved in state["sessions"]:
            session = self._sessions[saved["session"]] = Session(saved["learner"], saved["incarnation"])
            session.begin_with(saved, accounts.get((session.learner, session.incarnation)))
        self._leases.begin_with(state["leases"], self._sessions)

    # -------------------------------------------------------------------------------------------------------- records

    def _apply(self, record: Json) -> None:
        match record["kind"]:
            case "Seeded":
                self._config, self._versions = record["manifest"]["config"], [0] * record["manifest"]["num_fragments"]
            case "Granted":
                self._sessions.setdefault(record["session"], Session(record["learner"], record["incarnation"]))
            case "Forgotten":
                self._sessions.pop(record["session"], None)
            case "Activated":
                self._activated(record)
            case "CommitRecord":
                self._commit(record)
            case "Decided":
                self._decided(record)
            case "Quarantined":
                self._quarantined[record["learner"]] = record["reason"]
            case "Released":
                self._quarantined.pop(record["learner"], None)
            case "Lapsed" | "Returned" | "Departed":
                self._came_or_went(record)
            case "Regenerated":
                self._generation = record["generation"]
            case "Stopped":
                self._stopped = self._stopped or record["reason"]
            case "RangesLeased":
                if self._is(record, "live", "gets leases"):
                    for grant in record["grants"]:
                        self._note(*self._leases.lease(self._of(record), grant, record["drops"]))
            case "RangesSettled":
                self._note(*self._leases.settle(self._of(record), record, len(self._versions)))
            case "Seeding" | "Catalogued" | "SourceEnded":
                pass  # nothing is counted from them
            case other:
                raise ValueError(f"its kind {other} is unknown")

    def _of(self, record: Json) -> Session:
        if (session := self._sessions.get(record["session"])) is None:
            raise ValueError(f"session {record['session']} was never granted")
        return session

    def _note(self, *problems: str) -> None:
        """Keep problems.

        A snapshot may already include the first records of the log, so nothing is a problem until a fragment has had
        two commits.
        """
        self.problems += problems if self._is_strict else ()

    def _is(self, record: Json, wanted: str, what: str) -> bool:
        session = self._of(record)
        if session.where != wanted:
            self._note(f"{session} {what}, although it is {session.where}")
        return session.where == wanted

    def _activated(self, record: Json) -> None:
        if not self._is(record, "granted", "takes part"):
            return
        new, report = self._of(record), record["replaced"]
        older = [s for s in self._sessions.values() if s.learner == new.learner and s.incarnation < new.incarnation]
        active = [old for old in older if old.state == "active"]
        if len(active) != (report is not None):
            self._note(f"{new} has {'no' if report is None else 'a'} last report of the {len(active)} that it replaces")
        for old in active:
            self._hear(old, (report or {}).get("seen", 0), (report or {}).get("declared"))
            self._close(old, "lapsed")
        for old in older:
            old.state = "fenced" if old.state in ("granted", "active") else old.state
        new.state = "active"
        self._counts["joins"] += 1

    def _came_or_went(self, record: Json) -> None:
        kind, session = record["kind"], self._of(record)
        if not self._is(record, "lapsed" if kind == "Returned" else "live", f"has {kind.lower()}"):
            return
        session.is_lapsed = kind == "Lapsed"
        if kind == "Lapsed":
            self._hear(session, record["heard"]["seen"], record["heard"]["declared"])
            self._counts["lapses"] += 1
        elif kind == "Departed":
            self._hear(session, record["progress"]["tokens"], record["progress"])
            self._close(session, "undrained")
            session.state, session.step, self._ending = "left", record["progress"]["step"], record["reason"]

    def _hear(self, session: Session, seen: int, report: Json | None) -> None:
        """Take the last report of a session that lapses, leaves or is replaced."""
        session.hear(seen, report)
        if held := self._leases.of(session):
            self._note(f"{session} reports for the last time, but holds the leases {held}")
        if report is not None:
            self._balance(session, f"reports {report['tokens']} tokens", report["tokens"], session.reported())

    def _close(self, session: Session, cause: str) -> None:
        """Discard for this cause what a session leaves behind."""
        session.booked[cause] += session.waiting(len(self._versions))
        terms = {"merged": session.num_merged, **session.discarded}
        self._balance(session, f"trained {session.seen} tokens", session.seen, terms)

    def _balance(self, session: Session, what: str, tokens: int, terms: dict[str, int]) -> None:
        if sum(terms.values()) != tokens * len(self._versions):
            self._is_exact = False
            self.problems.append(f"{session} {what} in each of {len(self._versions)} fragments; the log has {terms}")

    def _commit(self, record: Json) -> None:
        p, version = record["fragment"], record["version"]
        if (version, record["generation"]) != (self._versions[p] + 1, self._generation):
            self.problems.append(
                f"fragment {p}: version {version} of generation {record['generation']} follows version "
                f"{self._versions[p]}; the generation is {self._generation}"
            )
        self._versions[p] = version
        self._counts["commits"] += 1
        self._counts["contributors"] += len(record["merges"])
        self._counts["stepping"] += record["num_stepping"]
        self._is_strict |= p in self._committed
        self._committed.add(p)
        for merge in record["merges"]:
            self._merge(p, version, merge)

    def _merge(self, p: int, version: int, merge: Json) -> None:
        session, ready = self._of(merge), merge["ready"]
        who = f"{session}, fragment {p}, contribution {ready['seq']}"
        start = ready["start"]
        stop = start + int((ready["stop"] - start) * merge["kept"])
        if session.state != "active":
            self.problems.append(f"{who}: merged, although its learner is {session.state}")
        if (before := session.decide(p, ready["seq"], "merged", version)) is not None:
            self.problems.append(f"{who}: merged, although it was {before}")
        if size(minus([(start, stop)], session.taken(p))) != stop - start:
            self.problems.append(f"{who}: tokens from {start} to {stop} were merged before")
        session.merge(p, version, start, stop)
        session.num_clipped += merge["kept"] < 1
        self._leases.follow(session, ready)

    def _decided(self, record: Json) -> None:
        session, p, seq, fate = self._of(record), record["fragment"], record["seq"], record["fate"]
        is_new = (p, seq) not in session.fates
        if (before := session.decide(p, seq, fate, record["reason"])) is not None:
            self._note(f"{session}, fragment {p}, contribution {seq}: {fate}, although it was {before}")
        session.num_refused += is_new and fate in CAUSES["refused"]

    # -------------------------------------------------------------------------------------------------------- the end

    def _total(self) -> None:
        for session in self._sessions.values():
            if session.where == "live":
                self.live.append(str(session))
            elif session.where == "lapsed":
                self._close(session, "lapsed")
            self.seen += session.seen * len(self._versions)
            self.merged += session.num_merged
            self.discarded += session.discarded
            if self._is_whole and not self._generation:  # otherwise some causes are no longer in the log
                self.problems += session.without_cause()

    def _compare(self, summary: Json) -> None:
        lost: Counter[str] = Counter(summary["tokens_discarded"])
        terms = {cause: (lost[cause], self.discarded[cause]) for cause in {**lost, **self.discarded}}
        for what, (said, counted) in {"seen": (summary["tokens_seen"], self.seen), **terms}.items():
            may_exceed = self.live and what != "undrained"
            if said < counted or (said > counted and not may_exceed):
                self.problems.append(f"the summary says {said} token x fragment {what}, the log {counted}")
        counts, seen, num_fragments = self._counts, summary["tokens_seen"], len(self._versions)
        wanted = {
            "tokens_merged": self.merged,
            "tokens_pending": 0,  # of a run that has ended, all that is not merged is discarded
            "tokens_seen": summary["tokens_merged"] + summary["tokens_pending"] + lost.total(),
            "fleet_tokens": seen / max(1, num_fragments),
            "tokens_repeated": self._leases.num_repeated(num_fragments),
            "ranges_done": self._leases.num_done,
            "ledger_exact": self._is_exact,
            "versions": self._versions,
            "rounds": counts["commits"],
            "participation": counts["contributors"] / counts["stepping"] if counts["stepping"] else None,
            "joins": counts["joins"],
            "lapses": counts["lapses"],
            "stopped": self._stopped,
            "config": self._config or summary["config"],
        }
        for name, value in wanted.items():
            if summary[name] != value:
                self.problems.append(f"the summary says {name} {summary[name]}, by the log it is {value}")
        if summary["status"] == "finished" and (self.live or self._ending != "finished"):
            self.problems.append(f"the summary says finished, but {self.live} train, and the last left {self._ending}")
        told = [told_of(each) for each in summary["learners"]]
        took_part = [s.told(self._quarantined.get(s.learner)) for s in self._sessions.values() if s.state != "granted"]
        for text, one, other in (("only the summary", told, took_part), ("only the log", took_part, told)):
            self.problems += [f"{text} has the learner {each}" for each in one if each not in other]


def main(arguments: Sequence[str]) -> int:
    """Print what is wrong with a run; return 1 if anything is."""
    if len(arguments) != 1:
        print(f"found {len(arguments)} arguments; name one run directory: python -m tests.recorded_run RUN_DIR")
        return 1
    found = Check(Path(arguments[0]))
    print(*found.problems or ["nothing is wrong"], sep="\n")
    print(f"token x fragment: {found.seen} seen, {found.merged} merged, discarded: {dict(found.discarded)}")
    if found.live:
        print(f"still training at the end, so that the log lacks their last reports: {', '.join(found.live)}")
    return int(bool(found.problems))


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
