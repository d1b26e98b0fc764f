"""The losses that are shown for a run: the loss of each learner while it trains, and the loss of the final anchor.

1. The user's module logs the metrics. A loss is recognized by its name; there may be none.
2. The final anchor's loss comes from the last validation of a fit, if Lightning validates after the run was left. If it
   does not (after early stopping, for example), the last learner of a run that others have started validates once more.
   That is an ordinary validation, which loggers and callbacks see. If it fails, only a message says so, because the
   model is trained. A learner that has started the run by itself adds no validation.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_diloco.devices.streams import to_be_read
from lightning_diloco.protocol.metric_names import TRAIN_LOSSES, VAL_LOSSES

if TYPE_CHECKING:
    import lightning.pytorch as pl

log = logging.getLogger(__name__)

# A loss and None, or None and the reason why there is no loss.
Verdict = tuple[float | None, str | None]

NOT_VALIDATED = (
    "no validation after the last contributions were merged: stopped early, no validation_step, no validation data, or "
    "limit_val_batches=0"
)
NOT_DRAINED = "the last learner left before all of its contributions were merged"


def train_loss(trainer: pl.Trainer, output: object) -> Callable[[], float | None]:
    """Return a function that reads the loss of the step that has just ended.

    Args:
        trainer: a Trainer in a training step.
        output: what the optimizer's closure returned; a part of the loss if gradients are accumulated.

    Returns:
        A function that waits for the device and returns the loss, in any thread. It returns None if there is no loss,
        or if the loss is not finite, because messages cannot carry such a value. A loss that is found by its name is on
        the host already. A loss that is sharded over ranks is gathered here, by all ranks.
    """
    if isinstance(output, Tensor) and output.numel() == 1:
        whole = output.full_tensor() if isinstance(output, DTensor) else output
        read, times = to_be_read(whole), trainer.accumulate_grad_batches
        return lambda: _finite(read() * times)
    named = _named_loss(trainer.callback_metrics, TRAIN_LOSSES)
    return lambda: _finite(named)


def val_loss(trainer: pl.Trainer) -> float | None:
    """Return the loss of the validation that has just ended; None if there is none, or if it is not finite."""
    return _finite(_named_loss(trainer.callback_metrics, VAL_LOSSES))


def validate_final(trainer: pl.Trainer) -> str | None:
    """Validate the present parameters at the end of a fit, as Lightning does during training.

    Returns:
        Why it failed; None if it did not fail, or if there is nothing to validate.
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
    """Return the loss of the validation that ends now, without metrics of training."""
    metrics = validated_metrics(trainer)
    loss = _named_loss(metrics, (*VAL_LOSSES, *(name for name in metrics if "loss" in name)))
    if loss is None:
        return None, f"validation logs no loss: no name contains 'loss' (found: {', '.join(metrics) or 'nothing'})"
    return (loss, None) if math.isfinite(loss) else (None, f"the loss is {loss}")


def validated_metrics(trainer: pl.Trainer) -> Mapping[str, Any]:
    """Return the metrics that the validation that ends now has logged for callbacks."""
    return trainer._logger_connector.metrics["callback"]


def _finite(loss: float | None) -> float | None:
    return loss if loss is not None and math.isfinite(loss) else None


def _named_loss(metrics: Mapping[str, Any], names: Iterable[str]) -> float | None:
    return next((float(metrics[name]) for name in names if name in metrics), None)
