"""Block sizes, warps and stages of each kernel timed on the GPU; every candidate's result is compared with the present one's.

    python tools/gpu/sweep.py --warm 12 --widths 64,128        compile all candidates in 12 processes; nothing is timed
    python tools/gpu/sweep.py --widths 64,128 --minutes 5 --out $OUT/sweep.jsonl

Prints, for each kernel, width and variant, the present choice and the best three, with TFLOP/s of the visible pairs.
Baselines: torch's flash and cuDNN attention, and the kernel without a table ("bare"), which shows the cost of the table.
"""

import argparse
import json
import os
import subprocess
import sys
import time

p = argparse.ArgumentParser()
p.add_argument("--widths", default="64,128")
p.add_argument("--variants", default="table,bare,parametric,scale")
p.add_argument("--kernels", default="forward,dkdv,dq,diagonal")
p.add_argument("--length", type=int, default=8192)
p.add_argument("--rows", type=int, default=64, help="batch times heads")
p.add_argument("--minutes", type=float, default=5.0)
p.add_argument("--warm", type=int, default=0)
p.add_argument("--part", default="")
p.add_argument("--out", default="")
a = p.parse_args()
if a.warm:
    each = [
        subprocess.Popen(
            [
                sys.executable,
                __file__,
                "--part",
                f"{i}/{a.warm}",
                "--widths",
                a.widths,
                "--variants",
                a.variants,
                "--kernels",
                a.kernels,
                "--minutes",
                str(a.minutes),
            ]
        )
        for i in range(a.warm)
    ]
    sys.exit(max(x.wait() for x in each))
import torch  # noqa: E402

sys.path.insert(0, os.getcwd())
from triton.runtime.jit import JITFunction  # noqa: E402

if a.part:  # compile and do not launch
    launch = JITFunction.run
    JITFunction.run = lambda self, *x, **k: launch(self, *x, **{**k, "warmup": True})
import triton  # noqa: E402

from zoo.attention.triton import backward, forward, table_grad  # noqa: E402
from zoo.attention.triton.backward import OutputGradient, output_gradient  # noqa: E402
from zoo.attention.triton.common import Operands  # noqa: E402
from zoo.attention.triton.common import Geometry  # noqa: E402

device = torch.device("cuda")
L = a.length if not a.part else 1024
B, H = (a.rows // 16, 16) if not a.part else (1, 16)
end = time.time() + 60 * a.minutes
CANDIDATES = {  # (queries, keys, warps, stages)
    "forward": {
        64: [
            (128, 64, 4, 3),
            (128, 64, 4, 2),
            (128, 64, 4, 4),
            (128, 128, 4, 2),
            (128, 128, 8, 2),
            (128, 128, 8, 3),
            (128, 64, 8, 3),
            (64, 64, 4, 3),
            (64, 128, 4, 2),
            (256, 64, 8, 3),
        ],
        128: [
            (128, 128, 8, 2),
            (128, 64, 8, 2),
            (128, 64, 8, 3),
            (128, 64, 4, 3),
            (64, 64, 4, 3),
            (64, 128, 4, 2),
            (128, 128, 8, 3),
            (128, 32, 4, 3),
        ],
    },
    "dkdv": {
        64: [
            (64, 128, 8, 2),
            (64, 128, 8, 3),
            (32, 128, 8, 3),
            (64, 64, 4, 2),
            (64, 64, 4, 3),
            (32, 128, 4, 3),
            (128, 128, 8, 2),
            (64, 128, 4, 2),
            (32, 64, 4, 4),
        ],
        128: [
            (64, 128, 8, 2),
            (32, 128, 8, 2),
            (32, 128, 8, 3),
            (64, 64, 4, 2),
            (32, 64, 4, 3),
            (64, 64, 8, 2),
            (64, 128, 8, 1),
        ],
    },
    "dq": {
        64: [
            (128, 64, 8, 2),
            (128, 32, 8, 2),
            (128, 64, 8, 3),
            (64, 64, 4, 2),
            (64, 64, 4, 3),
            (128, 64, 4, 3),
            (64, 128, 4, 2),
            (128, 128, 8, 2),
            (64, 32, 4, 3),
        ],
        128: [
            (128, 64, 8, 2),
            (128, 32, 8, 2),
            (128, 32, 8, 3),
            (64, 64, 4, 2),
            (64, 32, 4, 3),
            (128, 64, 8, 3),
            (64, 128, 8, 2),
        ],
    },
    "diagonal": {
        64: [(64, 8, 2), (64, 4, 2), (64, 4, 3), (64, 8, 3), (128, 8, 2), (32, 4, 3)],
        128: [(64, 8, 2), (64, 4, 2), (64, 8, 3), (32, 4, 3)],
    },
}


class Off:
    """A kernel that is not launched, so that its neighbour is timed alone."""

    def __getitem__(self, grid):
        return lambda *x, **k: None


def inputs(width, variant):
    torch.manual_seed(0)
    q, k, v, do = (
        (torch.randn(B, L, H, width, device=device) * (0.3 if i == 0 else 1)).bfloat16().transpose(1, 2)
        for i in range(4)
    )
    g = Geometry(B, H, H, L, L, width, width, 0, True, 0, L - 1)
    slopes = torch.logspace(-1, -6, H, base=2, device=device)[:, None]
    d = torch.arange(2 * L - 1, device=device) - (L - 1)
    table = None if variant == "bare" else (-slopes * d.abs() * 0.05).float().contiguous()
    scale = torch.rand(1, H, L, device=device) + 0.5 if variant == "scale" else None
    jacobian = torch.stack([table, table * 0.5]) if variant == "parametric" else None
    return q, k, v, do, table, scale, jacobian, g


def timed(run):
    run()
    return triton.testing.do_bench(run, warmup=8, rep=40, return_mode="median")


def note(line):
    if a.out:
        with open(a.out, "a") as file:
            file.write(json.dumps(line) + "\n")


def flops(width, products):
    return 2.0 * products * B * H * width * (L * (L + 1) / 2)


def baselines(width):
    from torch.nn.attention import SDPBackend, sdpa_kernel

    q, k, v, do, *_ = inputs(width, "bare")
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    for name, which in (("flash", SDPBackend.FLASH_ATTENTION), ("cudnn", SDPBackend.CUDNN_ATTENTION)):
        try:
            with sdpa_kernel(which):
                out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
                with torch.no_grad():
                    f = timed(lambda: torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True))
                b = timed(lambda out=out: torch.autograd.grad(out, (q, k, v), do, retain_graph=True))
            rates = flops(width, 2) / f / 1e9, flops(width, 5) / b / 1e9
            print(
                f"torch {name:6} D{width}: forward {f:.3f} ms {rates[0]:.0f} TFLOP/s, backward {b:.3f} ms {rates[1]:.0f}",
                flush=True,
            )
            note(dict(kernel=f"torch {name}", width=width, forward=f, backward=b))
        except Exception as error:
            print(name, type(error).__name__, str(error)[:200], flush=True)


