"""The syncer's tensors: equal bits on all paths, and updates that bring every learner to them."""

from __future__ import annotations

import hashlib
import threading
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_diloco.config import CHAIN_LENGTH, RunConfig, Wire
from lightning_diloco.core.buffers import bytes_of, tensor_of
from lightning_diloco.core.fragments import FragmentPlan
from lightning_diloco.core.outer import apply_update
from lightning_diloco.core.quantize import encode, wire_nbytes
from lightning_diloco.errors import CorruptLogError, CorruptMessageError, NonFiniteError, PlanMismatchError
from lightning_diloco.process import parallel
from lightning_diloco.syncer import anchors
from lightning_diloco.syncer.anchors import AnchorStore, Update

PLAN = FragmentPlan.balanced({"a": (40, 8), "b": (100,), "c": (30, 7)}, num_fragments=2, max_slice_numel=1 << 20)


def config(wire: Wire = "int8", **options: Any) -> RunConfig:
    return RunConfig(sync_every=8, num_fragments=2, block_size=16, wire=wire, **options)


def values(store: AnchorStore, p: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(store.layouts[p].padded_numel, generator=generator)


def gradient(store: AnchorStore, p: int, seed: int) -> Tensor:
    return (0.1 * values(store, p, 1000 + seed)).to(torch.bfloat16)


def seeded(wire: Wire = "int8", **options: Any) -> AnchorStore:
    store = AnchorStore(PLAN, config(wire, **options))
    for p in range(PLAN.num_fragments):
        assert not store.is_seeded
        store.seed(p, values(store, p, p))
    assert store.is_seeded
    return store


def landed(anchor: Tensor, update: Update, wire: Wire) -> Tensor:
    """Return a learner's anchor after an update."""
    if update.kind == "full":
        return tensor_of(update.payload, torch.float32)
    size = wire_nbytes(anchor.numel(), wire, 16)
    mine = anchor.clone()
    for one in tensor_of(update.payload, torch.uint8).split(size) if update.payload.nbytes else ():
        apply_update(mine, one, wire=wire, block_size=16)
    return mine


def same_state(left: AnchorStore, right: AnchorStore, p: int) -> bool:
    (mine, my_numbers), (theirs, their_numbers) = (
        (store.anchor(p).tensors(), (store.anchor(p).generation, store.anchor(p).version)) for store in (left, right)
    )
    return my_numbers == their_numbers and all(torch.equal(mine[name], theirs[name]) for name in mine.keys() | theirs)


@pytest.mark.parametrize("wire", ["int8", "int4", "bf16", "fp32"])
def test_learner_any_number_of_versions_behind_gets_the_same_bits(wire: Wire) -> None:
    store = seeded(wire)
    seen = [store.anchor(0).published]
    for k in range(6):
        store.commit(0, gradient(store, 0, k), work=1.0)
        seen.append(store.anchor(0).published)
        for have, anchor in enumerate(seen):
            update = store.update_for(0, have)
            assert torch.equal(landed(anchor, update, wire), store.anchor(0).published)
            assert update.kind == ("chain" if k + 1 - have <= CHAIN_LENGTH else "full")
            assert (update.version, update.generation) == (k + 1, 0)
            assert update.from_version == (have if update.kind == "chain" else k + 1)
            assert update.payload.readonly
    assert store.update_for(0, 6).payload.nbytes == 0
    assert (store.anchor(1).version, store.update_for(1, 0).kind) == (0, "chain")


def test_learner_without_an_anchor_or_with_another_history_gets_the_full_values() -> None:
    store = seeded()
    store.commit(0, gradient(store, 0, 0), work=1.0)
    for update in (
        store.update_for(0, None),
        store.update_for(0, 2),  # a version that does not exist here, because the disk was rolled back
        store.update_for(0, 0, generation=1),
    ):
        assert update.kind == "full"
        assert torch.equal(tensor_of(update.payload, torch.float32), store.anchor(0).published)
    assert store.update_for(0, 0, generation=0).kind == "chain"


def test_new_generation_keeps_values_and_drops_the_chain() -> None:
    store = seeded()
    store.commit(0, gradient(store, 0, 0), work=1.0)
    before = store.digests()
    store.regenerate(3)
    assert store.digests() == before
    assert [(a.generation, a.version) for a in map(store.anchor, (0, 1))] == [(3, 1), (3, 0)]
    assert store.update_for(0, 0).kind == "full"
    store.commit(0, gradient(store, 0, 1), work=1.0)
    assert store.update_for(0, 1).kind == "chain"


def test_commit_is_a_nesterov_step_on_the_master() -> None:
    store, options = seeded("fp32", outer_lr=0.7), config(outer_lr=0.7)
    master = store.anchor(0).master.double()
    momentum = torch.zeros_like(master)
    for k in range(4):
        g = gradient(store, 0, k).double()
        momentum = options.outer_momentum * momentum + g
        master -= options.outer_lr * (g + options.outer_momentum * momentum)
        store.commit(0, gradient(store, 0, k), work=1.0)
        torch.testing.assert_close(store.anchor(0).master.double(), master, rtol=1e-6, atol=1e-6)
        assert store.outer_lr(store.anchor(0)) == 0.7


def test_automatic_lr_falls_while_gradients_are_alike_and_is_separate_for_each_fragment() -> None:
    store = seeded()
    lrs = [store.outer_lr(store.anchor(0))]
    for _ in range(6):
        store.commit(0, gradient(store, 0, 0), work=1.0)
        lrs.append(store.outer_lr(store.anchor(0)))
    assert lrs[0] == lrs[1] == pytest.approx(1 - 0.7 * 0.6), "nothing to compare with"
    assert lrs[1:] == sorted(lrs[1:], reverse=True)
    assert lrs[-1] == pytest.approx(1 - 0.6, abs=0.02)
    assert store.outer_lr(store.anchor(1)) == lrs[0]
    for k in range(1, 9):
        store.commit(0, gradient(store, 0, k), work=1.0)
    assert store.outer_lr(store.anchor(0)) == pytest.approx(1 - 0.3 * 0.6), "gradients of noise"


def test_momentum_depends_on_the_work_of_the_round() -> None:
    full, half = seeded(), seeded()
    for k in range(2):
        full.commit(0, gradient(full, 0, k), work=1.0)
        half.commit(0, gradient(half, 0, k), work=0.5)
    g = [gradient(full, 0, k).float() for k in range(2)]
    assert torch.equal(full.anchor(0).momentum, g[0].mul(0.6).add(g[1]))
    assert torch.equal(half.anchor(0).momentum, g[0].mul(0.6**0.5).add(g[1]))


def test_the_quantization_error_is_published_later() -> None:
    store = seeded("int4", outer_lr=0.7)
    store.commit(0, gradient(store, 0, 0), work=1.0)
    first = (store.anchor(0).master - store.anchor(0).published).abs().max()
    nothing = torch.zeros_like(gradient(store, 0, 0))
    for _ in range(12):
        store.commit(0, nothing, work=1.0)
    assert (store.anchor(0).master - store.anchor(0).published).abs().max() < 1e-3 * first


def test_merge_changes_nothing_and_its_result_can_be_committed() -> None:
    store, untouched = seeded(), seeded()
    sent = [encode(0.1 * values(store, 0, k), wire="int8", block_size=16, name="sent") for k in (5, 6)]
    merged, report = store.merge(0, sent, [0.25, 0.75])
    assert (merged.dtype, merged.shape, len(report.norms)) == (torch.bfloat16, store.anchor(0).master.shape, 2)
    assert same_state(store, untouched, 0)
    store.commit(0, merged, work=1.0)
    with pytest.raises(CorruptMessageError):
        store.merge(0, [sent[0], sent[1][:-1]], [0.5, 0.5])
    clipped, _ = store.merge(0, sent, [0.25, 0.75], [report.merged_norm / 10] * 2)
    assert clipped.float().norm() < 0.2 * merged.float().norm()


def test_bytes_of_the_record_commit_the_same_bits() -> None:
    live, replayed = seeded(), seeded()
    for k in range(5):
        g = gradient(live, 1, k)
        live.commit(1, g, work=0.9)
        replayed.commit(1, bytes(bytes_of(g)), work=0.9, version=k + 1)
    assert same_state(live, replayed, 1)
    assert live.digests() == replayed.digests()


@pytest.mark.parametrize(("version", "cut"), [(3, 0), (1, 0), (2, 16)])
def test_record_that_does_not_follow_the_state_is_an_error(version: int, cut: int) -> None:
    store, untouched = seeded(), seeded()
    for each in (store, untouched):
        each.commit(0, gradient(each, 0, 0), work=1.0)
    payload = bytes_of(gradient(store, 0, 1))
    with pytest.raises(CorruptLogError, match=rf"commit of fragment 0 to version {version} .*comes 2 .*; restore"):
        store.commit(0, payload[: payload.nbytes - cut], work=1.0, version=version)
    assert same_state(store, untouched, 0)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 3e38])
