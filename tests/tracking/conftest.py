"""W&B without a login, in a separate folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.strategy.conftest import THIRD_PARTY_WARNINGS, model, scenario, trainer_for

__all__ = ["model", "scenario", "trainer_for"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            for warning in (*THIRD_PARTY_WARNINGS, "ignore::DeprecationWarning:wandb"):
                item.add_marker(pytest.mark.filterwarnings(warning))


@pytest.fixture(autouse=True)
def _logged_out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    wandb = pytest.importorskip("wandb")
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_PROJECT", "WANDB_DIR"):
        monkeypatch.delenv(name, raising=False)
    for name in ("HOME", "WANDB_CONFIG_DIR", "WANDB_CACHE_DIR", "WANDB_DATA_DIR"):
        monkeypatch.setenv(name, str(tmp_path / "home"))
    monkeypatch.setenv("NETRC", str(tmp_path / "home" / "netrc"))
    wandb.teardown()
