"""Cases that `test_accelerator.py` runs in a new process: `python -m tests.devices.late_checks` prints JSON."""

from __future__ import annotations

import json
import logging
import sys
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from functools import cache, partial
from itertools import product
from types import SimpleNamespace
from typing import Any, ClassVar
from unittest import mock

import lightning as L
import torch

import lightning_diloco
from lightning_diloco.devices import streams
from lightning_diloco.devices.accelerator import AcceleratorFragments
from lightning_diloco.devices.base import Update
from lightning_diloco.devices.dense import DenseFragments
from lightning_diloco.devices.streams import to_be_read
from lightning_diloco.errors import ConfigError
from tests.devices import fake_tpu, late
from tests.devices.rig import SHAPES, Rig, lands_alike

DTYPES = (torch.float32, torch.bfloat16, torch.float64)
ALIGN = ("carry", "overwrite", "blend")
CAN_PIN, EMPTY = streams._can_pin, torch.empty


@contextmanager
def _aside_without_a_wait(self: AcceleratorFragments) -> Iterator[None]:
    with self._streams.on(self._side):
        self._wait_for_training()
        yield


class LateRig(Rig):
    """A rig without parameters in other memory formats, which the stand-in does not have."""

    shapes: ClassVar = {name: shape for name, shape in SHAPES.items() if name != "conv"}


def equals_the_cpu(**patched: Any) -> dict[str, str]:
    """Run random sequences on both devices; with patched methods, the results must differ."""
    found = {}
    with mock.patch.multiple(AcceleratorFragments, **patched) if patched else nullcontext():
        for dtype, align in product(DTYPES, ALIGN):
            try:
                lands_alike(LateRig(dtype, align=align), LateRig(dtype, late.NAME, align=align))
                found[f"{dtype}, {align}"] = "equal"
            except Exception as error:
                found[f"{dtype}, {align}"] = type(error).__name__
    return found


def one_queue() -> dict[str, str]:
    """Run as on a device without side streams and pinned memory."""
    nothing = mock.Mock(side_effect=AssertionError("neither streams nor pinned memory may be used"))
    with (
        mock.patch.object(streams, "_has_side_streams", return_value=False),
        mock.patch.object(streams, "_can_pin", return_value=False),
        mock.patch.object(torch.late, "Stream", nothing),
        mock.patch.object(torch.Tensor, "pin_memory", nothing),
    ):
        return equals_the_cpu()


def without_double() -> dict[str, str]:
    """Run as on a device without float64; a learner with float64 parameters must fail, or this shows nothing."""
    with mock.patch.object(late, "has_double", False):
        return equals_the_cpu()


@contextmanager
def _said() -> Iterator[list[str]]:
    handler = logging.Handler()
    lines: list[str] = []
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.disable(logging.NOTSET)
    streams.log.addHandler(handler)
    yield lines
    streams.log.removeHandler(handler)
    logging.disable(logging.WARNING)


def says_what_is_missing() -> dict[str, list[str]]:
    """Make two learners on a device without side streams and pinned memory."""
    with (
        mock.patch.object(torch, "get_device_module", return_value=fake_tpu),
        mock.patch.object(streams, "_has_side_streams", cache(streams._has_side_streams.__wrapped__)),
        mock.patch.object(streams, "_can_pin", cache(CAN_PIN.__wrapped__)),
        mock.patch.object(torch, "empty", EMPTY),
        _said() as lines,
    ):
        for _ in range(2):
            LateRig(where=late.NAME)
    return {"said": lines}


class SilentStream(late.Stream):
    """A stream that does not tell whether its work is done."""

    def query(self) -> bool:
        """Refuse."""
        raise NotImplementedError


def side_streams() -> dict[str, bool]:
    """Ask the stand-in for side streams, and modules whose streams are missing or do nothing."""
    own = vars(torch.late)  # type: ignore[attr-defined]
    modules = {
        "late": SimpleNamespace(**own),
        "no streams": SimpleNamespace(),
        "refused": fake_tpu,
        "not made current": SimpleNamespace(**{**own, "stream": fake_tpu.stream}),
        "one for all": SimpleNamespace(**{**own, "Stream": late.current}),
        "no query": SimpleNamespace(**{**own, "Stream": SilentStream}),
    }
    found = {}
    for name, module in modules.items():
        with mock.patch.object(torch, "get_device_module", return_value=module):
            found[name] = streams._has_side_streams.__wrapped__(name)
    return found


