"""The ranks of one learner: what they tell each other, on CPU groups of their own, beside the ones that train.

1. `begin` and `end` are called by the training threads: one asynchronous sum per step. Rank 0 says what it promises,
   everybody its tokens; all know all of it when the step ends, and nobody has waited for more than the step itself.
2. `tell` is called on rank 0 and `listen` on the others, by one thread beside training: commands and their bytes, in
   order, answered when they are done. What takes longer, uploading, has a channel of its own (`uploads`).
3. A pulse says that all ranks live. A rank that is stopped stops it: then this learner says nothing to the syncer
   either, and lapses there. A rank that is gone is an error.
4. The groups outlive any pause in training: nothing here ends because it was quiet for long.
5. Groups end before the interpreter does. gloo's threads let go of tensors a moment after whoever waited for them goes
   on; one that does so in an interpreter that is being taken down aborts the process, whose work was done. A model may
   hold a group for longer: then its threads become idle before (`process/exit.py`).
"""

from __future__ import annotations

import atexit
import json
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import count
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _get_default_store

from lightning_diloco.errors import ConfigError, DiLoCoError
from lightning_diloco.learner.ranks.channel import Channel, patient_group
from lightning_diloco.learner.ranks.scatter_batches import BatchScatter
from lightning_diloco.process.exit import arm_hard_exit, disarm_hard_exit, let_threads_become_idle
from lightning_diloco.process.threads import Crew

PULSE_S = 1.0
COME_S = 0.01
_numbers = count()  # of what is made here: the same on all ranks
T = TypeVar("T")


