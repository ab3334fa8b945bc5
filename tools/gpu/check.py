"""First minutes on a GPU: every fused kernel, at real tile sizes, against float64 of the same rounded inputs.

    python tools/gpu/check.py --quick     one forward and backward of each kernel, D = 64 and bfloat16: about a minute
    python tools/gpu/check.py --widths 64,128 --dtypes bfloat16,float16,float32 --out $OUT/check.jsonl
    TRITON_INTERPRET=1 python tools/gpu/check.py --length 70 --tile 16 --widths 16 --dtypes float32     on a CPU

The cases are in tools/gpu/cases.py, and tests/gpu has them as tests. This command needs no pytest, its processes share a GPU
(`--part`), and a case that fails does not stop it. Fresh memory is filled with NaN, every call runs twice and must agree to the
bit. Prints one line per case; exits with the number of failures.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # so that a plain `python tools/…` finds the project

from tools.gpu.cases import CASES, QUICK, compare, too_wide


def parser() -> argparse.ArgumentParser:
    """The command's options."""
    found = argparse.ArgumentParser()
    found.add_argument("--quick", action="store_true")
    found.add_argument("--cases", default="")
    found.add_argument("--widths", default="64,128")
    found.add_argument("--dtypes", default="bfloat16")
    found.add_argument("--length", type=int, default=0)
    found.add_argument("--tile", type=int, default=0)
    found.add_argument("--part", default="0/1", help="i/n: every n-th case from i on, for n processes")
    found.add_argument("--repeat", type=int, default=2)
    found.add_argument("--out", default="")
    return found


def check(name: str, width: int, dtype: torch.dtype, device: torch.device, args: argparse.Namespace) -> dict[str, Any]:
    """One line of JSON; an exception is a failure like another."""
    begun = time.time()
    line: dict[str, Any] = {"case": name, "width": width, "dtype": str(dtype).removeprefix("torch.")}
    try:
        found = compare(
            CASES[name], width, dtype, device, length=args.length or None, tile=args.tile or None, repeat=args.repeat
        )
        line |= {
            "errors": {n: float(f"{e:.3g}") for n, e in found.errors.items()},
            "same_bits": found.same_bits,
            "bad": found.bad,
            "ok": found.ok,
        }
    except Exception as error:
        line |= {
            "ok": False,
            "error": f"{type(error).__name__}: {str(error)[:300]}",
            "trace": traceback.format_exc()[-1500:],
        }
    line["seconds"] = round(time.time() - begun, 1)
    return line


def text_of(line: dict[str, Any]) -> str:
    """A line of JSON as it is printed."""
    worst = max(line.get("errors", {}).items(), key=lambda x: x[1], default=("", 0))
    return (
        f"{'ok  ' if line['ok'] else 'FAIL'} {line['case']:22} D{line['width']:<4}{line['dtype']:9} "
        f"worst {worst[1]:.1e} ({worst[0]}) {'' if line.get('same_bits', True) else 'BITS DIFFER '}"
        f"{line.get('error', '')}{line.get('bad') or ''} {line['seconds']}s"
    )


def main() -> int:
    """Run the command line; returns its exit status."""
    args = parser().parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    names = [n.strip() for n in args.cases.split(",") if n.strip()] or (QUICK if args.quick else list(CASES))
    widths = [64] if args.quick and not args.length else [int(w) for w in args.widths.split(",")]
    dtypes = [getattr(torch, d) for d in args.dtypes.split(",")]
    index, count = (int(x) for x in args.part.split("/"))
    work = [(n, w, d) for d in dtypes for w in widths for n in names if not too_wide(CASES[n], w)][index::count]
    failed, started = 0, time.time()
    for name, width, dtype in work:
        line = check(name, width, dtype, device, args)
        failed += not line["ok"]
        print(text_of(line), flush=True)
        if args.out:
            with open(args.out, "a") as file:
                file.write(json.dumps(line) + "\n")
        error = line.get("error", "")
        if "illegal memory access" in error or "CUDA error" in error:
            print("the CUDA context is lost: stopping this process", flush=True)
            break
    where = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
    print(f"{failed} of {len(work)} failed in {time.time() - started:.0f} s on {where}")
    return min(failed, 100)


if __name__ == "__main__":
    sys.exit(main())