def recycled_buffer(**patched: Any) -> dict[str, bool]:
    """Land while the link thread encodes: it takes a buffer that the landing, which has not run yet, still reads."""
    with mock.patch.multiple(AcceleratorFragments, **patched) if patched else nullcontext():
        rigs = [LateRig(torch.bfloat16, where) for where in ("cpu", late.NAME)]
        for rig in rigs:
            rig.train()
            device = rig.device
            staged = device.stage(0, Update(full=None, chain=[rig.published(0)], sent=None))
            snapshot, settle = device.snapshot(1), device.settle
            with ThreadPoolExecutor(1, "link") as link:

                def land(device: Any = device, staged: Any = staged, settle: Any = settle) -> None:
                    settle()
                    if staged is not None:
                        with ThreadPoolExecutor(1, "training") as training:
                            training.submit(device.land, 0, staged).result()

                with mock.patch.object(device, "settle", land):
                    link.submit(device.encode, snapshot).result()
        one, other = (rig.device.local_values(0) for rig in rigs)
    return {"equal": torch.equal(one, other)}


def buffer_in_use(*, recycles: bool = False) -> dict[str, bool]:
    """Take a snapshot while another is encoded; it must not get a buffer that the link thread uses."""
    one, rig = LateRig(torch.bfloat16), LateRig(torch.bfloat16, late.NAME)
    wanted = [one.contribute(p).payload for p in (1, 2) if one.train() is None]
    rig.train()
    device, stored, snapshots = rig.device, rig.device._stored, []

    def stored_beside_training(fragment: int, anchor: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        found = stored(fragment, anchor, out)
        if recycles:
            device._spare.append(out)
        rig.train()
        with ThreadPoolExecutor(1, "training") as training:
            snapshots.append(training.submit(device.snapshot, 2).result())
        late.default.run(late.default.num_queued)
        return found

    with mock.patch.object(device, "_stored", stored_beside_training):
        payloads = [device.encode(device.snapshot(1)).payload]
    payloads.append(device.encode(snapshots[0]).payload)
    return {"equal": all(map(torch.equal, payloads, wanted))}


def work_beside_training(**patched: Any) -> dict[str, float]:
    """Read, beside training, what training has written before its last mark."""
    with mock.patch.multiple(AcceleratorFragments, **patched) if patched else nullcontext():
        device: Any = LateRig(where=late.NAME).device
        written = torch.zeros((), device=late.NAME)
        torch.late.synchronize()  # type: ignore[attr-defined]
        written.add_(1)
        device._mark()
        with ThreadPoolExecutor(1, "link") as link:

            def read() -> torch.Tensor:
                with device._aside():
                    return device._to_host(written)  # type: ignore[no-any-return]

            return {"read": float(link.submit(read).result())}


def waits_of_training() -> dict[str, Any]:
    """Return the threads that wait during a snapshot and a landing, before any queued operation has run."""
    rig = LateRig(where=late.NAME)
    with ThreadPoolExecutor(1, "link") as link:
        update = Update(full=None, chain=[rig.published(0)], sent=None)
        staged = link.submit(rig.device.stage, 0, update).result()
        busy = torch.zeros(3, device=late.NAME).add_(1)
        late.waits.clear()
        snapshot = rig.device.snapshot(1)
        rig.device.land(0, staged)
        of_training = list(late.waits)
        is_left = bool(torch.isnan(late.raw(busy)).any())
        link.submit(rig.device.encode, snapshot).result()
    return {"training": of_training, "nothing had run": is_left, "link": sorted({name[:4] for name in late.waits})}


def payload_is_there(**patched: Any) -> dict[str, bool]:
    """Read a contribution on the host as soon as it is returned."""
    with mock.patch.multiple(AcceleratorFragments, **patched) if patched else nullcontext():
        rig = LateRig(where=late.NAME)
        rig.train()
        payload = rig.contribute(0).payload
    found = payload.clone()
    torch.late.synchronize()  # type: ignore[attr-defined]
    return {"complete": torch.equal(found, payload)}


def payload_in_one_queue(**patched: Any) -> dict[str, bool]:
    """Read a contribution as on a device without side streams, but with pinned memory."""
    with mock.patch.object(streams, "_has_side_streams", return_value=False):
        return payload_is_there(**patched)


def loss_is_read() -> dict[str, Any]:
    """Read a loss in another thread while training changes it."""
    loss = torch.ones((), device=late.NAME) * 3
    late.waits.clear()
    read = to_be_read(loss)
    loss.zero_()
    waited = list(late.waits)
    with ThreadPoolExecutor(1) as other:
        return {"read": other.submit(read).result(), "training": waited}


def loss_in_one_queue() -> dict[str, Any]:
    """Read a loss as on a device without side streams."""
    with mock.patch.object(streams, "_has_side_streams", return_value=False):
        return loss_is_read()


def other_arithmetic() -> dict[str, str]:
    """Make a device whose sums are less exact."""
    with mock.patch.object(late, "imprecise", True):
        try:
            LateRig(where=late.NAME)
        except ConfigError as error:
            return {"error": str(error)}
    return {"error": "none"}


class Line(L.LightningModule):
    """A line through points."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(4))
        self.register_buffer("wanted", torch.tensor([1.0, 2.0, 3.0, 4.0]))

    def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
        """Squared error."""
        return ((batch * (self.weight - self.wanted)) ** 2).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Plain SGD."""
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Waits(L.Callback):
    """Counts the waits of the training thread in steps after a warm-up."""

    def __init__(self) -> None:
        self.by_step: list[int] = []

    def on_train_batch_end(self, *_: Any) -> None:
        """Note the number so far."""
        self.by_step.append(late.waits.count(threading.current_thread().name))


def fit() -> dict[str, Any]:
    """Run a fit with an embedded syncer."""
    waits = Waits()
    with tempfile.TemporaryDirectory() as folder:
        trainer = L.Trainer(
            accelerator="torch", devices=1, max_steps=300, default_root_dir=folder, logger=False,
            strategy=lightning_diloco.DecoupledDiLoCoStrategy(sync_every=4, checkpoint_every=0),
            enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, callbacks=[waits],
        )  # fmt: skip
        module = Line()
        late.waits.clear()
        trainer.fit(module, torch.utils.data.DataLoader(torch.ones(64, 4), batch_size=4))
    threads = {name for name in late.waits if name != threading.main_thread().name}
    return {
        "weight": module.weight.detach().cpu().tolist(),
        "other threads": sorted(threads),
        "waits in steps": waits.by_step[-1] - waits.by_step[20],
    }


def fit_without_double() -> dict[str, Any]:
    """Run a fit as on a device without float64."""
    with mock.patch.object(late, "has_double", False):
        return fit()


CASES = {
    "equals the CPU": equals_the_cpu,
    "control: no events": lambda: equals_the_cpu(_wait_for_training=lambda self: None),
    "recycled": recycled_buffer,
    "control: a recycled buffer is taken at once": lambda: recycled_buffer(_take=DenseFragments._take),
    "in use": buffer_in_use,
    "control: a buffer is recycled while it is used": lambda: buffer_in_use(recycles=True),
    "beside": work_beside_training,
    "control: work begins at once": lambda: work_beside_training(_wait_for_training=lambda self: None),
    "payload": payload_is_there,
    "control: the payload is not waited for": lambda: payload_is_there(_aside=_aside_without_a_wait),
    "payload in one queue": payload_in_one_queue,
    "control: the payload of one queue is not waited for": lambda: payload_in_one_queue(_aside=_aside_without_a_wait),
    "one queue": one_queue,
    "without float64": without_double,
    "side streams": side_streams,
    "says": says_what_is_missing,
    "waits": waits_of_training,
    "loss": loss_is_read,
    "loss in one queue": loss_in_one_queue,
    "other arithmetic": other_arithmetic,
    "fit": fit,
    "fit without float64": fit_without_double,
}


def main() -> None:
    """Run the named cases, or all."""
    logging.disable(logging.WARNING)
    late.register()
    assert not streams._can_pin(late.NAME), "the stand-in cannot pin memory"
    with (  # ordinary memory stands for pinned memory
        mock.patch.object(streams, "_can_pin", return_value=True),
        mock.patch.object(torch.Tensor, "pin_memory", lambda tensor: tensor),
        mock.patch.object(torch, "empty", partial(_empty, torch.empty)),
    ):
        print(json.dumps({name: CASES[name]() for name in sys.argv[1:] or CASES}))


def _empty(empty: Any, *size: Any, pin_memory: bool = False, **options: Any) -> torch.Tensor:
    return empty(*size, **options)  # type: ignore[no-any-return]


if __name__ == "__main__":
    main()
