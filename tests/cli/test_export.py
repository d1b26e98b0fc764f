"""`diloco export`: the files of a run become files that transformers and Lightning can load."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

import lightning_diloco
from lightning_diloco.cli.main import main
from lightning_diloco.core.buffers import bytes_of
from lightning_diloco.core.fragments import gather
from lightning_diloco.errors import ConfigError, PlanMismatchError, StorageError
from lightning_diloco.hf import CausalLM
from lightning_diloco.hf.export import CHECKPOINT, PARAMETERS
from lightning_diloco.manifest import make_manifest, plan_of
from lightning_diloco.protocol import codec
from lightning_diloco.protocol.syncer import records
from lightning_diloco.protocol.syncer.machine import SyncerState
from lightning_diloco.strategy.trainer.parameters import describe, named_values, trainable_parameters
from lightning_diloco.syncer.anchors import AnchorStore
from lightning_diloco.syncer.store import SyncerStore

MODEL = {
    "model_type": "llama", "vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2,
    "num_attention_heads": 2, "max_position_embeddings": 32, "tie_word_embeddings": True,
}  # fmt: skip
COMMITTED = 1  # fragment


class Run:
    """A run directory as a syncer leaves it: start values in a snapshot, one commit in the log."""

    def __init__(self, run_dir: Path) -> None:
        self.dir = run_dir
        module = CausalLM(config=MODEL)
        module.configure_model()
        params = trainable_parameters(module)
        options = {"sync_every": 4, "num_fragments": 3, "overlap": 1}
        manifest, plan = make_manifest(describe(module, "tokens"), options)
        store = AnchorStore(*plan_of(manifest))
        for p, layout in enumerate(store.layouts):
            store.seed(p, gather(layout, params, torch.empty(layout.padded_numel)))
        gradient = (torch.randn(store.layouts[COMMITTED].padded_numel) * 0.01).bfloat16()
        durable = SyncerStore(run_dir)
        state = SyncerState(run="r")
        durable.store_seed(codec.dump(state.saved()), manifest, store)
        durable.write(records.encode(records.Seeded(1, manifest)))
        commit = records.CommitRecord(
            fragment=COMMITTED, generation=0, version=1, round=1, work=0.5, num_stepping=1, merges=()
        )
        durable.write(records.encode(commit), bytes_of(gradient))
        durable.close()
        store.commit(COMMITTED, gradient, work=0.5)
        self.anchor = named_values(plan, store_block(manifest), params, lambda p: store.anchor(p).published)
        self.started = {name: p.detach().clone() for name, p in params.items()}
        self.write_config(MODEL)

    def write_config(self, model: dict[str, Any]) -> Path:
        """Write the config that LightningCLI saves in a learner's folder."""
        path = self.dir / "learners" / "l0" / "lightning_logs" / "version_0" / "config.yaml"
        path.parent.mkdir(parents=True, exist_ok=True)
        sections = {"model": {"class_path": "lightning_diloco.hf.CausalLM", "init_args": {"config": model}}}
        path.write_text(yaml.safe_dump({**sections, "ckpt_path": None}))
        return path


def store_block(manifest: Any) -> int:
    return int(manifest["config"]["block_size"])


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path / "run")


def export(run: Run, to: Path, *more: str) -> int:
    return main(["export", str(run.dir), "--to", str(to), *more])


def same(found: Tensor, wanted: Tensor) -> bool:
    return found.dtype == wanted.dtype and torch.equal(found, wanted)


@pytest.mark.seconds
def test_the_exported_folder_has_the_anchor_of_snapshot_and_log(run: Run, tmp_path: Path) -> None:
    to = tmp_path / "to"
    assert export(run, to) == 0
    model = AutoModelForCausalLM.from_pretrained(to)
    found = dict(model.named_parameters())
    assert found.keys() == {name.removeprefix("model.") for name in run.anchor}
    assert all(same(found[name.removeprefix("model.")], value) for name, value in run.anchor.items())
    assert any(not torch.equal(run.started[name], value) for name, value in run.anchor.items())
    assert model.config.use_cache


