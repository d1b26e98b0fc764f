"""Learners read disjoint parts of the training data, and everything else in full."""

import itertools

import lightning as L
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from lightning_diloco.errors import ConfigError
from lightning_diloco.strategy.data.split import PartSampler, split
from tests.strategy.conftest import Sequences

ITEMS = list(range(23))


class SampleStream(IterableDataset):
    """The samples as a stream."""

    def __iter__(self):
        return iter(Sequences()[k] for k in range(24))


def seen_by_each(scenario, make_model, trainer_for, parts, **options):
    seen = []
    for part in range(parts):
        L.seed_everything(5, verbose=False)
        scenario.data_part, scenario.learner_id = (part, parts), f"l{part}"
        model = make_model()
        trainer_for(max_steps=-1, limit_val_batches=0, **options).fit(model)
        seen.append(model.seen)
    return seen


@pytest.mark.parametrize("parts", [2, 5])
def test_learners_with_equal_seeds_read_disjoint_samples(scenario, model, trainer_for, parts):
    seen = seen_by_each(scenario, type(model), trainer_for, parts, max_epochs=1)
    assert sum(map(len, seen)) == len(set().union(*seen)) == 24 // parts * parts


def test_every_epoch_shuffles_anew_and_stays_disjoint(scenario, model, trainer_for):
    first, second = seen_by_each(scenario, type(model), trainer_for, 2, max_epochs=2)
    assert set(first[:12]).isdisjoint(second[:12])
    assert set(first[12:]).isdisjoint(second[12:])
    assert first[:12] != first[12:]


def test_validation_data_stays_whole_also_on_resume(scenario, model, trainer_for, tmp_path):
    sizes = []
    model.validation_step = lambda batch, batch_idx: sizes.append(len(batch["index"]))
    scenario.data_part = (1, 2)
    trainer = trainer_for(max_steps=3, val_check_interval=3, num_sanity_val_steps=0)
    trainer.fit(model)
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    trainer_for(max_steps=6, val_check_interval=3).fit(model, ckpt_path=tmp_path / "a.ckpt")
    assert len(sizes) >= 2
    assert set(sizes) == {24}


class OneCycle:
    """A schedule for the length that the Trainer expects, as in most examples."""

    def configure_optimizers(self):
        self.estimate = self.trainer.estimated_stepping_batches
        optimizer = super().configure_optimizers()
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=self.estimate)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