class Ranks:
    """One rank's view of its learner; made by all ranks at the same time, with torch.distributed initialized.

    Attributes:
        rank, size: in the learner.
        num_begun: steps agreed on so far; the same on all ranks.
        uploads: for what rank 0 has the others upload.
    """

    def __init__(self) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.num_begun, self._number = 0, next(_numbers)
        self._texts, self._steps = patient_group(), patient_group()
        self._pulses, self._commands = patient_group(yields=True), Channel(yields=True)
        self.uploads = Channel(yields=True)
        self._telling = threading.Lock()
        self._begun: tuple[dist.Work, Tensor] | None = None
        self._handouts: list[BatchScatter] = []
        self._beat_s = time.monotonic()
        arm_hard_exit()

    def __getstate__(self) -> dict[str, Any]:
        return {}  # a copy, such as in a worker of a data loader, has no part in it

    def close(self) -> None:
        """End the groups, when no thread uses them any more, and see to it that those of training end in time, too."""
        self._commands.close()
        self.uploads.close()
        for handout in self._handouts:
            handout.close()
        for group in (self._texts, self._steps, self._pulses):
            dist.destroy_process_group(group)
        del self._texts, self._steps, self._commands, self._pulses, self._handouts, self.uploads
        atexit.unregister(_end_training_groups)
        atexit.register(_end_training_groups)
        disarm_hard_exit()

    # ----------------------------------------------------------------------------------------------- training threads

    def share(self, values: object) -> list[Any]:
        """What each rank has here, by rank: plain values. Waits for all; one thread of each rank at a time."""
        return [json.loads(text) for text in self._all_texts(json.dumps(values))]

    def compare(self, settings: Mapping[str, object]) -> None:
        """Before anything else: all ranks must have been configured alike.

        Raises:
            ConfigError: on all ranks, naming each setting that differs.
        """
        found = [json.loads(text) for text in self._all_texts(json.dumps(settings, sort_keys=True, default=repr))]
        problems = [
            f"{name}={found[0].get(name)!r} on rank 0, but {other.get(name)!r} on rank {rank}: all ranks of a learner "
            "must have the same settings; start them with the same script and environment"
            for rank, other in enumerate(found)
            for name in sorted(found[0].keys() | other.keys())
            if found[0].get(name) != other.get(name)
        ]
        if problems:
            raise ConfigError(problems)

    def hand_out(self, shares: Sequence[int]) -> BatchScatter:
        """A way for rows from rank 0 to all, from now on; outside of steps, by all ranks at the same time.

        Args:
            shares: by rank, which part of each batch it takes.
        """
        self._handouts.append(BatchScatter(shares))
        return self._handouts[-1]

    def begin(self, numbers: Sequence[int]) -> None:
        """Start the sum of these over all ranks; does not wait."""
        sums = torch.tensor(numbers, dtype=torch.int64)
        work = dist.all_reduce(sums, group=self._steps, async_op=True)
        assert work is not None and self._begun is None
        self._begun, self.num_begun = (work, sums), self.num_begun + 1

    def end(self) -> list[int]:
        """The sums; they are there as soon as all ranks have begun."""
        assert self._begun is not None, "begin() comes first"
        (work, sums), self._begun = self._begun, None
        work.wait()
        return [int(number) for number in sums.tolist()]

    def count(self, mine: bool) -> int:
        """Of how many ranks this is true. Waits for all; between two steps."""
        number = torch.tensor([int(mine)])
        dist.all_reduce(number, group=self._steps)
        return int(number)

    def all_come(self, within_s: float) -> bool:
        """Whether all ranks call this after the same step; those that do are told the same.

        No collective: ranks that do not call it know nothing of it.

        Args:
            within_s: how long who calls it waits for the others.
        """
        store, key = _get_default_store(), f"diloco/all_come/{self._number}/{self.num_begun}"
        until_s, said = time.monotonic() + within_s, "not all"
        if store.add(f"{key}/num", 1) == self.size:
            said = "all"
        while said != "all" and not store.check([f"{key}/said"]) and time.monotonic() < until_s:
            time.sleep(COME_S)
        return bool(store.compare_set(f"{key}/said", "", said) == b"all")  # the first to say it has said it for all

    # -------------------------------------------------------------------------------------------------------- commands

    def tell(self, command: Mapping[str, Any], payload: Tensor | None = None) -> None:
        """Rank 0: have all others do this, and wait until they have.

        Args:
            command: plain values.
            payload: 1-D uint8 on the host.

        Raises:
            DiLoCoError: one of them failed; it says why itself.
        """
        with self._telling:
            self._tell(command, payload)

    def collect(
        self, command: Mapping[str, Any], numels: Sequence[int], dtype: torch.dtype = torch.float32
    ) -> list[Tensor]:
        """Rank 0: have the others do this, and take what each of them `deliver`s: so many numbers."""
        with self._telling:
            self._tell(command)
            found = [torch.empty(numel, dtype=dtype) for numel in numels]
            for rank, values in enumerate(found, start=1):
                if values.numel():
                    dist.recv(values, rank, group=self._commands.group)
            return found

    def deliver(self, values: Tensor) -> None:
        """Another rank: what `collect` asked for, after the answer."""
        if values.numel():
            dist.send(values, 0, group=self._commands.group)

    def together(self, command: Mapping[str, Any], do: Callable[[], T]) -> T:
        """Rank 0: have the others begin this, and do one's own part of it."""
        with self._telling:
            self._tell(command)
            return do()

    def swap(self, outgoing: Sequence[Tensor], incoming: Sequence[Tensor]) -> None:
        """Send to each rank what is meant for it, and fill what comes from it; within a command, all ranks at once.

        Args:
            outgoing: by rank; own and empty ones do not travel.
            incoming: by rank, overwritten.
        """
        kinds = ((dist.isend, outgoing), (dist.irecv, incoming))
        works = [
            move(values, rank, group=self._commands.group)
            for move, by_rank in kinds
            for rank, values in enumerate(by_rank)
            if rank != self.rank and values.numel()
        ]
        for work in works:
            work.wait()

    def _tell(self, command: Mapping[str, Any], payload: Tensor | None = None) -> None:
        self._commands.tell(command, payload)
        self._end_command(True)

    def listen(self) -> tuple[dict[str, Any], Tensor]:
        """Another rank: the next command and its payload; `answer` must follow."""
        return self._commands.hear()

    def answer(self, done: bool) -> None:
        """Another rank: the command that was heard last is done, or failed.

        Raises:
            DiLoCoError: it failed elsewhere.
        """
        self._end_command(done)

    def _end_command(self, done: bool) -> None:
        if not self._commands.all_could(done) and done:
            raise DiLoCoError("a rank of this learner could not follow rank 0; its own output says why; start again")

    def _all_texts(self, text: str) -> list[str]:
        mine = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
        size = torch.tensor([mine.numel()])
        sizes = [torch.empty_like(size) for _ in range(self.size)]
        dist.all_gather(sizes, size, group=self._texts)
        longest = max(map(int, sizes))
        padded = torch.nn.functional.pad(mine, (0, longest - mine.numel()))
        texts = [torch.empty_like(padded) for _ in range(self.size)]
        dist.all_gather(texts, padded, group=self._texts)
        return [bytes(text[: int(size)].tolist()).decode() for text, size in zip(texts, sizes, strict=True)]

    # ----------------------------------------------------------------------------------------------------------- pulse

    @property
    def silent_s(self) -> float:
        """For how long not all ranks have been heard."""
        return max(0.0, time.monotonic() - self._beat_s - PULSE_S)

    def pulse(self, crew: Crew) -> None:
        """Beat until one rank's crew stops.

        Raises:
            DiLoCoError: a rank is gone.
        """
        is_last = torch.zeros(1, dtype=torch.int64)
        while not int(is_last):
            is_last.fill_(crew.stopping.wait(PULSE_S))
            try:
                dist.all_reduce(is_last, group=self._pulses)
            except RuntimeError as error:
                if not crew.stopping.is_set():
                    raise DiLoCoError(
                        f"a rank of this learner is gone ({error}); a learner trains with all of its {self.size} "
                        "ranks; start it again"
                    ) from error
                return
            self._beat_s = time.monotonic()


def _end_training_groups() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
    let_threads_become_idle()
