"""Finding and loading documents."""

import json
import os
import shutil
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lightning_diloco.errors import ConfigError
from lightning_diloco.hf.corpus import TEXT, FileCorpus, HubCorpus, find_files, standard_library


def test_each_text_file_is_one_document_in_sorted_order(texts: Path, tmp_path: Path) -> None:
    documents = find_files(str(texts / "*.txt")).load(tmp_path / "scratch")
    assert list(documents[TEXT]) == [file.read_text() for file in sorted(texts.iterdir())]


def test_rows_of_jsonl_and_parquet_are_documents(tmp_path: Path) -> None:
    rows = ["first", "second"]
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps({"body": row, "id": 1}) for row in rows))
    pq.write_table(pa.table({"body": rows}), tmp_path / "b.parquet")
    for name in ("a.jsonl", "b.parquet"):
        documents = find_files(str(tmp_path / name), text_column="body").load(tmp_path / "scratch")
        assert documents.column_names == [TEXT]
        assert list(documents[TEXT]) == rows


def test_the_format_of_a_link_follows_its_own_name(tmp_path: Path) -> None:
    (tmp_path / "0a1b").write_text('{"text": "row"}')  # as in download caches
    (tmp_path / "rows.jsonl").symlink_to(tmp_path / "0a1b")
    documents = find_files(str(tmp_path / "rows.jsonl")).load(tmp_path / "scratch")
    assert list(documents[TEXT]) == ["row"]


def test_fingerprint_depends_on_content_and_order_but_not_on_the_location(texts: Path, tmp_path: Path) -> None:
    files = sorted(texts.iterdir())[:2]
    before = FileCorpus(tuple(files)).fingerprint()
    assert FileCorpus(tuple(reversed(files))).fingerprint() != before
    moved = tmp_path / "moved"
    texts.rename(moved)
    files = [moved / file.name for file in files]
    assert FileCorpus(tuple(files)).fingerprint() == before
    files[0].write_text(files[0].read_text() + "!")
    assert FileCorpus(tuple(files)).fingerprint() != before


def test_copies_of_a_folder_are_the_same_corpus_and_other_content_is_another_corpus(
    texts: Path, tmp_path: Path
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(texts, copy)
    os.utime(copy / "00.txt", (1, 1))
    (copy / ".DS_Store").write_text("hidden")

    def identities(folder: Path, split: str = "train") -> tuple[str, str]:
        corpus = HubCorpus(str(folder), None, split, TEXT)
        return corpus.fingerprint(), corpus.stream_name()

    before = identities(texts)
    assert identities(copy) == before
    other_split = identities(texts, "test")
    (copy / "00.txt").write_text((copy / "00.txt").read_text() + "!")
    longer = identities(copy)
    (texts / "00.txt").rename(texts / "renamed.txt")
    renamed = identities(texts)
    for index in range(2):
        assert len({found[index] for found in (before, other_split, longer, renamed)}) == 4


def test_missing_files_are_all_named(texts: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        find_files([str(texts / "*.txt"), "gone.txt", "nowhere/*.md"])
    assert len(caught.value.problems) == 2
    assert "'gone.txt': no such file" in caught.value.problems[0]
    assert "'nowhere/*.md'" in caught.value.problems[1]


def test_files_of_several_kinds_are_refused(texts: Path) -> None:
    (texts / "rows.jsonl").write_text('{"text": "x"}')
    with pytest.raises(ConfigError, match=r"several kinds \(json, text\)"):
        find_files(str(texts / "*"))


def test_wrong_text_column_names_the_columns(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"body": "x", "id": 1}')
    with pytest.raises(ConfigError, match=r"text_column='text' is not in .*a\.jsonl; it has body, id"):
        find_files(str(tmp_path / "a.jsonl")).load(tmp_path / "scratch")


@pytest.mark.parametrize(
    ("name", "content", "kind"),
    [("a.parquet", b"not parquet", "parquet"), ("a.jsonl", b"{", "json"), ("a.txt", b"\xff\xfe\x00", "text")],
)
def test_unreadable_files_are_named_when_loaded_or_streamed(
    tmp_path: Path, name: str, content: bytes, kind: str
) -> None:
    (tmp_path / name).write_bytes(content)
    corpus = find_files(str(tmp_path / name))
    with pytest.raises(ConfigError, match=rf"{name} cannot be read as {kind} \(.+\); .* leave it out of files="):
        corpus.load(tmp_path / "scratch")
    with pytest.raises(ConfigError, match=f"{name} cannot be read as {kind}"):
        next(iter(corpus.stream()))


def test_unreachable_dataset_is_named() -> None:
    with pytest.raises(ConfigError, match="path='nobody/nothing' was not found or not reached"):
        HubCorpus("nobody/nothing", None, "train", TEXT).fingerprint()


def test_standard_library_has_sources_and_no_tests_or_build_records() -> None:
    files = standard_library().files
    names = {file.name for file in files}
    assert {"argparse.py", "base_events.py"} <= names
    assert not any("test" in file.parts or file.name.startswith("_sysconfigdata") for file in files)
    assert list(files) == sorted(files)
