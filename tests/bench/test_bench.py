"""Tests of the benchmarks with small sizes, and of their assumptions."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_diloco.config import LearnerConfig, RunConfig
from lightning_diloco.protocol.events import Verdict
from lightning_diloco.protocol.syncer.conduct import Conduct
from lightning_diloco.protocol.syncer.roster import Member
from tests.bench import (
    at_size,
    attacks,
    bandwidth,
    broken_learner,
    busy_survivors,
    chaos,
    exchange,
    fleets,
    forecast,
    goodput_table,
    loop,
    loss_by_participation,
    memory,
    outer_rules,
    participation,
    quality,
    ranks_step,
    report,
    shards,
    simulated,
    soak,
    speeds,
    survivors,
    timed_recipe,
    xla_step,
)
from tests.bench.processes import Measured
from tests.bench.tasks import Classifier, Gan, Task
from tests.bench.tiny import RECIPE, Tiny


def test_the_loop_of_a_syncer_is_measured_while_leases_come_and_go() -> None:
    found = loop.measure(2, leases=8, num_fragments=4, measured_s=8.0)
    assert 0.0 < found["cpu_s_per_s"] < 1.0
    assert found["commits_per_s"] > 0.5
    assert 4 < found["leases_each"] < 20


@pytest.mark.slow
def test_a_fleet_without_a_trainer_takes_part_in_every_round(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleets, "MEASURED_PERIODS", 1)
    found = fleets.measure(2, step_s=0.3, width=16)
    assert found["take part"] > 0.9
    assert 0.8 < found["rounds / period"] < 1.2
    assert found["merged"] == 1.0
    assert found["ledger_exact"]
    assert found["hold p99.9 [ms]"] > 0.0


@pytest.mark.slow
def test_a_fragment_is_uploaded_and_downloaded_over_the_wire() -> None:
    found = at_size.measure(200_000, 2, 1, rounds=3)
    assert found["last byte to offer [s]"] > 0
    assert 2 <= found["log bytes per parameter"] < 2.1


@pytest.mark.slow
def test_shards_share_the_bytes_and_give_the_same_bits() -> None:
    one, two = (shards.measure(1 << 18, num_shards, waves=2) for num_shards in (1, 2))
    assert one["digests"] == two["digests"]
    assert two["its payloads [bytes per parameter and wave]"] == "4.03, 4.03"


@pytest.fixture
def toy(tmp_path: Path) -> Tiny:
    """Return the recipe with a few short sequences of its own text."""
    text = tmp_path / "texts"
    text.mkdir()
    for k in range(8):
        (text / f"{k}.txt").write_text(f"document {k} counts: " + " ".join(map(str, range(60 * k, 60 * k + 60))))
    data = {"files": f"{text}/*.txt", "vocab_size": 257, "seq_len": 16, "batch_size": 2, "cache_dir": str(tmp_path)}
    config = {"model_type": "llama", "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
    return Tiny(model={"config": {**config, "num_attention_heads": 2}}, data={**data, "max_bytes": None})


SMALL = {"sync_every": 6, "num_fragments": 3}


@pytest.mark.seconds
def test_one_learner_with_a_plain_outer_step_trains_as_without_the_strategy(toy: Tiny) -> None:
    size = {"learners": 1, "steps": 15, "seed": 1}
    config = RunConfig(**SMALL, outer_lr=1.0, outer_momentum=0.0, wire="fp32")
    alone = quality.data_parallel(toy, **size)
    assert quality.decoupled(toy, config, LearnerConfig(), **size)["loss"] == pytest.approx(alone, abs=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["random direction, 100x the norm", "norm 6.7e33", "sign flipped", "2^40 tokens a step"]
)
def test_a_broken_learner_does_not_move_the_loss(name: str) -> None:
    task, kinds = Classifier(1), broken_learner.KINDS
    alone = broken_learner.outcome(task, None, steps=480)
    found = broken_learner.outcome(task, kinds[name], steps=480)
    assert found["loss"] < 1.02 * alone["loss"]
    assert found["told"]


@pytest.mark.slow
def test_attacks_have_no_effect_on_a_live_run_and_a_stopped_learner_counts_as_an_effect(tmp_path: Path) -> None:
    wanted = ("a batch that inflates to 256 MiB", "random directions")
    found = attacks.run(tmp_path, [attack for attack in attacks.ATTACKS if attack.name in wanted])
    assert [row["effect"] for row in found["rows"]] == ["none", "none"]
    assert found["rows"][1]["its learner"] == "quarantine"
    beside_others = ("memory", "honest learners make")  # they depend on what else the machine does
    assert all(holds for what, holds in found["checks"].items() if not what.startswith(beside_others))


@pytest.mark.slow
def test_a_broken_learner_moves_the_loss_without_guards() -> None:
    task, kind = Classifier(1), broken_learner.KINDS["random direction, 100x the norm"]
    alone = broken_learner.outcome(task, None, steps=240)
    assert broken_learner.outcome(task, kind, steps=240, guarded=False)["loss"] > 1.2 * alone["loss"]


@pytest.mark.slow
@pytest.mark.parametrize("arm", ["one is 10x slower", "one leaves, one comes", "slower network, nobody waits"])
@pytest.mark.parametrize("task", [Classifier, Gan])
def test_honest_learners_are_not_odd(task: type[Task], arm: str, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[Verdict] = []
    hear = Conduct.hear

    def overheard(self: Conduct, member: Member, verdict: Verdict) -> None:
        said.append(verdict)
        assert hear(self, member, verdict) is None, "nobody is to be put in quarantine"

    monkeypatch.setattr(Conduct, "hear", overheard)
    loss_by_participation.anchor_loss(task(1), loss_by_participation.ARMS[arm], learners=4, steps=240)
    assert len(said) > 100
    assert not any(verdict.odd for verdict in said)


def test_the_computed_bandwidth_gives_the_requested_utilization() -> None:
    for method in bandwidth.METHODS.values():
        for share in bandwidth.UTILIZATIONS:
            rate = method.gbps(share, 1e10, 0.8)
            all_reduce_s = method.bits * 1e10 / method.parts / 1e9 / rate  # among two sites: all bytes once
            waits_s = method.parts * max(0.0, all_reduce_s - method.hidden * 0.8)
            assert method.period * 0.8 / (method.period * 0.8 + waits_s) == pytest.approx(share)


@pytest.mark.seconds
def test_quality_is_the_same_each_time(toy: Tiny) -> None:
    size = {"learners": 2, "steps": 13, "seed": 1}
    first, second = (quality.decoupled(toy, RunConfig(**SMALL), LearnerConfig(), **size) for _ in range(2))
    assert first == second
    assert -1 < first["rho"] < 1


@pytest.mark.seconds
def test_a_rule_that_changes_nothing_gives_the_loss_of_the_package(toy: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    task = {"batch_size": 2, "learners": 2, "sync_every": 6, "steps": 13, "seed": 1}
    options = RunConfig(sync_every=6, num_fragments=6, outer_lr=0.5, outer_momentum=0.9)
    plain = quality.decoupled(toy, options, LearnerConfig(), learners=2, steps=13, seed=1)
    monkeypatch.setattr(outer_rules, "Tiny", lambda *_, **__: toy)
    rules = {"same": outer_rules.Rule(lr=0.5, mu=0.9), "other": outer_rules.Rule(lr=0.5, mu=0.9, skip=True)}
    monkeypatch.setattr(outer_rules, "RULES", rules)
    same, other = (outer_rules.run(RECIPE, {"rule": name, **task}) for name in rules)
    assert (same["loss"], same["rho"]) == (plain["loss"], plain["rho"])
    assert other["loss"] != plain["loss"]


def test_missing_options_of_a_sweep_are_those_of_a_run() -> None:
    args = quality.parser().parse_args(["--sync-every", "24", "6", "--num-fragments", "6", "--seed", "1"])
    found = [(trial["sync_every"], trial["outer_lr"], trial["outer_momentum"]) for trial in quality.trials(args)]
    assert found == [(24, "auto", 0.6), (6, "auto", 0.15)]


@pytest.mark.slow
def test_a_sweep_skips_stored_trials(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    size = ["--steps", "2", "--batch-size", "1", "--learners", "1", "--outer-lr", "0.5", "--out", str(tmp_path / "it")]
    quality.main([*size, "--seed", "1"])
    stored = json.loads((tmp_path / "it").read_text())
    stored["anchors"][0]["loss"] = 2 * stored["data_parallel"][0]["loss"]
    (tmp_path / "it").write_text(json.dumps(stored))
    assert quality.main([*size, "--seed", "1"]) == 1, "the stored loss is beyond the bound"
    assert quality.main([*size, "--seed", "1", "2", "--baseline-lr", "0.1", "4e-3"]) == 1
    results = json.loads((tmp_path / "it").read_text())
    assert [(one["seed"], one["lr"]) for one in results["data_parallel"]] == [(1, 4e-3), (1, 0.1), (2, 0.1), (2, 4e-3)]
    assert results["anchors"][0] == stored["anchors"][0]
    assert "+100.00%" in capsys.readouterr().out


@pytest.mark.slow
def test_the_anchor_does_not_depend_on_participation() -> None:
    task, size = Classifier(1), {"learners": 4, "steps": 400}
    arms = loss_by_participation.ARMS
    everybody, some, control = (
        loss_by_participation.anchor_loss(task, arms[name], **size)
        for name in (loss_by_participation.FULL, "a quarter", loss_by_participation.CONTROL)
    )
    assert (everybody["participation"], some["participation"]) == (1.0, pytest.approx(0.25, abs=0.01))
    assert some["loss"] < 1.02 * everybody["loss"]
    assert control["loss"] > 1.2 * everybody["loss"], "shares of the round, as the paper has it, go too far"


@pytest.mark.slow
def test_two_learners_of_a_gan_stay_as_close_to_the_data_as_one_trainer() -> None:
    task, size = Gan(1), {"learners": 2, "steps": 600}
    untrained = task.model().validation_loss()
    loss = loss_by_participation.anchor_loss(task, loss_by_participation.Arm(together=0.5, waits=False), **size)["loss"]
    assert loss < 0.1 * untrained


def test_data_parallel_reads_what_all_learners_read(toy: Tiny) -> None:
    parts = [next(toy.batches(3, part, 2))["input_ids"] for part in range(2)]
    joined = next(toy.joined_batches(3, 2))["input_ids"]
    assert torch.equal(joined, torch.cat(parts))


def test_simulated_learners_take_part(capsys: pytest.CaptureFixture[str]) -> None:
    assert participation.main(["--no-run", "--learners", "2", "--seeds", "1", "--steps", "60"]) == 0
    assert "simulated, M = 2" in capsys.readouterr().out


def test_an_exchange_costs_its_snapshot_and_its_landing() -> None:
    steps = [
        {"hook_s": 1.0, "hook_cpu_s": 0.5, "wall_s": 10.0, "snapshots": [0], "landings": []},
        {"hook_s": 2.0, "hook_cpu_s": 0.5, "wall_s": 10.0, "snapshots": [1], "landings": []},
        {"hook_s": 4.0, "hook_cpu_s": 0.5, "wall_s": 10.0, "snapshots": [0], "landings": [0, 1]},
    ]
    measured = Measured(steps=steps, num_snapshots=3, num_landings=2, bytes_up=0, bytes_down=0)
    assert measured.exchange_s() == pytest.approx([1.0 + 4 / 3, 2.0 + 4 / 3])
    assert measured.stall_share() == pytest.approx(7 / 30)


@pytest.mark.parametrize(
    ("must_fail", "failed", "is_right"),
    [
        (set(), set(), True),
        (set(), {"stall"}, False),
        ({"stall"}, {"stall", "bytes up"}, True),
        ({"stall"}, {"bytes up"}, False),
    ],
)
def test_a_control_must_fail_its_own_checks(must_fail: set[str], failed: set[str], is_right: bool) -> None:
    case = exchange.Case("any", must_fail=frozenset(must_fail))
    assert exchange.is_right(case, failed) is is_right


def test_tables_are_inserted_between_the_markers_of_a_readme(tmp_path: Path) -> None:
    readme = tmp_path / "README.md"
    readme.write_text("before\n<!-- bench x -->\nold\n<!-- /bench x -->\nafter\n")
    for _ in range(2):
        report.insert(readme, "x", report.table([{"a": 1, "b": 0.12345}]))
    lines = readme.read_text().splitlines()
    assert (lines[0], lines[-1]) == ("before", "after")
    assert lines[2:-2] == ["| a | b      |", "|---|--------|", "| 1 | 0.1235 |"]
    with pytest.raises(ValueError, match="bench y"):
        report.insert(readme, "y", "text")


@pytest.mark.slow
def test_real_processes_exchange_and_controls_fail(capsys: pytest.CaptureFixture[str]) -> None:
    toy_run = ["--numel", str(8 * 512**2), "--steps", "24", "--step-s", "0.02", "--sync-every", "6", "--runs", "1"]
    exchange.main(toy_run)  # its verdict on time depends on the machine; that on bytes does not
    rows = capsys.readouterr().out.splitlines()
    assert "bytes down, bytes up" in next(row for row in rows if "wire=fp32" in row)


@pytest.mark.parametrize(("slope_bps", "is_flat"), [(0.0, True), (2000.0, False)])
def test_growing_memory_is_distinguished_from_varying_memory(slope_bps: float, is_flat: bool) -> None:
    chance = random.Random(1)
    times_s = [1200.0 + 2.0 * k for k in range(600)]
    values = [2e8 + slope_bps * t + chance.gauss(0.0, 2e6) for t in times_s]
    assert soak.trend(times_s, values, is_kept=False).is_flat is is_flat


@pytest.mark.parametrize(("slope_bps", "is_flat"), [(0.0, True), (1000.0, False)])
def test_growing_memory_is_distinguished_from_kept_memory(slope_bps: float, is_flat: bool) -> None:
    """Memory that an allocator keeps is the running maximum of a varying demand, so it rises less and less often."""
    chance = random.Random(1)
    taken = [3e8 + chance.gauss(0.0, 5e4) for _ in range(1500)]
    kept = [(2.0 * k, max(taken[:k]) + slope_bps * 2.0 * k) for k in range(600, 1500)]
    assert kept[-1][1] > kept[0][1]
    assert soak.trend(*zip(*kept, strict=True), is_kept=True).is_flat is is_flat


@pytest.mark.parametrize(("longest_ms", "holds"), [(70.0, True), (130.0, False)])
def test_a_step_that_a_fault_made_longer_is_detected(longest_ms: float, holds: bool) -> None:
    calm, faulty = ({"faults": said, "exit code": 0} for said in ("none", "kill 1"))
    rows = [{**calm, "longest [ms]": 70.0}, {**faulty, "longest [ms]": longest_ms}, {**calm, "longest [ms]": 60.0}]
    assert [*survivors.checks_of(rows, {**faulty, "longest [ms]": 2000.0}).values()] == [holds, True, True]
    assert [*survivors.checks_of(rows, rows[1]).values()] == [holds, True, not holds]


def seen(*, step_s: float = 0.05, hook_s: float = 0.003, is_back: bool = True) -> busy_survivors.Seen:
    """Return a survivor whose steps and hooks differ after the kill."""
    steps = [0.048, 0.052] * 200
    return busy_survivors.Seen(
        before_s=steps,
        after_s=[step_s / 0.05 * s for s in steps],
        hooks_before_s=[0.002, 0.004] * 200,
        hooks_after_s=[hook_s] * 400,
        num_merged_after=8,
        was_back=is_back,
        ledger_exact=True,
    )


@pytest.mark.parametrize(
    ("survivor", "failed"),
    [
        ({}, []),
        ({"step_s": 0.04}, []),  # the victim's core is free
        ({"hook_s": 0.053}, []),
        ({"hook_s": 0.055}, ["is started again: the longest hook"]),
        ({"step_s": 0.053}, ["is started again: steps"]),
        ({"is_back": False}, ["who was started again"]),
    ],
    ids=["as before", "faster", "within", "hooks", "steps", "never back"],
)
def test_a_busy_survivor_that_slows_down_is_detected(survivor: dict[str, Any], failed: list[str]) -> None:
    runs = [
        (busy_survivors.DEAD, seen(is_back=False), seen(is_back=False)),
        (busy_survivors.AGAIN, seen(**survivor), seen()),
    ]
    checks = busy_survivors.checks_of(runs, control=seen(step_s=0.1, hook_s=5.0))
    found = [sentence for sentence, holds in checks.items() if not holds]
    assert len(found) == len(failed)
    assert all(sentence.startswith(start) for sentence, start in zip(found, failed, strict=True))
    blind = busy_survivors.checks_of(runs, control=seen())
    assert sum(not holds for holds in blind.values()) == len(failed) + 2, "a control that shows nothing is seen, too"


@pytest.mark.slow
@pytest.mark.thorough
def test_hooks_of_a_recipe_s_learner_are_timed_from_outside(tmp_path: Path) -> None:
    argv = [sys.executable, "-m", "tests.bench.timed_recipe", str(RECIPE), "--trainer.max_steps=4"]
    argv += ["--trainer.limit_val_batches=0", "--data.max_bytes=200000", f"--data.cache_dir={tmp_path}"]
    told = {"DILOCO_RUN_DIR": str(tmp_path), "DILOCO_LEARNER": "l0", "OMP_NUM_THREADS": "1"}
    began_s = time.time()
    ended = subprocess.run(argv, env={**os.environ, **told}, capture_output=True, text=True, timeout=300, check=False)
    assert ended.returncode == 0, ended.stderr
    (path,) = (tmp_path / "learners" / "l0").glob(timed_recipe.PATTERN)
    pairs = timed_recipe.read_hooks(path)
    assert len(pairs) == 4
    assert all(began_s < t < time.time() and 0.0 < hook_s < 10.0 for t, hook_s in pairs)


@pytest.mark.parametrize(
    ("with_s", "control_s", "holds"),
    [(0.0515, 0.053, [True, True]), (0.0517, 0.053, [False, True]), (0.0515, 0.0514, [True, False])],
    ids=["within", "slower", "blind"],
)
def test_steps_that_the_strategy_makes_longer_are_detected(with_s: float, control_s: float, holds: list[bool]) -> None:
    steps_s = {"without": [0.05, 0.05, 0.09], "with": [with_s, 0.05, 0.2], "control": [control_s] * 3}
    assert [*ranks_step.checks_of(ranks_step.figures("ddp", steps_s, 0.16)).values()] == [True, *holds]
    assert [*ranks_step.checks_of(ranks_step.figures("ddp", steps_s, 0.14)).values()] == [False, *holds]


def test_steps_on_xla_that_the_strategy_makes_longer_are_detected() -> None:
    def row(steps_s: list[float], landings: float = 1.0, graphs: int = 0) -> dict[str, Any]:
        found = {"landings per step": landings, "graphs after warm-up": graphs}
        return xla_step.figures("with", [1.0, 1.1, 1.5], steps_s, found)

    good, slow = [1.02, 1.12, 3.0], [1.04, 1.2, 1.0]
    assert [*xla_step.checks_of(row(good), row(slow)).values()] == [True] * 4
    assert [*xla_step.checks_of(row(slow, landings=0.1, graphs=1), row(good)).values()] == [False] * 4


CHAOS = {
    "exit_code": 0, "ledger_exact": True, "replayed": "merges", "step_efficiency": 0.95, "participation": 0.9,
    "num_faults_by_kind": {"kill": 5, "stop": 6, "cut": 5, "slow": 6, "syncer": 6}, "num_faults_skipped": 0,
    "eval_loss_excess": 0.01, "trained_minutes": 20.0,
    "recoveries": [{"kind": kind, "recovery_s": s} for kind, s in (("kill", 29.0), ("kill", 70.0), ("kill", 20.0))],
}  # fmt: skip


def test_a_chaos_run_within_its_bounds_passes() -> None:
    assert all(chaos.checks_of(CHAOS).values())


@pytest.mark.parametrize(
    "changed",
    [
        {"exit_code": 1}, {"ledger_exact": False}, {"replayed": None}, {"step_efficiency": 0.94},
        {"participation": 0.89}, {"recoveries": []}, {"recoveries": [{"kind": "kill", "recovery_s": 31.0}]},
        {"trained_minutes": 19.9}, {"eval_loss_excess": 0.011}, {"eval_loss_excess": None},
        {"num_faults_by_kind": {"kill": 3, "stop": 6, "cut": 5, "slow": 6, "syncer": 6}},
    ],
)  # fmt: skip
def test_a_chaos_run_beyond_a_bound_fails(changed: dict[str, object]) -> None:
    assert list(chaos.checks_of({**CHAOS, **changed}).values()).count(False) == 1


@pytest.mark.parametrize(
    ("row", "changed", "num_missed"),
    [
        (0, {}, 0),
        (0, {"loss": 2.0}, 1),
        (0, {"ledger exact": 0.5}, 1),
        (1, {"slower": 3.0}, 2),
        (1, {"idle, slow": 0.04}, 1),
        (1, {"minutes": 6.0}, 1),
        (1, {"ends of the epoch, apart": 0.06}, 1),
        (1, {"participation": 0.4}, 1),
        (2, {"idle, fast": 0.01}, 1),
        (2, {"ends of the epoch, apart": 0.01}, 1),
    ],
)
def test_a_slow_learner_that_costs_time_or_loss_is_detected(
    row: int, changed: dict[str, float], num_missed: int
) -> None:
    rows = json.loads((Path(speeds.__file__).parent / "results" / "speeds.json").read_text())["rows"]
    rows[row] |= changed
    assert list(speeds.checks_of(rows, minutes=2.88).values()).count(False) == num_missed


def test_the_first_epoch_ends_with_the_last_new_sequence() -> None:
    fast = [(1.0, 1.0), (2.0, 2.0), (3.0, 3.0), (6.0, 4.0)]
    slow = [(1.0, 4.0), (5.0, 5.0), (9.0, 1.0)]
    assert speeds._first_epoch({"l0": fast, "l1": slow}) == (4.0, 2.0)


@pytest.mark.parametrize(("at_the_end", "grew"), [((15, 16), "-"), ((17, 17), "threads")])
def test_accumulating_threads_are_distinguished_from_one_that_comes_and_goes(
    at_the_end: tuple[int, int], grew: str
) -> None:
    before = [(2.0 * k, 1 << 28, 15 + k % 2, 21) for k in range(290)]
    samples = before + [(2.0 * k, 1 << 28, at_the_end[k % 2], 21) for k in range(290, 310)]
    assert soak._row("a run", samples, is_kept=False)["grew"] == grew


@pytest.mark.seconds
def test_planned_goodput_agrees_with_measured_runs() -> None:
    found = json.loads((RECIPE.parent / "results" / "forecast.json").read_text())
    checks = forecast.checks_of(found["runs"])
    assert list(checks.values()) == [True] * (len(found["runs"]) + 1), checks
    assert [forecast.row_of(name, **run) for name, run in found["runs"].items()] == found["rows"]


@pytest.mark.seconds
def test_a_simulation_shows_kills_slow_learners_and_slow_links(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simulated, "SIMULATIONS", 1)
    told = {"steps_s": [0.1] * 3, "jitter": 0.05, "mtbf_s": None, "rejoin_s": 5.0, "rate_bps": None}
    calm, *others = (
        simulated.simulated([told | more], 100.0)
        for more in ({}, {"mtbf_s": 20.0}, {"steps_s": [0.1, 0.1, 0.4]}, {"rate_bps": simulated.rate_bps()})
    )
    assert simulated.misses(calm, [calm | {"goodput": 0.98}]) == []
    assert [len(simulated.misses(other, [calm])) > 0 for other in others] == [True] * 3
    lowest = {name: value and 0.5 * value for name, value in others[0].items()}
    assert simulated.misses(others[0], [calm, lowest | {"recovery [s]": 99.0}, {**calm, "recovery [s]": 1.0}]) == []
    assert others[2]["participation"] < 0.7


@pytest.mark.seconds
def test_the_measured_runs_with_kills_are_simulated_again() -> None:
    rows = goodput_table.real_runs("1min")
    assert [row["run"] for row in rows] == ["real: killed learners", "real: all kinds of faults"]
    assert all(abs(row["off by"]) < 0.1 for row in rows), rows


@pytest.mark.seconds
def test_memory_that_differs_from_the_plan_is_detected() -> None:
    planned = {size: memory.planned_of(memory.forecast_of(size)) for size in (320, 640)}
    assert list(memory.checks_of(planned).values()) == [True] * 6
    taken = {size: (learner, round(1.2 * syncer)) for size, (learner, syncer) in planned.items()}
    assert [what for what, holds in memory.checks_of(taken).items() if not holds] == [
        f"{size} parameters: the syncer is off by -16.7%, at most 15%" for size in ("15.2M", "37.0M")
    ]