def test_the_exported_model_generates_with_a_cache(run: Run, tmp_path: Path) -> None:
    assert export(run, tmp_path / "out") == 0
    for name in ("config.json", "generation_config.json"):
        assert json.loads((tmp_path / "out" / name).read_text()).get("use_cache", True) is True


def test_tied_weights_are_stored_once_and_tied_again(run: Run, tmp_path: Path) -> None:
    export(run, to := tmp_path / "to")
    with safe_open(to / "model.safetensors", "pt") as file:
        assert "lm_head.weight" not in file.keys()  # noqa: SIM118  not a dict
    model = AutoModelForCausalLM.from_pretrained(to)
    assert model.lm_head.weight is model.model.embed_tokens.weight


@pytest.mark.seconds
def test_the_checkpoint_loads_into_the_module(run: Run, tmp_path: Path) -> None:
    export(run, to := tmp_path / "to")
    module = CausalLM.load_from_checkpoint(to / CHECKPOINT)
    assert all(same(param, run.anchor[name]) for name, param in module.named_parameters())


def test_the_run_can_continue_after_an_export(run: Run, tmp_path: Path) -> None:
    export(run, tmp_path / "to")
    durable = SyncerStore(run.dir)
    store = durable.restore(SyncerState(run="r"), 0.0)
    durable.close()
    assert store is not None
    assert store.anchor(COMMITTED).version == 1


def test_a_running_run_is_refused(run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    syncer = SyncerStore(run.dir)
    try:
        assert export(run, tmp_path / "to") == 1
    finally:
        syncer.close()
    said = capsys.readouterr().err
    assert "is in use: its syncer runs, or another command reads it; wait for its end or stop it" in said
    assert "Errno" not in said
    assert not (tmp_path / "to").exists()


def test_a_model_that_differs_from_the_run_s_is_refused(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run.write_config({**MODEL, "hidden_size": 32})
    assert export(run, tmp_path / "to") == 2
    assert "not the model of the run" in capsys.readouterr().err


def test_a_script_s_parameters_are_written_by_name(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = run.write_config(MODEL)
    moved = config.rename(tmp_path / "recipe.yaml")
    to = tmp_path / "to"
    assert export(run, to) == 0
    said = capsys.readouterr().out
    assert "--config" in said
    assert "load_anchor" in said
    found = load_file(to / PARAMETERS)
    assert found.keys() == run.anchor.keys()
    assert all(same(found[name], value.float()) for name, value in run.anchor.items())
    assert export(run, tmp_path / "whole", "--config", str(moved)) == 0
    assert (tmp_path / "whole" / CHECKPOINT).exists()


def test_the_anchor_is_loaded_into_a_module(run: Run) -> None:
    module = CausalLM(config=MODEL)
    module.configure_model()
    module.register_buffer("seen", torch.ones(3))  # state that training changes is not in the anchor, and stays
    lightning_diloco.load_anchor(run.dir, module)
    assert all(same(param.detach(), run.anchor[name]) for name, param in module.named_parameters())
    assert module.seen.sum() == 3


def test_the_anchor_is_not_loaded_into_another_module_or_from_a_running_run(run: Run, tmp_path: Path) -> None:
    other = torch.nn.Linear(2, 2)
    with pytest.raises(PlanMismatchError, match="not the model of the run"):
        lightning_diloco.load_anchor(str(run.dir), other)
    with pytest.raises(ConfigError, match="no syncer ever ran there"):
        lightning_diloco.load_anchor(tmp_path / "nowhere", other)
    syncer = SyncerStore(run.dir)
    with pytest.raises(StorageError, match="its syncer runs"):
        lightning_diloco.load_anchor(run.dir, other)
    syncer.close()


def test_a_folder_that_is_not_empty_is_refused(run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "note").write_text("mine")
    assert export(run, tmp_path) == 2
    assert "not empty" in capsys.readouterr().err


def test_a_folder_that_is_not_a_run_directory_is_not_changed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "c.yaml"
    config.write_text("{}")
    assert main(["export", str(tmp_path / "x"), "--to", str(tmp_path / "to"), "--config", str(config)]) == 2
    assert "no syncer ever ran there" in capsys.readouterr().err
    assert not (tmp_path / "x").exists()
