"""Times of training and exchanges in a Chrome trace of a GPU: how long each takes, and how much they overlap.

Training is the stream with the longest work. All other streams are those of exchanges.
"""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt

Span = tuple[float, float]  # begin and end in seconds
KERNELS, COPIES = "kernels", "copies"
WORK = {"kernel": KERNELS, "gpu_memcpy": COPIES, "gpu_memset": KERNELS}


class Timeline:
    """The GPU's work in a trace.

    Args:
        path: a Chrome trace, as torch.profiler exports it, .json.gz.

    Attributes:
        training: work of the training stream, merged, in seconds since the first of all.
        exchange: kernels and copies of all other streams, in the same form.

    Raises:
        IndexError: the trace has no work of a GPU.
    """

    def __init__(self, path: Path) -> None:
        streams: dict[Any, dict[str, list[Span]]] = defaultdict(lambda: {KERNELS: [], COPIES: []})
        for event in json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]:
            if (kind := WORK.get(event.get("cat"))) is not None:
                began_s = float(event["ts"]) / 1e6
                streams[event["args"]["stream"]][kind].append((began_s, began_s + float(event["dur"]) / 1e6))
        others = sorted(streams.values(), key=lambda stream: seconds(stream[KERNELS]))
        training = others.pop()
        first_s = min(span[0] for stream in (training, *others) for spans in stream.values() for span in spans)
        self.training = merged(chain(*training.values()), first_s)
        self.exchange = {
            kind: merged(chain(*(stream[kind] for stream in others)), first_s) for kind in (KERNELS, COPIES)
        }

    def row(self, num_steps: int) -> dict[str, Any]:
        """Return a row of a table: milliseconds in a step, and the share of the exchanges that is beside training."""
        row: dict[str, Any] = {"training [ms/step]": 1e3 * seconds(self.training) / num_steps}
        for kind, spans in self.exchange.items():
            total_s = seconds(spans)
            row[f"{kind} of exchanges [ms/step]"] = 1e3 * total_s / num_steps
            row[f"{kind} beside training"] = seconds(common(spans, self.training)) / total_s if total_s else 0.0
        return row

    def draw(self, path: Path) -> None:
        """Draw the streams over time."""
        figure, axes = plt.subplots(figsize=(9, 2.2), layout="constrained")
        lanes = {"training": self.training, **{f"exchange: {kind}": spans for kind, spans in self.exchange.items()}}
        for at, (spans, color) in enumerate(zip(reversed(lanes.values()), ("C1", "C1", "C0"), strict=True)):
            axes.broken_barh([(1e3 * a, 1e3 * (b - a)) for a, b in spans], (at - 0.35, 0.7), color=color, linewidth=0)
        axes.set_yticks(range(len(lanes)), [*reversed(lanes)])
        axes.set_xlabel("ms")
        axes.spines[["top", "right"]].set_visible(False)
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def merged(spans: Iterable[Span], origin_s: float = 0.0) -> list[Span]:
    """Sort spans and join those that touch; times become those since the origin."""
    found: list[Span] = []
    for began_s, ended_s in sorted((a - origin_s, b - origin_s) for a, b in spans):
        if found and began_s <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], ended_s))
        else:
            found.append((began_s, ended_s))
    return found


def common(some: Sequence[Span], others: Sequence[Span]) -> list[Span]:
    """Return the times that are in both; each is merged."""
    found, k = [], 0
    for began_s, ended_s in some:
        while k < len(others) and others[k][1] <= began_s:
            k += 1
        at = k
        while at < len(others) and others[at][0] < ended_s:
            found.append((max(began_s, others[at][0]), min(ended_s, others[at][1])))
            at += 1
    return found


def seconds(spans: Iterable[Span]) -> float:
    """Return the sum of the spans' lengths."""
    return sum(b - a for a, b in spans)