def test_numbers_out_of_range_are_refused_before_anything_is_logged(bad: float) -> None:
    store, untouched = seeded(), seeded()
    g = gradient(store, 0, 0)
    g[3] = bad
    for each in (store, untouched):
        each.commit(0, torch.full_like(g, 1e38), work=1.0)
    with pytest.raises(NonFiniteError, match="found NaN or Inf in"):
        store.next_state(0, g, work=1.0)
    assert same_state(store, untouched, 0)


def test_seed_of_another_plan_or_with_nan_is_refused() -> None:
    store = AnchorStore(PLAN, config())
    good = values(store, 0, 0)
    with pytest.raises(PlanMismatchError, match=r"float32 \[\d+\]; its plan wants torch.float32"):
        store.seed(0, good[:-1])
    with pytest.raises(PlanMismatchError, match="bfloat16"):
        store.seed(0, good.bfloat16())
    with pytest.raises(NonFiniteError, match="start values of fragment 0"):
        store.seed(0, good.index_fill(0, torch.tensor([4]), torch.nan))
    assert not store.is_seeded


def test_digest_covers_the_published_bits() -> None:
    store, other = seeded(), seeded()
    assert store.digest(0) == hashlib.sha256(store.anchor(0).published.numpy().tobytes()).hexdigest()
    assert store.digests() == other.digests()
    assert store.digest(0) != store.digest(1)
    other.commit(0, gradient(other, 0, 0), work=1.0)
    assert store.digest(0) != other.digest(0)
    store.seed(0, other.anchor(0).published)
    assert store.digest(0) == other.digest(0)


