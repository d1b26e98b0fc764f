"""What others said, as a terminal may be shown it.

A learner names its metrics and says why it stops in words of its own. Control characters in them would move the cursor,
change the window's title, or hide a line; and marks of direction would turn text around. They are shown as `\\x1b`.

Source: our choice; the categories are Unicode's Cc and Cf.
"""

from __future__ import annotations

import unicodedata
from typing import TypeVar, cast

T = TypeVar("T")


def printable(said: T) -> T:
    """The same value, of JSON, with no character in its texts that does something; lines stay lines."""
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
