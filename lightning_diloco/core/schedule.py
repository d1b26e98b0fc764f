"""The exchange schedule of the fragments.

Fragment p is due floor((p + 1) * H / P) steps into each period of H steps, which spreads the P exchanges evenly.

Source: arXiv 2604.21428, the schedule of Algorithm 1; with P = H exactly one fragment is due at every step.
"""

from __future__ import annotations

from lightning_diloco.errors import ConfigError


def fragment_due(step: int, *, sync_every: int, num_fragments: int) -> int | None:
    """Return the fragment due after this inner step, or None.

    Args:
        step: number of completed inner steps, >= 1.
        sync_every: H, steps between two exchanges of the same fragment.
        num_fragments: P, 1 <= P <= H.

    Raises:
        ConfigError: step < 1, or not 1 <= P <= H.
    """
    if step < 1 or not 1 <= num_fragments <= sync_every:
        raise ConfigError(
            f"step={step}, sync_every={sync_every}, num_fragments={num_fragments}: "
            "must be step >= 1 and 1 <= num_fragments <= sync_every; pass completed steps and a validated RunConfig"
        )
    position = (step - 1) % sync_every + 1
    candidate = -(-position * num_fragments // sync_every) - 1  # the only p that can be due at this step
    return candidate if (candidate + 1) * sync_every // num_fragments == position else None
