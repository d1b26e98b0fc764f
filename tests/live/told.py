"""Status and tape lines of a run for tests."""

from __future__ import annotations

from typing import Any

START = 1_700_000_000.0


def learner(name: str, step: int, *, phase: str = "stepping", loss: float | None = None, **more: Any) -> dict[str, Any]:
    metrics = {"diloco/stall_s": 0.01 * step, **({} if loss is None else {"loss": loss}), **more}
    return {
        "id": name, "incarnation": 1, "where": f"{name}.example.com:17", "site": "", "phase": phase, "step": step,
        "trainer_step": step,
        "tokens": 2048 * step, "metrics": metrics,
        "tokens_per_s": 5123.0, "staleness_versions": 1, "num_refused": 0, "num_clipped": 0,
        "quarantined": None, "last_contribution_s_ago": 0.8, "last_heard_s_ago": 0.2,
    }  # fmt: skip


def status(step: int = 100, *learners: dict[str, Any], **changes: Any) -> dict[str, Any]:
    rounds = [{"fragment": 1, "round": 9, "stage": "collecting", "ready": ["l0"], "waiting_for": ["l1"]}]
    wait = {"what": "fragment 1, round 9, collecting", "for": ["l1"], "since_s": 0.4, "until_s": 1.2,
            "then": "the round closes with those that are ready"}  # fmt: skip
    tokens = 2 * 2048 * step
    return {
        "run": "gpt-20261120-abc123", "state": "open", "reason": None, "uptime_s": float(step), "waits": [wait],
        "learners": list(learners) or [learner("l0", step, loss=4.0), learner("l1", step, loss=4.1)],
        "versions": [step // 24, step // 24 + 1, step // 24], "rounds": rounds, "num_commits": step // 8,
        "effective_quorum": 1, "participation": 0.97, "goodput": 0.93, "fleet_tokens": float(tokens),
        "ledger": {"seen": 3 * tokens, "merged": 2 * tokens, "pending": tokens, "discarded": {"lapsed": 7}},
        "bytes_up": 40_000 * step, "bytes_down": 80_000 * step, "recent": [], **changes,
    }  # fmt: skip
