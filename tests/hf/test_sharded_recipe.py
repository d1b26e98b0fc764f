"""`inner=ModelParallelStrategy` shards a recipe's language model over two devices of a learner."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.bench.tiny import RECIPE

pytestmark = pytest.mark.slow

STRATEGY = "--trainer.strategy.init_args.inner"


def fitted(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(RECIPE.parents[2]), "PYTHONWARNINGS": "ignore"}
    argv = [sys.executable, "-m", "lightning_diloco.cli.fit", str(RECIPE), "--trainer.devices=2"]
    argv += [f"{STRATEGY}.class_path=lightning.pytorch.strategies.ModelParallelStrategy", *arguments]
    argv += ["--trainer.max_steps=6", "--trainer.limit_val_batches=1", "--trainer.logger=false"]
    argv += [f"--trainer.default_root_dir={folder}", "--data.max_bytes=200000", f"--data.cache_dir={folder}"]
    elsewhere = folder / "elsewhere"  # a root directory that is the working directory counts as not given
    elsewhere.mkdir()
    return subprocess.run(argv, cwd=elsewhere, env=env, capture_output=True, text=True, timeout=600, check=False)


def test_layers_are_sharded_and_the_run_ends_well(tmp_path: Path) -> None:
    sizes = [f"{STRATEGY}.init_args.data_parallel_size=2", f"{STRATEGY}.init_args.tensor_parallel_size=1"]
    noting = ["--trainer.callbacks+=tests.hf.sharded.Noting", f"--trainer.callbacks.folder={tmp_path}"]
    done = fitted(tmp_path, *sizes, *noting)
    assert done.returncode == 0, done.stdout + done.stderr
    ranks = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    for rank in ranks:
        assert rank["strategy"] == "ModelParallelDiLoCo"
        assert rank["sharded"] == ["FSDPLlamaForCausalLM", "FSDPLlamaDecoderLayer", "FSDPLlamaDecoderLayer"]
    assert sum(rank["local_numel"] for rank in ranks) == ranks[0]["numel"] == ranks[1]["numel"]
    (summary,) = tmp_path.glob("diloco/*/summary.json")
    found = json.loads(summary.read_text())
    assert (found["status"], found["ledger_exact"], found["tokens_merged"]) == ("finished", True, found["tokens_seen"])


def test_tensor_parallel_is_refused_with_advice(tmp_path: Path) -> None:
    sizes = [f"{STRATEGY}.init_args.data_parallel_size=1", f"{STRATEGY}.init_args.tensor_parallel_size=2"]
    done = fitted(tmp_path, *sizes)
    assert done.returncode == 2, done.stdout + done.stderr
    assert "tensor_parallel_size=2: must be 1, because CausalLM is sharded" in done.stderr
