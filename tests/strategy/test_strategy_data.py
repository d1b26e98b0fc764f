"""Learners read disjoint parts of the training data, and everything else in full."""

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

from lightning_diloco.strategy.data import PartSampler, split

ITEMS = list(range(23))


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
def test_learners_seeded_alike_see_disjoint_samples(scenario, model, trainer_for, parts):
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


def test_training_data_loaded_early_is_loaded_again_with_a_warning(scenario, model, trainer_for):
    class Estimating(type(model)):
        def configure_optimizers(self):
            self.estimate = self.trainer.estimated_stepping_batches
            return super().configure_optimizers()

    scenario.data_part, estimating = (0, 2), Estimating()
    with pytest.warns(UserWarning, match=r"part 0 of 2\. Set Trainer\(max_steps"):
        trainer_for(max_steps=-1, max_epochs=1, limit_val_batches=0).fit(estimating)
    assert (estimating.estimate, len(estimating.seen)) == (6, 12)


def test_data_is_not_split_against_the_users_will(scenario, model, trainer_for):
    scenario.data_part = (0, 2)
    trainer_for(max_steps=-1, max_epochs=1, limit_val_batches=0, use_distributed_sampler=False).fit(model)
    assert sorted(model.seen) == list(range(24))


def test_data_part_is_told_to_loaders_that_split_themselves(scenario, model, trainer_for):
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


def test_drawing_a_part_leaves_the_global_generator_alone():
    torch.manual_seed(0)
    expected = torch.rand(())
    torch.manual_seed(0)
    list(PartSampler(RandomSampler(ITEMS), 0, 2, seed=9))
    assert torch.equal(torch.rand(()), expected)


def test_a_fixed_split_is_said(monkeypatch):
    said = []
    monkeypatch.setattr("lightning_diloco.strategy.data.rank_zero_info", said.append)
    split(DataLoader(ITEMS), 1, 3)
    assert "split in 3 fixed parts; this learner reads part 1" in said[0]


def test_split_keeps_the_loaders_settings():
    loader = DataLoader(ITEMS, batch_size=3, drop_last=True, shuffle=True, collate_fn=list)
    part = split(loader, 0, 2)
    assert (part.batch_size, part.drop_last, part.collate_fn, len(part)) == (3, True, list, 3)


def test_split_keeps_a_batch_sampler():
    part = split(DataLoader(ITEMS, batch_sampler=BatchSampler(SequentialSampler(ITEMS), 4, False)), 1, 2)
    assert torch.cat(list(part)).tolist() == ITEMS[1:22:2]


def test_loader_with_a_distributed_sampler_is_left_alone():
    loader = DataLoader(ITEMS, sampler=DistributedSampler(ITEMS, num_replicas=2, rank=1))
    assert split(loader, 0, 2) is loader


def test_splitting_twice_changes_nothing():
    once = split(DataLoader(ITEMS), 0, 2)
    assert split(once, 0, 2) is once


class Stream(IterableDataset):
    def __iter__(self):
        return iter(ITEMS)


class OwnBatches:
    def __iter__(self):
        return iter([ITEMS[:2], ITEMS[2:]])

    def __len__(self):
        return 2


@pytest.mark.parametrize(
    ("loader", "reason"),
    [
        (DataLoader(Stream()), "Stream is an iterable dataset"),
        (DataLoader(ITEMS, batch_sampler=OwnBatches()), "OwnBatches has no sampler"),
        ([1, 2, 3], "a list is no torch DataLoader"),
    ],
)
def test_data_that_cannot_be_split_is_read_whole_with_a_warning(loader, reason):
    with pytest.warns(UserWarning, match=reason):
        assert split(loader, 0, 2) is loader
