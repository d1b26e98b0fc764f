"""Progress notes of a run on the tape."""

from __future__ import annotations

from typing import Any

from lightning_diloco.syncer.status.progress import MAX_PAUSE_S, MIN_PAUSE_S, pause_s, progress

LEARNER: dict[str, Any] = {
    "id": "l0", "incarnation": 1, "phase": "stepping", "step": 7, "tokens": 70, "tokens_per_s": 10.0,
    "staleness_versions": 1, "metrics": {"loss": 2.5, "diloco/stall_s": 0.1}, "last_heard_s_ago": 0.2,
}  # fmt: skip
STATUS: dict[str, Any] = {
    "run": "r", "fleet_tokens": 70.0, "goodput": 0.9, "participation": 1.0, "bytes_up": 5, "bytes_down": 6,
    "ledger": {"seen": 140, "merged": 70, "pending": 70, "discarded": {}},
    "config": {}, "versions": [1, 2], "learners": [LEARNER],
}  # fmt: skip


def test_a_note_has_only_the_fields_for_plots() -> None:
    note = progress(STATUS)
    assert note.keys() == {"fleet_tokens", "goodput", "participation", "bytes_up", "bytes_down", "ledger", "learners"}
    assert note["learners"] == [
        {"id": "l0", "phase": "stepping", "step": 7, "tokens": 70, "tokens_per_s": 10.0, "staleness_versions": 1,
         "loss": 2.5, "eval_loss": None}
    ]  # fmt: skip


def test_the_loss_is_null_before_a_learner_has_reported_one() -> None:
    assert progress({**STATUS, "learners": [{**LEARNER, "metrics": {}}]})["learners"][0]["loss"] is None


def test_notes_become_less_frequent_with_age_within_bounds() -> None:
    pauses = [pause_s(age_s) for age_s in (0, 10, 1000, 5000, 1e7)]
    assert pauses == sorted(pauses)
    assert (pauses[0], pauses[-1]) == (MIN_PAUSE_S, MAX_PAUSE_S)
