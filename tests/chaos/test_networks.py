"""Real processes over bad networks: training does not wait, nothing is lost, and all end with the same anchors."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lightning_diloco.storage.tape import read_tape
from lightning_diloco.transport.faults import FaultProxy
from tests.e2e.conftest import Processes, until
from tests.e2e.learner import TOKENS

pytestmark = pytest.mark.chaos

NUM_FRAGMENTS = 4
HOOK_S = 1.0  # a step that waits for the network takes until a deadline, or until the end of the fault
ROUNDS_DISTURBED = 80  # some seconds, more than a lease
NUM_RESETS = 20
RECONNECT_S = 5.0  # TCP, TLS and the first call are three round trips


@pytest.fixture
def network(processes: Processes) -> Iterator[FaultProxy]:
    processes.syncer(expect=2)
    with FaultProxy(processes.address.host_port) as proxy:
        yield proxy


def commits_of(run_dir: Path, name: str) -> int:
    lines = read_tape(run_dir / "tape" / "events.jsonl")
    return sum(line["event"] == "commit" and name in line["learners"] for line in lines)


def until_merged_again(processes: Processes, name: str, times: int = 2 * NUM_FRAGMENTS) -> None:
    wanted = commits_of(processes.run_dir, name) + times
    until(lambda: commits_of(processes.run_dir, name) >= wanted, f"commits that name {name}", processes)


def assert_a_good_end(processes: Processes, *learners: Any) -> None:
    """Check that all processes end by themselves, hold the published anchors, and that each token was merged once."""
    processes.stop_file.touch()
    assert [processes.end(learner) for learner in learners] == [0] * len(learners)
    until((processes.run_dir / "summary.json").exists, "the summary", processes)
    held = [processes.held(f"l{k}") for k in range(len(learners))]
    tape = [line for line in read_tape(processes.run_dir / "tape" / "events.jsonl") if line["event"] == "commit"]
    published = {(line["fragment"], line["version"]): line["digest"] for line in tape}
    for learner in held:
        assert learner["longest_hook_s"] < HOOK_S
        assert learner["threads"] == []
        assert learner["digests"] == [published[p, version] for p, version in enumerate(learner["landed"])]
    last = next(learner for learner in held if learner["is_last"])
    assert last["landed"] == [max(version for q, version in published if q == p) for p in range(NUM_FRAGMENTS)]
    summary = processes.summary()
    assert summary["ledger_exact"]
    assert summary["joins"] == len(learners), "nobody had to begin anew"
    assert summary["tokens_merged"] == summary["tokens_seen"] == sum(x["steps"] for x in held) * TOKENS * NUM_FRAGMENTS


def test_a_cut_half_open_or_late_network_costs_only_time(
    processes: Processes,
    network: FaultProxy,
) -> None:
    learners = processes.learner("l0", through=network), processes.learner("l1")
    until_merged_again(processes, "l0")
    for disturb in (network.cut, network.freeze, network.hold):
        disturb()
        connections, others = network.num_connections, commits_of(processes.run_dir, "l1")
        until(lambda n=others: commits_of(processes.run_dir, "l1") > n + ROUNDS_DISTURBED, "rounds of l1", processes)
        if disturb == network.hold:
            until(lambda n=connections: network.num_connections > n, "a connection that overtakes", processes)
        network.heal()
        until_merged_again(processes, "l0")
    assert_a_good_end(processes, *learners)


def test_a_slow_and_delayed_network_with_resets_costs_only_time(
    processes: Processes,
    network: FaultProxy,
) -> None:
    learners = processes.learner("l0", through=network, deadline_s=RECONNECT_S), processes.learner("l1")
    until_merged_again(processes, "l0")
    # 200 ms each way; and each chunk that is sent resets its connection with 2 %. With the chunks of a TLS handshake,
    # about half of the calls fail.
    network.delay_s, network.rate_bps, network.reset_probability = 0.2, 1e6, 0.02
    connections = network.num_connections
    until_merged_again(processes, "l0", NUM_FRAGMENTS)
    until(lambda: network.num_connections > connections + NUM_RESETS, "connections that were reset", processes)
    until_merged_again(processes, "l0", NUM_FRAGMENTS)
    network.reset_probability = 0.005  # with 2 %, a drain, which ends after two minutes, was too short in some runs
    assert_a_good_end(processes, *learners)
