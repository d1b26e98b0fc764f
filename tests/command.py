"""Runs `diloco` in a new process, with the package of this checkout."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
WITHIN_S = 300.0


def start(folder: Path, *words: object, **env: str) -> subprocess.Popen[str]:
    """Start `diloco WORDS` in a folder; its output and its errors share one stream."""
    return subprocess.Popen(stdout=subprocess.PIPE, stderr=subprocess.STDOUT, **_called(folder, words, env))


def run(folder: Path, *words: object, **env: str) -> subprocess.CompletedProcess[str]:
    """Run `diloco WORDS` in a folder to its end."""
    return subprocess.run(capture_output=True, timeout=WITHIN_S, check=False, **_called(folder, words, env))


def succeed(folder: Path, *words: object, **env: str) -> str:
    """Run `diloco WORDS`; it must succeed. Return its output."""
    ended = run(folder, *words, **env)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


def _called(folder: Path, words: tuple[object, ...], env: dict[str, str]) -> dict[str, Any]:
    return {
        "args": (sys.executable, "-m", "lightning_diloco.cli.main", *map(str, words)),
        "cwd": folder,
        "env": {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **env},
        "text": True,
    }
