"""BAM, "Bayesian Attention Mechanism" (arXiv 2505.22842)."""

from __future__ import annotations

import json
import math
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from modalities.cost import Meter
from recipes.estimate import build_on_meta
from recipes.registry import find_recipe
from tools.papers import Row, Verdict, at, columns, command, evaluate, item, lengths, needs_gpu, shipped, told, train
from zoo import Positions, create_model, create_prior
from zoo.prior_plot import save_figure

METHODS = ("ggd", "ggd_ssmax", "alibi", "rope", "nope", "sinusoidal")
FINEWEB = [f"recipes/train.py text.bam_{method}_120m" for method in METHODS]
SCORE = "free_generation"
TINY = ("ggd", "ggd_ssmax", "alibi", "rope")  # those with shipped weights that the paper has too


# ------------------------------------------------------------------------------------------------ set-ups and cost


def _counts(rows: list[Row]) -> Verdict:
    right = all(row["prior"] == row["published_prior"] for row in rows)
    return right, "; ".join(f"{row['size']}: {row['millions']:.1f}M, {row['prior']} of the prior" for row in rows)


@item(
    "bam.table1",
    "sizes of models, and parameters of the prior",
    published="120M, 432M, 1.1B; 384, 672 and 960 trained parameters of the prior",
    paper=["recipes/train.py text.bam_ggd_ssmax_120m --dry-run"],
    judge=_counts,
)
def table1(out: Path) -> list[Row]:
    """Counts of the recipes' models, which are built without memory."""
    rows = []
    for size, prior in (("120m", 384), ("432m", 672), ("1100m", 960)):
        model = build_on_meta(find_recipe(f"text.bam_ggd_ssmax_{size}"))
        named = [(name, p.numel()) for name, p in model.named_parameters() if p.requires_grad]
        own = sum(count for name, count in named if ".prior." in name)
        rows.append({"size": size, "millions": sum(n for _, n in named) / 1e6, "prior": own, "published_prior": prior})
    return rows


def _cost(rows: list[Row]) -> Verdict:
    plain = next(row for row in rows if row["method"] == "nope")
    ratios = {row["method"]: row["milliseconds"] / plain["milliseconds"] for row in rows if row is not plain}
    text = ", ".join(f"{m} {ratio:.2f}" for m, ratio in ratios.items())
    return ratios["ggd"] < 1.5, f"time of a prefill of 2,048 tokens as a multiple of NoPE's: {text}"


@item(
    "bam.table8",
    "inference: milliseconds and memory by method",
    published="BAM's overhead over NoPE is small, and memory equal",
    paper=["tools/reproduce.py bam.table8 (with a GPU: tools/bench.py attention --device cuda)"],
    judge=_cost,
)
def table8(out: Path) -> list[Row]:
    """Prefill of 2,048 tokens by models of 10M parameters, in turns, one thread; median and deviation of 9."""
    torch.set_num_threads(1)
    names = ("nope", "ggd", "ggd_ssmax", "alibi", "alibi_ssmax", "rope", "rope_ssmax", "sinusoidal", "ggd_goat")
    models = {name: create_model(f"text_{name}_small").eval() for name in names}
    tokens = torch.randint(200, (1, 2048))
    times: dict[str, list[float]] = {name: [] for name in names}
    memory: dict[str, float] = {}
    with torch.inference_mode():
        for turn in range(10):
            for name, model in models.items():
                started = time.perf_counter()
                with Meter("cpu") as meter:
                    model.forward_features(tokens, last=1)
                if turn:  # the first allocates
                    times[name].append(1e3 * (time.perf_counter() - started))
                    memory[name] = max(memory.get(name, 0.0), (meter.peak_bytes or 0) / 2**20)
    return [
        {
            "method": name,
            "milliseconds": statistics.median(found),
            "deviation": statistics.stdev(found),
            "mib": memory[name],
        }
        for name, found in times.items()
    ]


# ------------------------------------------------------------------------------------------------ perplexity


def _flat(rows: list[Row]) -> Verdict:
    points = sorted({row["length"] for row in rows})
    rise = {
        m: at(rows, m, "bits_per_byte", length=points[-1]) / at(rows, m, "bits_per_byte", length=points[0])
        for m in TINY
    }
    good = rise["ggd"] < 1.02 and rise["rope"] > rise["ggd"]
    return good, f"bits per byte {told(rows, 'bits_per_byte', digits=3)}"


