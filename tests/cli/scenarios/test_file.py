"""Scenario files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lightning_diloco.cli.scenarios.file import read
from lightning_diloco.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("sync-every: 12\nfailures-per: slice\n", {"sync_every": [12], "failures_per": "slice"}),
        ("sync_every: [12, 24]\nstep: 1s\n", {"sync_every": [12, 24], "step": [1.0]}),
        ("baseline: dp\nspread: 20%\nseed: 0\n", {"baseline": ["dp"], "spread": 0.2, "seed": 0}),
    ],
)
def test_names_have_dashes_or_underscores(tmp_path: Path, text: str, found: dict[str, Any]) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    assert read(path) == found


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("learner: 2\n", r"unknown options: learner \(did you mean learners\?\); known: baseline, .*sync-every"),
        ("explore: true\n", "unknown options: explore"),
        ("- 2\n", r"holds \[2\]; a scenario maps options to values"),
        ("", "is empty; a scenario maps options to values, such as `learners"),
        ("a: [\n", "is no scenario"),
        ("chips: many\n", "chips: 'many': must be a number such as 64"),
        ("seed: [1, 2]\n", r"seed: \[1, 2\]: must be one value"),
        ("learners: []\n", "learners: expected at least one argument"),
        ("seed:\n", "seed has no value; give one, or leave it out"),
        ("quorum: [1, --seed, 3]\n", "must be one value, and no option"),
        ("mtbf: 2020-13-45\n", "is no scenario"),
        ("mtbi: 1e400y\n", "above 0 and finite"),
        ("shards: 0\n", "shards: '0': must be a whole number of at least 1"),
        ("baseline: ddp\n", "baseline: invalid choice: 'ddp'"),
        ("chips: 1k\nchips: 2k\n", "chips is given more than once; give all of its values in one list"),
        ("sync-every: 12\nsync_every: 24\n", "sync_every is given more than once"),
    ],
)
def test_a_bad_file_is_refused_with_its_name(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=rf"mine\.yaml.*{said}"):
        read(path)


def test_all_bad_values_are_reported_at_once(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("chips: many\nquorum: 0\nseed: 3\n")
    with pytest.raises(ConfigError) as refused:
        read(path)
    assert len(refused.value.problems) == 2


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    with pytest.raises(ConfigError, match=r"mine\.yaml is no scenario"):
        read(path)
    path.write_bytes(b"\xff")
    with pytest.raises(ConfigError, match=r"mine\.yaml is no scenario"):
        read(path)
