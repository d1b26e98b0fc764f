"""Convert the errors of a handler for the caller, in the same way for all transports.

1. A `DiLoCoError` raised by a handler arrives at the caller as the same class with the same text.
2. Any other exception is a bug in the syncer. The syncer reports it, and the caller gets a `TransportError` that names
   its type. The syncer does not send text and traceback, because they may contain paths.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from lightning_diloco import errors
from lightning_diloco.errors import DiLoCoError, TransportError
from lightning_diloco.transport.base import Json

OnError = Callable[[Exception], None]

# The text becomes part of the trailing metadata of a gRPC call. gRPC may drop metadata above 8 KiB.
_MAX_TEXT_BYTES = 1500
_log = logging.getLogger(__name__)


def log_error(error: Exception) -> None:
    """Log an error with its traceback; the default report."""
    _log.error("internal error at the syncer", exc_info=error)


@contextmanager
def handling(on_error: OnError) -> Iterator[None]:
    """Apply rule 2 to a block that calls a handler."""
    try:
        yield
    except DiLoCoError:
        raise
    except Exception as error:
        raise internal_error(error, on_error) from error


def internal_error(error: Exception, on_error: OnError) -> TransportError:
    """Report a bug, and return the error for the caller (rule 2)."""
    on_error(error)
    return TransportError(f"internal error at the syncer: {type(error).__name__}; its log says more")


def to_json(error: DiLoCoError) -> Json:
    """Convert an error to JSON; its class becomes the nearest one in `lightning_diloco.errors`."""
    known = next(cls for cls in type(error).__mro__ if getattr(errors, cls.__name__, None) is cls)
    text = str(error).encode(errors="replace")
    if len(text) > _MAX_TEXT_BYTES:
        text = text[:_MAX_TEXT_BYTES] + "…".encode()
    return {"error": known.__name__, "text": text.decode(errors="ignore")}


def from_json(told: Json) -> DiLoCoError:
    """Convert JSON to an error; an unknown class becomes a `TransportError`."""
    cls = getattr(errors, str(told.get("error")), None)
    if not (isinstance(cls, type) and issubclass(cls, DiLoCoError)):
        cls = TransportError
    return cls(str(told.get("text")))
