"""How errors cross the seam, the same over every transport.

1. An error of our tree, raised by a handler, arrives at the caller as the same class with the same text.
2. Anything else a handler raises is a defect of the syncer: it is reported there, and the caller gets a
   `TransportError` that names its type: text and traceback may name paths, and stay there.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from lightning_diloco import errors
from lightning_diloco.errors import DiLoCoError, TransportError
from lightning_diloco.transport.base import Json

OnError = Callable[[Exception], None]

# The trailing metadata of a gRPC call, of which this becomes a part, may be dropped whole above 8 KiB.
_MAX_TEXT_BYTES = 1500
_log = logging.getLogger(__name__)


def log_error(error: Exception) -> None:
    """The default report: one log record with the traceback."""
    _log.error("internal error at the syncer", exc_info=error)


@contextmanager
def handling(on_error: OnError) -> Iterator[None]:
    """Around every call of a handler: rule 2."""
    try:
        yield
    except DiLoCoError:
        raise
    except Exception as error:
        raise internal_error(error, on_error) from error


def internal_error(error: Exception, on_error: OnError) -> TransportError:
    """Report a defect, and say what may be said of it: rule 2."""
    on_error(error)
    return TransportError(f"internal error at the syncer: {type(error).__name__}; its log says more")


def to_json(error: DiLoCoError) -> Json:
    """What is said of an error; its class is the nearest one that `lightning_diloco.errors` has."""
    known = next(cls for cls in type(error).__mro__ if getattr(errors, cls.__name__, None) is cls)
    text = str(error).encode(errors="replace")
    if len(text) > _MAX_TEXT_BYTES:
        text = text[:_MAX_TEXT_BYTES] + "…".encode()
    return {"error": known.__name__, "text": text.decode(errors="ignore")}


def from_json(told: Json) -> DiLoCoError:
    """The inverse of `to_json`; a class unknown here becomes a `TransportError`."""
    cls = getattr(errors, str(told.get("error")), None)
    if not (isinstance(cls, type) and issubclass(cls, DiLoCoError)):
        cls = TransportError
    return cls(str(told.get("text")))
