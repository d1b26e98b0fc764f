"""Samples of a user's shuffled loader are leased; those of other loaders keep their fixed parts."""

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    RandomSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from lightning_diloco.protocol.data_ranges import Lease
from lightning_diloco.strategy.data import leased_part
from lightning_diloco.strategy.data.leased_part import ShuffledRanges, can_be_leased
from lightning_diloco.strategy.data.split import split
from tests.strategy.conftest import NUM_SAMPLES, RecordingLink, Sequences
from tests.strategy.data.test_range_batches import Desk

ITEMS = list(range(6000))
SAMPLERS = {
    "random": lambda: RandomSampler(ITEMS),
    "with replacement": lambda: RandomSampler(ITEMS, replacement=True, num_samples=7000),
    "subset": lambda: SubsetRandomSampler(ITEMS[:5000]),
    "weighted": lambda: WeightedRandomSampler([1.0, 2.0] * 3000, 6000),
}


def epoch_of(ranges, epoch):
    rows = [ranges.read(Lease(0, epoch, 0, index))[0] for index in range(ranges.catalogue.num_ranges)]
    return torch.cat(rows).tolist()


@pytest.mark.parametrize("make", SAMPLERS.values(), ids=SAMPLERS)
def test_all_learners_draw_the_same_order_without_the_global_generator(make):
    orders = []
    for seed in (1, 2):  # learners may have different seeds
        torch.manual_seed(seed)
        before = torch.get_rng_state()
        ranges = ShuffledRanges(make(), 5)
        orders.append([epoch_of(ranges, epoch) for epoch in (0, 1, 0)])
        assert torch.equal(before, torch.get_rng_state())
    first, second = orders
    assert first == second
    assert first[0] == first[2] != first[1]
    assert len(first[0]) == len(make())
    assert ShuffledRanges(make(), 6).catalogue != ranges.catalogue


@pytest.mark.parametrize("name", ["random", "subset"])
def test_an_epoch_has_each_sample_once(name):
    sampler = SAMPLERS[name]()
    assert sorted(epoch_of(ShuffledRanges(sampler, 5), 0)) == ITEMS[: len(sampler)]


def test_a_lease_leaves_out_merged_samples():
    ranges = ShuffledRanges(RandomSampler(ITEMS), 5)
    whole, _ = ranges.read(Lease(0, 3, 0, 7))
    rest, is_last = ranges.read(Lease(0, 3, 0, 7, skip=9))
    assert torch.equal(rest, whole[9:])
    assert not is_last


class Stateful(DataLoader):
    """A loader that keeps its own position, like torchdata's."""

    def load_state_dict(self, state):
        raise NotImplementedError


@pytest.mark.parametrize(
    ("loader", "is_leased"),
    [
        (lambda: DataLoader(ITEMS, 4, shuffle=True), True),
        (lambda: DataLoader(ITEMS, batch_sampler=BatchSampler(RandomSampler(ITEMS), 4, True)), True),
        (lambda: DataLoader(ITEMS, 4), False),
        (lambda: DataLoader(ITEMS[:4000], 4, shuffle=True), False),
        (lambda: DataLoader(ITEMS, 4, sampler=RandomSampler(ITEMS, True, num_samples=10**12)), False),
        (lambda: DataLoader(ITEMS, batch_size=None, sampler=RandomSampler(ITEMS)), False),
        (lambda: DataLoader(ITEMS, batch_sampler=[[0, 1]] * 5000), False),
        (lambda: DataLoader(ITEMS, 4, shuffle=True, in_order=False), False),
        (lambda: Stateful(ITEMS, 4, shuffle=True), False),
    ],
    ids=[
        "shuffled",
        "batch_sampler",
        "in order",
        "small",
        "huge",
        "no batches",
        "own batches",
        "any order",
        "stateful",
    ],
)
@pytest.mark.filterwarnings("ignore:in_order=False is ineffective")
def test_loaders_that_torch_shuffles_are_leased(loader, is_leased):
    assert can_be_leased(split(loader(), 1, 2)) is is_leased


