"""The video recipe, which is no language model: its model learns alone and with the strategy."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from lightning_diloco.cli.main import main
from lightning_diloco.hf.export import CHECKPOINT
from lightning_diloco.hf.recipe import class_of, make_importable, parse
from tests import command

RECIPE = Path(__file__).parents[2] / "recipes" / "diffusion" / "video.yaml"


@pytest.fixture(scope="module")
def video() -> ModuleType:
    make_importable(RECIPE)
    return sys.modules[class_of(parse(RECIPE)["model"]).__module__]


def test_patches_are_pieces_of_the_clip(video: ModuleType) -> None:
    model, clips = video.VideoDiT(), torch.randn(2, video.FRAMES, video.SIZE, video.SIZE)
    patches = model.to_patches(clips)
    assert torch.equal(patches[1, 1], clips[1, 0:2, 0:4, 4:8].flatten())  # the second patch is to the right
    assert torch.equal(model.to_clips(patches), clips)


def test_a_clip_is_always_the_same_and_its_dot_moves(video: ModuleType) -> None:
    dots = video.MovingDots(4)
    assert torch.equal(dots[3], dots[3])
    assert not torch.equal(dots[3], dots[2])
    places = {int(frame.argmax()) for frame in dots[3]}
    assert len(places) > 2
    assert all(frame.max() > 0.7 for frame in dots[3])  # it stays inside


def test_training_and_validation_clips_are_different(video: ModuleType) -> None:
    data = video.Clips(num_clips=4, num_val_clips=2)
    trained, validated = data.train_dataloader().dataset, data.val_dataloader().dataset
    assert not any(torch.equal(a, b) for a in map(trained.__getitem__, range(4)) for b in (validated[0], validated[1]))


@pytest.mark.seconds
def test_forty_steps_lower_the_loss_and_clips_can_be_drawn(video: ModuleType) -> None:
    model, batches = video.VideoDiT(), iter(video.Clips().train_dataloader())
    optimizer, losses = model.configure_optimizers(), []
    for _ in range(40):
        batch = next(batches)
        loss = model.loss(batch, torch.rand(len(batch)), torch.randn_like(batch))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert sum(losses[-5:]) < 0.6 * sum(losses[:5])
    assert model.sample(2, num_steps=2).shape == (2, video.FRAMES, video.SIZE, video.SIZE)


@pytest.mark.slow
def test_two_learners_lower_the_loss_and_tools_take_their_run(tmp_path: Path, video: ModuleType) -> None:
    words = ("--local", 2, "--run-dir", "run", "--no-table", "--trainer.max_steps", 120)
    command.succeed(tmp_path, "run", RECIPE, *words)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["status"] == "finished"
    assert summary["fleet_tokens"] == 2 * 120 * 16
    assert summary["eval_loss"] < 0.7  # 1.9 before the first step

    run_dir, exported = str(tmp_path / "run"), tmp_path / "exported"
    assert main(["replay", run_dir]) == 0
    assert main(["plot", run_dir]) == 0
    assert main(["export", run_dir, "--to", str(exported), "--config", str(RECIPE)]) == 0
    assert video.VideoDiT.load_from_checkpoint(exported / CHECKPOINT).sample(1, num_steps=2).isfinite().all()
