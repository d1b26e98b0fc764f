"""One learner of the comparison with other packages: the same model and the same steps in each.

PYTHON tests/bench/peer_learner.py PACKAGE '{"rank": 0, "folder": ..., ...}'

1. The interpreter of the package's own environment runs it. Therefore it imports torch and that package only.
2. `task="sleep"`: a step sleeps, then changes one matrix by plain SGD. All others change only when an exchange lands.
   So the clock can detect landings in the parameters of any package.
3. `task="text"`: a small transformer learns the bytes of Python's standard library.
4. Each package gets the options of its own examples, and the period and the fragments of the comparison.
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
from array import array
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

SYNC_EVERY, NUM_FRAGMENTS, OVERLAP = 24, 4, 2
WIDTH, NUM_MATRICES = 1024, 24  # 25M parameters
BATCH_SIZE, LENGTH, VOCABULARY = 16, 128, 256
WARMUP_STEPS, WEIGHT_DECAY, LEAST_LR, CLIP = 50, 0.1, 0.1, 1.0
HOST = "127.0.0.1"


class Matrices(nn.Module):
    """Matrices in fragments, one of which is trained in each step after a sleep.

    Args:
        step_s: sleep per step.
        rank: learners take the matrices in different orders.
    """

    def __init__(self, step_s: float, rank: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        per_fragment = NUM_MATRICES // NUM_FRAGMENTS
        parts = [[nn.Parameter(torch.randn(WIDTH, WIDTH)) for _ in range(per_fragment)] for _ in range(NUM_FRAGMENTS)]
        self.parts = nn.ModuleList(nn.ParameterList(part) for part in parts)
        self._step_s, self._rank = step_s, rank
        self._trained = -1
        self._corners: list[float] = []

    def loss(self, step: int) -> Tensor:
        """Sleep, and return a loss that depends on one matrix."""
        time.sleep(self._step_s)
        self._trained = (step + self._rank * NUM_MATRICES // 2) % NUM_MATRICES
        return list(self.parameters())[self._trained].mul(0.1 + 0.01 * self._rank).sum()

    def has_landed(self) -> bool:
        """Whether a matrix that was not trained differs from that of the last step."""
        before, self._corners = self._corners, [matrix[0, 0].item() for matrix in self.parameters()]
        pairs = enumerate(zip(before, self._corners, strict=False))
        return any(k != self._trained and old != new for k, (old, new) in pairs)

    def optimizer(self, parameters: Any) -> torch.optim.Optimizer:
        """Return plain SGD, which leaves matrices without a gradient as they are."""
        return torch.optim.SGD(parameters, lr=0.01)

    def factor(self, step: int) -> float:
        """Return the factor of the learning rate."""
        return 1.0


class Text(nn.Module):
    """A byte-level transformer in four fragments, and its data.

    Args:
        rank: data of which learner.
        batches: batches of how many learners are joined, from this rank on.
        steps: length of the schedule.
        lr: peak of the inner learning rate.
        seed: seed of data and parameters.
    """

    def __init__(self, *, rank: int, batches: int, steps: int, lr: float, seed: int, width: int = 64) -> None:
        super().__init__()
        torch.manual_seed(seed)
        layer = partial(nn.TransformerEncoderLayer, width, 4, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True)
        embed = nn.ModuleDict({"byte": nn.Embedding(VOCABULARY, width), "place": nn.Embedding(LENGTH, width)})
        head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, VOCABULARY))
        self.parts = nn.ModuleList([embed, layer(), layer(), head])
        self._ranks = range(rank, rank + batches)
        self._steps, self._lr, self._seed = steps, lr, seed
        self.training_bytes, self._held_out = _texts()

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits, [batch, LENGTH, 256]."""
        embed, first, second, head = self.parts
        places = torch.arange(tokens.shape[1])
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        found = embed["byte"](tokens) + embed["place"](places)
        return head(second(first(found, src_mask=mask, is_causal=True), src_mask=mask, is_causal=True))

    def loss(self, step: int) -> Tensor:
        """Return the loss of the batch of a step, in nats per byte."""
        batches = []
        for rank in self._ranks:
            draw = torch.Generator().manual_seed(self._seed * 1_000_003 + step * 101 + rank)
            begins = torch.randint(len(self.training_bytes) - LENGTH - 1, (BATCH_SIZE,), generator=draw)
            batches += [self.training_bytes[k : k + LENGTH + 1] for k in begins.tolist()]
        return self._loss(torch.stack(batches).long())

    @torch.no_grad()
    def held_out_loss(self) -> float:
        """Return the loss on bytes that no learner reads."""
        lines = self._held_out[: len(self._held_out) // (LENGTH + 1) * (LENGTH + 1)].view(-1, LENGTH + 1).long()
        losses = [self._loss(some).item() * len(some) for some in lines.split(64)]
        return sum(losses) / len(lines)

    def _loss(self, lines: Tensor) -> Tensor:
        return functional.cross_entropy(self(lines[:, :-1]).flatten(0, 1), lines[:, 1:].flatten())

    def has_landed(self) -> bool:
        """Landings are not observed."""
        return False

    def optimizer(self, parameters: Any) -> torch.optim.Optimizer:
        """Return AdamW."""
        return torch.optim.AdamW(parameters, lr=self._lr, betas=(0.9, 0.95), weight_decay=WEIGHT_DECAY)

    def factor(self, step: int) -> float:
        """Return the factor of the learning rate: a warm-up, then half a cosine."""
        done = min(1.0, step / self._steps)
        return min(1.0, (step + 1) / WARMUP_STEPS) * (LEAST_LR + (1 - LEAST_LR) * 0.5 * (1 + math.cos(math.pi * done)))


def _texts() -> tuple[Tensor, Tensor]:
    """Return bytes to train on and bytes held out."""
    files = sorted(Path(os.__file__).parent.glob("*.py"))
    joined = b"".join(file.read_bytes() for file in files)
    values = torch.frombuffer(bytearray(joined), dtype=torch.uint8)
    cut = len(values) - 131_072
    return values[:cut], values[cut:]


class Clock:
    """Writes two float64 for each step, unix seconds and whether an exchange has landed, unbuffered.

    Args:
        folder: of the learner, in a folder for all of them.
        model: of the learner.
        num_learners: number of learners.
    """

    def __init__(self, folder: Path, model: Matrices | Text, num_learners: int) -> None:
        self._folder, self._model, self._num_learners = folder, model, num_learners
        self._fd = os.open(folder / "clock", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def gather(self) -> None:
        """Wait until all learners are about to begin."""
        (self._folder / "here").touch()
        while len(list(self._folder.parent.glob("*/here"))) < self._num_learners:
            time.sleep(0.01)

    def tick(self) -> None:
        """Note the end of a step."""
        os.write(self._fd, array("d", [time.time(), float(self._model.has_landed())]).tobytes())


def loop(
    model: Matrices | Text,
    optimizer: Any,
    clock: Clock,
    steps: int,
    *,
    around: AbstractContextManager[Any] | None = None,
    groups: list[dict[str, Any]] | None = None,
    least_s: float = 0.0,
) -> None:
    """Train for a number of steps of at least `least_s`; the optimizer is the package's, or hooked by it.

    The learning rate is set in `groups`, or in those of the optimizer.
    """
    clock.gather()
    with around or nullcontext():
        for step in range(steps):
            began_s = time.monotonic()
            optimizer.zero_grad()
            model.loss(step).backward()
            if isinstance(model, Text):
                nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            for group in optimizer.param_groups if groups is None else groups:
                group.setdefault("peak_lr", group["lr"])
                group["lr"] = group["peak_lr"] * model.factor(step)
            optimizer.step()
            clock.tick()
            time.sleep(max(0.0, began_s + least_s - time.monotonic()))


def plain(model: Matrices | Text, clock: Clock, given: dict[str, Any]) -> None:
    """Train alone."""
    loop(model, model.optimizer(model.parameters()), clock, given["steps"])


def torchft(model: Matrices | Text, clock: Clock, given: dict[str, Any]) -> None:
    """Train with torchft's streaming DiLoCo; outer options and timeouts are those of its example."""
    from torch.distributed import TCPStore
    from torchft.local_sgd import DiLoCo
    from torchft.manager import Manager
    from torchft.process_group import ProcessGroupGloo

    store = TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
    inner = model.optimizer(model.parameters())
    outers = [torch.optim.SGD(part.parameters(), lr=0.7, momentum=0.9, nesterov=True) for part in model.parts]

    def load(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        inner.load_state_dict(state["inner"])

    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=10)),
        load_state_dict=load,
        state_dict=lambda: {"model": model.state_dict(), "inner": inner.state_dict()},
        min_replica_size=1,
        use_async_quorum=False,
        replica_id=f"learner_{given['rank']}",
        store_addr=HOST,
        store_port=store.port,
        rank=0,
        world_size=1,
        lighthouse_addr=given["meeting"],
        hostname=HOST,
        timeout=timedelta(seconds=30),
    )
    diloco = DiLoCo(manager, list(model.parts), inner, outers, sync_every=SYNC_EVERY, fragment_sync_delay=OVERLAP)
    loop(model, inner, clock, given["steps"], around=diloco)
    for part in diloco._fragments:
        part.restore_parameters()