@pytest.fixture
def leases(monkeypatch):
    """Lease small data, too, from a run with one learner; return the requested catalogues."""
    asked = []

    def lease(link, catalogue):
        asked.append(catalogue)
        size = catalogue.num_ranges
        return Desk(*(Lease(number + 1, number // size, 0, number % size) for number in range(100)))

    monkeypatch.setattr(leased_part, "MIN_SAMPLES", NUM_SAMPLES)
    monkeypatch.setattr(leased_part, "MAX_RANGE", 5)
    monkeypatch.setattr(leased_part, "NUM_RANGES", 4)
    monkeypatch.setattr(RecordingLink, "lease", lease, raising=False)
    return asked


def test_an_epoch_is_as_long_as_a_part_and_the_next_one_continues(scenario, model, trainer_for, leases):
    scenario.data_part = (1, 2)
    trainer_for(max_steps=-1, max_epochs=4, limit_val_batches=0).fit(model)
    ranges = ShuffledRanges(RandomSampler(Sequences()), 0)
    assert [catalogue.num_ranges for catalogue in leases] == [5]
    assert len(model.seen) == 4 * NUM_SAMPLES // 2
    assert sorted(model.seen[:NUM_SAMPLES]) == sorted(model.seen[NUM_SAMPLES:]) == list(range(NUM_SAMPLES))
    assert model.seen[:NUM_SAMPLES] != epoch_of(ranges, 0), "the order has the run's seed"


def test_batches_that_were_not_trained_come_first_in_the_next_epoch(scenario, model, trainer_for, leases):
    scenario.data_part = (0, 2)
    options = {"limit_train_batches": 2, "limit_val_batches": 0}
    trainer_for(max_steps=-1, max_epochs=3, **options).fit(model)
    assert sorted(model.seen) == list(range(NUM_SAMPLES))


@pytest.mark.parametrize(
    "options",
    [{"overfit_batches": 2}, {"reload_dataloaders_every_n_epochs": 1}, {"use_distributed_sampler": False}],
    ids=lambda options: next(iter(options)),
)
@pytest.mark.filterwarnings("ignore:You requested to overfit but enabled train dataloader shuffling")
def test_loaders_that_the_trainer_may_not_change_are_not_leased(scenario, model, trainer_for, leases, options):
    scenario.data_part = (0, 2)
    trainer_for(max_steps=4, limit_val_batches=0, **options).fit(model)
    assert not leases


def test_data_without_parts_is_not_leased(scenario, model, trainer_for, leases):
    trainer_for(max_steps=4, limit_val_batches=0).fit(model)
    assert not leases


def test_samples_of_several_loaders_stay_together(scenario, model, trainer_for, leases):
    """Two loaders with equal seeds give inputs and targets of the same samples."""
    scenario.data_part, pairs = (1, 2), []

    def loaders():
        return [DataLoader(Sequences(), 4, shuffle=True, generator=torch.Generator().manual_seed(3)) for _ in range(2)]

    def step(batch, batch_idx):
        pairs.extend(zip(*(each["index"].tolist() for each in batch), strict=True))
        return model.loss(batch[0])

    model.train_dataloader, model.training_step = loaders, step
    trainer_for(max_steps=-1, max_epochs=2, limit_val_batches=0).fit(model)
    assert not leases
    assert len(pairs) == NUM_SAMPLES
    assert all(one == other for one, other in pairs)


def test_a_leased_loader_is_used_again_in_the_next_fit(scenario, model, trainer_for, leases):
    """A CombinedLoader of the user keeps the strategy's copy of its loader."""
    from lightning.pytorch.utilities import CombinedLoader

    scenario.data_part = (0, 2)
    loader = CombinedLoader(DataLoader(Sequences(), 4, shuffle=True))
    model.train_dataloader = None
    seen = []
    for _ in range(2):
        scenario.made.clear()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("lightning_diloco.strategy.identity._done", set())
            trainer_for(max_steps=-1, max_epochs=2, limit_val_batches=0).fit(model, loader)
        seen.append(model.seen)
        model.seen = []
    assert [sorted(each) for each in seen] == [list(range(NUM_SAMPLES))] * 2
    assert len(leases) == 2


def test_leases_are_requested_when_training_begins(scenario, model, trainer_for, leases):
    """A schedule asks for the length earlier."""
    scenario.data_part = (0, 2)
    when = []
    model.setup = lambda stage=None: when.append((model.trainer.estimated_stepping_batches, len(leases)))
    trainer_for(max_steps=-1, max_epochs=2, limit_val_batches=0).fit(model)
    assert when == [(6, 0)]
    assert len(leases) == 1