@item(
    "bam.table2",
    "perplexity in and beyond the training length (with figures 2, 6, 7 and 13)",
    published="BAM equals the others to 512 tokens and stays flat to 32k, where RoPE and sinusoidal rise",
    paper=[*FINEWEB, "recipes/evaluate.py runs/… perplexity --lengths 512,1024,4096,32768"],
    judge=_flat,
)
def table2(out: Path) -> list[Row]:
    """The shipped tiny models on held-out speeches."""
    rows = evaluate(out, [shipped(m) for m in TINY], "perplexity", "--lengths", lengths("ggd", 1, 2, 8, 32))
    return columns(rows, "model", "method", "length", "bits_per_byte", "bits_per_byte_standard_error")


# ------------------------------------------------------------------------------------------------ retrieval


def _far(rows: list[Row]) -> Verdict:
    last = max(row["length"] for row in rows)
    best = max(at(rows, m, SCORE, length=last) for m in ("ggd", "ggd_ssmax"))
    others = max(at(rows, m, SCORE, length=last) for m in ("alibi", "rope"))
    return best > 0.9 and best > others, f"exact match {told(rows, SCORE)}"


@item(
    "bam.figure3",
    "passkey against length (with figures 10 and 12)",
    published="BAM-SSMax 1.0 to 200 times the training length, 0.8 at 500 times; ALiBi and RoPE fail soon",
    paper=[*FINEWEB, "recipes/evaluate.py runs/… passkey --template bam --samples 1 --lengths 512,4096,32768,262144"],
    judge=_far,
)
def figure3(out: Path) -> list[Row]:
    """The shipped tiny models to 32 times their training length, generated; half a million tokens: `evaluate.py … far`."""
    rows = evaluate(out, [shipped(m) for m in TINY], "passkey", "--lengths", lengths("ggd", 1, 8, 32), "--samples", "1")
    return columns(rows, "model", "method", "length", SCORE)


@item(
    "bam.figure4",
    "passkey by length and depth, with margins (and figure 16)",
    published="BAM-SSMax is even over depths; others lose the far end first",
    paper=[*FINEWEB, "recipes/evaluate.py runs/… passkey --template bam --samples 5"],
    judge=lambda rows: (
        rows[0]["least"] > 0.6,
        f"{rows[0]['model']} at {rows[0]['length']} tokens: over depths {rows[0]['least']:.2f} at least, {rows[0]['mean']:.2f} "
        "in the mean",
    ),
)
def figure4(out: Path) -> list[Row]:
    """The heat map of the shipped ggd_ssmax, five depths of five prompts, at 8 times its training length."""
    name = shipped("ggd_ssmax")
    command(
        "recipes/evaluate.py", name, "passkey", "--lengths", lengths("ggd", 1, 8), "--depths", "5", "--out", str(out)
    )
    found = json.loads(next((out / "passkey").glob("*.json")).read_text())["rows"][-1]
    depths = found[f"{SCORE}_by_depth"]
    return [{"model": name, "length": found["length"], "least": min(depths), "mean": sum(depths) / len(depths)}]


def _heads(rows: list[Row]) -> Verdict:
    away = [row["answer_mass"] for row in rows if row["retrieval"]]
    near = [row["answer_mass"] for row in rows if not row["retrieval"]]
    best = max(away, default=math.nan)
    other = max((row for row in rows if not row["retrieval"]), key=lambda row: row["answer_mass"])
    text = f"weight on the key's digits: best head of θβ < 0 {best:.3f}, of θβ > 0 {other['answer_mass']:.3f}"
    if max(near) >= 0.05:
        falls = math.exp(other["theta_alpha"]) * 256 ** other["theta_beta"]
        text += f", whose prior falls by no more than {falls:.1f} logits in 256 tokens and leaves them to content"
    return best > 0.5 and max(near) < 0.05, text


@item(
    "bam.figure5",
    "attention of head classes on the passkey prompt",
    published="heads of θβ < 0 put their weight on the key, those of θβ > 0 on what is near",
    paper=[FINEWEB[1], "recipes/evaluate.py runs/… heads --template bam --length 841"],
    judge=_heads,
)
def figure5(out: Path) -> list[Row]:
    """`heads` of the shipped ggd_ssmax at its training length; and the picture of its best head over a prompt."""
    name = shipped("ggd_ssmax")
    rows = evaluate(out, [name], "heads")
    prompt = "The light is on. The pass key is 71432. Remember it. The wind goes round. What is the pass key? The pass key is"
    command("recipes/attention.py", name, prompt, "--out", str(out / "attention.png"))
    return [
        {key: row[key] for key in ("model", "head", "answer_mass", "retrieval", "theta_alpha", "theta_beta", "ssmax.s")}
        for row in rows
    ]


