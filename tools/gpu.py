"""What has to be known of one GPU: are the kernels right, what does a training step launch, how
fast is attention.

    python tools/gpu.py                          all steps: half an hour, rows in benchmarks/gpu/
    python tools/gpu.py doctor tests             these alone
    python tools/gpu.py --minutes 8 --out out    stop in time; what was measured is kept
    python tools/gpu.py --device cpu --out out   a rehearsal in small, kernels interpreted

Steps run one after the other, each in a process with its own time limit; one that fails does not
stop the next. Every step writes OUT/STEP.json: commit, card, versions, shapes, dtype, rows. Needs
torch, triton, numpy, safetensors and pytest, for the doctor also typer and rich, and no
installation of this project.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

# So that a plain `python tools/…` finds the project.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tools.benches.timing import device_of, environment

ROOT = Path(__file__).resolve().parent.parent
# Step → minutes at most, words behind python on CUDA, and what is added or replaced in a rehearsal
# on the CPU.
STEPS: dict[str, tuple[float, str, str]] = {
    "doctor": (4, "-m priorzoo doctor", ""),
    "tests": (12, "-m pytest -q -p no:cacheprovider -m gpu tests/zoo tests/gpu", "-x -k bare"),
    "profile": (
        3,
        "tools/gpu.py --profile text_ggd_ssmax_125m",
        "--profile text_ggd_ssmax_tiny --length 64 --rows 2",
    ),
    "attention": (6, "tools/bench.py attention --seconds 0.3", "--lengths 64 --without Flex"),
    "decoding": (4, "tools/bench.py decoding --lengths 8192,131072 --seconds 0.3", "--lengths 128"),
    "training": (
        5,
        "tools/bench.py training --seconds 3",
        "--models text_rope_tiny,text_ggd_ssmax_tiny --lengths 32",
    ),
}


def run_step(name: str, device: str, out: Path, seconds: float) -> bool:
    """Run a step for at most so long; whether it succeeded. A step that wrote no rows gets a file
    with its output's end."""
    _, words, rehearsal = STEPS[name]
    path = out / f"{name}.json"
    command = [sys.executable, *words.split()]
    if device == "cpu":
        command += rehearsal.split()
    if name not in ("doctor", "tests"):
        command += ["--device", device, "--out", str(path)]
    env = os.environ.copy()
    env["PRIORZOO_TEST_DEVICE"] = device
    env["PYTHONPATH"] = str(ROOT)
    env["MPLBACKEND"] = "Agg"
    if device == "cpu":
        env["CUDA_VISIBLE_DEVICES"] = ""
        env["OMP_NUM_THREADS"] = "1"
        # The doctor would interpret every kernel in every dtype, for more than its minutes.
        env["TRITON_INTERPRET"] = "0" if name == "doctor" else "1"
    path.unlink(missing_ok=True)
    started = time.monotonic()
    with tempfile.TemporaryFile("w+") as log:
        # The status of `timeout` where the time runs out.
        status = 124
        with contextlib.suppress(subprocess.TimeoutExpired):
            status = subprocess.run(
                command, cwd=ROOT, env=env, stdout=log, stderr=log, timeout=seconds
            ).returncode
        log.seek(0)
        text = log.read()
    took = round(time.monotonic() - started)
    print(f"\n=== {name}: exit status {status}, {took} s\n{text[-3000:]}", flush=True)
    if not path.exists():
        step = {
            "step": name,
            "status": status,
            "seconds": took,
            "device": card(device),
            "output": text[-6000:],
        }
        path.write_text(json.dumps(environment() | step, indent=1))
    return status == 0


def card(device: str) -> str:
    """The GPU's name, or cpu."""
    import torch

    return torch.cuda.get_device_name() if device == "cuda" else "cpu"


def profile(args: argparse.Namespace) -> int:
    """A training step of a text model by torch's profiler: kernels by the time they take, and the
    host's share."""
    import torch
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as record

    from tools.benches.training import random_loss, training_step
    from zoo import create_model

    cuda = args.device == "cuda"
    dtype = torch.bfloat16 if cuda else torch.float32
    torch.manual_seed(0)
    model = create_model(args.profile, train_context=args.length).to(args.device, dtype).train()
    step = training_step(model, random_loss(model, args.rows, args.length))
    # Kernels are compiled, and Adam's moments allocated.
    for _ in range(3):
        step()
    activities = [ProfilerActivity.CPU]
    if cuda:
        activities.append(ProfilerActivity.CUDA)
    started = time.perf_counter()
    with record(activities=activities) as profiler:
        step()
    took = 1e3 * (time.perf_counter() - started)
    events = profiler.key_averages()
    column = "self_device_time_total" if cuda else "self_cpu_time_total"
    launches = sum(event.count for event in events if "launchkernel" in event.key.lower())
    table = events.table(sort_by=column, row_limit=25, max_name_column_width=100)
    print(f"{table}\nstep {took:.1f} ms, {launches} launches")
    about = {
        "model": args.profile,
        "shape": f"{args.rows} × {args.length} tokens",
        "dtype": str(dtype),
        "device": card(args.device),
        "step_ms": took,
        "launches": launches,
        "table": table.splitlines(),
    }
    args.out.write_text(json.dumps(environment() | about, indent=1))
    return 0


def main() -> int:
    """Run the steps; the exit status is 1 where one failed."""
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("steps", nargs="*", metavar="STEP", help=", ".join(STEPS))
    options.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    options.add_argument("--minutes", type=float, default=45.0, help="of all steps together")
    options.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "gpu")
    # Of the step "profile" itself, in its process.
    options.add_argument("--profile", default="", help=argparse.SUPPRESS)
    options.add_argument("--length", type=int, default=2048, help=argparse.SUPPRESS)
    options.add_argument("--rows", type=int, default=16, help=argparse.SUPPRESS)
    args = options.parse_args()
    unknown = [name for name in args.steps if name not in STEPS]
    if unknown:
        options.error(f"{', '.join(unknown)}: expected some of {', '.join(STEPS)}")
    device_of(args)
    if args.profile:
        return profile(args)
    args.out.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + 60 * args.minutes
    failed = []
    for name in args.steps or STEPS:
        seconds = min(60 * STEPS[name][0], end - time.monotonic())
        if seconds < 5 or not run_step(name, args.device, args.out.resolve(), seconds):
            failed.append(name)
    if failed:
        print(f"failed or no time left: {', '.join(failed)}")
        return 1
    print("all steps succeeded")
    return 0


if __name__ == "__main__":
    sys.exit(main())
