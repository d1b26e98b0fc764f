"""Streamed or leased text: the same documents from files of any kind, no validation text, and no repeated sample."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import lightning as L
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from lightning_diloco.errors import ConfigError
from lightning_diloco.hf import TextData, corpus
from lightning_diloco.protocol.data_ranges import Lease
from tests.quiet import QUIET

MARKERS = ["marker" + chr(ord("a") + index) for index in range(12)]


def stored(texts: Path, kind: str) -> str:
    """Store the texts as three files of this kind; return a pattern for them."""
    documents = [path.read_text() for path in sorted(texts.iterdir())]
    for shard in range(3):
        rows, path = documents[shard::3], texts.parent / f"{shard}.{kind}"
        if kind == "parquet":
            pq.write_table(pa.table({"text": rows}), path)
        elif kind == "jsonl":
            path.write_text("".join(json.dumps({"text": text}) + "\n" for text in rows))
    return str(texts / "*.txt" if kind == "txt" else texts.parent / f"*.{kind}")


def data(files: str, cache_dir: Path, **options: Any) -> TextData:
    defaults = {"vocab_size": 300, "seq_len": 16, "batch_size": 4, "val_fraction": 0.25, "range_size": 2}
    made = TextData(files=files, cache_dir=str(cache_dir), **{**defaults, "streaming": True, **options})
    made.prepare_data()
    made.setup()
    return made


def epoch_of(made: TextData, epoch: int = 0) -> dict[tuple[int, int], torch.Tensor]:
    """Return all nonempty ranges of an epoch."""
    found = {}
    for source in range(made._ranges.catalogue.num_sources):
        for index in range(20):
            rows, is_last = made._ranges.read(Lease(1, epoch, source, index))
            found[source, index] = rows
            if is_last:
                break
    return found


def words(made: TextData, rows: torch.Tensor) -> set[str]:
    text = made.tokenizer.decode(rows.flatten().tolist())
    return {marker for marker in MARKERS if marker in text}


@pytest.mark.parametrize(("kind", "num_sources"), [("parquet", 3), ("jsonl", 3), ("txt", 1)])
def test_a_stream_holds_all_training_documents_and_none_for_validation(
    texts: Path, cache_dir: Path, kind: str, num_sources: int
) -> None:
    made = data(stored(texts, kind), cache_dir)
    assert made._ranges.catalogue.num_sources == num_sources
    trained = set().union(*(words(made, rows) for rows in epoch_of(made).values()))
    validated = words(made, torch.cat([batch["input_ids"] for batch in made.val_dataloader()]))
    assert trained | validated == set(MARKERS)
    assert len(validated) == 3
    assert not trained & validated


def test_small_text_files_are_joined_and_only_the_incomplete_end_of_a_range_is_dropped(
    texts: Path, cache_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(corpus, "_SOURCE_BYTES", sum(path.stat().st_size for path in texts.iterdir()) // 3)
    made = data(stored(texts, "txt"), cache_dir, range_size=100)
    documents = [path.read_text() for path in texts.iterdir()]
    trained = [text for text in documents if text not in made._ranges._held_out]
    num_tokens = sum(len(ids) + 1 for ids in made.tokenizer(trained)["input_ids"])
    rows = torch.cat(list(epoch_of(made).values()))
    assert made._ranges.catalogue.num_sources == 3
    assert num_tokens - 3 * 16 < rows.numel() <= num_tokens


@pytest.mark.parametrize("kind", ["jsonl", "txt"])
def test_a_stream_without_a_full_sequence_is_refused_after_an_epoch(texts: Path, cache_dir: Path, kind: str) -> None:
    made = data(stored(texts, kind), cache_dir)
    made._ranges._seq_len = 100_000
    with pytest.raises(ConfigError, match=r"no sequence of seq_len=100000 tokens: .* has \d+ tokens.*lower seq_len"):
        next(iter(made.train_dataloader()))
    made.teardown()


def test_an_empty_end_of_a_source_is_not_an_error(texts: Path, cache_dir: Path) -> None:
    made = data(stored(texts, "txt"), cache_dir, range_size=12)
    assert [len(made._ranges.read(Lease(1, epoch, 0, 1))[0]) for epoch in range(3)] == [0, 0, 0]


def test_each_epoch_has_its_own_order_which_is_equal_on_all_learners(
    texts: Path, cache_dir: Path, tmp_path: Path
) -> None:
    files = stored(texts, "jsonl")
    one, two = data(files, cache_dir), data(files, tmp_path / "elsewhere")
    assert one._ranges.catalogue == two._ranges.catalogue
    first, again, later = epoch_of(one), epoch_of(two), epoch_of(one, 1)
    assert all(torch.equal(first[key], again[key]) for key in first)
    assert any(not torch.equal(first[key], later[key]) for key in first.keys() & later.keys())
    assert {tuple(row) for rows in first.values() for row in rows.tolist()} == {
        tuple(row) for rows in later.values() for row in rows.tolist()
    }


def test_an_earlier_range_is_read_again_with_its_skip(texts: Path, cache_dir: Path) -> None:
    ranges = data(stored(texts, "jsonl"), cache_dir)._ranges
    early, _ = ranges.read(Lease(1, 0, 1, 0))
    ranges.read(Lease(2, 0, 1, 1))
    assert torch.equal(ranges.read(Lease(3, 0, 1, 0, skip=2))[0], early[2:])


class Noting(L.LightningModule):
    """Records the sequences that it trains with."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.seen = torch.nn.Linear(1, 1), []

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        self.seen += batch["input_ids"].tolist()
        return self.layer(torch.ones(1)).sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit(made: TextData, steps: int, *, save: Path | None = None, ckpt_path: Path | None = None) -> list[list[int]]:
    model = Noting()
    trainer = L.Trainer(accelerator="cpu", max_steps=steps, limit_val_batches=0, **QUIET)
    trainer.fit(model, made, ckpt_path=ckpt_path)
    if save is not None:
        trainer.save_checkpoint(save)
    return model.seen