def _spread(rows: list[Row]) -> Verdict:
    away = [row for row in rows if row["retrieval"]]
    s = [row["ssmax.s"] for row in rows if row["ssmax.s"] is not None]
    text = f"{len(away)} of {len(rows)} heads have θβ < 0; θβ from {min(r['theta_beta'] for r in rows):.2f} to "
    text += f"{max(r['theta_beta'] for r in rows):.2f}; s from {min(s):.2f} to {max(s):.2f}"
    return bool(away) and min(s) != max(s), text


@item(
    "bam.figure14",
    "distribution of SSMax's s, and of θβ against θα (with figures 17 and 18)",
    published="two clusters of θβ, below and above 0; s positive and spread",
    paper=[FINEWEB[1], "recipes/evaluate.py runs/… heads"],
    judge=_spread,
)
def figure14(out: Path) -> list[Row]:
    """Parameters of the heads of the shipped ggd and ggd_ssmax; heads.png has the scatters."""
    rows = evaluate(out, [shipped("ggd_ssmax"), shipped("ggd")], "heads", "--samples", "4")
    return [
        {"model": row["model"]}
        | {key: row.get(key) for key in ("head", "retrieval", "theta_alpha", "theta_beta", "ssmax.s")}
        for row in rows
    ]


# ------------------------------------------------------------------------------------------------ ablations

STEPS = ("train.steps=300", "train.save_every=0", "evaluate.every=300", "evaluate.samples=128")
INITS = ("uniform", "alibi", "linear", "sampled")


def ablation(out: Path, name: str, *settings: str, recipe: str = "text.ggd_ssmax_tiny") -> Row:
    """Held-out loss after 300 steps of the tiny recipe."""
    run = train(out, recipe, *STEPS, *settings)
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {"what": name, "heldout_loss": [r["heldout_loss"] for r in records if r.get("heldout_loss") is not None][-1]}


def _range(rows: list[Row]) -> Verdict:
    best = min(rows, key=lambda row: row["heldout_loss"])
    return None, "; ".join(f"{row['what']} {row['heldout_loss']:.3f}" for row in rows) + f"; least: {best['what']}"


def _least(expected: str) -> Callable[[list[Row]], Verdict]:
    def judge(rows: list[Row]) -> Verdict:
        found = min(rows, key=lambda row: row["heldout_loss"])["what"] == expected
        why = (
            ""
            if found
            else "; short runs rank settings poorly, by what is learnt before anything is found in the context"
        )
        return found, _range(rows)[1] + why

    return judge


@item(
    "bam.figure7",
    "inits of θα and θβ (with figure 8)",
    published="a uniform start is the best",
    paper=[f"{FINEWEB[1]} --set model.options.position_options.init={init}" for init in INITS],
    judge=_least("uniform"),
)
def figure7(out: Path) -> list[Row]:
    """Held-out loss after 300 steps of the tiny recipe, one seed."""
    return [ablation(out, init, f"model.options.position_options.init={init}") for init in INITS]


SUBSETS = ("beta", "alpha", "mu", "alpha+beta", "alpha+mu", "beta+mu", "alpha+beta+mu")


@item(
    "bam.figure9",
    "which of θα, θβ, θμ are trained",
    published="θα and θβ trained, θμ fixed at 0, is the best",
    paper=[f"{FINEWEB[1]} --set model.options.position_options.train_mu=true"],
    judge=_least("alpha+beta"),
)
def figure9(out: Path) -> list[Row]:
    """All seven choices: held-out loss after 300 steps of the tiny recipe from ALiBi's slopes, one seed."""
    rows = []
    for subset in SUBSETS:
        trained = {name: str(name in subset.split("+")).lower() for name in ("alpha", "beta", "mu")}
        settings = [f"model.options.position_options.train_{name}={on}" for name, on in trained.items()]
        rows.append(ablation(out, subset, "model.options.position_options.init=alibi", *settings))
    return rows


