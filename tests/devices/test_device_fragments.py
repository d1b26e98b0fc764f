"""Snapshots, contributions and landings against plain float64 formulas, over random sequences."""

from __future__ import annotations

import random
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from lightning_diloco.config import LearnerConfig, RunConfig
from lightning_diloco.core.digest import digest
from lightning_diloco.devices import device_for
from lightning_diloco.devices.accelerator import AcceleratorFragments
from lightning_diloco.devices.base import Update
from lightning_diloco.devices.cpu import CpuFragments
from lightning_diloco.devices.streams import Streams, to_be_read
from lightning_diloco.errors import ConfigError, CorruptMessageError, NonFiniteError
from tests.devices.rig import Rig, lands_alike

EPSILON = torch.finfo(torch.float32).eps

DTYPES = [torch.float32, torch.bfloat16, torch.float64]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_carry_equals_the_float64_rule_over_a_random_sequence(dtype, seed):
    rig, choose = Rig(dtype), random.Random(seed)
    for _ in range(60):
        p = choose.randrange(rig.plan.num_fragments)
        rig.train()
        payload = rig.contribute(p).payload
        rig.train()
        chain = [rig.published(p) for _ in range(choose.randint(1, 3))]
        sent = choose.choice([payload, None])
        param, old = rig.local(p), rig.stored(p)
        anchor = rig.device.anchor(p)
        for update in chain:
            anchor += rig.decoded(p, update)

        rig.receive(p, *chain, sent=sent)

        assert torch.equal(rig.device.anchor(p), anchor)  # bit for bit
        merged = 0.0 if sent is None else rig.decoded(p, sent).double()
        expected = rig.stored(p) + (param - old) + merged
        terms = rig.stored(p).abs() + (param - old).abs() + (abs(merged) if sent is None else merged.abs())
        epsilon = EPSILON + (torch.finfo(dtype).eps if dtype != torch.float32 else 0)
        assert bool(((rig.local(p) - expected).abs() <= epsilon * terms).all())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("align", ["carry", "overwrite"])  # under blend, mixing itself moves the parameters
def test_learner_without_a_step_contributes_exactly_zero(dtype, align):
    Rig(dtype, align=align).contributes_zero(num_rounds=4)


@pytest.mark.parametrize("align", ["carry", "blend"])
def test_float64_keeps_its_precision_at_every_landing(align):
    """Digits beyond float32 are kept over many landings, as in plain float64 arithmetic."""
    rig = Rig(torch.float64, align=align)
    for round_ in range(20):
        p = round_ % rig.plan.num_fragments
        rig.train()
        payload = rig.contribute(p).payload
        old, before = rig.stored(p), rig.device.local_values(p, torch.float64)
        rig.receive(p, rig.published(p), sent=payload)
        expected = rig.stored(p) + (before - old) + rig.decoded(p, payload).double()
        if align == "blend":
            expected = 0.5 * before + 0.5 * rig.stored(p)
        moved = (rig.device.local_values(p, torch.float64) - expected).abs()
        assert bool((moved <= 1e-15).all())
        lost = rig.device.local_values(p, torch.float64) - rig.device.local_values(p).double()
        assert lost.abs().max() > 0, "these are no float32 values"


def test_float64_that_rounds_to_the_adopted_values_keeps_its_precision():
    rig = Rig(torch.float64)
    with torch.no_grad():
        for param in rig.params.values():
            param.copy_(rig.random(param.shape).double() / 3)
    before = {name: param.detach().clone() for name, param in rig.params.items()}
    for p in rig.fragments:
        rig.device.adopt(p, rig.device.local_values(p))
    assert all(torch.equal(param, before[name]) for name, param in rig.params.items())
    for p in rig.fragments:
        rig.device.adopt(p, rig.device.local_values(p) * 2)
        assert torch.equal(rig.local(p), rig.stored(p))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("align", ["carry", "overwrite", "blend"])
