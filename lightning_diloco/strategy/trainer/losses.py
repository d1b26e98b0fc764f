"""The two losses people see beside a run: each learner's own while it trains, and the final anchor's.

1. Metrics are the user's: a loss is known by its name, and there may be none.
2. The final anchor's is that of the last validation of a fit, if Lightning validates after the run was left. If it does
   not, such as after early stopping, the last learner of a run that others have started validates once more, for the
   run's summary. That is an ordinary validation, seen by loggers and callbacks. It fails for itself: the model is
   trained, whatever its last validation does. A learner that has started the run by itself runs no validation that
   Lightning would not.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_diloco.devices.scalars import to_be_read

if TYPE_CHECKING:
    import lightning.pytorch as pl

log = logging.getLogger(__name__)

_TRAIN_NAMES = ("train/loss", "train_loss", "loss")
_VAL_NAMES = ("val/loss", "val_loss")
# A loss and no reason, or None and the reason.
Verdict = tuple[float | None, str | None]

NOT_VALIDATED = (
    "no validation after the last contributions were merged: stopped early, no validation_step, no validation data, or "
    "limit_val_batches=0"
)
NOT_DRAINED = "the last learner left before all of its contributions were merged"


def train_loss(trainer: pl.Trainer, output: object) -> Callable[[], float | None]:
    """The loss of the step just done.

    Args:
        trainer: in a training step.
        output: what the optimizer's closure returned; a part of the loss where gradients are accumulated.

    Returns:
        Reads the loss, in any thread, and waits for the device to have computed it; None if it cannot be told, or is
        not finite, which messages cannot carry. A loss that is known by its name only has been waited for already, and
        one that is spread over ranks was put together, by all of them.
    """
    if isinstance(output, Tensor) and output.numel() == 1:
        whole = output.full_tensor() if isinstance(output, DTensor) else output
        read, times = to_be_read(whole), trainer.accumulate_grad_batches
        return lambda: _finite(read() * times)
    named = _named_loss(trainer.callback_metrics, _TRAIN_NAMES)
    return lambda: _finite(named)


def val_loss(trainer: pl.Trainer) -> float | None:
    """The loss of the validation just done; None if it cannot be told, or is not finite."""
    return _finite(_named_loss(trainer.callback_metrics, _VAL_NAMES))


def validate_final(trainer: pl.Trainer) -> str | None:
    """Validate the parameters as they are now, at the end of a fit, as Lightning does in the midst of training.

    Returns:
        Why that failed; None: it did not, or there is nothing to validate.
    """
    if not trainer.enable_validation:
        return None
    log.info("validating the final anchor")
    trainer.validating = True
    try:
        trainer.fit_loop.epoch_loop.val_loop.run()
    except Exception as error:
        log.exception("the final anchor could not be validated")
        return f"validation failed: {error!r}"
    finally:
        trainer.training = True
    return None


def verdict(trainer: pl.Trainer) -> Verdict:
    """What the validation that ends now found; no metrics of training are among it."""
    metrics = validated_metrics(trainer)
    loss = _named_loss(metrics, (*_VAL_NAMES, *(name for name in metrics if "loss" in name)))
    if loss is None:
        return None, f"validation logs no loss: no name contains 'loss' (found: {', '.join(metrics) or 'nothing'})"
    return (loss, None) if math.isfinite(loss) else (None, f"the loss is {loss}")


def validated_metrics(trainer: pl.Trainer) -> Mapping[str, Any]:
    """What the validation that ends now has logged for callbacks, by name."""
    return trainer._logger_connector.metrics["callback"]


def _finite(loss: float | None) -> float | None:
    return loss if loss is not None and math.isfinite(loss) else None


def _named_loss(metrics: Mapping[str, Any], names: Iterable[str]) -> float | None:
    return next((float(metrics[name]) for name in names if name in metrics), None)
