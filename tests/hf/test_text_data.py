"""Preparing, caching and loading packed text."""

import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from lightning_diloco.errors import ConfigError
from lightning_diloco.hf import TextData
from lightning_diloco.hf.corpus import FileCorpus
from lightning_diloco.hf.packing import TRAIN, VALIDATION

MARKERS = ["marker" + chr(ord("a") + index) for index in range(12)]


def _data(texts: Path, cache_dir: Path, **options: Any) -> TextData:
    defaults = {"vocab_size": 300, "seq_len": 16, "batch_size": 4, "val_fraction": 0.25}
    return TextData(files=str(texts / "*.txt"), cache_dir=str(cache_dir), **{**defaults, **options})


def _ready(texts: Path, cache_dir: Path, **options: Any) -> TextData:
    data = _data(texts, cache_dir, **options)
    data.prepare_data()
    data.setup()
    return data


def _text(data: TextData, split: str) -> str:
    return data.tokenizer.decode([token for row in data._sequences[split] for token in row["input_ids"].tolist()])


def test_batches_are_packed_tokens_with_equal_labels(texts: Path, cache_dir: Path) -> None:
    data = _ready(texts, cache_dir)
    batches = list(data.train_dataloader())
    assert len(batches) == len(data._sequences[TRAIN]) // 4
    for batch in batches:
        assert batch["input_ids"].shape == (4, 16)
        assert batch["input_ids"].dtype == torch.int64
        assert torch.equal(batch["input_ids"], batch["labels"])


def test_documents_are_joined_by_the_end_token_without_loss(texts: Path, cache_dir: Path) -> None:
    data = _ready(texts, cache_dir)
    held_out = [
        text for text in (file.read_text() for file in sorted(texts.iterdir())) if text[:7] in _text(data, VALIDATION)
    ]
    joined = "".join(text + data.tokenizer.eos_token for text in held_out)
    found = _text(data, VALIDATION)
    assert joined.startswith(found)
    assert len(data.tokenizer(joined.removeprefix(found))["input_ids"]) < 16


def test_validation_holds_other_documents_than_training(texts: Path, cache_dir: Path) -> None:
    (texts / "copy.txt").write_text((texts / "00.txt").read_text())
    data = _ready(texts, cache_dir)
    sides = [{marker for marker in MARKERS if marker in _text(data, split)} for split in (TRAIN, VALIDATION)]
    assert sides[0].isdisjoint(sides[1])
    assert sides[0] | sides[1] == set(MARKERS)
    assert len(sides[1]) == 3


def test_shuffling_follows_the_seed(texts: Path, cache_dir: Path) -> None:
    first, again = (next(iter(_ready(texts, cache_dir).train_dataloader()))["input_ids"] for _ in range(2))
    assert torch.equal(first, again)
    assert not torch.equal(first, _ready(texts, cache_dir)._sequences[TRAIN][:4]["input_ids"])