@pytest.mark.parametrize("parts", [None, 2, 3])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_schedules_made_for_the_expected_length_end_with_training(scenario, model, trainer_for, parts, accumulate):
    scenario.data_part = parts and (1, parts)
    learner = type("Learner", (OneCycle, type(model)), {})()
    trainer = trainer_for(max_steps=-1, max_epochs=2, limit_val_batches=0, accumulate_grad_batches=accumulate)
    trainer.fit(learner)
    assert learner.estimate == trainer.global_step == 2 * -(-6 // (parts or 1) // accumulate)
    assert trainer.lr_scheduler_configs[0].scheduler.last_epoch == learner.estimate
    assert len(set(learner.seen)) == 24 // (parts or 1) if parts is None else len(learner.seen) == 48 // parts


@pytest.mark.parametrize("made_in", ["setup", "configure_model"])
def test_an_estimate_in_an_earlier_hook_knows_of_the_split(scenario, model, trainer_for, made_in):
    scenario.data_part, estimates = (1, 2), []
    setattr(model, made_in, lambda stage=None: estimates.append(model.trainer.estimated_stepping_batches))
    trainer_for(max_steps=-1, max_epochs=1, limit_val_batches=0).fit(model)
    assert (estimates, len(model.seen)) == ([3], 12)


def test_a_loader_made_before_its_part_was_known_is_made_again(scenario, model, trainer_for):
    seen = []
    for part in (0, 1):
        L.seed_everything(5, verbose=False)
        scenario.data_part = (part, 2)
        learner = type("Learner", (OneCycle, type(model)), {})()
        trainer_for(max_steps=-1, max_epochs=1, limit_val_batches=0).fit(learner)
        seen.append(learner.seen)
    assert sorted(seen[0] + seen[1]) == list(range(24))


@pytest.mark.parametrize("every", [1, 2])
def test_a_validation_interval_longer_than_a_part_is_kept(scenario, model, trainer_for, every):
    scenario.data_part, at = (0, 2), []
    model.validation_step = lambda batch, batch_idx: at.append(model.trainer.global_step)
    options = {"val_check_interval": 6, "check_val_every_n_epoch": every, "num_sanity_val_steps": 0}
    trainer = trainer_for(max_steps=-1, max_epochs=8, **options)
    trainer.fit(model)
    assert at == list(range(6 * every, 25, 6 * every))
    assert (trainer.val_check_interval, trainer.check_val_every_n_epoch) == (6, every)


def test_an_interval_longer_than_the_whole_data_is_refused_by_lightning(scenario, model, trainer_for):
    scenario.data_part = (0, 2)
    with pytest.raises(ValueError, match="must be less than or equal"):
        trainer_for(max_steps=-1, max_epochs=1, val_check_interval=7).fit(model)


def test_a_part_without_a_full_batch_is_an_error(scenario, model, trainer_for):
    scenario.data_part = (0, 2)
    loader = DataLoader(Sequences(), batch_size=16, drop_last=True)
    with pytest.raises(ConfigError, match=r"has 1 batch\(es\), and none is left in this learner's part"):
        trainer_for(max_steps=1, limit_val_batches=0).fit(model, loader)
    assert model.seen == []


def test_data_that_cannot_be_split_are_not_reported_as_split(scenario, model, trainer_for, caplog):
    scenario.data_part = (0, 2)
    loader = DataLoader(SampleStream(), batch_size=4)
    with pytest.warns(UserWarning, match="cannot be split over learners: SampleStream is an iterable dataset"):
        trainer_for(max_steps=2, limit_val_batches=0).fit(model, loader)
    assert "are split in" not in caplog.text


def test_data_is_not_split_against_the_users_will(scenario, model, trainer_for):
    scenario.data_part = (0, 2)
    trainer_for(max_steps=-1, max_epochs=1, limit_val_batches=0, use_distributed_sampler=False).fit(model)
    assert sorted(model.seen) == list(range(24))


def test_data_part_is_available_to_loaders_that_split_themselves(scenario, model, trainer_for):
    told = []
    scenario.data_part = (1, 3)
    loader, model.train_dataloader = (
        model.train_dataloader,
        lambda: told.append(model.trainer.strategy.data_part) or loader(),
    )
    trainer_for(max_steps=1, limit_val_batches=0).fit(model)
    assert told == [(1, 3)]
    assert model.trainer.strategy.data_part is None  # after fit


@pytest.mark.parametrize(
    "sampler",
    [
        lambda: SequentialSampler(ITEMS),
        lambda: RandomSampler(ITEMS),
        lambda: RandomSampler(ITEMS, generator=torch.Generator().manual_seed(1)),
        lambda: SubsetRandomSampler(ITEMS),
        lambda: WeightedRandomSampler([1.0] * 23, 23, replacement=False),
    ],
)
def test_parts_of_any_sampler_are_disjoint_and_complete(sampler):
    drawn = []
    for part in range(3):
        torch.manual_seed(part)  # learners' generators differ
        candidate = PartSampler(sampler(), part, 3, seed=0)
        candidate.set_epoch(4)
        drawn.append(list(candidate))
        assert len(candidate) == len(drawn[-1]) == 7
    assert len(set().union(*drawn)) == 21


@pytest.mark.parametrize(
    "sampler",
    [
        lambda: SequentialSampler(ITEMS),
        lambda: RandomSampler(ITEMS),
        lambda: RandomSampler(ITEMS, replacement=True, num_samples=70),
        lambda: RandomSampler(ITEMS, replacement=True, generator=torch.Generator().manual_seed(1)),
        lambda: WeightedRandomSampler([1.0] * 23, 23),
    ],
)
@pytest.mark.parametrize(("part", "parts", "skip"), [(0, 1, 0), (1, 3, 0), (2, 3, 4), (0, 2, 99)])
def test_a_part_is_a_strided_slice_of_the_whole_order(sampler, part, parts, skip):
    whole = list(PartSampler(sampler(), 0, 1, seed=5))
    stop = len(whole) // parts * parts
    assert list(PartSampler(sampler(), part, parts, seed=5, skip=skip)) == whole[part:stop:parts][skip:]
    torch.manual_seed(5)
    own = sampler()
    if getattr(own, "generator", None) is not None:
        own.generator.manual_seed(5)
    assert whole == list(own)


class Endless(Sequences):
    """A sampler whose list of indices does not fit in memory."""

    def __len__(self):
        return 10**12


@pytest.mark.parametrize("draws", [{}, {"sampler": RandomSampler(Endless(), replacement=True)}])
@pytest.mark.parametrize("parts", [1, 2])
def test_an_order_that_is_too_long_for_memory_is_not_drawn_in_advance(scenario, model, trainer_for, draws, parts):
    scenario.data_part = (parts - 1, parts)
    loader = DataLoader(Endless(), batch_size=4, **draws)
    trainer_for(max_steps=2, limit_val_batches=0).fit(model, loader)
    assert len(model.seen) == 8
    assert draws or model.seen == list(range(parts - 1, 8 * parts, parts))


def test_drawing_a_part_leaves_the_global_generator_alone():
    torch.manual_seed(0)
    expected = torch.rand(())
    torch.manual_seed(0)
    list(PartSampler(RandomSampler(ITEMS), 0, 2, seed=9))
    assert torch.equal(torch.rand(()), expected)


@pytest.mark.parametrize(
    "case",
    [
        ((1, 3), 1, "split in 3 fixed parts; this learner reads part 1"),
        ((1, 3), 4, "This learner reads part 1 like another learner, in a different order"),
        (None, 1, "all of its learners read all of it, each in an order of its own"),
    ],
)
def test_shared_data_is_logged_once(scenario, model, trainer_for, monkeypatch, case):
    (scenario.data_part, scenario.slot, said), sentences = case, []
    for how in ("rank_zero_info", "rank_zero_warn"):
        monkeypatch.setattr(f"lightning_diloco.strategy.data.hooks.{how}", sentences.append)
    model.train_dataloader = lambda: [type(model).train_dataloader(model) for _ in range(2)]
    model.training_step = lambda batch, batch_idx: model.loss(batch[0])
    trainer_for(max_steps=4, limit_val_batches=0).fit(model)
    assert len(sentences) == 1
    assert said in sentences[0]


def test_a_single_learner_logs_nothing_about_a_split(scenario, model, trainer_for, monkeypatch):
    monkeypatch.setattr("lightning_diloco.strategy.data.hooks.rank_zero_warn", lambda _: pytest.fail("said"))
    trainer_for(max_steps=1, limit_val_batches=0).fit(model)


def test_split_keeps_the_loaders_settings():
    loader = DataLoader(ITEMS, batch_size=3, drop_last=True, shuffle=True, collate_fn=list)
    part = split(loader, 0, 2)
    assert (part.batch_size, part.drop_last, part.collate_fn, len(part)) == (3, True, list, 3)


def test_split_keeps_a_batch_sampler():
    part = split(DataLoader(ITEMS, batch_sampler=BatchSampler(SequentialSampler(ITEMS), 4, False)), 1, 2)
    assert torch.cat(list(part)).tolist() == ITEMS[1:22:2]


class Buckets:
    """A batch sampler of groups of ten, in any order."""

    def __init__(self, drawn_from=(ITEMS[:10], ITEMS[10:20], ITEMS[20:])):
        self.buckets, self.epochs = drawn_from, []

    def set_epoch(self, epoch):
        self.epochs.append(epoch)

    def __iter__(self):
        return (self.buckets[i] for i in torch.randperm(len(self.buckets)).tolist())

    def __len__(self):
        return len(self.buckets)


def test_batches_of_a_users_batch_sampler_are_split_as_wholes():
    buckets, parts = Buckets(), []
    for part in range(3):
        loader = split(DataLoader(ITEMS, batch_sampler=buckets, collate_fn=list), part, 3, seed=1)
        loader.batch_sampler.set_epoch(4)
        assert len(loader) == 1
        parts += list(loader)
    assert sorted(parts) == list(buckets.buckets)
    assert buckets.epochs == [4] * 3


def test_a_loader_class_with_its_own_constructor_keeps_its_attributes():
    class Own(DataLoader):
        def __init__(self, path):
            self.path = path
            super().__init__(ITEMS, batch_size=4)

    part = split(Own("p"), 0, 2)
    assert (type(part), part.path, len(part)) == (Own, "p", 3)


SAMPLERS = {
    "shuffled": RandomSampler,
    "weighted": lambda data: WeightedRandomSampler([0.0] * 12 + [1.0] * 12, 24),
    "subset": lambda data: SubsetRandomSampler(range(8)),
}


@pytest.mark.parametrize("parts", [None, 2])
@pytest.mark.parametrize("how", list(itertools.product(SAMPLERS, [True, False])))
def test_the_users_sampler_decides_what_is_read(scenario, model, trainer_for, parts, how):
    kind, is_batch_sampler = how

    def loader():
        data = Sequences()
        sampler = SAMPLERS[kind](data)
        if is_batch_sampler:
            return DataLoader(data, batch_sampler=BatchSampler(sampler, 4, False))
        return DataLoader(data, batch_size=4, sampler=sampler)

    scenario.data_part, model.train_dataloader = parts and (0, parts), loader
    trainer_for(max_steps=-1, max_epochs=2, limit_val_batches=0).fit(model)
    allowed = {"shuffled": range(24), "weighted": range(12, 24), "subset": range(8)}[kind]
    assert set(model.seen) <= set(allowed)
    assert len(model.seen) == 2 * (8 if kind == "subset" else 24) // (parts or 1)
    first, second = model.seen[: len(model.seen) // 2], model.seen[len(model.seen) // 2 :]
    assert first != second, "every epoch is shuffled anew"
    assert first != sorted(first)
    assert parts or kind == "weighted" or set(first) == set(allowed)


def pairs_read(scenario, trainer_for, make_model, generators, **options):
    """Return the pairs of indices that two loaders of equal length read over two epochs."""
    model, pairs = make_model(), []

    def training_step(batch, batch_idx):
        pairs.append((batch[0]["index"].tolist(), batch[1]["index"].tolist()))
        return model.loss(batch[0])

    model.training_step = training_step
    made = [DataLoader(Sequences(), 4, shuffle=True, generator=generator) for generator in generators]
    model.train_dataloader = lambda: made
    trainer_for(max_steps=-1, max_epochs=2, limit_val_batches=0, **options).fit(model)
    return pairs


@pytest.mark.parametrize("parts", [None, 2])
def test_two_loaders_are_not_paired(scenario, model, trainer_for, parts):
    scenario.data_part = parts and (1, parts)
    pairs = pairs_read(scenario, trainer_for, type(model), [None, None])
    assert not any(a == b for a, b in pairs)


@pytest.mark.parametrize("parts", [None, 2])
def test_loaders_with_equal_seeds_stay_paired(scenario, model, trainer_for, parts):
    scenario.data_part = parts and (1, parts)
    pairs = pairs_read(scenario, trainer_for, type(model), [torch.Generator().manual_seed(3) for _ in range(2)])
    assert all(a == b for a, b in pairs)
    assert pairs[0] != pairs[len(pairs) // 2]


def test_orders_depend_on_the_runs_seed_and_the_slot(scenario, model, trainer_for):
    def seen(**changes):
        vars(scenario).update(data_part=(0, 2), slot=0, data_seed=1, **{})
        vars(scenario).update(changes)
        L.seed_everything(changes.pop("own_seed", 5), verbose=False)
        learner = type(model)()
        trainer_for(max_steps=-1, max_epochs=1, limit_val_batches=0).fit(learner)
        return learner.seen

    first = seen()
    assert seen(own_seed=6) == first, "a learner's own seed decides nothing"
    assert seen(data_seed=2) != first
    with pytest.warns(UserWarning, match="more learners than parts of the training data"):
        assert seen(slot=2) != first, "another learner of the same part has an order of its own"
    whole = seen(data_part=None)
    with pytest.warns(UserWarning, match="not split"):
        assert seen(data_part=None, slot=1) != whole


def test_loader_with_a_distributed_sampler_is_not_split_again():
    loader = DataLoader(ITEMS, sampler=DistributedSampler(ITEMS, num_replicas=2, rank=1))
    assert split(loader, 0, 2) is loader


def test_splitting_twice_changes_nothing():
    once = split(DataLoader(ITEMS), 0, 2)
    assert list(split(once, 0, 2)) == list(once)


def test_a_loader_that_was_split_for_another_part_is_split_again():
    part = split(split(DataLoader(ITEMS), 0, 2), 1, 2)
    assert torch.cat(list(part)).tolist() == ITEMS[1:22:2]


class Stream(IterableDataset):
    def __iter__(self):
        return iter(ITEMS)


class OwnBatches:
    def __iter__(self):
        return iter([ITEMS[:2], ITEMS[2:]])


@pytest.mark.parametrize(
    ("loader", "reason"),
    [
        (DataLoader(Stream()), "Stream is an iterable dataset"),
        (DataLoader(ITEMS, batch_sampler=OwnBatches()), "OwnBatches has no length"),
        (DataLoader(ITEMS[:1]), "1 samples are fewer than the 2 parts"),
        ([1, 2, 3], "a list is no torch DataLoader"),
    ],
)
def test_data_that_cannot_be_split_is_read_whole_with_a_warning(loader, reason):
    with pytest.warns(UserWarning, match=reason):
        assert split(loader, 0, 2) is loader
