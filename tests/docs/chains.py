"""The command lines that the tests run for each documented command.

1. A step names the documented commands that it represents: the same program and verb with the same options, with
   placeholders filled in, small numbers, and additional options that make it short.
2. If a command needs files, an earlier command of its chain creates them, as for a reader.
3. `NOT_HERE` has the reason for each command that cannot run here; such commands are parsed as far as possible.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator

from tests.docs.shell import Step

TINY = "diloco run recipes/tiny/gpt.yaml --local 2"
SHORT = "--trainer.max_steps 24 --trainer.limit_val_batches 1"
ENDLESS = "--trainer.max_steps 100000 --trainer.limit_val_batches 1"
CTRL_C = {"beside": signal.SIGINT, "exits": 130}
OPEN_MODEL = "python -c \"from transformers import AutoModelForCausalLM as M; print(M.from_pretrained('my-model'))\""
SMALL_GPT2 = (
    "--trainer.accelerator cpu --trainer.precision 32-true --trainer.accumulate_grad_batches 1 --trainer.max_steps 8 "
    "--model.init_args.config '{model_type: gpt2, n_positions: 32, n_embd: 16, n_layer: 1, n_head: 2}' "
    "--data.init_args.path null --data.init_args.subset null --data.init_args.files 'texts/**/*.txt' "
    "--data.init_args.tokenizer null --data.init_args.vocab_size 300 --data.init_args.seq_len 32"
)

CHAINS: dict[str, tuple[Step, ...]] = {
    "a run": (
        Step(
            line=f"{TINY} --run-dir runs/mine --wandb my-project --page 127.0.0.1:0 {ENDLESS}",
            of=(
                "diloco run RECIPE.yaml --local 2 --wandb PROJECT",
                f"{TINY} --wandb my-project --page 127.0.0.1:8080",
            ),
            says=r"(?s)live page: http.* [1-9]\d* commits",
            **CTRL_C,
        ),
        Step(line="diloco status runs/mine", of=("diloco status RUN_DIR",), says=r"(?s)l1.*training: .*waits"),
        Step(
            line="diloco status runs/mine --watch",
            of=("diloco status runs/mine --watch",),
            says=r"(?s)training: .*training: ",
            beside=0,
        ),
        Step(
            line="diloco status runs/mine --serve",
            of=("diloco status runs/mine --serve",),
            says="live page: http",
            **CTRL_C,
        ),
        Step(
            line="diloco rotate runs/mine",
            of=("diloco rotate RUN_DIR", "diloco rotate runs/mine"),
            says="the syncer has taken it",
        ),
        Step(
            line="diloco snapshot runs/mine --to snapshots/monday",
            of=("diloco snapshot RUN_DIR --to DIR", "diloco snapshot runs/mine --to snapshots/monday"),
            leaves=("snapshots/monday/snapshot.json",),
        ),
        Step(
            line="diloco plot runs/mine --to pictures --cap 5Gbit",
            of=("diloco plot RUN_DIR", "diloco plot runs/mine --to pictures --cap 5Gbit"),
            leaves=("pictures/*.png", "pictures/*.svg"),
            ends_others=True,
        ),
        Step(
            line="diloco replay runs/mine",
            of=("diloco replay RUN_DIR", "diloco replay runs/mine"),
        ),
        Step(
            line="diloco export runs/mine --to my-model",
            of=(
                "diloco export RUN_DIR --to DIR",
                "diloco export RUN_DIR --to my-model",
                "diloco export runs/mine --to my-model",
            ),
            leaves=("my-model/model.safetensors", "my-model/lightning.ckpt"),
        ),
        Step(
            line=OPEN_MODEL,
            of=(OPEN_MODEL,),
            says="LlamaForCausalLM",
        ),
        Step(
            line=f"{TINY} -- --model.init_args.config null --model.init_args.name my-model --data.init_args.tokenizer "
            f"my-model --model.init_args.adapter '{{r: 8, target_modules: all-linear}}' {SHORT}",
            of=(
                f"{TINY} -- --model.init_args.config null --model.init_args.name my-model --data.init_args.tokenizer "
                "my-model --model.init_args.adapter '{r: 8, target_modules: all-linear}'",
            ),
            says="finished",
        ),
        Step(
            line=f"{TINY} --from snapshots/monday {ENDLESS}",
            of=(
                "diloco run RECIPE --local 2 --from DIR",
                f"{TINY} --from snapshots/monday",
            ),
            says="l0 stepping",
            **CTRL_C,
        ),
    ),
    "recipes": (
        Step(line="diloco ls", of=("diloco ls",), says="tiny/gpt"),
        Step(
            line="diloco cp tiny/gpt my_gpt.yaml",
            of=("diloco cp RECIPE PATH", "diloco cp tiny/gpt my_gpt.yaml"),
            leaves=("my_gpt.yaml",),
        ),
        Step(
            line=f"diloco run my_gpt.yaml --local 2 {SHORT}",
            of=(
                "diloco run my_gpt.yaml --local 2",
                "diloco run RECIPE.yaml --local 4",
                f"{TINY} --trainer.max_steps 60",
            ),
            says="finished",
        ),
        Step(
            line=f"{TINY} -- --data.init_args.files 'texts/**/*.txt' {SHORT}",
            of=(
                TINY,
                "diloco run tiny/gpt --local 2",
                f"{TINY} -- --data.init_args.files 'texts/**/*.txt'",
                f"{TINY} -- --trainer.max_steps 60",
            ),
            says="finished",
        ),
        Step(
            line="diloco cp diffusion/video mine.yaml",
            of=("diloco cp diffusion/video PATH",),
            leaves=("mine.yaml", "video_dit.py"),
        ),
        Step(
            line=f"diloco run recipes/diffusion/video.yaml --local 2 --run-dir runs/video {SHORT}",
            of=("diloco run recipes/diffusion/video.yaml --local 2",),
            says="finished",
        ),
        Step(
            line="diloco export runs/video --to clips --config recipes/diffusion/video.yaml",
            of=("diloco export RUN_DIR --to DIR --config recipes/diffusion/video.yaml",),
            leaves=("clips/lightning.ckpt",),
        ),
    ),
    "scripts": (
        Step(line="python train.py", of=("python train.py",), leaves=("diloco/*/summary.json",)),
        Step(
            line="diloco run train.py --local 2 --run-dir runs/script -- --epochs 1",
            of=("diloco run train.py --local 4", "diloco run train.py --local 4 --run-dir runs/mine -- --epochs 3"),
            says="finished",
        ),
        Step(
            line="diloco run recipes/tiny/train.py --local 2 --max-steps 6",
            of=("diloco run recipes/tiny/train.py --local 2",),
            says="finished",
        ),
        Step(
            line="python recipes/tiny/train.py --strategy auto --max-steps 6",
            of=("python recipes/tiny/train.py --strategy auto",),
            says="max_steps=6. reached",
        ),
    ),
    "several sites": (
        Step(
            line="diloco syncer --run-dir runs/sites --listen 127.0.0.1:0 --data-parts 2",
            of=("diloco syncer --run-dir runs/mine --listen 0.0.0.0:7654 --data-parts 2",),
            leaves=("runs/sites/join",),
            beside=signal.SIGTERM,  # without --expect it serves until it is stopped
        ),
        Step(line="cp runs/sites/join join"),
        Step(
            line='DILOCO_JOIN="$(cat join)" python train.py',
            of=('DILOCO_JOIN="$(cat join)" python train.py', "DILOCO_JOIN=$(cat RUN_DIR/join) python train.py"),
            says="max_epochs=1. reached",
        ),
        Step(
            line="DILOCO_HOST=127.0.0.1 diloco syncer --run-dir runs/gpt2-parts --listen 127.0.0.1:0 --expect 1 "
            "--data-parts 1",
            of=(
                "DILOCO_HOST=syncer.example.com diloco syncer --run-dir run --listen 0.0.0.0:7654 --expect 4 "
                "--data-parts 4",
            ),
            leaves=("runs/gpt2-parts/join",),
            beside=signal.SIGTERM,
        ),
        Step(
            line="DILOCO_HOST=127.0.0.1 diloco syncer --standby-of runs/gpt2-parts/standby --run-dir runs/copy "
            "--listen 127.0.0.1:0 --expect 1",
            of=(
                "DILOCO_HOST=standby.example.com diloco syncer --standby-of primary.join --run-dir copy "
                "--listen 0.0.0.0:7654 --expect 4",
            ),
            leaves=("runs/copy/join",),
            beside=signal.SIGTERM,
        ),
        Step(
            line="DILOCO_HOST=127.0.0.1 diloco syncer --run-dir runs/shards --listen 127.0.0.1:0 --shards 2 "
            "--elsewhere --expect 1",
            of=(
                "DILOCO_HOST=syncer.example.com diloco syncer --run-dir run --listen 0.0.0.0:7654 --shards 2 "
                "--elsewhere --expect 4",
            ),
            leaves=("runs/shards/standby",),
            beside=signal.SIGTERM,
        ),
        Step(
            line="DILOCO_HOST=127.0.0.1 diloco syncer --shard 1/2 --of runs/shards/standby --run-dir runs/shard "
            "--listen 127.0.0.1:0",
            of=(
                "DILOCO_HOST=shard.example.com diloco syncer --shard 1/2 --of syncer.join --run-dir shard "
                "--listen 0.0.0.0:7654",
            ),
            says="works for run",
            beside=signal.SIGTERM,
        ),
        Step(line="cp -r runs/sites runs/taken-over"),
        Step(
            line="diloco syncer --run-dir runs/taken-over --listen 127.0.0.1:0 --take-over",
            of=("diloco syncer --run-dir copy --take-over",),
            says="is served at",
            beside=signal.SIGTERM,
        ),
        Step(
            line="DILOCO_JOIN=$(cat join) diloco doctor llama/1b",
            of=("DILOCO_JOIN=$(cat join) diloco doctor llama/1b",),
            says=r"(?s)ok .*token.*round trip.*learner's link",
        ),
        Step(
            line="diloco doctor --run-dir runs/sites",
            of=("diloco doctor --run-dir runs/mine",),
            says="--syncer-memory-rate",
        ),
        Step(
            line='DILOCO_JOIN="$(cat join)" diloco fit train.py -- --epochs 1',
            of=("DILOCO_JOIN=$(cat join) diloco fit train.py -- --epochs 3",),
            says="max_epochs=1. reached",
        ),
        Step(
            line="diloco syncer --run-dir runs/gpt2 --listen 127.0.0.1:0 --expect 1 --sync-every 48",
            of=(
                "diloco syncer --run-dir runs/gpt2 --listen 0.0.0.0:7654 --expect 4",
                "diloco syncer --run-dir runs/mine --listen 0.0.0.0:7654 --expect 4 --sync-every 96",
            ),
            leaves=("runs/gpt2/join",),
            beside=0,
        ),
        Step(
            line='DILOCO_JOIN="$(cat runs/gpt2/join)" diloco fit gpt2/124m ' + SMALL_GPT2,
            of=(
                'DILOCO_JOIN="$(cat runs/gpt2/join)" diloco fit gpt2/124m',
                "DILOCO_JOIN=$(cat RUN_DIR/join) diloco fit RECIPE.yaml",
                'DILOCO_JOIN="$(cat run/join)" DILOCO_LEARNER=l0 diloco fit RECIPE.yaml',
                "DILOCO_JOIN=$(cat join) DILOCO_LEARNER=site-a diloco fit llama/1b",
            ),
            leaves=("runs/gpt2/summary.json",),
        ),
    ),
    "ray": (
        Step(
            line="diloco run recipes/tiny/gpt.yaml --engine ray --learners 1 --resources-per-learner '{\"CPU\": 1}' "
            f"--run-dir runs/ray {ENDLESS}",
            of=(
                "diloco run RECIPE.yaml --engine ray --learners 4",
                "diloco run gpt2/124m --engine ray --learners 4 --resources-per-learner '{\"GPU\": 1}' "
                "--run-dir /shared/mine",
            ),
            says="l0 stepping",
            **CTRL_C,
        ),
        Step(
            line="diloco scale runs/ray 2",
            of=("diloco scale /shared/mine 6",),
            says="2 learner",
        ),
    ),
    "plans": tuple(
        Step(line=line.replace("RECIPE", "tiny/gpt"), of=(line,), says=says)
        for line, says in {
            "diloco plan RECIPE --learners 8 --link 5Gbit": "It fits",
            "diloco plan RECIPE --shards 4": "4 such machines",
            "diloco plan RECIPE --standby-link 10Gbit": "standby's link",
            "diloco plan recipes/tiny/gpt.yaml --learners 2 --link 1Gbit --step 200ms": "It fits",
            "diloco plan gemma/12b-8gpu --learners 8 --link 5Gbit --rtt 40ms --mtbf 6h --json": '"feasible": true',
            "diloco plan diffusion/video": "It fits",
            "diloco plan gemma/12b-8gpu": "It fits",
            "diloco plan gemma/12b-v5p": "It fits",
            "diloco plan gemma/12b-v6e": "It fits",
            "diloco plan gpt2/124m": "It fits",
            "diloco plan llama/1b": "It fits",
            "diloco plan llama/1b-v6e": "It fits",
            "diloco plan mistral/12b-8gpu": "It fits",
            "diloco plan mistral/12b-v5p": "It fits",
        }.items()
    ),
    "launch": (
        Step(
            line="diloco launch gpt2/124m --engine slurm --learners 4 --to mine",
            of=(
                "diloco launch gpt2/124m --engine slurm --learners 4 --to mine",
                "diloco launch RECIPE.yaml --engine slurm --learners 4 --to DIR",
                "diloco launch llama/1b --engine skypilot --learners 8 --to mine",
            ),
            says="sbatch syncer.sh",
            leaves=("mine/learners.sh", "mine/syncer.sh"),
        ),
    ),
    "simulations": tuple(
        Step(line=f"{line} {short}", of=(line,), says=says, leaves=leaves)
        for line, short, says, leaves in (
            ("diloco simulate --learners 8 --chips 1.2M", "--duration 2min", "8 learners", ()),
            (
                "diloco simulate --learners 8 --chips 1.2M --baseline dp dp-elastic --plot training.png",
                "--duration 2min",
                "data parallel",
                ("training.png",),
            ),
            (
                "diloco simulate --learners 2 4 8 16 --chips 150k 600k 2.4M --baseline dp dp-elastic "
                "--plot goodput.png",
                "--duration 1min",
                "16 learners",
                ("goodput.png",),
            ),
            (
                "diloco simulate --learners 2 4 8 16 --chips 150k 300k 600k 1.2M 2.4M --baseline dp dp-elastic "
                "--plot goodput.png",
                "--duration 1min",
                "300k",
                (),
            ),
            (
                "diloco simulate --learners 8 --step 1s 1.18s --quorum 1 8 --mtbi 1000y",
                "--duration 2min",
                r"8 learners, quorum[^\n]*\n│ 8 ",
                (),
            ),
            (
                "diloco simulate --chips 1k --parameters 12B --step 2s --jitter 1% --sync-every 24 96 "
                "--link 0.25Gbit 0.5Gbit 1Gbit 2Gbit 5Gbit --plot links.png",
                "--duration 1min",
                "link 250M",
                ("links.png",),
            ),
            (
                "diloco simulate --chips 1k --step 1s 1.18s 4s --quorum 1 2 4 6 8 --grace 0 adaptive "
                "--duration 30min --plot quorum.png",
                "--duration 1min",
                r"quorum[^\n]*\n│ 8, grace adaptive",
                ("quorum.png",),
            ),
            (
                "diloco simulate --chips 1k --mtbf 30min --jitter 1% --sync-every 12 24 48 96 192 --link 1Gbit 5Gbit "
                "--duration 30min --plot periods.png",
                "--duration 1min",
                "link 1G",
                ("periods.png",),
            ),
            ("diloco simulate --explore --for 2min", "--seeds 3", "no invariant was broken", ()),
        )
    ),
    "faults": (
        Step(
            line="diloco chaos recipes/tiny/gpt.yaml --local 2 --faults-per-hour 85 --kinds kill,cut --duration 20m "
            "--compare --trainer.max_steps 60 --trainer.limit_val_batches 1",
            of=(
                "diloco chaos RECIPE --local 4 --faults-per-hour 85",
                "diloco chaos recipes/tiny/gpt.yaml --local 4 --faults-per-hour 85 --duration 20m",
                "diloco chaos recipes/tiny/gpt.yaml --local 4 --faults-per-hour 85 --duration 20m --compare",
                "diloco chaos recipes/tiny/gpt.yaml --local 2 --faults-per-hour 240 --kinds kill,cut "
                "--trainer.max_steps 400",
            ),
            leaves=("runs/chaos-gpt-*/chaos.json", "runs/chaos-gpt-*/chaos.png"),
        ),
    ),
    "benchmarks": (
        Step(
            line="python -m tests.bench.quality --seed 1 --outer-lr 0.4 0.8 --align carry overwrite --steps 3 --jobs 2",
            of=("python -m tests.bench.quality --seed 1 --outer-lr 0.4 0.8 --align carry overwrite",),
            says="overwrite",
        ),
        Step(
            line="python -m tests.bench.quality --seed 1 --learners 1 2 --steps 3 4 --out quality.json",
            of=("python -m tests.bench.quality --seed 1 --learners 1 2 4 8 --steps 600 1440 --out FILE",),
            leaves=("quality.json",),
            says="learners",
        ),
        Step(
            line="python -m tests.bench.fine_tuning --pretraining-steps 3 --steps 3 --learners 2 --lr 8e-3 --seed 1 "
            "--out tuned.json",
            of=("python -m tests.bench.fine_tuning --out FILE",),
            leaves=("tuned.json",),
            says="control: without fine-tuning",
            exits=1,  # so few steps change little
        ),
        Step(
            line="python -m tests.bench.outer_rules --rules 'lr by rho, mu 0.6' skip --learners 1 2 --batch-size 4 "
            "--steps 3 --out rules.json",
            of=("python -m tests.bench.outer_rules --learners 1 4 --batch-size 4 --out FILE",),
            leaves=("rules.json",),
            says="skip",
        ),
        Step(
            line="python -m tests.bench.quality --lr 6e-3 --baseline-lr 4e-3 8e-3 --seed 1 --steps 3 --out best.json",
            of=("python -m tests.bench.quality --lr 6e-3 --baseline-lr 4e-3 8e-3 --out FILE",),
            leaves=("best.json",),
            says="mean gap",
        ),
        Step(
            line="python tests/bench/run.py syncer_round --numel 1e6 --threads 1 --repeats 1 || [ $? -eq 1 ]",
            of=("python tests/bench/run.py syncer_round",),
            says="control: torch",
        ),
        Step(line="python -m tests.bench.render", of=("python -m tests.bench.render",)),
    ),
    "contributing": (
        Step(line="ruff check", of=("ruff check",)),
        Step(line="ruff format --check", of=("ruff format --check",)),
        Step(line="mypy -p lightning_diloco.protocol", of=("mypy",), says="no issues"),
        Step(line="pytest tests/test_config.py", of=("pytest",), says=r"\d+ passed"),
        Step(
            line='pytest -m "seconds and not (slow or gpu)" tests/core/test_fragments.py',
            of=('pytest -m "seconds and not (slow or gpu)"',),
            says=r"\d+ passed",
        ),
        Step(
            line='pytest -n 0 -m "slow or chaos" tests/tracking/test_script_real_run.py -k login',
            of=('pytest -n 0 -m "(slow or chaos) and not thorough"',),
            says=r"\d+ passed",
        ),
    ),
}

IN_CI = ("ray", "plans", "launch", "simulations")
"""Chains that CI runs; the others take minutes, and run before a release."""

NOT_HERE = {
    "pip install -e . -c .ci/constraints.txt": "changes this environment; how a fresh one is made by .ci/run",
    "pip install -e '.[test]' -c .ci/constraints.txt": "the same; .ci/run types it word for word",
    "pip install -e '.[wandb]'": "changes this environment",
    "pip install -e '.[tpu]'": "is for TPU hosts, and brings another torch",
    "pip install -e '.[torch_tpu]'": "is for TPU hosts, and brings another torch",
    "pip install 'lightning-diloco[peft]'": "needs a package index that has a release of ours",
    "pip install 'lightning-diloco[syncer]'": "the same",
    "pip install 'lightning-diloco[ray]'": "the same",
    "diloco run gpt2/124m --engine ray --learners 4 --resources-per-learner '{\"GPU\": 1}' --address 10.0.0.1:6379 "
    "--run-dir /shared/mine": "needs a Ray head elsewhere; tests/cli/ray run it on clusters of this machine",
    "PJRT_DEVICE=TPU python train.py": "needs a TPU; tests/xla run such scripts on PJRT's CPU devices",
    "hf auth login": "needs an account, and asks for its token",
    ".ci/run": "downloads two environments; this test is a part of it",
    "python tests/bench/run.py loss_by_participation exchange straggler ranks_step attacks": "an hour; see tests/bench",
    "PJRT_DEVICE=CPU python -m tests.bench.xla_step": "ten minutes, with torch_xla; tests/xla run it with less of all",
    "python -m tests.bench.gpu --out gpu.json": "needs a GPU; tests/bench run it on the CPU with less of all",
    "python tests/bench/run.py goodput_table": "half an hour; its command runs here with shorter cells",
    "python tests/bench/run.py simulated": "thirteen minutes; tests/bench run its simulations",
    "python tests/bench/run.py speeds": "half an hour; tests/bench check its verdicts",
    "python tests/bench/run.py wide_area": "eleven minutes on an idle machine",
    "python tests/bench/run.py peers": "half an hour, with other packages; tests/bench run it with this one",
    "python tests/bench/run.py at_size": "takes 24 GB; tests/bench run it with a small fragment",
    "python tests/bench/run.py shards": "takes 24 GB; tests/bench run it with small fragments",
    "python tests/bench/run.py chaos recoveries takeovers soak survivors busy_survivors forecast": "two hours",
}


def executed() -> Iterator[tuple[str, Step]]:
    """Return the documented commands and the steps that represent them."""
    for chain in CHAINS.values():
        for step in chain:
            for command in step.of:
                yield command, step
