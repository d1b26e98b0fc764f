"""Models and tokenizers by name: what cannot be had is said at once, with what to do."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from lightning_diloco.errors import ConfigError


@contextmanager
def fetched(option: str, name: str) -> Iterator[None]:
    """Around a `from_pretrained`.

    Args:
        option: by which the user chose it.
        name: hub name or local folder.

    Raises:
        ConfigError: it is neither here nor to be had from the hub.
    """
    try:
        yield
    except (OSError, ValueError) as error:
        why = str(error).partition("\n")[0]
        raise ConfigError(
            f"{option}={name!r} was not found or not reached ({why}); it must be a hub name or a folder of "
            f"transformers; check the name and the network, or fetch it where there is one, `hf download {name}`, and "
            "give the folder"
        ) from error
