"""Small texts, and no network."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # read once, when huggingface_hub is first imported

from pathlib import Path

import pytest

NUM_DOCUMENTS = 12


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    """Return a folder of text files; file i consists of the word `marker<letter i>` and common words."""
    folder = tmp_path / "texts"
    folder.mkdir()
    for index in range(NUM_DOCUMENTS):
        marker = "marker" + chr(ord("a") + index)
        lines = [f"{marker} line {number} of a short text about nothing" for number in range(10 + index)]
        (folder / f"{index:02d}.txt").write_text("\n".join(lines))
    return folder


@pytest.fixture
def cache_dir(tmp_path: Path) -> Path:
    return tmp_path / "cache"
