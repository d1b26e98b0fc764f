"""A run whose fragments are held by several shards, over the in-memory transport."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.learner.fleet import Fleet, assert_exact, finish


@pytest.mark.parametrize("num_shards", [2, 3])
def test_learners_train_and_end_with_the_anchors_of_all_shards(tmp_path: Path, num_shards: int) -> None:
    with Fleet(tmp_path, num_shards=num_shards) as fleet:
        learners = [fleet.learner(name).go() for name in ("l0", "l1")]
        fleet.until_commits(12)
        finish(*learners)
        summary, digests = fleet.stop(), fleet.digests()
        last = next(learner for learner in learners if learner.is_last)
        assert last.digests() == digests
    assert_exact(summary)
    assert summary["tokens_merged"] == summary["tokens_seen"]
