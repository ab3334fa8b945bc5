"""First minutes on a GPU: every fused kernel, at real tile sizes, against float64 of the same rounded inputs.

    python tools/gpu/check.py --quick     one forward and backward of each kernel, D = 64 and bfloat16: about a minute
    python tools/gpu/check.py --widths 64,128 --dtypes bfloat16,float16,float32 --out $OUT/check.jsonl
    TRITON_INTERPRET=1 python tools/gpu/check.py --length 70 --tile 16 --widths 16 --dtypes float32     on a CPU

tests/zoo/test_triton_backward.py is skipped on CUDA and the other tests there have one tile, which leaves the paths without a
mask (`part == 1` of _dkdv and _dq, `full` blocks of _forward) untested. This script covers them. Fresh memory is filled with
NaN, every call runs twice and must agree to the bit. Prints one line per case; exits with the number of failures.
"""

import argparse
import json
import math
import os
import sys
import time
import traceback
from dataclasses import replace

import torch

parser = argparse.ArgumentParser()
parser.add_argument("--quick", action="store_true")
parser.add_argument("--cases", default="")
parser.add_argument("--widths", default="64,128")
parser.add_argument("--dtypes", default="bfloat16")
parser.add_argument("--length", type=int, default=0)
parser.add_argument("--tile", type=int, default=0)
parser.add_argument("--part", default="0/1", help="i/n: every n-th case from i on, for n processes")
parser.add_argument("--repeat", type=int, default=2)
parser.add_argument("--out", default="")
args = parser.parse_args()
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
sys.path.insert(0, os.getcwd())
from zoo import Positions, create_prior  # noqa: E402
from zoo.attention import prior_attention  # noqa: E402
from zoo.attention import triton as fused  # noqa: E402
from zoo.attention.triton import common  # noqa: E402
from zoo.priors.base import PriorTerms, RelativeTable  # noqa: E402

if args.tile:
    common.TILE = args.tile
torch.use_deterministic_algorithms(True, warn_only=True)  # torch.empty is filled with NaN and the largest integers
torch.utils.deterministic.fill_uninitialized_memory = True
torch.backends.cuda.matmul.allow_tf32 = False
# rounding of operands (2^-9, 2^-12), once in the logits and once in the weights, and of float32 sums
BOUND = {torch.bfloat16: 2e-2, torch.float16: 3e-3, torch.float32: 2e-5}
L = args.length or 1031  # odd: a tail in every tile; 16 tiles of 64, so whole tiles inside

# name: (queries, keys, options). lanes: columns; parametric: GGD as a parametric table; scale: SSMax-like row scale
CASES = {
    "bare": dict(),
    "lanes": dict(lanes=16),
    "lanes-odd": dict(lanes=5),
    "lanes-inside": dict(lanes=9, narrow=9),
    "table": dict(table="random"),
    "table-even": dict(table="random", even=True),
    "parametric": dict(parametric=True),
    "parametric-skip": dict(parametric=True, skip=True),
    "parametric-scale-skip": dict(parametric=True, skip=True, scale=True),
    "parametric-mu": dict(parametric=True, mu=True),
    "table-skip": dict(table="decay", skip=True),
    "scale": dict(table="random", scale=True),
    "scale-bare": dict(scale=True),
    "documents": dict(table="random", documents=True),
    "documents-lanes-skip": dict(lanes=5, documents=True, skip=True),
    "window": dict(table="random", window=200),
    "both-ways": dict(table="random", causal=False),
    "window-both-ways": dict(table="random", causal=False, window=150),
    "grouped": dict(table="random", groups=2),
    "grouped-parametric-scale": dict(parametric=True, groups=1, scale=True),
    "offset": dict(table="random", queries=300),
    "offset-parametric": dict(parametric=True, queries=300),
    "grid": dict(grid=(31, 32, 3)),
    "grid-scale": dict(grid=(31, 32, 3), scale=True),
    "grid-skip": dict(grid=(16, 60, 1), skip=True),
    "everything": dict(
        table="random", lanes=5, scale=True, documents=True, window=300, groups=2, queries=700, skip=True
    ),
    "packed-qkv": dict(table="random", packed=True),
    "bias": dict(bias=(1, 1), causal=False),
    "bias-everything": dict(bias=(2, 4), table="random", lanes=5, scale=True, documents=True, groups=2, queries=700),
    "plus-infinity-hidden": dict(table="hidden"),
}
QUICK = ["bare", "lanes", "table", "parametric-scale-skip", "documents", "grouped", "grid", "bias"]