def test_digests_are_computed_on_several_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    both = threading.Barrier(2)

    def hashed(values_P: Tensor) -> str:
        both.wait(10.0)  # fails if only one is computed at a time
        return "digest"

    store = seeded()
    monkeypatch.setattr(parallel, "cores_here", lambda: 2)
    monkeypatch.setattr(anchors, "digest", hashed)
    assert len(store.mine) % 2 == 0
    assert store.digests() == ("digest",) * len(store.mine)


def test_a_digest_that_was_computed_in_the_background_is_not_computed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    store = seeded()
    for p in store.mine:
        store.commit(p, gradient(store, p, 1), work=1.0)
        store.compute_digest(p)
    for thread in threading.enumerate():
        if thread.name == "diloco-digest":
            thread.join()
    wanted = tuple(hashlib.sha256(store.anchor(p).published.numpy()).hexdigest() for p in store.mine)
    monkeypatch.setattr(anchors, "digest", lambda values_P: pytest.fail("computed again"))
    assert store.digests() == wanted


def test_versions_that_come_faster_than_digests_are_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    store, hashed = seeded(), list[Tensor]()
    goes_on, has_begun = threading.Event(), threading.Event()

    def slow(values_P: Tensor) -> str:
        hashed.append(values_P)
        has_begun.set()
        goes_on.wait(10.0)
        return "digest"

    monkeypatch.setattr(anchors, "digest", slow)
    store.compute_digest(0)
    assert has_begun.wait(10.0)
    for version in range(5):
        store.commit(0, gradient(store, 0, version), work=1.0)
        store.compute_digest(0)
    goes_on.set()
    for thread in threading.enumerate():
        if thread.name == "diloco-digest":
            thread.join()
    assert len(hashed) == 2
    assert hashed[1] is store.anchor(0).published


