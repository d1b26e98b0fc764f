"""A learner on an XLA device whose link to its syncer is slow, loses connections and is cut again and again."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback

from lightning_diloco.runtime.embedded import EmbeddedSyncer
from lightning_diloco.transport.address import split_host_port
from lightning_diloco.transport.faults import FaultProxy
from tests.xla.test_xla_trainer import Line, loader, trainer_for

MIN_EXCHANGES = 300
MAX_STEPS = 40_000
CUT_EVERY = 500
SETTLED = 150  # exchanges after which every fragment has been through everything


class Adversity(Callback):
    """Cuts the link at fixed steps, ends training after enough exchanges, keeps what is needed to look at anchors."""

    def __init__(self, proxy: FaultProxy) -> None:
        self.proxy = proxy
        self.num_graphs: dict[int, int] = {}  # by the number of exchanges

    def on_train_start(self, trainer: L.Trainer, module: Line) -> None:
        self.link = trainer.strategy._link
        self.device = trainer.strategy._device

    def on_train_batch_end(self, trainer: L.Trainer, module: Line, *_: Any) -> None:
        exchanges = int(self.link.metrics()["diloco/num_exchanges"])
        self.num_graphs[exchanges] = module.compilations[-1]
        trainer.should_stop = exchanges >= MIN_EXCHANGES
        if trainer.global_step % CUT_EVERY == 0:
            self.proxy.cut()
            self.proxy.heal()
            self.proxy.delay_s = 0.01 * (trainer.global_step // CUT_EVERY % 3)


def train_through_adversity(folder: Path, devices: int) -> None:
    """Exchange MIN_EXCHANGES times, a fragment due at every step; the anchors must be what the syncer published."""
    run_dir = folder / "run"
    syncer = EmbeddedSyncer(run_dir)
    with FaultProxy(syncer.address.host_port, reset_probability=0.005) as proxy:
        host, port = split_host_port(proxy.address)
        join = replace(syncer.address, host=host, port=port).join_string()
        torch.manual_seed(5)
        model, adversity = Line(), Adversity(proxy)
        options = {"callbacks": [adversity], "strategy": {"join": join, "learner": "stressed"}, "limit_val_batches": 0}
        trainer = trainer_for(folder, MAX_STEPS, devices=devices, **options)
        trainer.fit(model, loader())
        syncer.let_go(was_joined=True, is_last=True)

    assert max(adversity.num_graphs) >= MIN_EXCHANGES
    settled = min(n for n in adversity.num_graphs if n >= SETTLED)
    assert adversity.num_graphs[max(adversity.num_graphs)] == adversity.num_graphs[settled]
    assert proxy.num_connections > 10
    events = [json.loads(line) for line in (run_dir / "tape" / "events.jsonl").read_text().splitlines()]
    published = {(event["fragment"], event["digest"]) for event in events if event["event"] == "commit"}
    assert {(p, adversity.device.digest(p)) for p in range(4)} <= published
    assert json.loads((run_dir / "summary.json").read_text())["ledger_exact"]
    assert all(bool(torch.isfinite(param).all()) for param in model.parameters())