def test_copies_move_as_their_parameters_do(dtype, align):
    rig = Rig(dtype, align=align)
    rig.train()
    copies = {name: param.detach().double() + 0.25 for name, param in rig.params.items()}
    rig.device.copies_of = lambda name: [copies[name]]

    def beside():
        return all(
            torch.allclose(copies[n] - p.detach(), torch.full_like(copies[n], 0.25)) for n, p in rig.params.items()
        )

    for p in rig.fragments:
        sent = rig.contribute(p).payload
        rig.receive(p, rig.published(p), sent=sent)
        assert beside()
        rig.device.adopt(p, rig.device.anchor(p) + 1)
        assert beside()
    rig.train()
    before = {name: copy.clone() for name, copy in copies.items()}
    rig.device.show_anchor()
    assert not torch.equal(copies["matrix"], before["matrix"])
    rig.device.show_local()
    assert all(torch.equal(copies[name], before[name]) for name in copies)


def test_contribution_is_the_stored_anchor_minus_the_parameters():
    rig = Rig()
    rig.train()
    p = 1
    encoded, expected = rig.contribute(p), rig.stored(p) - rig.local(p)
    sent = rig.decoded(p, encoded.payload).double()
    assert encoded.norm == pytest.approx(expected.norm().item(), rel=1e-6)
    assert encoded.relative_error == pytest.approx(((expected - sent).norm() / expected.norm()).item(), rel=1e-4)
    assert 0 < encoded.relative_error < 0.01


def test_snapshot_keeps_the_values_of_its_boundary():
    rig = Rig()
    rig.train()
    snapshot, then = rig.device.snapshot(0), rig.contribute(0).payload
    rig.train(scale=1.0)
    assert torch.equal(rig.device.encode(snapshot).payload, then)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("is_begun", [False, True])
@pytest.mark.parametrize("settles", [True, False])
def test_snapshot_is_of_its_boundary_if_it_is_settled_before_parameters_change(dtype, is_begun, settles, monkeypatch):
    """The bits are equal, whether another thread has not begun to copy or is copying; without `settle`, they differ."""
    rig = Rig(dtype)
    rig.train()
    then = rig.contribute(0).payload
    snapshot, left = rig.device.snapshot(0), rig.device._copies._left
    begun, may_end, first, last = threading.Event(), threading.Event(), left[0], left[-1]
    beside = threading.Thread(target=rig.device._copies.settle, daemon=True)
    if is_begun:
        left[0] = lambda: (begun.set(), may_end.wait(10.0), first())
        left[-1] = lambda: (last(), may_end.set())  # by then the training thread has made all other copies
        beside.start()
        assert begun.wait(10.0)
    if not settles:
        monkeypatch.setattr(rig, "settle", lambda: None)

    rig.train(scale=1.0)

    assert torch.equal(rig.device.encode(snapshot).payload, then) is settles
    if is_begun:
        beside.join(10.0)


def test_carry_keeps_the_quantization_error_for_the_next_contribution():
    rig = Rig()
    rig.train()
    first = rig.contribute(0)
    rig.receive(0, sent=first.payload)
    second = rig.contribute(0)
    assert second.norm == pytest.approx(first.norm * first.relative_error, rel=1e-2)


@pytest.fixture
def half_by_default():
    """Set the default dtype of all threads to bfloat16, as a forward in half precision in another thread does."""
    before = torch.get_default_dtype()

    def switch(on):
        torch.set_default_dtype(torch.bfloat16 if on else before)

    yield switch
    switch(False)


@pytest.mark.parametrize("wire", ["int8", "int4", "bf16"])
@pytest.mark.parametrize("align", ["carry", "overwrite", "blend"])
def test_exchanges_do_not_depend_on_the_default_dtype(half_by_default, align, wire):
    found = []
    for is_half in (False, True):
        rig = Rig(torch.bfloat16, align=align, wire=wire)
        rig.train()
        updates, values = [rig.published(0), rig.published(0)], []
        half_by_default(is_half)
        for update in updates:
            payload = rig.contribute(0).payload
            rig.receive(0, update, sent=payload)
            values += [payload, rig.device.anchor(0), rig.device.local_values(0)]
        half_by_default(False)
        found.append(values)
    assert all(map(torch.equal, *found))
    assert {value.dtype for value in found[1]} == {torch.uint8, torch.float32}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_updates", [0, 1, 2])