def test_frozen_state_is_restored_and_continues_with_the_same_bits() -> None:
    store, restored = seeded(), AnchorStore(PLAN, config())
    for k in range(5):
        store.commit(k % 2, gradient(store, k % 2, k), work=1.0)
    numbers, shards = store.freeze()
    store.commit(0, gradient(store, 0, 9), work=1.0)  # while the snapshot is being written
    restored.restore(numbers, dict(shards))
    assert (restored.anchor(0).version, restored.anchor(1).version) == (3, 2)
    restored.commit(0, gradient(store, 0, 9), work=1.0)
    assert all(same_state(store, restored, p) for p in (0, 1))
    assert bytes(restored.update_for(0, 1).payload) == bytes(store.update_for(0, 1).payload)


def test_snapshot_of_an_older_version_continues_with_its_fixed_lr() -> None:
    store, restored = (seeded(outer_lr=0.7) for _ in range(2))
    for k in range(3):
        store.commit(0, gradient(store, 0, k), work=1.0)
    numbers, shards = store.freeze()
    restored.restore(numbers, {stem: {k: x for k, x in each.items() if k != "correlation"} for stem, each in shards})
    for each in (store, restored):
        each.commit(0, gradient(each, 0, 3), work=1.0)
    assert same_state(store, restored, 0)


def test_snapshot_of_another_plan_or_wire_is_refused() -> None:
    store = seeded("int8")
    store.commit(0, gradient(store, 0, 0), work=1.0)
    numbers, shards = store.freeze()
    tensors = dict(shards)
    with pytest.raises(CorruptLogError, match=r"a chain of \d+ bytes"):
        AnchorStore(PLAN, config("fp32")).restore(numbers, tensors)
    other = FragmentPlan.balanced({"a": (9, 9), "b": (9, 9)}, num_fragments=2, max_slice_numel=1 << 20)
    with pytest.raises(
        CorruptLogError, match=r"the snapshot holds fragment 0 as .*; use the run directory of this model"
    ):
        AnchorStore(other, config()).restore(numbers, tensors)
    with pytest.raises(CorruptLogError, match="holds 1 fragments"):
        AnchorStore(PLAN, config()).restore(numbers[:1], tensors)


def test_readers_never_see_a_partial_update() -> None:
    """Every reply, at any time, brings a learner to exactly the version that it names."""
    reference = seeded()
    wanted = {0: reference.anchor(0).published}
    for k in range(40):
        reference.commit(0, gradient(reference, 0, k), work=1.0)
        wanted[k + 1] = reference.anchor(0).published
    store, wrong, is_done = seeded(), list[Update](), threading.Event()

    def read(behind: int) -> None:
        while not is_done.is_set():
            have = max(0, store.anchor(0).version - behind)
            update = store.update_for(0, have)
            if not torch.equal(landed(wanted[have], update, "int8"), wanted[update.version]):
                wrong.append(update)

    readers = [threading.Thread(target=read, args=(behind,)) for behind in (1, 5)]
    for reader in readers:
        reader.start()
    for k in range(40):
        store.commit(0, gradient(store, 0, k), work=1.0)
    is_done.set()
    for reader in readers:
        reader.join()
    assert wrong == []
