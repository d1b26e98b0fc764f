"""What the strategy costs on a GPU: everything that must be measured there, in less than ten minutes.

python -m tests.bench.gpu --out gpu.json                        on a GPU of 80 GB
python -m tests.bench.gpu --accelerator cpu --tiny --parts quantizer steps quality      a trial of this program

1. tests: `pytest -m gpu` runs the tests that need a GPU.
2. quantizer: bytes read and written per second while a fragment is encoded and decoded, by the fused kernels and by
   torch, as a share of a copy in the same run. For each value, encoding reads 4 bytes and writes 1; decoding and adding
   reads 5 and writes 4.
3. steps: a learner with the strategy and one without it take turns (turns.py), with a fragment in every step. The table
   has the time of the strategy's hooks in a step, the speed that is left, and device memory. The control waits for the
   device at the end of each step and must fail the check of speed.
4. overlap: from a Chrome trace of some steps, stored beside --out, the time of training and of exchanges in a step, how
   much of them happens at the same time, and a picture.
5. quality: two learners on one GPU, limited to half of its memory each, and data parallel training of the same tokens
   with the same recipe: GPT-2 with 124M parameters, on the sources of Python's standard library.

Results are stored after each part, with its time, so that an interrupted run keeps the parts before.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from lightning_diloco.config import RunConfig
from lightning_diloco.core import fused
from lightning_diloco.core.fragments import FragmentPlan
from lightning_diloco.core.quantize import Decoder, encode_unchecked
from lightning_diloco.planner.memory import FragmentSizes, Training, device_bytes
from tests.bench import report, timed_recipe, timeline, turns
from tests.bench.gpu_learner import TRACE, TRACED, wait_for_gpu
from tests.bench.stack import CONTROL, END, NOTES, WITH, WITHOUT, Stack

SHARE, STALL_S, SPEED, LANDINGS, BESIDE, GAP = 0.7, 0.005, 0.99, 0.9, 0.5, 0.05
TESTS = ("tests/devices", "tests/core")  # all tests that need a GPU are in these folders
WARM_UP = 30  # steps, more than a period
FIRST_S = 1.0
LIMIT_S = 600.0  # of all parts
REPEATS = 20
RECIPE = report.ROOT / "recipes" / "gpt2" / "124m.yaml"
TEXT = (
    "--data.init_args.path=null",
    "--data.init_args.subset=null",
    "--data.init_args.tokenizer=null",
    "--data.init_args.streaming=false",
    "--data.init_args.max_bytes=null",
    "--data.init_args.vocab_size=8192",
    "--model.init_args.warmup_steps=50",
    "--trainer.limit_val_batches=20",
    "--trainer.accumulate_grad_batches=1",
)
TINY = (
    "--model.init_args.config={model_type: gpt2, vocab_size: 8192, n_positions: 64, n_embd: 16, n_layer: 1, n_head: 1}",
    "--data.init_args.seq_len=64",
    "--data.init_args.max_bytes=300000",
    "--trainer.precision=32",
)

Checks = dict[str, bool]


def tests(args: argparse.Namespace) -> tuple[list[report.Row], Checks]:
    """Run the tests that need a GPU."""
    command = (sys.executable, "-m", "pytest", "-q", "-n", "0", "-m", "gpu", *TESTS)
    code = subprocess.run(command, cwd=report.ROOT, check=False).returncode
    return [{"run": "pytest -m gpu", "exit code": code}], {"the tests that need a GPU pass": code == 0}


# -------------------------------------------------------------------------------------------------------- quantizer


def quantizer(args: argparse.Namespace) -> tuple[list[report.Row], Checks]:
    """Measure encoding and decoding of int8."""
    config, numel = RunConfig(), 1 << (20 if args.tiny else 28)
    device = torch.device("cpu" if args.accelerator == "cpu" else "cuda")
    x, y = torch.randn(numel, device=device), torch.empty(numel, device=device)
    update = encode_unchecked(x, wire="int8", block_size=config.block_size)

    def encode() -> object:
        return encode_unchecked(x, wire="int8", block_size=config.block_size)

    def decode() -> object:
        return Decoder(update, numel, "int8", config.block_size).add_to(y)

    copied = 8 * numel / _median_s(lambda: y.copy_(x))
    rows: list[report.Row] = [{"run": "copy", "GB/s": copied / 1e9, "of a copy": 1.0}]
    jobs: dict[str, tuple[Callable[[], object], int]] = {"encode": (encode, 5), "decode and add": (decode, 9)}
    for by, devices in (("fused", fused.DEVICES), ("torch", frozenset[str]())):
        with mock.patch.object(fused, "DEVICES", devices):
            for name, (job, nbytes) in jobs.items():
                speed = nbytes * numel / _median_s(job)
                rows.append({"run": f"{name}, {by}", "GB/s": speed / 1e9, "of a copy": speed / copied})
    checks = {}
    for row in rows[1:3]:
        holds = f"{row['run']}: {row['of a copy']:.0%} of a copy's bandwidth, at least {SHARE:.0%}"
        checks[holds] = row["of a copy"] >= SHARE
    return rows, checks


def _median_s(job: Callable[[], object]) -> float:
    job()  # warms up, and compiles
    return statistics.median(_timed_s(job) for _ in range(REPEATS))


def _timed_s(job: Callable[[], object]) -> float:
    wait_for_gpu()
    began_s = time.perf_counter()
    job()
    wait_for_gpu()
    return time.perf_counter() - began_s


# ------------------------------------------------------------------------------------------------------------ steps


def steps(args: argparse.Namespace) -> tuple[list[report.Row], Checks]:
    """Measure stall, speed and memory of a learner, beside one without the strategy."""
    rows = _beside(WITH, args) + _beside(CONTROL, args)[1:]
    plain, ours, control = rows
    checks = {
        f"{ours['landings per step']:.2f} updates land per step, at least {LANDINGS}": (
            ours["landings per step"] >= LANDINGS
        ),
        f"hooks take {1e3 * ours['hooks p95 [s]']:.1f} ms in 95 of 100 steps, at most {1e3 * STALL_S:g} ms": (
            ours["hooks p95 [s]"] <= STALL_S
        ),
        f"{ours['speed']:.3f} of the speed is left, at least {SPEED}": ours["speed"] >= SPEED,
        f"a host that waits for each step leaves {control['speed']:.3f}, less than {SPEED}": control["speed"] < SPEED,
    }
    if plain["bytes / parameter"]:
        added, planned = ours["bytes / parameter"] - plain["bytes / parameter"], ours["planned bytes / parameter"]
        checks[f"the strategy takes {added:.1f} bytes per parameter, planned {planned:.1f}"] = added <= 1.1 * planned
    return rows, checks


def _beside(ours: str, args: argparse.Namespace) -> list[report.Row]:
    sizes = {"width": args.width, "depth": args.depth, "batch": args.batch, "warm-up": WARM_UP}
    words = [word for name, value in sizes.items() for word in (f"--{name}", str(value))]
    common = (sys.executable, "-m", "tests.bench.gpu_learner", "--accelerator", args.accelerator, *words)
    programs = {mode: (*common, "--mode", mode, *(["--traces"] if mode == WITH else [])) for mode in (WITHOUT, ours)}
    env = {"PYTHONPATH": str(report.ROOT)}
    with (
        tempfile.TemporaryDirectory(prefix="diloco-bench-") as name,
        turns.playing(programs, Path(name), env=env, warm_up=2 * WARM_UP) as players,
    ):
        turns.take_turns(players.values(), rounds=args.rounds, turn_s=args.turn_s, first_s=FIRST_S)
        times_s = {mode: [*map(statistics.median, player.steps_by_turn())] for mode, player in players.items()}
        rows = []
        for mode, player in players.items():
            folder = Path(name) / mode
            (folder / END).touch()
            player.end()
            notes = json.loads((folder / NOTES).read_text())
            hooks_s = timed_recipe.hooks_within(folder, player.turns)
            pairs = zip(times_s[WITHOUT], times_s[mode], strict=True)
            rows.append(
                {
                    "run": mode,
                    "step [ms]": 1e3 * statistics.median(times_s[mode]),
                    "hooks p95 [s]": report.quantile(hooks_s, 0.95) if hooks_s else 0.0,
                    "landings per step": player.landings_per_step,
                    "speed": statistics.median(plain / with_it for plain, with_it in pairs),
                    "bytes / parameter": notes["peak"] and notes["peak"] / notes["numel"],
                    "planned bytes / parameter": _planned(args) if mode != WITHOUT else 0.0,
                }
            )
            if args.out and (folder / TRACE).exists():
                shutil.copy(folder / TRACE, args.out.with_suffix(f".{TRACE}"))
    return rows


def _planned(args: argparse.Namespace) -> float:
    """Return the bytes per parameter that `diloco plan` adds for the strategy on the device."""
    with torch.device("meta"):
        shapes = {name: tuple(param.shape) for name, param in Stack(args.width, args.depth).named_parameters()}
    config = RunConfig.with_defaults({}).validate()
    plan = FragmentPlan.balanced(
        shapes, num_fragments=config.fragments_wanted, max_slice_numel=config.max_slice_numel, mean_names=frozenset()
    )
    numel = sum(plan.layout(p, config.block_size).numel for p in range(plan.num_fragments))
    found = device_bytes(FragmentSizes.of(plan, config), Training(num_parameters=numel, num_trainable=numel))
    return (found["anchors"] + found["exchange buffers"]) / numel


def overlap(args: argparse.Namespace) -> tuple[list[report.Row], Checks]:
    """Read from the trace how long training and exchanges take in a step, and draw it."""
    if not (trace := args.out.with_suffix(f".{TRACE}")).exists():
        raise SystemExit(f"overlap: {trace} is missing, which the part steps stores; run both")
    found = timeline.Timeline(trace)
    found.draw(args.out.with_suffix(".svg"))
    row: report.Row = {"run": WITH, **found.row(TRACED)}
    share = row["kernels beside training"]
    return [row], {f"{share:.0%} of the exchanges' kernels run beside training, at least {BESIDE:.0%}": share >= BESIDE}


# ---------------------------------------------------------------------------------------------------------- quality


def quality(args: argparse.Namespace) -> tuple[list[report.Row], Checks]:
    """Compare two learners on one device with data parallel training of the same tokens."""
    with tempfile.TemporaryDirectory(prefix="diloco-bench-") as name:
        ours = _trained(args, Path(name) / "two", learners=2, batch_size=8)
        # With the identity as its outer step, a single learner trains as without the strategy.
        identity = ("--trainer.strategy.init_args.outer_lr=1", "--trainer.strategy.init_args.outer_momentum=0")
        parallel = _trained(args, Path(name) / "one", *identity, learners=1, batch_size=16)
    gap = ours["loss"] / parallel["loss"] - 1
    checks = {f"two learners: loss {gap:+.2%} against data parallel, at most {GAP:+.0%}": gap <= GAP}
    for row in (ours, parallel):
        falls = f"{row['run']}: the loss falls, from {row['loss at half']:.3f} at half time to {row['loss']:.3f}"
        checks[falls] = row["loss"] < row["loss at half"]
    return [ours, parallel], checks


def _trained(args: argparse.Namespace, run_dir: Path, *options: str, learners: int, batch_size: int) -> report.Row:
    num_steps = 60 if args.tiny else 240
    notes = run_dir.with_suffix(".notes")
    notes.mkdir()
    overrides = [*TEXT, f"--trainer.accelerator={args.accelerator}", f"--trainer.max_steps={num_steps}"]
    overrides += [f"--trainer.val_check_interval={num_steps // 2}", f"--data.init_args.batch_size={batch_size}"]
    overrides += ["--trainer.callbacks+=tests.bench.gpu_learner.PartOfGpu", f"--trainer.callbacks.share={1 / learners}"]
    overrides += [f"--trainer.callbacks.folder={notes}", *options, *(TINY if args.tiny else ())]
    verb = (sys.executable, "-m", "lightning_diloco.cli.main", "run", str(RECIPE), "--no-page", "--no-table")
    command = [*verb, "--local", str(learners), "--run-dir", str(run_dir), *overrides]
    subprocess.run(command, check=True, cwd=run_dir.parent, env={**os.environ, "PYTHONPATH": str(report.ROOT)})
    found = [json.loads(path.read_text()) for path in notes.iterdir()]
    assert len(found) == learners
    peaks = [each["peak"] / 2**30 for each in found if each["peak"] is not None]
    return {
        "run": "two learners" if learners == 2 else "data parallel",
        "loss at half": max(each["losses"][0] for each in found),
        "loss": float(json.loads((run_dir / "summary.json").read_text())["eval_loss"]),
        "part of memory": max(each["share"] for each in found),
        "peak of a learner [GiB]": max(peaks, default=None),
    }


PARTS: dict[str, Callable[[argparse.Namespace], tuple[list[report.Row], Checks]]] = {
    "tests": tests,
    "quantizer": quantizer,
    "steps": steps,
    "overlap": overlap,
    "quality": quality,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Measure all parts; return 1 if a check or a test fails."""
    parser = report.options(__doc__)
    parser.add_argument("--accelerator", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="small sizes, for a trial without a GPU")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=[*PARTS])
    parser.add_argument("--rounds", type=int, default=6, help="turns of each learner")
    parser.add_argument("--turn-s", type=float, default=5.0)
    args = parser.parse_args(argv)
    if "overlap" in args.parts and args.out is None:
        parser.error("the part overlap reads the trace that the part steps stores beside --out FILE, which is missing")
    args.width, args.depth, args.batch = (128, 16, 512) if args.tiny else (4096, 60, 8192)  # 1.0B parameters
    seen = report.circumstances() | {"lightning": metadata.version("lightning")}
    if args.accelerator == "cuda":
        seen["card"] = torch.cuda.get_device_name()
    found: dict[str, Any] = {"circumstances": seen}
    checks: Checks = {}
    taken_s: dict[str, float] = {}
    for name in args.parts:
        began_s = time.monotonic()
        rows, holds = PARTS[name](args)
        taken_s[name] = time.monotonic() - began_s
        if len(taken_s) == len(PARTS):
            holds[f"all parts take {sum(taken_s.values()):.0f} s, at most {LIMIT_S:.0f}"] = (
                sum(taken_s.values()) <= LIMIT_S
            )
        print(f"\n{name}\n\n{report.table(rows)}\n\n{report.verdicts(holds)}", flush=True)
        found[name], checks = rows, checks | holds
        report.store(args.out, {**found, "seconds": taken_s, "checks": checks})
    return int(not all(checks.values()))


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that no learner is left behind
    raise SystemExit(main())