def test_learner_without_a_step_lands_on_the_anchor_from_any_version(dtype, num_updates):
    rig = Rig(dtype)
    for p in rig.fragments:
        full = None if num_updates else rig.device.anchor(p) * 1.01
        rig.receive(p, *(rig.published(p, scale=3.0) for _ in range(num_updates)), full=full)
        assert torch.equal(rig.local(p), rig.stored(p))


@pytest.mark.parametrize("dtype", DTYPES)
def test_overwrite_lands_on_the_anchor(dtype):
    rig = Rig(dtype, align="overwrite")
    rig.train()
    rig.receive(0, rig.published(0))
    assert torch.equal(rig.local(0), rig.stored(0))


@pytest.mark.parametrize("dtype", DTYPES)
def test_blend_mixes_local_and_anchor(dtype):
    rig = Rig(dtype, align="blend", blend_alpha=0.25)
    rig.train()
    before = rig.local(0)
    rig.receive(0, rig.published(0))
    expected = 0.25 * before + 0.75 * rig.stored(0)
    tolerance = 2 * (EPSILON + torch.finfo(dtype).eps)
    assert torch.allclose(rig.local(0), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("align", ["overwrite", "blend"])
@pytest.mark.parametrize("merged", [True, False])
def test_explicit_residual_is_kept_only_of_merged_contributions(align, merged):
    rig = Rig(align=align, blend_alpha=0.0)
    rig.train()
    first = rig.contribute(0)
    rig.receive(0, rig.published(0), sent=first.payload if merged else None)
    again = rig.contribute(0)
    lost = first.norm * first.relative_error
    assert again.norm == pytest.approx(lost if merged else 0.0, rel=1e-3, abs=0.0)
    assert (again.norm > 0) is merged


def test_without_error_feedback_no_residual_is_kept():
    rig = Rig(align="overwrite", error_feedback=False)
    rig.train()
    rig.receive(0, rig.published(0), sent=rig.contribute(0).payload)
    assert rig.contribute(0).norm == 0.0


def test_adopting_forgets_the_residual():
    rig = Rig(align="overwrite")
    rig.train()
    rig.receive(0, rig.published(0), sent=rig.contribute(0).payload)
    rig.device.adopt(0, rig.device.anchor(0))
    assert rig.contribute(0).norm == 0.0


@pytest.mark.parametrize("dtype", DTYPES)
def test_full_fragment_replaces_the_anchor_and_keeps_progress(dtype):
    rig = Rig(dtype)
    full = rig.device.anchor(0) * 2
    rig.receive(0, full=full)
    assert torch.equal(rig.device.anchor(0), full)
    assert torch.equal(rig.local(0), rig.stored(0))


def test_anchors_agree_for_all_dtypes_of_parameters():
    rigs = [Rig(dtype) for dtype in DTYPES]
    start = rigs[0].device.anchor(0)
    for rig in rigs:
        rig.device.adopt(0, start)
        rig.train()
    for _ in range(5):
        update = rigs[0].published(0)
        for rig in rigs:
            rig.receive(0, update)
    assert len({digest(rig.device.anchor(0)) for rig in rigs}) == 1
    assert digest(rigs[0].device.anchor(0)) != digest(rigs[0].device.anchor(1))


def test_anchor_is_a_copy():
    rig = Rig()
    rig.device.anchor(0).zero_()
    assert rig.device.anchor(0).any()


@pytest.mark.parametrize(
    "bad",
    [
        lambda rig: {"chain": [rig.published(0)[:-1]]},
        lambda rig: {"chain": [rig.published(0), torch.full_like(rig.published(0), 0xFF)]},
        lambda rig: {"full": rig.device.anchor(0)[:-1]},
        lambda rig: {"full": rig.device.anchor(0).index_fill(0, torch.tensor([3]), torch.nan)},
        lambda rig: {"full": rig.device.anchor(0).double()},
        lambda rig: {"sent": rig.published(0)[1:]},
    ],
)
def test_corrupt_update_changes_nothing(bad):
    rig = Rig()
    anchor, local = rig.device.anchor(0), rig.local(0)
    with pytest.raises(CorruptMessageError):
        rig.device.stage(0, Update(**{"full": None, "chain": (), "sent": None, **bad(rig)}))
    assert torch.equal(rig.device.anchor(0), anchor)
    assert torch.equal(rig.local(0), local)


def test_non_finite_parameter_is_named():
    rig = Rig()
    with torch.no_grad():
        rig.params["bias"][2] = torch.nan
    p = next(p for p in rig.fragments if any(s.name == "bias" for s in rig.plan.fragments[p]))
    with pytest.raises(NonFiniteError, match="bias"):
        rig.contribute(p)


@pytest.mark.parametrize("dtype", DTYPES)
def test_anchor_is_shown_and_local_values_return(dtype):
    rig = Rig(dtype)
    rig.train()
    local = {name: param.detach().clone() for name, param in rig.params.items()}
    values = [rig.local(p) for p in rig.fragments]
    for _ in range(2):  # showing what is shown changes nothing
        rig.device.show_anchor()
    shown = [rig.device.encode(rig.device.snapshot(p)).norm for p in rig.fragments]
    assert shown == [0.0] * 3
    assert all(torch.equal(rig.local(p), values[p]) for p in rig.fragments)
    for _ in range(2):
        rig.device.show_local()
    assert all(torch.equal(rig.params[name], values) for name, values in local.items())


def test_parameters_stay_the_same_objects_in_the_same_memory():
    rig = Rig()
    places = {name: param.data_ptr() for name, param in rig.params.items()}
    rig.train()
    rig.receive(0, rig.published(0), sent=rig.contribute(0).payload)
    assert {name: param.data_ptr() for name, param in rig.params.items()} == places
    assert all(param.requires_grad and param.grad_fn is None for param in rig.params.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("align", ["carry", "overwrite", "blend"])
def test_steady_state_allocates_no_fragment(dtype, align, monkeypatch):
    rig = Rig(dtype, align=align)

    def exchange_all():
        for p in rig.fragments:
            rig.train()
            rig.receive(p, rig.published(p), sent=rig.contribute(p).payload)

    exchange_all()
    exchange_all()
    spare = len(rig.device._spare)
    monkeypatch.setattr(CpuFragments, "_new_buffer", lambda self: pytest.fail("a fragment was allocated"))
    exchange_all()
    assert len(rig.device._spare) == spare


def test_every_spare_buffer_has_one_user():
    rig = Rig(torch.bfloat16)
    for _ in range(3):
        for p in rig.fragments:
            rig.train()
            rig.receive(p, rig.published(p), sent=rig.contribute(p).payload)
    held = [*rig.device._spare, *rig.device._anchors]
    assert len({buffer.data_ptr() for buffer in held}) == len(held)


def test_device_without_a_class_is_refused():
    with pytest.raises(ConfigError, match="device meta: must be of type cpu, xla, or an accelerator"):
        device_for(torch.device("meta"))


def test_anchors_in_host_memory_are_refused_on_accelerators():
    rig = Rig()
    with pytest.raises(ConfigError, match="anchor_device='host' on cpu: must be 'device' there"):
        AcceleratorFragments(rig.plan, rig.params, RunConfig(), LearnerConfig(anchor_device="host"))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("align", ["carry", "overwrite", "blend"])
def test_cuda_equals_cpu_over_a_random_sequence(dtype, align):
    lands_alike(*(Rig(dtype, where, align=align) for where in ("cpu", "cuda")))


def test_a_loss_is_read_before_training_changes_it():
    loss = torch.ones(()) * 3
    read = to_be_read(loss)
    loss.zero_()
    assert read() == 3.0


@pytest.mark.gpu
def test_a_loss_on_another_stream_is_read_after_it_is_computed():
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(1_000_000_000)
        loss = torch.ones((), device="cuda") * 3
        read = to_be_read(loss)
        loss.zero_()
    with ThreadPoolExecutor(1) as other:
        assert other.submit(read).result() == 3.0


@pytest.mark.gpu
def test_cuda_has_side_streams():
    assert Streams(torch.device("cuda")).has_side_streams


@pytest.mark.gpu
def test_cuda_training_thread_never_waits():
    """Snapshot and landing return while the device is still busy."""
    rig = Rig(where="cuda")
    staged = rig.device.stage(0, Update(full=None, chain=[rig.published(0)], sent=None))
    busy = torch.cuda.Event()
    torch.cuda._sleep(2_000_000_000)
    busy.record()
    rig.device.snapshot(1)
    rig.device.land(0, staged)
    assert not busy.query()
