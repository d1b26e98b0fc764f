"""Errors for models and tokenizers that cannot be loaded by name."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from lightning_diloco.errors import ConfigError


@contextmanager
def fetched(option: str, name: str) -> Iterator[None]:
    """Convert errors of a `from_pretrained` call to `ConfigError`; a context manager.

    Args:
        option: the option that holds the name.
        name: hub name or local folder.

    Raises:
        ConfigError: the name is neither a local folder nor available from the hub.
    """
    try:
        yield
    except (OSError, ValueError) as error:
        why = str(error).partition("\n")[0]
        raise ConfigError(
            f"{option}={name!r} was not found or not reached ({why}); it must be a hub name or a transformers folder; "
            f"check the name and the network, or run `hf download {name}` on a machine with network access and give "
            "the folder"
        ) from error