def one(kernel, width, variant, candidates):
    q, k, v, do, table, scale, jacobian, g = inputs(width, variant)
    call = Operands(q, k, v, table, scale, None, g)
    rows, wanted = [], None
    out, lse = (
        forward.attention_forward(call) if not a.part else (torch.zeros_like(q), torch.zeros(B, H, L, device=device))
    )
    upstream = output_gradient(do, out, lse, g) if not a.part else OutputGradient(do, lse, lse)
    keep = {n: getattr(backward, n) for n in ("_dkdv", "_dq")}
    products = {"forward": 2, "dkdv": 4, "dq": 3, "diagonal": 2}[kernel]
    for number, blocks in enumerate(candidates):
        if time.time() > end:
            print("out of time", flush=True)
            break
        try:
            if kernel == "forward":
                forward.BLOCKS_16[width] = blocks
                run = lambda: forward.attention_forward(call)[0]  # noqa: E731
            elif kernel == "diagonal":
                table_grad.BLOCKS_16[width] = blocks
                run = lambda: table_grad.table_gradient(call, upstream)  # noqa: E731
            else:
                backward.DKDV_16[width] = backward.DQ_16[width] = backward.DKDV_PLAIN_128 = blocks
                other = {"dkdv": "_dq", "dq": "_dkdv"}[kernel]
                setattr(backward, other, Off())
                index = 1 if kernel == "dkdv" else 0
                run = lambda at=index: backward.attention_backward(  # noqa: E731
                    call, upstream, jacobian=jacobian
                )[at]
            if a.part:
                run()
                continue
            result = run().float()
            wanted = result if wanted is None else wanted
            error = float((result - wanted).norm() / wanted.norm())
            ms = timed(run)
            rows.append((ms, blocks, error))
            note(
                dict(
                    kernel=kernel,
                    width=width,
                    variant=variant,
                    blocks=blocks,
                    ms=ms,
                    tflops=flops(width, products) / ms / 1e9,
                    error=error,
                    present=number == 0,
                )
            )
        except Exception as error:
            if not a.part:
                note(
                    dict(
                        kernel=kernel,
                        width=width,
                        variant=variant,
                        blocks=blocks,
                        failed=f"{type(error).__name__}: {str(error)[:200]}",
                    )
                )
                if "CUDA error" in str(error) or "illegal" in str(error):
                    raise
        finally:
            for n, x in keep.items():
                setattr(backward, n, x)
    if rows:
        first = rows[0]
        best = sorted(rows)[:3]
        work = flops(width, products) / 1e9
        found = [f"{b} {ms:.3f} {work / ms:.0f}{'' if e < 2e-2 else f' WRONG {e:.1e}'}" for ms, b, e in best]
        now = f"now {first[1]} {first[0]:.3f} ms {work / first[0]:.0f} TF/s"
        print(f"{kernel:8} D{width} {variant:6} {now} | {'; '.join(found)}", flush=True)


jobs = [
    (k, w, v)
    for w in (int(x) for x in a.widths.split(","))
    for v in a.variants.split(",")
    for k in a.kernels.split(",")
    if not (k == "diagonal" and v == "bare")
    and not (v == "parametric" and k != "dq")
    and not (v == "scale" and k == "diagonal")
]
saved = {
    m: {n: dict(getattr(m, n)) for n in names}
    for m, names in ((forward, ["BLOCKS_16"]), (backward, ["DKDV_16", "DQ_16"]), (table_grad, ["BLOCKS_16"]))
}
if a.part:
    i, n = (int(x) for x in a.part.split("/"))
    flat = [(job, c) for job in jobs for c in CANDIDATES[job[0]][job[1]]]
    for job, c in flat[i::n]:
        one(*job, [c])
else:
    for width in (int(x) for x in a.widths.split(",")):
        baselines(width)
    plain = backward.DKDV_PLAIN_128
    for job in jobs:
        for m, names in saved.items():
            for n, blocks in names.items():
                getattr(m, n).update(blocks)
        backward.DKDV_PLAIN_128 = plain
        one(*job, CANDIDATES[job[0]][job[1]])
