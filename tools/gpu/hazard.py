"""Static check of sm_90 SASS: does anything touch a register that an HGMMA still in flight reads (A) or accumulates into?"""

import collections
import glob
import importlib.util
import json
import os
import re
import subprocess
import sys

_T = importlib.util.find_spec("triton")
CU = os.environ.get("CUOBJDUMP") or os.path.join(os.path.dirname(_T.origin), "backends/nvidia/bin/cuobjdump")
INS = re.compile(r"/\*([0-9a-f]{4,})\*/\s+(@!?U?P\w+\s+)?([A-Za-z0-9_.]+)\s*([^;]*);")


def regs(op, mods=""):
    m = re.match(r"R(\d+)", op)
    return int(m[1]) if m else None


def dests(name, ops):
    if name.startswith(
        (
            "ST",
            "LDGSTS",
            "BAR",
            "BRA",
            "EXIT",
            "WARP",
            "DEPBAR",
            "LDGDEPBAR",
            "RED",
            "CCTL",
            "MEMBAR",
            "FENCE",
            "SYNCS",
            "NOP",
            "ERRBAR",
            "BSSY",
            "BSYNC",
            "YIELD",
            "RET",
            "CALL",
            "UTMA",
            "UBLKCP",
        )
    ):
        return []
    parts = [p.strip() for p in ops.split(",")]
    i = 0
    if name.startswith(("SHFL", "LOP3", "PLOP")) and parts and re.match(r"!?U?P", parts[0]):
        i = 1
    if "SETP" in name:
        return []
    if i >= len(parts):
        return []
    r = regs(parts[i])
    if r is None:
        return []
    n = 1
    if name.startswith("HGMMA"):
        n = 0
    elif ".128" in name or ".M88.4" in name or ".MT88.4" in name:
        n = 4
    elif (
        (".64" in name and name.startswith(("LD", "MOV", "CS2R", "ATOM")))
        or ".WIDE" in name
        or ".M88.2" in name
        or ".MT88.2" in name
        or name.startswith("CS2R")
    ):
        n = 2
    elif name.startswith(("HMMA",)):
        n = 4
    return list(range(r, r + n))


def sources(name, ops, d):
    parts = [p.strip() for p in ops.split(",")]
    out = set()
    for p in parts:
        for m in re.finditer(r"(?<![UA-Z])R(\d+)", p):
            out.add(int(m[1]))
    if d and not name.startswith(("ST", "LDGSTS")):
        # first operand is dest; may also be a source elsewhere
        cnt = sum(1 for p in parts[1:] for m in re.finditer(r"(?<![UA-Z])R(\d+)", p) if int(m[1]) == d[0])
        if not cnt:
            out.discard(d[0])
    return out


def hg(name, ops):
    m = re.search(r"HGMMA\.64x(\d+)x(\d+)", name)
    n = int(m[1])
    parts = [p.strip() for p in ops.split(",")]
    acc = regs(parts[0])
    cnt = n // 2 if ".F32" in name else n // 4
    accs = set(range(acc, acc + cnt)) if acc is not None else set()
    a = regs(parts[1]) if parts[1].startswith("R") and not parts[1].startswith("RZ") else None
    As = set(range(a, a + 4)) if a is not None else set()
    return accs, As, "gsb0" in ops


def analyse(path):
    txt = subprocess.run([CU, "-sass", path], capture_output=True, text=True).stdout
    code = [(int(m[1], 16), (m[2] or "").strip(), m[3], m[4].strip()) for m in INS.finditer(txt)]
    idx = {a: i for i, (a, _, _, _) in enumerate(code)}
    found = set()
    nhg = nrs = 0
    succ = collections.defaultdict(list)
    for i, (_, p, n, o) in enumerate(code):
        if n.startswith("BRA"):
            m = re.search(r"0x([0-9a-f]+)", o)
            if m and int(m[1], 16) in idx:
                succ[i].append(idx[int(m[1], 16)])
            if p or ("P" in o.split(",")[0] and o.startswith(("P", "!P", "UP", "!UP"))):
                succ[i].append(i + 1)
        elif n.startswith("EXIT") and not p:
            pass
        elif i + 1 < len(code):
            succ[i].append(i + 1)
    for _, _, n, o in code:
        if n.startswith("HGMMA"):
            nhg += 1
            nrs += bool(hg(n, o)[1])
    # may dataflow. state: (open set of (reg,kind)), list of closed groups newest first (max 4)
    init = (frozenset(), (frozenset(),) * 4)
    state = {0: init}
    work = [0]

    def join(s, t):
        return (s[0] | t[0], tuple(x | y for x, y in zip(s[1], t[1], strict=True)))

    steps = 0
    while work:
        i = work.pop()
        s = state[i]
        steps += 1
        if steps > 400000:
            print("too long", path)
            break
        a, p, n, o = code[i]
        opened, groups = s
        if n.startswith("HGMMA"):
            accs, As, close = hg(n, o)
            opened = opened | frozenset(("a", r) for r in As) | frozenset(("c", r) for r in accs)
            if close:
                groups = (opened, *groups[:3])
                opened = frozenset()
        elif n.startswith("WARPGROUP.DEPBAR"):
            m = re.search(r"0x([0-9a-f]+)", o)
            k = int(m[1], 16) if m else 0
            groups = tuple(g if q < k else frozenset() for q, g in enumerate(groups))
            if k == 0:
                opened = frozenset()
        else:
            live = set(opened) | set().union(*groups)
            if live:
                d = dests(n, o)
                for r in d:
                    if ("a", r) in live:
                        found.add((a, "writes A operand in flight", n, o, r))
                    if ("c", r) in live:
                        found.add((a, "writes accumulator in flight", n, o, r))
                for r in sources(n, o, d):
                    if ("c", r) in live:
                        found.add((a, "reads accumulator in flight", n, o, r))
        new = (opened, groups)
        for j in succ[i]:
            if j >= len(code):
                continue
            if j not in state:
                state[j] = new
                work.append(j)
            else:
                m = join(state[j], new)
                if m != state[j]:
                    state[j] = m
                    work.append(j)
    return nhg, nrs, sorted(found)


if __name__ == "__main__":
    total = 0
    for path in sorted(path for pattern in sys.argv[1:] for path in glob.glob(pattern)):
        nhg, nrs, found = analyse(path)
        if not nhg:
            continue
        total += 1
        with open(path.replace(".cubin", ".json")) as file:
            meta = json.load(file)
        print(
            path.split("/")[-2][:8],
            meta["name"],
            "warps",
            meta["num_warps"],
            "HGMMA",
            nhg,
            "of A in registers",
            nrs,
            "-> hazards",
            len(found),
        )
        for at, what, instruction, operands, register in found[:6]:
            print(f"    {at:x} {what}: {instruction} {operands}  (R{register})")
    print(total, "kernels")