@item(
    "bam.figure11",
    "training contexts",
    published="longer training contexts move the curves, not their order",
    paper=[
        f"{FINEWEB[1]} --set data.context={context} --set train.batch={589824 // context}"
        for context in (512, 1024, 2048)
    ],
    judge=_range,
)
def figure11(out: Path) -> list[Row]:
    """Held-out loss after 300 steps of the tiny recipe at half, once and twice its context, with as many tokens a step."""
    recipe = find_recipe("text.ggd_ssmax_tiny")
    rows = []
    for factor in (0.5, 1, 2):
        context, batch = int(recipe.data.context * factor), int(recipe.train.batch / factor)
        rows.append(ablation(out, f"context {context}", f"data.context={context}", f"train.batch={batch}"))
    return rows


@item(
    "bam.figure1",
    "priors of one query on one axis",
    published="GGD of several shapes between uniform and Laplace (ALiBi), and beyond",
    paper=["tools/reproduce.py bam.figure1"],
    judge=lambda rows: (
        all(abs(row["total"] - 1) < 1e-6 for row in rows),
        "weight of the query's own half of the row: " + ", ".join(f"{r['what']} {r['near']:.2f}" for r in rows),
    ),
)
def figure1(out: Path) -> list[Row]:
    """π over 128 keys for a query at the end."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    cases: dict[str, tuple[str, dict[str, Any]]] = {
        "uniform": ("uniform", {}),
        "alibi": ("alibi", {}),
        **{
            f"ggd β = {beta}": ("ggd", {"init": {"alpha": a, "beta": beta}})
            for a, beta in ((-2.0, 0.5), (-7.0, 2.0), (1.0, -0.5))
        },
    }
    query, keys, rows = Positions.line(1, offset=127), Positions.line(128), []
    figure, axis = pyplot.subplots(figsize=(6, 3.4), layout="constrained")
    for name, (prior, options) in cases.items():
        pi = (
            create_prior(prior, num_heads=4, **options)
            .log_prior(query, keys, causal=True)[0, 1, 0]
            .double()
            .softmax(-1)
        )
        axis.plot(pi.detach(), label=name)
        rows.append({"what": name, "total": float(pi.sum()), "near": float(pi[64:].sum())})
    axis.set(xlabel="key j of a query at 127", ylabel="prior π", yscale="log", ylim=(1e-5, 1))
    axis.legend(frameon=False, fontsize=8)
    axis.grid(alpha=0.25, linewidth=0.6)
    save_figure(figure, out / "priors.png")
    return rows


# ------------------------------------------------------------------------------------------------ extension, downstream


def _extended(rows: list[Row]) -> Verdict:
    last = max(row["length"] for row in rows)
    before, after = (
        next(row[SCORE] for row in rows if row["length"] == last and row["what"] == what)
        for what in ("before", "after")
    )
    return (
        after >= before,
        f"passkey at {last} tokens {before:.2f} before, {after:.2f} after 200 steps at four times the context",
    )


@item(
    "bam.table7",
    "context extension (with figure 15)",
    published="256 steps at twice the context: passkey 1.0 at 512k",
    paper=["recipes/train.py text.bam_extend_ggd_ssmax_120m", "recipes/evaluate.py runs/… passkey --template bam"],
    judge=_extended,
)
def table7(out: Path) -> list[Row]:
    """The shipped ggd_ssmax before and after `text.ggd_ssmax_tiny_extend`."""
    name, far = shipped("ggd_ssmax"), lengths("ggd", 1, 16)
    run = train(out, "text.ggd_ssmax_tiny_extend", f"model.init_from={name}")
    rows = []
    for what, model in (("before", name), ("after", str(run))):
        for row in evaluate(out / what, [model], "passkey", "--lengths", far, "--samples", "1"):
            rows.append({"what": what, "length": row["length"], SCORE: row[SCORE]})
    return rows


for _key, _title, _published, _paper in (
    (
        "bam.table3",
        "MMLU and ARC",
        "near chance for all methods at 120M",
        ["lm_eval --tasks mmlu,arc_easy,arc_challenge"],
    ),
    (
        "bam.table6",
        "LongBench v2",
        "near chance; BAM runs where others are out of memory",
        ["lm_eval --tasks longbench2"],
    ),
    (
        "bam.table4",
        "RULER, eight NIAH tasks (and table 5)",
        "single_1 1.0 to 4k, 0.88 at 10k",
        ["recipes/evaluate.py runs/… ruler --samples 500"],
    ),
):
    needs_gpu(
        _key, _title, published=_published, paper=[FINEWEB[1], *_paper], why="a model of 1M parameters knows none of it"
    )