def build(name, width, dtype, seed):
    o = CASES[name]
    torch.manual_seed(seed)
    B, H = 2, 4
    T = S = L
    if "grid" in o:
        h, w, p = o["grid"] if not args.length else (5, 7, 2)
        T = S = h * w + p
    elif o.get("even"):
        T = S = max(128, L // 128 * 128)
    if "queries" in o:
        T = min(o["queries"], S - 7) if not args.length else max(9, S // 3)
    G = o.get("groups", H)
    content = width - o.get("narrow", 0)

    def leaf(*shape, d=dtype, factor=1.0):
        return (factor * torch.randn(*shape, device=device)).to(d).requires_grad_()

    if o.get("packed"):  # as a model's projection leaves them: heads beside one another
        q, k, v = (
            (torch.randn(B, S, H, width, device=device)).to(dtype).transpose(1, 2).requires_grad_() for _ in range(3)
        )
    else:
        q, k, v = leaf(B, H, T, content), leaf(B, G, S, content), leaf(B, G, S, width)
    leaves = {"q": q, "k": k, "v": v}
    pos = (
        (Positions.line(T, offset=S - T), Positions.line(S))
        if "grid" not in o
        else (Positions.grid(h, w, num_prefix=p),) * 2
    )
    if "lanes" in o:
        leaves["q_lanes"] = leaf(1, H, T, o["lanes"], d=torch.float32)
        leaves["k_lanes"] = leaf(1, 1, S, o["lanes"], d=torch.float32, factor=0.3)
        with torch.no_grad():  # what both sides see is what the kernel rounds to
            for n in ("q_lanes", "k_lanes"):
                leaves[n].copy_(leaves[n].to(dtype).float())
    prior = None
    if o.get("parametric"):
        prior = create_prior("ggd", num_heads=H, init="alibi", train_mu=bool(o.get("mu"))).to(device).float()
        with torch.no_grad():
            prior.theta_beta.add_(0.1 * torch.randn_like(prior.theta_beta))
            if o.get("skip"):
                prior.theta_alpha.add_(1.0)
        leaves |= {n: p_ for n, p_ in prior.named_parameters() if p_.requires_grad}
    elif "grid" in o:
        n = (2 * h - 1) * (2 * w - 1)
        leaves["table"] = leaf(H, n, d=torch.float32)
        if o.get("skip"):
            y, x = torch.arange(1 - h, h, device=device), torch.arange(1 - w, w, device=device)
            leaves["table"] = (
                (-1.5 * torch.hypot(y[:, None].float(), x.float()).flatten().expand(H, -1)).clone().requires_grad_()
            )
    elif "table" in o:
        table = torch.randn(H, T + S - 1, device=device)
        d = torch.arange(T + S - 1, device=device) - (S - 1) + (S - T)
        if o["table"] == "decay":
            table = -torch.tensor([2.0, 0.5, 0.1, 0.01], device=device)[:, None] * d.abs()
        if o["table"] == "hidden":
            table[:, (d > 70) & (d % 3 == 0)] = -math.inf
        leaves["table"] = table.clone().requires_grad_()
    if o.get("scale"):
        leaves["query_scale"] = (0.5 + torch.rand(H, T, device=device)).requires_grad_()
    if "bias" in o:
        leaves["bias"] = leaf(*o["bias"], T, S, d=torch.float32)
    segments = None
    if o.get("documents"):
        cut = torch.tensor([[S // 5], [S // 2]], device=device)
        at = torch.arange(S, device=device)[None]
        segments = (at >= cut).long() + (at >= cut + S // 4).long()
    causal = o.get("causal", "grid" not in o)
    options = dict(
        causal=causal, window=o.get("window") if not args.length else (o.get("window") and 20), segments=segments
    )

    def call(leaves, kernel, prior):
        terms = PriorTerms(leaves.get("q_lanes"), leaves.get("k_lanes"), bias=leaves.get("bias"))
        if prior is not None:
            terms = replace(terms, table=prior(*pos, causal=causal).table)
        elif "grid" in o:
            terms = replace(terms, table=RelativeTable.grid(leaves["table"], pos[0]))
        elif "table" in leaves:
            terms = replace(terms, table=RelativeTable.line(leaves["table"], *pos, center=(S - 1) - (S - T)))
        out = prior_attention(
            leaves["q"],
            leaves["k"],
            leaves["v"],
            terms,
            query_scale=leaves.get("query_scale"),
            kernel=kernel,
            **options,
        )
        return out

    return leaves, prior, call, bool(o.get("skip"))


def norm_error(a, b):
    a, b = a.double(), b.double()
    if not torch.isfinite(a).all():
        return math.inf
    return float((a - b).norm() / b.norm().clamp(min=1e-30))


def check(name, width, dtype, seed=0):
    leaves, prior, call, skip = build(name, width, dtype, seed)
    wide = {n: x.detach().double().requires_grad_() for n, x in leaves.items()}
    wide_prior = None
    if prior is not None:
        import copy

        wide_prior = copy.deepcopy(prior).double()
        wide |= {n: p for n, p in wide_prior.named_parameters() if n in leaves}
    truth = call(wide, "reference", wide_prior)
    direction = torch.randn_like(truth).to(dtype).double()
    exact = dict(zip(wide, torch.autograd.grad(truth, list(wide.values()), direction), strict=True)) | {
        "out": truth.detach()
    }
    runs = []
    fused.TRITON.least_keys = 1
    for _ in range(args.repeat):
        with fused.skipping(skip):
            out = call(leaves, "triton", prior)
        grads = torch.autograd.grad(out, list(leaves.values()), direction.to(dtype))
        runs.append(dict(zip(leaves, grads, strict=True)) | {"out": out.detach()})
    errors = {n: norm_error(runs[0][n], exact[n]) for n in exact}
    rows = (runs[0]["out"].double() - exact["out"]).norm(dim=-1) / exact["out"].norm(dim=-1).clamp(min=1e-30)
    errors["out, worst row"] = float(rows.max()) if torch.isfinite(rows).all() else math.inf
    same = all(torch.equal(a[n], runs[0][n]) for a in runs[1:] for n in a)
    bound = BOUND[dtype]
    # Sums for a table and its parameters cancel: errors are relative to the size of the summands, hence × 4.
    loose = {
        "theta_alpha",
        "theta_beta",
        "theta_mu",
        "table",
        "bias",
        "query_scale",
        "q_lanes",
        "k_lanes",
        "out, worst row",
    }
    bad = {n: e for n, e in errors.items() if not e <= bound * (4 if n in loose else 1)}
    return errors, same, bad


names = [n.strip() for n in args.cases.split(",") if n.strip()] or (QUICK if args.quick else list(CASES))
widths = [64] if args.quick and not args.length else [int(w) for w in args.widths.split(",")]
dtypes = [getattr(torch, d) for d in args.dtypes.split(",")]
index, count = (int(x) for x in args.part.split("/"))
work = [
    (n, w, d)
    for d in dtypes
    for w in widths
    for n in names
    if not ("lanes" in CASES[n] and w + CASES[n]["lanes"] > 256)
]
failed, started = 0, time.time()
for number, (name, width, dtype) in enumerate(work):
    if number % count != index:
        continue
    begun = time.time()
    line = {"case": name, "width": width, "dtype": str(dtype)[6:]}
    try:
        errors, same, bad = check(name, width, dtype)
        line |= {
            "errors": {n: float(f"{e:.3g}") for n, e in errors.items()},
            "same_bits": same,
            "bad": bad,
            "ok": not bad and same,
        }
    except Exception as error:
        line |= {
            "ok": False,
            "error": f"{type(error).__name__}: {str(error)[:300]}",
            "trace": traceback.format_exc()[-1500:],
        }
    line["seconds"] = round(time.time() - begun, 1)
    failed += not line["ok"]
    worst = max(line.get("errors", {}).items(), key=lambda x: x[1], default=("", 0))
    print(
        f"{'ok  ' if line['ok'] else 'FAIL'} {name:22} D{width:<4}{line['dtype']:9} worst {worst[1]:.1e} ({worst[0]}) "
        f"{'' if line.get('same_bits', True) else 'BITS DIFFER '}{line.get('error', '')}{line.get('bad') or ''} "
        f"{line['seconds']}s",
        flush=True,
    )
    if args.out:
        with open(args.out, "a") as file:
            file.write(json.dumps(line) + "\n")
    if "illegal memory access" in line.get("error", "") or "CUDA error" in line.get("error", ""):
        print("the CUDA context is lost: stopping this process", flush=True)
        break
where = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
print(f"{failed} of {len(work[index::count])} failed in {time.time() - started:.0f} s on {where}")
sys.exit(min(failed, 100))
