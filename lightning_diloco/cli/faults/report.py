"""The report of a chaos run: RUN_DIR/chaos.json.

1. Token counts come from the summary, everything else from the recorded files (`story.py`). Values that need a
   step clock are null without one.
2. Step efficiency is tokens merged / tokens of all inner steps executed, including those of killed processes. It is a
   little stricter than the ledger's merged / seen, which does not count the last steps of a killed process.
3. Availability is the time from first to last step of each process, without stops, / planned time. The planned time of
   a learner runs from its first step to its leave and includes downtime.
4. Goodput is tokens merged / sum over learners of planned time x median tokens per second.
5. The longest gap is the longest time between two steps of one process, without its stops and without validation.
6. Recovery is the time from a kill, or from the end of a stop or cut, to the next commit that names the learner. For
   the syncer it is the time from the kill to the next commit, if a learner was stepping that could contribute; for a
   shard, to the next commit of one of its fragments.

Source: our choice; the definitions are those of `syncer/status/report.py`.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path

from rich.table import Table

from lightning_diloco.cli.faults.schedule import SHARD, SYNCER
from lightning_diloco.cli.faults.story import Json, Story, span
from lightning_diloco.cli.local.display import named_values, percent

NEEDED_WITHIN_S = 3.0
EQUAL_TOKENS = 0.01
_percent = partial(percent, digits=2)
_SHARES = ("step_efficiency", "merged_of_seen", "availability", "goodput", "participation")


def measure(story: Story) -> Json:
    """Return the report in the form of chaos.json."""
    summary = story.summary or {}
    recoveries = [{"fault": f["number"], "target": f["target"], "kind": f["kind"], "recovery_s": recovery_s(story, f)}
                  for f in story.faults if f["kind"] != "slow"]  # fmt: skip
    names = sorted({*story.learners, *(f["target"] for f in story.faults)})
    return {
        "status": summary.get("status", "no summary"),
        "ledger_exact": bool(summary) and summary["ledger_exact"] and _adds_up(summary),
        "num_faults": len(story.faults),
        "num_faults_by_kind": dict(Counter(f["kind"] for f in story.faults)),
        "num_faults_skipped": story.num_skipped,
        **_shares(story, summary),
        "participation": summary.get("participation"),
        "longest_gap_s": {name: max(x.gaps(), default=None) for name, x in story.learners.items()},
        "median_step_s": {name: _median(x.gaps()) for name, x in story.learners.items()},
        "recovery_s": {name: _worst(r["recovery_s"] for r in recoveries if r["target"] == name) for name in names},
        "recoveries": recoveries,
        "eval_loss": summary.get("eval_loss"),
        "eval_reason": summary.get("eval_reason"),
        "rounds": summary.get("rounds"),
        "tokens_seen": summary.get("tokens_seen"),
        "tokens_merged": summary.get("tokens_merged"),
        "tokens_discarded": summary.get("tokens_discarded"),
    }


def recovery_s(story: Story, fault: Json) -> float | None:
    """Return how long this fault kept its target from contributing; None if it did not contribute or was not needed."""
    name, since_s = fault["target"], fault["until_s"]
    if name == SYNCER:
        steps = (t for learner in story.learners.values() for life in learner.lives for t in life)
        was_needed = any(since_s < t < since_s + NEEDED_WITHIN_S for t in steps) or not story.learners
        return next((c.t - since_s for c in story.commits if c.t > since_s and was_needed), None)
    if fault["kind"] == "shard":
        mine = (c.t for c in story.commits if c.fragment % story.num_shards == int(name.removeprefix(SHARD)))
        return next((t - since_s for t in mine if t > since_s), None)
    back_s = since_s
    if fault["kind"] == "kill":
        starts = (span(life)[0] for life in (story.learners[name].lives if name in story.learners else ()))
        back_s = min((start for start in starts if start > since_s), default=math.inf)
    return next((c.t - since_s for c in story.commits if c.t > back_s and name in c.learners), None)


def steps_to_compare(story: Story, num_learners: int) -> int:
    """Return the inner steps after which a run without faults has merged as many tokens."""
    summary = story.summary or {}
    size = tokens_per_step(summary)
    return max(1, round(_merged(summary) / (size * num_learners))) if size else 1


def compared(report: Json, calm: Json) -> Json:
    """Compare the loss with that of the run without faults.

    `eval_loss_excess` is the relative difference. It is null if the runs merged different numbers of tokens, or if one
    has no loss.
    """
    loss, reference = report["eval_loss"], calm.get("eval_loss")
    merged, merged_calm = report["tokens_merged"] or 0, calm.get("tokens_merged") or 0
    is_fair = abs(merged_calm - merged) <= EQUAL_TOKENS * merged
    excess = loss / reference - 1.0 if loss is not None and reference and is_fair else None
    return {"eval_loss_calm": reference, "eval_loss_excess": excess, "tokens_merged_calm": merged_calm}


def view(report: Json, run_dir: Path) -> Table:
    """Return the report as a table."""
    kinds = ", ".join(f"{kind} {count}" for kind, count in report["num_faults_by_kind"].items())
    rows = {
        "status": f"{report['status']}, exit code {report['exit_code']}",
        "ledger": "exact" if report["ledger_exact"] else "NOT EXACT",
        "replayed": report["replay_error"] or f"{report['replayed']}, bit for bit",
        "faults": f"{report['num_faults']} ({kinds or 'none'}), skipped {report['num_faults_skipped']}",
        **{name.replace("_", " "): _percent(report[name]) for name in _SHARES},
        "longest gap": _seconds(report["longest_gap_s"], ".3f"),
        "median step": _seconds(report["median_step_s"], ".3f"),
        "recovery, the longest": _seconds(report["recovery_s"], ".1f"),
        "eval_loss of the anchor": "-" if report["eval_loss"] is None else f"{report['eval_loss']:.4f}",
    }
    if report.get("eval_loss_calm") is not None:
        share = report["tokens_merged_calm"] / report["tokens_merged"]
        rows["the same without faults"] = (
            f"{report['eval_loss_calm']:.4f} after {_percent(share)} of the tokens; "
            f"with faults it is {_percent(report['eval_loss_excess'])} above"
        )
    return named_values("chaos", {**rows, "files": str(run_dir)})


def failures(report: Json) -> list[str]:
    """Return why the run has not passed although its processes have finished."""
    found = []
    if not report["ledger_exact"]:
        found.append("failed: the ledger is not exact; see tokens_* in chaos.json")
    if report["replayed"] != "merges":
        level = f"only its {report['replayed']}" if report["replayed"] else "nothing"
        found.append(f"failed: `diloco replay` must reproduce the merges of the run, and reproduces {level}")
    return found


def tokens_per_step(summary: Json) -> float | None:
    """Return the mean tokens per step of the run, from the steps and tokens that processes reported to the syncer."""
    heard = [learner for learner in summary.get("learners", ()) if learner["step"] and learner["tokens"]]
    return sum(x["tokens"] for x in heard) / sum(x["step"] for x in heard) if heard else None


def _shares(story: Story, summary: Json) -> Json:
    """Return step efficiency, availability, goodput and their inputs."""
    merged, seen, size = summary.get("tokens_merged"), summary.get("tokens_seen"), tokens_per_step(summary)
    shares: Json = {"merged_of_seen": merged / seen if seen else None}
    if merged is None or size is None or not story.learners:
        unknown = dict.fromkeys(("num_steps", "step_efficiency", "availability"))
        return {**shares, **unknown, "goodput": summary.get("goodput")}
    learners = story.learners.values()
    end_s = max(learner.last_s for learner in learners)
    planned_s = {x.name: x.planned_s(end_s) for x in learners}
    fleet_tokens = _merged(summary)
    num_steps = sum(x.num_steps for x in learners)
    capacity = sum(planned_s[x.name] * size / (_median(x.gaps()) or math.inf) for x in learners)
    return {
        **shares,
        "num_steps": num_steps,
        "step_efficiency": fleet_tokens / (num_steps * size),
        "availability": sum(x.stepping_s() for x in learners) / sum(planned_s.values()),
        "goodput": fleet_tokens / capacity if capacity else None,
    }


def _merged(summary: Json) -> float:
    """Return the number of merged tokens, each counted once."""
    share: float = summary["tokens_merged"] / summary["tokens_seen"] if summary["tokens_seen"] else 0.0
    return share * float(summary["fleet_tokens"])


def _adds_up(summary: Json) -> bool:
    discarded = sum(summary["tokens_discarded"].values())
    return bool(summary["tokens_seen"] == summary["tokens_merged"] + discarded + summary["tokens_pending"])


def _median(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None


def _seconds(values: Mapping[str, float | None], form: str) -> str:
    return ", ".join(f"{name} {value:{form}} s" for name, value in values.items() if value is not None) or "-"


def _worst(values: Iterable[float | None]) -> float | None:
    return max((value for value in values if value is not None), default=None)
