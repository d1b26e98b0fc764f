"""All ranks of a learner have the same learning rate and stop at the same step; real processes."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.e2e.conftest import Processes, until
from tests.e2e.test_ranks import OF_THE_RUN, PACED, summary
from tests.e2e.trainer import RATE, decayed_by_tokens

pytestmark = pytest.mark.slow

NUM_BATCH, NUM_STEPS = 8, 24
SEVERAL = {"ddp": ("--devices", 2), "fsdp2": ("--devices", 2, "--inner", "fsdp2")}
BOTH, ONE, FIRST = "01", "1", "0"


def trained(processes: Processes, name: str, *arguments: object) -> list[dict[str, Any]]:
    """Return the records of the ranks of a learner; the learner must have succeeded."""
    assert processes.end(processes.trainer(name, *PACED, *arguments)) == 0
    ranks = processes.ranks_held(name)
    assert len(ranks) == 2
    found = summary(processes, name)
    assert (found["status"], found["ledger_exact"]) == ("finished", True)
    assert found["tokens_seen"] == sum(len(rank["seen"]) for rank in ranks) * len(found["versions"])
    return ranks


@pytest.mark.thorough
@pytest.mark.parametrize("inner", ["ddp", "fsdp2"])
def test_a_rate_by_fleet_tokens_is_equal_on_all_ranks_until_the_budget_is_used_up(
    processes: Processes, inner: str
) -> None:
    """With two learners, the received tokens of the other one depend on the time, but not on the rank."""
    limit = 6000  # long enough for both to start
    processes.syncer(expect=2, data_parts=2)
    join, unset = processes.address.join_string(), json.loads(OF_THE_RUN)
    options = {"several": {**unset, "max_fleet_tokens": limit}, "one": unset}
    learners = [
        processes.trainer(
            name,
            *("--by-tokens", "--steps", 100_000, "--pause-s", 0.03, "--options", json.dumps(options[name])),
            *(SEVERAL[inner] if name == "several" else ()),
            **{"DILOCO_JOIN": join, "DILOCO_LEARNER": name},
        )
        for name in options
    ]
    assert [processes.end(learner) for learner in learners] == [0, 0]

    first, other = processes.ranks_held("several")
    assert first["rates"] == other["rates"]
    assert first["steps"] == other["steps"] == len(first["rates"])
    alone = RATE * decayed_by_tokens(NUM_BATCH * first["steps"])
    assert first["rates"][-1] < 0.9 * alone  # it has received tokens of the other learner
    assert first["rates"] == sorted(first["rates"], reverse=True)
    until((processes.run_dir / "summary.json").exists, "the summary", processes)
    assert processes.summary()["fleet_tokens"] >= limit
    (one,) = processes.ranks_held("one")
    assert one["steps"] < 100_000


@pytest.mark.parametrize("inner", [pytest.param("ddp", marks=pytest.mark.thorough), "fsdp2"])
def test_early_stopping_by_the_loss_of_one_rank_stops_all_ranks(processes: Processes, inner: str) -> None:
    """The anchor is validated after every fifth step; only the samples of rank 1 give such a low loss."""
    first, other = trained(processes, "early", *SEVERAL[inner], "--early", 0.5)
    assert other["val_losses"][0] < 0.5 < min(first["val_losses"])
    assert first["steps"] == other["steps"] == 5
    assert len(first["val_losses"]) == len(other["val_losses"]) == 2  # before training, and then


@pytest.mark.parametrize(
    ("where", "number", "ranks", "num_steps"),
    [
        pytest.param("batch", 6, BOTH, 7, marks=pytest.mark.thorough),  # at this step, as with Lightning's strategies
        ("batch", 6, ONE, 8),  # after the next step, which the other ranks have begun
        pytest.param("batch", 6, FIRST, 8, marks=pytest.mark.thorough),
        pytest.param("validation", 4, ONE, 5, marks=pytest.mark.thorough),
    ],
)
def test_a_stop_on_some_ranks_stops_all_ranks(
    processes: Processes, where: str, number: int, ranks: str, num_steps: int
) -> None:
    found = trained(processes, "stopped", *SEVERAL["ddp"], "--stops", where, number, *ranks)
    assert [rank["steps"] for rank in found] == [num_steps, num_steps]
    assert [len(rank["val_losses"]) for rank in found] == [2 if where == "validation" else 3] * 2  # and where it stops


@pytest.mark.thorough
def test_a_stop_on_one_rank_during_accumulation_or_at_the_end_of_an_epoch_stops_all_ranks(
    processes: Processes,
) -> None:
    accumulating = ("--accumulate", 3, "--inner", "fsdp2", "--devices", 2)
    found = trained(processes, "accumulating", *accumulating, "--stops", "batch", 6, 0)
    assert [(rank["steps"], len(rank["losses"])) for rank in found] == [(3, 9), (3, 9)]
    several = ("--devices", 2, "--steps", 100)
    found = trained(processes, "epoch", *several, "--stops", "epoch", 0, 1)
    assert [rank["steps"] for rank in found] == [48, 48]
