"""Makes texts from other processes, and errors of the operating system, fit to print on a terminal.

Learners choose the names of their metrics and the reasons why they stop. Control characters in these texts could move
the cursor, change the window's title, or hide a line. Direction marks could reverse text. Such characters are printed
as escapes, for example `\\x1b`.

Source: our choice; the categories are Unicode's Cc and Cf.
"""

from __future__ import annotations

import unicodedata
from typing import TypeVar, cast

T = TypeVar("T")


def printable(said: T) -> T:
    """Return a JSON value with the control characters in its texts escaped, except line breaks."""
    if isinstance(said, str):
        return cast("T", said if said.isprintable() else "".join(map(_shown, said)))
    if isinstance(said, dict):
        return cast("T", {printable(key): printable(value) for key, value in said.items()})
    if isinstance(said, list | tuple):
        return cast("T", type(said)(map(printable, said)))
    return said


def _shown(character: str) -> str:
    does_something = unicodedata.category(character) in ("Cc", "Cf", "Cs") and character != "\n"
    return character.encode("unicode_escape").decode() if does_something else character


def reason(error: OSError) -> str:
    """Return why the operating system refused a path."""
    if isinstance(error, (FileExistsError, NotADirectoryError)):
        return "is a file, or inside one, and must be a folder"
    return error.strerror or str(error)