def test_second_preparation_reads_the_cache(texts: Path, cache_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = _ready(texts, cache_dir)

    def refuse(*_: object) -> None:
        pytest.fail("the documents were loaded again")

    monkeypatch.setattr(FileCorpus, "load", refuse)
    second = _ready(texts, cache_dir)
    assert _text(second, TRAIN) == _text(first, TRAIN)


def test_changed_options_or_content_are_prepared_again(texts: Path, cache_dir: Path) -> None:
    folders = {_data(texts, cache_dir)._directory, _data(texts, cache_dir, seq_len=8)._directory}
    (texts / "00.txt").write_text("other")
    assert len(folders | {_data(texts, cache_dir)._directory}) == 3


def test_two_machines_prepare_equal_tokens(texts: Path, tmp_path: Path) -> None:
    one, two = (_ready(texts, tmp_path / name) for name in ("one", "two"))
    assert one._directory.name == two._directory.name
    for split in (TRAIN, VALIDATION):
        assert torch.equal(one._sequences[split][:]["input_ids"], two._sequences[split][:]["input_ids"])


def test_concurrent_preparations_do_the_work_once(
    texts: Path, cache_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loads, load, barrier = [], FileCorpus.load, threading.Barrier(2)

    def counted(self: FileCorpus, scratch_dir: Path) -> Any:
        loads.append(scratch_dir)
        return load(self, scratch_dir)

    def prepare() -> None:
        data = _data(texts, cache_dir)
        barrier.wait()
        data.prepare_data()

    monkeypatch.setattr(FileCorpus, "load", counted)
    threads = [threading.Thread(target=prepare) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(loads) == 1
    assert [folder.name for folder in cache_dir.iterdir() if folder.is_dir()] == [
        _data(texts, cache_dir)._directory.name
    ]


@pytest.mark.slow
def test_concurrent_processes_share_one_preparation(texts: Path, cache_dir: Path) -> None:
    code = (
        "import sys; from lightning_diloco.hf import TextData\n"
        "data = TextData(files=sys.argv[1], cache_dir=sys.argv[2], vocab_size=300, seq_len=16)\n"
        "data.prepare_data(); data.setup(); print(len(data.train_dataloader().dataset))"
    )
    command = [sys.executable, "-c", code, str(texts / "*.txt"), str(cache_dir)]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    outputs = [process.communicate(timeout=120)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    assert outputs[0] == outputs[1] != ""
    assert len([folder for folder in cache_dir.iterdir() if folder.is_dir()]) == 1


def test_leftovers_of_a_killed_preparation_are_replaced(texts: Path, cache_dir: Path) -> None:
    directory = _data(texts, cache_dir)._directory
    partial = directory.with_name(f"{directory.name}.killed.partial")
    (partial / TRAIN).mkdir(parents=True)
    (partial / TRAIN / "half").write_text("written")
    data = _ready(texts, cache_dir)
    assert not partial.exists()
    assert not (data._directory / TRAIN / "half").exists()


def test_a_failed_preparation_leaves_no_folder(texts: Path, cache_dir: Path) -> None:
    data = _data(texts, cache_dir, max_bytes=600)
    with pytest.raises(ConfigError, match="the corpus has 1 different documents; it needs at least 2"):
        data.prepare_data()
    assert not [folder for folder in cache_dir.iterdir() if folder.is_dir()]


def test_max_bytes_takes_whole_documents_in_order(texts: Path, cache_dir: Path) -> None:
    sizes = [file.stat().st_size for file in sorted(texts.iterdir())]
    data = _ready(texts, cache_dir, max_bytes=sum(sizes[:3]) + 1)
    both = _text(data, TRAIN) + _text(data, VALIDATION)
    assert [marker for marker in MARKERS if marker in both] == MARKERS[:3]


def test_a_pretrained_tokenizer_is_used_as_it_is(texts: Path, cache_dir: Path, tmp_path: Path) -> None:
    trained = _ready(texts, cache_dir).tokenizer
    trained.save_pretrained(tmp_path / "tokenizer")
    data = _ready(texts, cache_dir, tokenizer=str(tmp_path / "tokenizer"), vocab_size=1)
    assert data.tokenizer.get_vocab() == trained.get_vocab()


def test_a_local_tokenizer_is_identified_by_its_content(texts: Path, cache_dir: Path, tmp_path: Path) -> None:
    trained = _ready(texts, cache_dir).tokenizer
    folders = [tmp_path / name for name in ("tokenizer", "copy")]
    for folder in folders:
        trained.save_pretrained(folder)
        (folder / "model.safetensors").write_text(folder.name)  # weights beside a tokenizer do not count
    one, copy = (_data(texts, cache_dir, tokenizer=str(folder))._directory for folder in folders)
    assert one == copy

    trained.add_tokens(["marker"])
    trained.save_pretrained(folders[0])  # in place
    data = _ready(texts, cache_dir, tokenizer=str(folders[0]))
    assert data._directory != one
    assert data.tokenizer.get_vocab() == trained.get_vocab()


def test_a_tokenizer_without_an_end_token_is_refused(texts: Path, cache_dir: Path, tmp_path: Path) -> None:
    bare = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE({"a": 0}, [])))
    bare.save_pretrained(tmp_path / "bare")
    with pytest.raises(ConfigError, match="has no end-of-sequence token"):
        _data(texts, cache_dir, tokenizer=str(tmp_path / "bare")).prepare_data()


def test_a_tokenizer_that_cannot_be_downloaded_is_refused(texts: Path, cache_dir: Path) -> None:
    data = TextData(files=str(texts / "*.txt"), tokenizer="nobody/nothing", cache_dir=str(cache_dir))
    with pytest.raises(ConfigError, match="tokenizer='nobody/nothing' was not found or not reached"):
        data.prepare_data()


def test_missing_files_are_reported_before_any_work(cache_dir: Path, tmp_path: Path) -> None:
    data = TextData(files=str(tmp_path / "none" / "*.txt"), cache_dir=str(cache_dir))
    with pytest.raises(ConfigError, match=r"none/\*\.txt': no such file, looked in"):
        data.prepare_data()
    assert not cache_dir.exists()


def test_too_little_text_for_a_batch_is_an_error(texts: Path, cache_dir: Path) -> None:
    with pytest.raises(ConfigError, match=r"the train split has \d+ sequences of seq_len=16; it needs at least 4096"):
        _ready(texts, cache_dir, batch_size=4096).train_dataloader()


def test_a_split_without_one_sequence_says_so(texts: Path, cache_dir: Path) -> None:
    with pytest.raises(ConfigError, match="the train split has fewer than seq_len=100000 tokens"):
        _data(texts, cache_dir, seq_len=100_000).prepare_data()


def test_bad_options_are_reported_together() -> None:
    with pytest.raises(ConfigError) as caught:
        TextData(path="a", files="b", vocab_size=100, seq_len=1, val_fraction=1.0, max_bytes=0)
    assert [problem.split("=")[0] for problem in caught.value.problems] == [
        "seq_len", "vocab_size", "max_bytes", "val_fraction", "both path",
    ]  # fmt: skip