@pytest.mark.filterwarnings("ignore:.*LeafSpec", "ignore:.*many workers", "ignore:You're resuming from a checkpoint")
@pytest.mark.filterwarnings("ignore:.*no `validation_step`")
def test_a_plain_trainer_resumes_a_stream_at_its_position(texts: Path, cache_dir: Path, tmp_path: Path) -> None:
    files = stored(texts, "parquet")
    uninterrupted = fit(data(files, cache_dir), 9)
    first = fit(data(files, cache_dir), 4, save=tmp_path / "a.ckpt")
    second = fit(data(files, cache_dir), 9, ckpt_path=tmp_path / "a.ckpt")
    assert first + second == uninterrupted


def test_packed_ranges_have_each_training_sequence_once(texts: Path, cache_dir: Path) -> None:
    made = data(stored(texts, "txt"), cache_dir, streaming=False, range_size=5)
    num_ranges = made._ranges.catalogue.num_ranges
    for epoch in range(2):
        rows = torch.cat([made._ranges.read(Lease(1, epoch, 0, index))[0] for index in range(num_ranges)])
        assert sorted(rows.tolist()) == sorted(made._sequences["train"][:]["input_ids"].tolist())
    skipped, _ = made._ranges.read(Lease(1, 1, 0, 2, skip=3))
    assert torch.equal(skipped, rows[13:15])


def test_training_data_are_leased_if_the_strategy_leases(texts: Path, cache_dir: Path) -> None:
    class Strategy:
        def lease(self, ranges: Any, **options: Any) -> Any:
            self.asked = ranges, options
            return "leased"

    class Trainer:
        strategy, training = Strategy(), True

    made = data(stored(texts, "txt"), cache_dir, streaming=False)
    made.trainer = Trainer()  # type: ignore[assignment]
    assert made.train_dataloader() == "leased"
    ranges, options = Trainer.strategy.asked
    assert ranges is made._ranges
    assert options["num_batches"] == len(made._sequences["train"]) // 4
    batch = options["collate"](torch.ones(4, 16))
    assert set(batch) == {"input_ids", "labels"}
    made.hparams.leases = False
    assert made.train_dataloader() != "leased"


@pytest.mark.parametrize("options", [{}, {"streaming": False}, {"streaming": False, "max_bytes": 10_000}])
def test_a_row_without_text_is_named(tmp_path: Path, cache_dir: Path, options: dict[str, Any]) -> None:
    rows = [{"body": None if index == 5 else f"document {index}"} for index in range(10)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    said = r"row 5 \(counted from 0\) of .*a\.jsonl has None in the column 'body'; .* remove the row"
    with pytest.raises(ConfigError, match=said):
        data(str(tmp_path / "a.jsonl"), cache_dir, text_column="body", **options)


def test_a_row_without_text_after_the_head_of_a_stream_is_named(tmp_path: Path, cache_dir: Path) -> None:
    rows = [{"text": None if index == 9 else f"document {index} " * 20} for index in range(10)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    made = data(str(tmp_path / "a.jsonl"), cache_dir, max_bytes=1500)
    made._ranges.read(Lease(1, 0, 0, 3))
    with pytest.raises(ConfigError, match=r"row 9 of source 0 \(counted from 0\) of .*a\.jsonl has None"):
        made._ranges.read(Lease(2, 0, 0, 4))


def test_a_missing_column_is_refused(texts: Path, cache_dir: Path) -> None:
    with pytest.raises(ConfigError, match="text_column='body' is not in"):
        data(stored(texts, "jsonl"), cache_dir, text_column="body")
