"""Communication between the ranks of one learner, on CPU groups that are separate from those of training.

1. The training threads call `begin` and `end`: one asynchronous sum per step. Rank 0 contributes its promises, and each
   rank contributes its tokens. All ranks know the sums when the step ends. The sum runs during the step, so it adds no
   wait of its own.
2. Rank 0 calls `tell` and the other ranks call `listen`, in parallel with training. Commands and their payloads are
   transferred in order, and a rank answers a command when it is done. Uploads take longer, so they have a channel of
   their own (`uploads`).
3. The ranks exchange a pulse every PULSE_S. If a rank is suspended, the pulse stops. Rank 0 then sends nothing to the
   syncer, and the learner lapses. If a rank is gone, the pulse raises an error.
4. A long pause in training is not an error, because the timeout of the groups is 30 days.
5. The groups are destroyed before the interpreter shuts down. gloo's threads release tensors a moment after the waiting
   thread continues. If this happens during the shutdown, the process aborts although its work is done. A model may keep
   a group for longer; the process then waits until the group's threads are idle (`process/exit.py`).
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
_numbers = count()  # counts the `Ranks` of a process; the same on all ranks
T = TypeVar("T")


class Ranks:
    """One rank's access to all ranks. All ranks make it at the same time, with torch.distributed initialized.

    Attributes:
        rank, size: index of this rank, and number of ranks of the learner.
        num_begun: number of calls of `begin` so far; the same on all ranks.
        uploads: channel on which rank 0 orders uploads.
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
        return {}  # a copy, for example in a data loader's worker, cannot communicate

    def close(self) -> None:
        """Destroy the groups. Call this when no thread uses them.

        The groups of training are destroyed when the process exits, before the interpreter shuts down.
        """
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
        """Return the values of all ranks, by rank. Waits for all ranks; one thread of each rank at a time.

        Args:
            values: values of this rank that JSON can represent.
        """
        return [json.loads(text) for text in self._all_texts(json.dumps(values))]

    def compare(self, settings: Mapping[str, object]) -> None:
        """Check that all ranks have the same settings. Call this before anything else.

        Raises:
            ConfigError: settings differ; it is raised on all ranks, and names each of these settings.
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
        """Make a `BatchScatter`. All ranks call this at the same time, between steps.

        Args:
            shares: index of each rank's share of a batch.
        """
        self._handouts.append(BatchScatter(shares))
        return self._handouts[-1]

    def begin(self, numbers: Sequence[int]) -> None:
        """Start to sum these numbers over all ranks; does not wait."""
        sums = torch.tensor(numbers, dtype=torch.int64)
        work = dist.all_reduce(sums, group=self._steps, async_op=True)
        assert work is not None and self._begun is None
        self._begun, self.num_begun = (work, sums), self.num_begun + 1

    def end(self) -> list[int]:
        """Return the sums. Waits until all ranks have called `begin`."""
        assert self._begun is not None, "begin() comes first"
        (work, sums), self._begun = self._begun, None
        work.wait()
        return [int(number) for number in sums.tolist()]

    def count(self, mine: bool) -> int:
        """Return on how many ranks `mine` is true. Waits for all ranks; call this between two steps."""
        number = torch.tensor([int(mine)])
        dist.all_reduce(number, group=self._steps)
        return int(number)

    def all_come(self, within_s: float) -> bool:
        """Return whether every rank calls this within `within_s` after the same step. All callers get the same result.

        This is not a collective operation. A rank may leave it out.

        Args:
            within_s: how long a rank waits for the other ranks.
        """
        store, key = _get_default_store(), f"diloco/all_come/{self._number}/{self.num_begun}"
        until_s, said = time.monotonic() + within_s, "not all"
        if store.add(f"{key}/num", 1) == self.size:
            said = "all"
        while said != "all" and not store.check([f"{key}/said"]) and time.monotonic() < until_s:
            time.sleep(COME_S)
        return bool(store.compare_set(f"{key}/said", "", said) == b"all")  # the first rank decides for all

    # -------------------------------------------------------------------------------------------------------- commands

    def tell(self, command: Mapping[str, Any], payload: Tensor | None = None) -> None:
        """Have all other ranks carry out a command, and wait until they have. Rank 0.

        Args:
            command: values that JSON can represent.
            payload: 1-D uint8 on the host; None: empty.

        Raises:
            DiLoCoError: a rank has failed; its own output says why.
        """
        with self._telling:
            self._tell(command, payload)

    def collect(
        self, command: Mapping[str, Any], numels: Sequence[int], dtype: torch.dtype = torch.float32
    ) -> list[Tensor]:
        """Have the other ranks carry out a command, and return the values that each of them delivers. Rank 0.

        Args:
            command: values that JSON can represent.
            numels: number of values from each rank, in order from rank 1.
            dtype: dtype of the values.
        """
        with self._telling:
            self._tell(command)
            found = [torch.empty(numel, dtype=dtype) for numel in numels]
            for rank, values in enumerate(found, start=1):
                if values.numel():
                    dist.recv(values, rank, group=self._commands.group)
            return found

    def deliver(self, values: Tensor) -> None:
        """Send rank 0 the values that `collect` has asked for, after the answer. Ranks other than 0."""
        if values.numel():
            dist.send(values, 0, group=self._commands.group)

    def together(self, command: Mapping[str, Any], do: Callable[[], T]) -> T:
        """Have the other ranks begin a command, and return the result of rank 0's part of it, `do`. Rank 0."""
        with self._telling:
            self._tell(command)
            return do()

    def swap(self, outgoing: Sequence[Tensor], incoming: Sequence[Tensor]) -> None:
        """Send a tensor to each rank, and receive one from each. All ranks call this at once, within a command.

        Args:
            outgoing: tensor for each rank; this rank's own and empty ones are not sent.
            incoming: tensor from each rank, overwritten; this rank's own and empty ones are not received.
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
        """Receive the next command and its payload; `answer` must follow. Ranks other than 0."""
        return self._commands.hear()

    def answer(self, done: bool) -> None:
        """Report that the last command is done or has failed. Ranks other than 0.

        Raises:
            DiLoCoError: the command is done on this rank, but has failed on another rank.
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
        """Seconds by which the pulse is late, because a rank does not answer; 0 while all ranks answer."""
        return max(0.0, time.monotonic() - self._beat_s - PULSE_S)

    def pulse(self, crew: Crew) -> None:
        """Exchange the pulse with the other ranks until the crew of one rank stops.

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