def hivemind(model: Matrices | Text, clock: Clock, given: dict[str, Any]) -> None:
    """Train with hivemind's local updates; an epoch is a period of both learners."""
    import hivemind as package

    meeting = Path(given["meeting"])
    peers = meeting.read_text().split() if meeting.exists() else None
    dht = package.DHT(host_maddrs=[f"/ip4/{HOST}/tcp/0"], initial_peers=peers, start=True)
    if peers is None:
        meeting.with_suffix(".new").write_text("\n".join(map(str, dht.get_visible_maddrs())))
        meeting.with_suffix(".new").rename(meeting)
    optimizer = package.Optimizer(
        dht=dht,
        run_id="comparison",
        target_batch_size=2 * SYNC_EVERY * BATCH_SIZE,
        batch_size_per_step=BATCH_SIZE,
        params=model.parameters(),
        optimizer=model.optimizer,
        use_local_updates=True,
        matchmaking_time=3.0,
        averaging_timeout=15.0,
    )
    groups = optimizer.state_averager.optimizer.param_groups  # the optimizer's own are copies
    loop(model, optimizer, clock, given["steps"], groups=groups, least_s=0.25)  # an epoch outlasts its matchmaking
    optimizer.shutdown()
    dht.shutdown()


def lightning_diloco(model: Matrices | Text, clock: Clock, given: dict[str, Any]) -> None:
    """Train with an ordinary Trainer and the strategy's defaults."""
    import lightning as L
    from torch.utils.data import DataLoader

    import lightning_diloco as package

    class Module(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def training_step(self, batch: Tensor, step: int) -> Tensor:
            return model.loss(self.global_step)

        def on_train_start(self) -> None:
            clock.gather()

        def on_train_batch_end(self, *args: Any) -> None:
            clock.tick()

        def configure_optimizers(self) -> Any:
            optimizer = model.optimizer(self.parameters())
            schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, model.factor)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    options = {"sync_every": SYNC_EVERY, "num_fragments": NUM_FRAGMENTS, "overlap": OVERLAP}
    trainer = L.Trainer(
        strategy=package.DecoupledDiLoCoStrategy(**options),
        accelerator="cpu",
        devices=1,
        max_steps=given["steps"],
        gradient_clip_val=CLIP if isinstance(model, Text) else None,
        default_root_dir=given["folder"],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Module(), DataLoader(torch.ones(8 * given["steps"], 1), batch_size=1))


PACKAGES = {call.__name__: call for call in (plain, torchft, hivemind, lightning_diloco)}


def main() -> None:
    """Train as the JSON says; a text task writes `loss`."""
    given = json.loads(sys.argv[2])
    torch.set_num_threads(1)
    if given["task"] == "sleep":
        model: Matrices | Text = Matrices(given["step_s"], given["rank"])
    else:
        model = Text(**{name: given[name] for name in ("rank", "batches", "steps", "lr", "seed")})
    clock = Clock(Path(given["folder"]), model, given["num_learners"])
    PACKAGES[sys.argv[1]](model, clock, given)
    if isinstance(model, Text):
        (Path(given["folder"]) / "loss").write_text(str(model.held_out_loss()))


if __name__ == "__main__":
    main()
