"""GOAT, "You Need Better Attention Priors" (arXiv 2601.15380)."""

from __future__ import annotations

import math
from pathlib import Path

import torch
import torch.nn.functional as F

from modalities.text.model import CausalLM, TextConfig
from tools.papers import Row, Verdict, at, columns, command, evaluate, item, lengths, needs_gpu, shipped, told
from zoo import create_model
from zoo.analysis import analyse
from zoo.model import ZooModel
from zoo.positions import Positions
from zoo.prior_plot_matrix import draw_prior_matrices, key_and_distance_parts

C4 = [
    "recipes/train.py text.goat_c4_goat_125m",
    "recipes/train.py text.goat_c4_alibi_125m",
    "recipes/train.py text.goat_c4_rope_125m",
]

# ------------------------------------------------------------------------------------------------ copy mixture

WORDS, LENGTH, FIRST, PREVIOUS = 64, 48, 0.4, 0.4  # the other targets are noise


def copy_mixture(seed: int, init: str, rank: int, out: Path, *, steps: int = 600) -> Row:
    """One layer and two heads of GOAT on targets that are the first word, the previous word or noise."""
    torch.manual_seed(seed)
    options = {"spectral": {"rank": rank, "init": init}, "key_bias": {"init": init}}
    config = TextConfig(
        vocab_size=WORDS, dim=64, num_layers=1, num_heads=2, hidden_dim=64, train_context=LENGTH, lanes="beside", tied=False,
        position="spectral+key_bias", position_options=options,
    )  # fmt: skip
    model = CausalLM(config)
    slow = [p for name, p in model.named_parameters() if ".prior." not in name]
    fast = [p for name, p in model.named_parameters() if ".prior." in name]
    optimizer = torch.optim.Adam([{"params": slow, "lr": 3e-3}, {"params": fast, "lr": 3e-2}], betas=(0.9, 0.99))
    generator = torch.Generator().manual_seed(1000 + seed)
    losses = []
    for step in range(steps):
        tokens, targets = mixture(64, generator)
        loss = F.cross_entropy(model(tokens)[:, 2:].flatten(0, 1), targets[:, 2:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if step % 100 == 99:
            print(f"  init {init}, R = {rank}, seed {seed}: step {step + 1}/{steps}, loss {loss:.3f}", flush=True)
    if seed == 0:
        draw_prior_matrices(
            model, f"copy mixture, init {init}, R = {rank}", out / f"copy_{init}_{rank}.png", length=LENGTH
        )
    prior = model.layers[0].attention.prior
    at_all = Positions.line(LENGTH)
    whole = prior.log_prior(at_all, at_all, causal=True)[0].double()
    pi = whole.masked_fill(torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1), -math.inf).softmax(-1)
    best = -sum(p * math.log(p) for p in (FIRST + 0.2 / WORDS, PREVIOUS + 0.2 / WORDS)) - 0.2 * (
        1 - 2 / WORDS
    ) * math.log(0.2 / WORDS)
    row = 40
    return {
        "init": init, "rank": rank, "seed": seed, "sink": float(pi[:, row, 0].max()),
        "previous": float(pi[:, row, row - 1].max()), "loss": sum(losses[-50:]) / 50, "best_loss": best,
    }  # fmt: skip


def mixture(batch: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and targets (B, L)."""
    tokens, noise = torch.randint(WORDS, (2, batch, LENGTH), generator=generator)
    kind = torch.rand(batch, LENGTH, generator=generator)
    targets = torch.where(kind < FIRST, tokens[:, :1].expand_as(tokens), noise)
    return tokens, torch.where((kind >= FIRST) & (kind < FIRST + PREVIOUS), tokens.roll(1, 1), targets)


def _copied(rows: list[Row]) -> Verdict:
    found = [row for row in rows if row["sink"] > 0.5 and row["previous"] > 0.5]
    kinds = {(row["init"], row["rank"]) for row in rows}
    by_kind = ", ".join(
        f"{init} R = {rank}: {sum((row['init'], row['rank']) == (init, rank) for row in found)} of "
        f"{sum((row['init'], row['rank']) == (init, rank) for row in rows)}"
        for init, rank in sorted(kinds)
    )
    most = max((row["sink"] for row in rows), default=math.nan)
    sentence = f"both heads recovered (π > 0.5 on either key) in {by_kind}; largest π(40, 0) {most:.2f}"
    return len(found) > len(rows) / 2, sentence


@item(
    "goat.figure1",
    "copy mixture: a sink head and a previous-token head are recovered",
    published="one head's prior peaks at key 0, the other's at distance 1",
    paper=["tools/reproduce.py goat.figure1"],
    judge=_copied,
)
def figure1(out: Path) -> list[Row]:
    """Gradient descent from three seeds, both inits, R = 2 and 8."""
    return [
        copy_mixture(seed, init, rank, out) for init in ("seeded", "uniform") for rank in (2, 8) for seed in range(3)
    ]


# ------------------------------------------------------------------------------------------------ text


def _c4(rows: list[Row]) -> Verdict:
    trained = min(int(row["length"]) for row in rows)
    longest = max(int(row["length"]) for row in rows)
    found = {
        m: (at(rows, m, "bits_per_byte", length=trained), at(rows, m, "bits_per_byte", length=longest))
        for m in ("goat", "alibi", "rope")
    }
    sentence = "; ".join(f"{m} {a:.3f} → {b:.3f}" for m, (a, b) in found.items())
    (goat, far), (alibi, _), (_, rope) = (found[m] for m in ("goat", "alibi", "rope"))
    return goat < alibi and far < rope, f"bits per byte at {trained} → {longest} tokens: {sentence}"


@item(
    "goat.figure2a",
    "perplexity against length: GOAT, ALiBi, RoPE",
    published="on C4, 125M: 1.55 below ALiBi in distribution; stays flat where RoPE rises",
    paper=[*C4, "recipes/evaluate.py runs/… perplexity --lengths 2048,4096,8192,16384"],
    judge=_c4,
)
def figure2a(out: Path) -> list[Row]:
    """The shipped tiny models on held-out speeches."""
    models = [shipped(method) for method in ("goat", "alibi", "rope")]
    rows = evaluate(out, models, "perplexity", "--lengths", lengths("goat", 1, 2, 4, 8, 16))
    return columns(rows, "model", "method", "length", "bits_per_byte", "bits_per_byte_standard_error")


def _spike(rows: list[Row]) -> Verdict:
    sentence = "; ".join(
        f"{row['model'].partition('.')[0]}: largest u(0) − median u {row['spike']:+.2f}, u(L) − median {row['at_end']:+.2f}"
        for row in rows
    )
    return any(row["spike"] > 1 for row in rows) and any(row["at_end"] > 0.5 for row in rows), sentence


@item(
    "goat.figure2b",
    "the learned u(j): a spike at key 0, a rise at the training length",
    published="a spike at the first key, and a rise towards L",
    paper=[C4[0], "priorzoo plot-prior runs/… --matrix"],
    judge=_spike,
)
def figure2b(out: Path) -> list[Row]:
    """u(j) of shipped GOAT models, at 0 and at the training length, less its median; the figure of each."""
    rows = []
    for name in (shipped("goat"), shipped("goat", "dna")):
        model = create_model(name, pretrained=True)
        length = model.config.train_context + 1
        parts = [key_and_distance_parts(layer.attention.prior, length)[0] for layer in model.layers]
        u = torch.stack(parts)
        middle = u.median(-1).values
        rows.append(
            {"model": name, "spike": float((u[..., 0] - middle).max()), "at_end": float((u[..., -1] - middle).max())}
        )
        draw_prior_matrices(model, name, out / f"{name}.png", length=96)
    return rows


def _sinks(rows: list[Row]) -> Verdict:
    top = {m: max(row["sink_mass"] for row in rows if row["method"] == m) for m in ("goat", "alibi", "rope")}
    sentence = ", ".join(f"{m} {v:.3f}" for m, v in top.items())
    none_shed = "no sink of weight near 1 forms here, so none is shed"
    return top["goat"] > 0.5, f"mean weight of the sink in the layer where it has most: {sentence}; {none_shed}"


@item(
    "goat.figure2c",
    "weight of the sink against the signal ω",
    published="GOAT's sink falls from about 1 to about 0 as ω grows; others keep theirs",
    paper=[*C4, "recipes/evaluate.py runs/… sinks"],
    judge=_sinks,
)
def figure2c(out: Path) -> list[Row]:
    """`sinks` of the shipped tiny models on held-out speeches."""
    rows = evaluate(out, [shipped(m) for m in ("goat", "alibi", "rope")], "sinks")
    margins = ("content_range", "divergence", "content_margin", "prior_margin")
    return columns(rows, "model", "method", "layer", "sink_mass", *margins)


def _retrieval(rows: list[Row]) -> Verdict:
    longest = max(row["length"] for row in rows)
    far = at(rows, "goat", SCORE, length=longest)
    others = [at(rows, m, SCORE, length=longest) for m in ("rope", "alibi")]
    return far > 0.9 and far > max(others), f"exact match {told(rows, SCORE, unit=' tokens')}"


SCORE = "free_generation"


@item(
    "goat.figure3a",
    "passkey against length: GOAT, RoPE and others",
    published="GOAT near-perfect far beyond the training length, RoPE and sinusoidal fail",
    paper=[
        "recipes/train.py text.goat_c4_goat_125m --set data.facts_fraction=0.1",
        "recipes/evaluate.py runs/… passkey",
    ],
    judge=_retrieval,
)
def figure3a(out: Path) -> list[Row]:
    """The shipped tiny models, five digits (the paper: eight)."""
    models = [shipped(m) for m in ("goat", "rope", "alibi")]
    rows = evaluate(out, models, "passkey", "--lengths", lengths("goat", 1, 4, 16), "--samples", "2")
    return columns(rows, "model", "method", "length", SCORE)


@item(
    "goat.figure3b",
    "the log-prior as a matrix, before and after the mask and normalisation",
    published="diagonal bands, and after the mask a column at the first key",
    paper=[C4[0], "priorzoo plot-prior runs/… --matrix"],
    judge=lambda rows: (
        rows[0]["first_key"] > 0.05,
        f"a head of {rows[0]['model']} has π(95, 0) = {rows[0]['first_key']:.2f}, where an even row has 0.01",
    ),
)
def figure3b(out: Path) -> list[Row]:
    """K and π of the shipped DNA model, at 96 positions."""
    name = shipped("goat", "dna")
    model, positions = create_model(name, pretrained=True), Positions.line(96)
    draw_prior_matrices(model, name, out / "matrix.png", length=96)
    most = 0.0
    for layer in model.layers:
        whole = layer.attention.prior.log_prior(positions, positions, causal=True)[0].double()
        hidden = torch.ones(96, 96, dtype=torch.bool).triu(1)
        most = max(most, float(whole.masked_fill(hidden, -math.inf).softmax(-1)[:, -1, 0].max()))
    return [{"model": name, "first_key": most}]


@item(
    "goat.figure3c",
    "needle in a haystack, length × depth, by method",
    published="GOAT's grid stays filled, the others' empties beyond the training length",
    paper=[*C4, "recipes/evaluate.py runs/… niah"],
    judge=_retrieval,
)
def figure3c(out: Path) -> list[Row]:
    """`niah` of the shipped tiny models; the heat map is niah.png."""
    models = [shipped(m) for m in ("goat", "rope", "alibi")]
    rows = evaluate(out, models, "niah", "--lengths", lengths("goat", 2, 4, 16), "--samples", "2")
    return columns(rows, "model", "method", "length", SCORE)


# ------------------------------------------------------------------------------------------------ DNA and images

GENOME = "recipes/train.py dna.human_125m"


def _dna(rows: list[Row]) -> Verdict:
    of = {m: {row["length"]: row["bits_per_base"] for row in rows if row["method"] == m} for m in ("goat", "rope")}
    near, far = min(of["goat"]), max(of["goat"])
    gaps = [of["goat"][length] - of["rope"][length] for length in (near, far)]
    sentence = f"GOAT less RoPE, bits a base: {gaps[0]:+.4f} at {near}, {gaps[1]:+.4f} at {far}"
    return max(gaps) < 0, sentence


@item(
    "goat.figure4a",
    "DNA likelihood: GOAT and RoPE",
    published="GOAT's NLL and bits a base below RoPE's, the more so at longer sequences",
    paper=[GENOME, f"{GENOME} --set model.name=dna_rope_125m", "recipes/evaluate.py runs/… bits"],
    judge=_dna,
)
def figure4a(out: Path) -> list[Row]:
    """The shipped tiny models on a yeast chromosome and a fungal one, neither trained on."""
    rows = evaluate(out, [shipped(m, "dna") for m in ("goat", "rope")], "bits", "--lengths", "256,1024,4096")
    return columns(rows, "model", "method", "length", "bits_per_base", "accuracy")


needs_gpu(
    "goat.figure4b",
    "throughput and peak memory of training on DNA",
    published="1.83 GB where RoPE takes 2.86 (−36%)",
    paper=["tools/bench.py dna --device cuda --out dna.json"],
    why="on a CPU training steps of GOAT take 0.99 to 1.05 times RoPE's time and 0.95 to 0.99 times its memory "
    "(benchmarks/cpu/dna.json); the paper's figure is of one GPU",
)


def _gc(rows: list[Row]) -> Verdict:
    sentence = ", ".join(f"{m} {at(rows, m, 'gc_r', length=1024):.3f}" for m in ("goat", "rope"))
    good = at(rows, "goat", "gc_r", length=1024) > max(0.2, at(rows, "rope", "gc_r", length=1024))
    return good, f"Pearson r of GC content after 1,024 bases: {sentence}; models of 0.75M parameters know no genes"


@item(
    "goat.figure4c",
    "completions of DNA: Pearson r of GC content to the truth",
    published="0.466 for GOAT, 0.320 for RoPE",
    paper=[GENOME, "recipes/evaluate.py runs/… completion"],
    judge=_gc,
)
def figure4c(out: Path) -> list[Row]:
    """`completion` of the shipped tiny models on chromosomes that they were not trained on."""
    models = [shipped(m, "dna") for m in ("goat", "rope")]
    rows = evaluate(out, models, "completion", "--lengths", "256,1024", "--samples", "16")
    return columns(rows, "model", "method", "length", "gc_r", "gc_r_standard_error", "accuracy", "chance")


def _resolution(rows: list[Row]) -> Verdict:
    largest = max(row["size"] for row in rows)
    far = {row["method"]: row["top1"] for row in rows if row["size"] == largest}
    sentence = f"top-1 {told(rows, 'top1', place='size', digits=3, unit=' pixels, trained at 48')}"
    good = far["goat_ssmax"] == max(far.values())
    return good, sentence + ("" if good else "; one seed: with three GOAT leads, within their spread (RESULTS.md)")


@item(
    "goat.figure5a",
    "resolution extrapolation: GOAT, absolute embeddings, 2-D RoPE",
    published="trained at 224, GOAT loses least at larger sizes",
    paper=[f"recipes/train.py vision.goat_imagenet_{m}_vits16" for m in ("goat", "ape", "rope2d")]
    + ["recipes/evaluate.py runs/… resolution"],
    judge=_resolution,
)
def figure5a(out: Path) -> list[Row]:
    """The shipped tiny models on the letters of fonts that ship; the README's table has three seeds and controls."""
    models = [shipped(m, "vision") for m in ("goat_ssmax", "learned_ssmax", "rope2d_axial_ssmax")]
    rows = evaluate(out, models, "resolution", "--source", "glyphs-builtin", "--sizes", "48,96,192", "--samples", "256")
    return columns(rows, "model", "method", "size", "top1", "ratio")


@item(
    "goat.figure5b",
    "the learned log-prior around the centre patch",
    published="heads with centres, stripes and rings from a uniform start",
    paper=["recipes/train.py vision.goat_imagenet_goat_vits16", "priorzoo plot-prior runs/…"],
    judge=lambda rows: (
        rows[0]["range"] > 1,
        f"K spans {rows[0]['range']:.1f} logits round the centre, and differs by direction by {rows[0]['direction']:.1f}",
    ),
)
def figure5b(out: Path) -> list[Row]:
    """K round the centre patch of the shipped tiny model."""
    name = shipped("goat_ssmax", "vision")
    command("-m", "zoo", "plot-prior", name, "--out", str(out / "prior.png"))
    model = create_model(name, pretrained=True)
    positions, spans, sides = model.train_positions(), [], []
    for layer in model.layers:
        centre = layer.attention.prior.log_prior(positions, positions, causal=False)[0, :, 3 * 6 + 3].double()
        spans.append(float((centre.amax(-1) - centre.amin(-1)).max()))
        sides.append(float((centre[:, 3 * 6 + 2] - centre[:, 3 * 6 + 4]).abs().max()))
    return [{"model": name, "range": max(spans), "direction": max(sides)}]


# ------------------------------------------------------------------------------------------------ theorems and set-ups


@item(
    "goat.theorem5.1",
    "collapse to the prior, π e^−ω ≤ p ≤ π e^ω, and the sensitivity of theorem 5.4",
    published="bounds for any weights",
    paper=["tools/reproduce.py goat.theorem5.1"],
    judge=lambda rows: (
        all(row["held"] == 1.0 for row in rows),
        "both hold in " + ", ".join(f"{row['held']:.2%} of {row['rows']:,} rows of {row['model']}" for row in rows),
    ),
)
def bounds(out: Path) -> list[Row]:
    """Every row of every head of shipped models, on random inputs."""
    rows = []
    for name in (shipped("goat"), shipped("ggd_ssmax"), shipped("goat", "dna"), shipped("goat_ssmax", "vision")):
        model: ZooModel = create_model(name, pretrained=True)
        torch.manual_seed(0)
        given = torch.randn(2, 3, 48, 48) if name.startswith("vision") else torch.randint(4, (2, 128))
        good = total = 0
        for one in analyse(model, given, full=True):
            assert one.weights is not None and one.prior is not None
            most = one.content_range.exp()[..., None] * (1 + 1e-9)
            within = ((one.weights <= one.prior * most + 1e-300) & (one.weights >= one.prior / most - 1e-300)).all(-1)
            others = (one.seen - 1) / (one.margin.exp() + one.seen - 1)
            within &= (one.sensitivity <= others * (1 + 1e-9)) | one.margin.isnan()
            good, total = good + int(within.sum()), total + within.numel()
        rows.append({"model": name, "rows": total, "held": good / total})
    return rows


for _key, _title, _published, _paper in (
    ("goat.table1", "set-up on C4", "12 layers, 12 heads, 768, R = 2, M = 8, L 2048, 4.0e9 tokens", C4),
    (
        "goat.table2",
        "set-up on ImageNet",
        "ViT-S/16, SwiGLU, 16 pairs, 224 pixels, 150 epochs, float16",
        [f"recipes/train.py vision.goat_imagenet_{m}_vits16" for m in ("goat", "ape", "rope2d")],
    ),
):
    needs_gpu(
        _key,
        _title,
        published=_published,
        paper=_paper,
        why="the recipes agree number by number (a test); the dry run says what they take",
    )
