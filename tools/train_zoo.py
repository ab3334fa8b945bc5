"""Train the shipped tiny models again, measure them, and publish them into the package.

    python tools/train_zoo.py train text           every method, one run folder each under runs/zoo; finished ones are kept
    python tools/train_zoo.py extend text          train the published weights on at a longer context, measured before and after
    python tools/train_zoo.py publish text         weights in bf16 and manifest into zoo/weights, those above 2 MB and further
                                                   seeds into release/
    python tools/train_zoo.py measure text         all published weights, and further seeds whose runs exist; then draw
    python tools/train_zoo.py draw text            tables, figures and cards from the stored results of all seeds
    python tools/train_zoo.py train vision …       the same for vision, dna, and lm: the text models that write English
    python tools/train_zoo.py sweep text           learning rates of each method by its held-out loss, one table in benchmarks/
    python tools/train_zoo.py variants text        models of other options beside the published ones: trained and measured

Same data and budget for all. A family of models is one entry of FAMILIES. Where it names several seeds, models of the zoo are
those of the first; the others' weights are kept in release/seeds, to be measured again. Tables have all results; figures the
methods of several seeds, and their spread.
"""

from __future__ import annotations

import csv
import hashlib
import json
import math
import os
import shlex
import statistics
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # so that a plain `python tools/…` finds the project

from modalities.contract import find_modality
from modalities.evaluation import ModelResult
from modalities.files import write_table
from modalities.results import mean_of_seeds, unconverged
from recipes.config import apply_overrides
from recipes.evaluate import write_overview
from recipes.hub import published_card
from recipes.registry import find_recipe
from recipes.report import draw_results, load_results, stored_settings
from recipes.targets import without_seed
from recipes.train_seeds import Run, seed_settings, train_all
from zoo.cli import call
from zoo.files import replacing, write_json, write_text
from zoo.pretrained import BUNDLED

ROOT = Path(__file__).resolve().parent.parent
RUNS = ROOT / "runs" / "zoo"
RATES, PRIOR_SCALES = (2e-3, 4e-3, 8e-3), (1.0, 5.0, 20.0)  # of a sweep
WEIGHTS, RELEASE = ROOT / "zoo" / "weights", ROOT / "release"
FURTHER = RELEASE / "seeds"  # of seeds that are no models of the zoo: what `recipes/evaluate.py` needs of a run folder

app = typer.Typer(add_completion=False, help=(__doc__ or "").split("\n", maxsplit=1)[0])
console = Console(highlight=False)


@dataclass(frozen=True)
class Call:
    """One call of `recipes/evaluate.py`: evaluators, its options, baselines beside the models, and where results go.

    Attributes:
        part: a folder below the family's, for an evaluator that is called more than once; its results are on no card.
        every_seed: also measured in the runs of further seeds.
        methods: the family's that it is for; empty: all.
        paired: compared with the family's reference, item by item; always where there is no part.
    """

    evaluators: str
    options: tuple[str, ...] = ()
    beside: tuple[str, ...] = ()
    part: str = ""
    every_seed: bool = True
    methods: tuple[str, ...] = ()
    paired: bool = False

    def concerns(self, method: str) -> bool:
        return not self.methods or method in self.methods


@dataclass(frozen=True)
class Column:
    """Of a family's summary: a score of an evaluator at one place of its axis, from the results of a part."""

    title: str
    evaluator: str
    score: str
    place: int
    part: str = ""


@dataclass(frozen=True)
class Family:
    """Models that are trained, published and measured together.

    Attributes:
        modality: of all of them.  run_prefix: of their run folders' names, before the method.
        methods: of each its recipe is `<modality>.<method>_<recipe_size>`.  size: the end of the models' names.
        tag: of their weights.  seeds: the first is published.
        against: the method that others are compared with, document by document or prompt by prompt; empty: none.
        evaluators: column names of each, as a card's table shows them; `axis` is the column that says where.
        calls: of `recipes/evaluate.py`, in which they are measured.
        describe: a card's entries out of the resolved recipe.
        explain: what the card's columns mean.
        summary: columns of summary.md.
        variants: name → method and `--set` settings, of models that are compared and not published.
    """

    modality: str
    run_prefix: str
    methods: tuple[str, ...]
    size: str
    tag: str
    evaluators: dict[str, tuple[str, ...]]
    axis: str
    calls: tuple[Call, ...]
    describe: Callable[[dict[str, Any]], dict[str, Any]]
    explain: str
    seeds: tuple[int, ...] = (0,)
    recipe_size: str = "tiny"
    against: str = ""
    variants: dict[str, tuple[str, ...]] = field(default_factory=dict)
    summary: tuple[Column, ...] = ()

    @property
    def measured(self) -> Path:
        return ROOT / "benchmarks" / f"{self.modality}_{self.recipe_size}"

    @property
    def measured_variants(self) -> Path:
        return self.measured / "variants"

    def recipe(self, method: str) -> str:
        return f"{self.modality}.{method}_{self.recipe_size}"

    def weights(self, method: str) -> str:
        """The name that the published weights have."""
        return f"{self.modality}_{method}_{self.size}.{self.tag}"

    def run(self, method: str, seed: int) -> Path:
        """The run folder of a method and seed."""
        name = self.run_prefix + method
        return RUNS / (name if seed == self.seeds[0] else f"{name}-s{seed}")

    def variant_run(self, name: str) -> Path:
        return RUNS / f"{self.run_prefix}variant_{name}"

    def measurable(self, method: str, seed: int) -> Path | None:
        """The folder of a further seed that measures: its kept weights, or a finished run that is not published yet."""
        folders = (FURTHER / self.run(method, seed).name, self.run(method, seed))
        return next((folder for folder in folders if (folder / "model" / "config.json").is_file()), None)

    def label(self, method: str, seed: int) -> str:
        """What results call it: published weights by their name, a run by its recipe and folder."""
        if seed == self.seeds[0]:
            return self.weights(method)
        return self.run_label(method, self.run(method, seed))

    def run_label(self, method: str, run: Path) -> str:
        """What results call a run of a method's recipe."""
        return f"{self.recipe(method)} ({run.name})"


def describe_text(recipe: dict[str, Any]) -> dict[str, Any]:
    data = recipe["data"]
    described = {
        "sotu-excerpt": "State of the Union speeches (public domain), training split of the shipped excerpt",
        "english": "State of the Union speeches, verse of Project Gutenberg and RFCs, training splits (docs/DATA.md)",
    }[data["source"]]
    if data["facts_fraction"]:
        described += (
            f"; {data['facts_fraction']:.0%} of the rows state facts and ask for them, in many wordings, their "
            f"answers counting {data['facts_weight']:g} times in the loss; in {data['copies_fraction']:.0%} a stretch of text "
            "comes again"
        )
    return {
        "data": described,
        "tokens": recipe["train"]["steps"] * recipe["train"]["batch"] * data["context"],
        "train_context": data["context"],
        "tokenizer": data["tokenizer"],
    }


def describe_vision(recipe: dict[str, Any]) -> dict[str, Any]:
    from modalities.vision.sources import class_names

    data = recipe["data"]
    drawn = {
        "glyphs": "capitals of freely licensed fonts, one in a scene with clutter",
        "scenes": "crowds of capitals of freely licensed fonts over photographs, one of them ringed",
        "scenes-count": "crowds of capitals of freely licensed fonts over photographs, none to four of them ringed",
    }[data["source"]]
    fetched = data["source"].partition("-")[0]
    return {
        "data": f"{data['source']}: {drawn} "
        f"(`priorzoo fetch-data vision {fetched} --offline`); font families of the held-out images are not in it",
        "images": recipe["train"]["steps"] * recipe["train"]["batch"],
        "image_size": data["image_size"],
        "class_names": list(class_names(data["source"])),
        "augmentation": f"{data['augment']}, crop scale {data['crop_scale']}"
        if data["augment"] != "window"
        else f"window; shapes {', '.join(data['shapes']) or data['image_size']}",
        "model_options": recipe["model"]["options"] or "none",
    }


def describe_dna(recipe: dict[str, Any]) -> dict[str, Any]:
    data = recipe["data"]
    held_out = "human_chr20 is" if data["source"] == "genomes:human" else "yeast_chr04 and zymoseptoria_chr01 are"
    return {
        "data": f"{data['source']} (`priorzoo fetch-data dna genomes --offline`), either strand with probability "
        f"{data['reverse_complement']:g}; {held_out} held out whole",
        "tokens": recipe["train"]["steps"] * recipe["train"]["batch"] * data["context"],
        "train_context": data["context"],
        "tokenizer": f"{data['tokenizer']}: one token a base; N and IUPAC codes are read, and never a target",
    }


SCENES = ("--sizes", "96,192,384", "--samples", "260")
FEWER = ("--samples", "130")
SCENE_METHODS = (
    "ggd_goat_ssmax", "goat_ssmax", "ggd2d_separable_ssmax", "alibi_ssmax", "lookhere_ssmax", "rope2d_axial_ssmax",
    "rope2d_normalised_ssmax", "learned_ssmax", "nope_ssmax", "rope2d_axial",
)  # fmt: skip


def scene_family(task: str) -> Family:
    """Models of `recipes.vision.scene`; 2-D RoPE also with its positions interpolated, and with theta grown (NTK)."""
    measured = "count,map" if task == "count" else "find,map"
    rope = ("rope2d_axial_ssmax", "rope2d_axial")
    return Family(
        modality="vision",
        run_prefix=f"vision_{task}_",
        methods=SCENE_METHODS,
        size="scene_patch8",
        recipe_size=task,
        tag=task,
        evaluators={
            measured.partition(",")[0]: (
                "top1",
                "reduced_top1",
                "multi_scale_top1",
                "enlarged_top1",
                "tiled_top1",
                "overlapping_top1",
            ),
            "map": ("miou", "reduced_miou", "tiled_miou", "overlapping_miou"),
        },
        axis="size",
        calls=(
            Call(measured, SCENES),
            Call(measured, ("--sizes", "96,192", "--aspect", "2:1", *FEWER), part="wide", every_seed=False),
            *(
                Call(measured, (*SCENES, "--set", f"position_options.scaling={scaling}"), part=scaling, methods=rope)
                for scaling in ("linear", "ntk")
            ),
        ),
        describe=describe_vision,
        explain="Held-out font families over held-out photographs; letters keep their pixels while the canvas grows (pixels of "
        "a side). top1: of the ringed letter, or of the count; miou: mean IoU of the patches' letters. reduced: the canvas "
        "reduced to the training size first; multi_scale: mean of the sizes up to it; enlarged: the training canvas enlarged; "
        "tiled: read in windows of the training size; overlapping: half a side apart.",
        seeds=(0, 1, 2),
        against="ggd_goat_ssmax",
        variants={
            f"{method}_reach{reach:g}": (method, f"model.options.position_options.{place}reach={reach}")
            for method, place in (("goat_ssmax", ""), ("ggd_goat_ssmax", "spectral."))
            for reach in (0.5, 2.0, 4.0, 8.0)  # of GOAT's slowest cosine, in training sides; 1 is the recipes'
        },
    )


EXPLAIN_DNA = (
    "Held-out contigs, the same bases at every length, cut into windows of it (bases), nothing tuned for any length. nll: nats "
    "a base; bits_per_base: uniform is 2; accuracy: of the likeliest next base."
)


MIXERS = ("mixer", "mixer-s1", "mixer-s2")  # of what the first three seeds read


def copy_family(
    run_prefix: str,
    recipe_size: str,
    tag: str,
    methods: tuple[str, ...],
    *,
    stretches: int,
    annotated: tuple[Call, ...] = (),
    size: str = "copy_tiny",
    seeds: tuple[int, ...] = (0, 1, 2),
    mixers: tuple[str, ...] = MIXERS,
) -> Family:
    """DNA models with a copy expert, on different genomes; what GOAT gains with length, also over a megabase in `stretches`
    of 65,536 bases of each held-out contig. Of the `mixers` the first has read what the first seed does."""
    beside = ("markov-12", *mixers, "uniform")
    return Family(
        modality="dna",
        run_prefix=run_prefix,
        methods=methods,
        size=size,
        tag=tag,
        evaluators={"bits": ("nll", "bits_per_base", "accuracy")},
        axis="length",
        calls=(
            Call("bits", ("--lengths", "256,1024,4096,16384,65536"), beside),
            Call("contigs,parts", ("--lengths", "4096", "--samples", "187"), beside),
            Call(
                "bits",
                ("--lengths", "1024,4096,16384,65536", "--samples", str(stretches)),
                mixers[:1],
                part="megabase",
                every_seed=False,
                methods=("goat",),
            ),
            *annotated,
        ),
        describe=describe_dna,
        explain=EXPLAIN_DNA,
        seeds=seeds,
        recipe_size=recipe_size,
        against="goat",
    )


INSIDE = 'model.options.lanes="inside"'
THREE, UP_TO_16 = "256,1024,4096", "256,512,1024,2048,4096"  # lengths of the text models, in training lengths
FAMILIES = {
    "text": Family(
        modality="text",
        run_prefix="text_",
        methods=(
            "ggd_goat", "ggd_goat_ssmax", "ggd", "ggd_ssmax", "goat", "goat_ssmax", "alibi", "cable", "t5", "rope", "rope_ssmax"
        ),
        size="tiny",
        tag="facts",
        evaluators={
            "passkey": ("free_generation (facts=1)", "free_generation (facts=5)"),
            "niah": ("free_generation",),
            "perplexity": ("nll", "bits_per_byte"),
        },
        axis="length",
        calls=(
            Call("passkey", ("--template", "heldout", "--facts", "1,5", "--lengths", UP_TO_16, "--samples", "3")),
            Call("perplexity", ("--source", "sotu-unseen", "--lengths", f"{THREE},16384", "--samples", "16")),
            Call("niah", ("--lengths", THREE, "--samples", "3")),
            Call(
                "passkey", ("--template", "train", "--facts", "5", "--lengths", THREE, "--samples", "3"), part="trained_words"
            ),
            Call(
                "passkey",
                ("--distractors", "0,1,4", "--lengths", THREE, "--samples", "2"),
                part="distractors",
                every_seed=False,
            ),
            Call("passkey", ("--template", "bam", "--lengths", THREE, "--samples", "1"), part="bam", every_seed=False),
            # the control of all others, whose questions repeat the words before the value
            Call(
                "passkey",
                ("--template", "paraphrased", "--facts", "1,5", "--lengths", "256,1024", "--samples", "3"),
                part="paraphrased",
            ),
            *(  # 200 prompts a length and seed, where the table's 60 leave ±0.04 of a share of 0.9
                Call(
                    "passkey",
                    ("--template", template, "--facts", "5", "--lengths", "256,4096", "--samples", "10"),
                    part=f"one_of_five/{template}",
                    methods=("ggd_goat_ssmax", "ggd_ssmax", "goat_ssmax", "alibi"),
                )
                for template in ("train", "heldout")
            ),
            *(
                Call(
                    "passkey",
                    ("--template", "heldout", "--facts", "1,5", "--values", values, "--lengths", "256,1024", "--samples", "3"),
                    part=f"values/{values}",
                    methods=("ggd_goat_ssmax", "ggd_ssmax", "goat_ssmax", "alibi"),
                )
                for values in ("letters", "word", "number")
            ),
            Call(  # the shortest length with room for these in bytes
                "ruler",
                ("--lengths", "2048", "--tasks", "single_1,single_2,multikey_1,vt,fwe"),
                every_seed=False,
                methods=("ggd_goat_ssmax", "ggd_ssmax", "goat_ssmax", "alibi"),
            ),
        ),
        describe=describe_text,
        explain="free_generation: share of answers generated exactly. passkey: one fact, or one of five, in held-out text, in "
        "wordings, names and nouns that training never had. niah: the passkey sentence in held-out text. nll: nats per "
        "token on unseen speeches.",
        seeds=(0, 1, 2),
        against="ggd_goat_ssmax",
        summary=(
            *(Column(f"bits/byte {n // 256}×", "perplexity", "bits_per_byte", n) for n in (256, 4096, 16384)),
            *(Column(f"one fact {n // 256}×", "passkey", "free_generation (facts=1)", n) for n in (256, 1024, 4096)),
            *(Column(f"one of five {n // 256}×", "passkey", "free_generation (facts=5)", n) for n in (256, 1024, 4096)),
            *(
                Column(f"one of five, trained words {n // 256}×", "passkey", "free_generation", n, "trained_words")
                for n in (256, 1024, 4096)
            ),
            *(Column(f"needle {n // 256}×", "niah", "free_generation", n) for n in (256, 4096)),
        ),
        variants={
            "ggd+spectral": ("ggd+spectral_ssmax",),
            "ggd+key_bias": ("ggd+key_bias_ssmax",),  # also rank 0
            "spectral+key_bias": ("spectral+key_bias_ssmax",),
            "rank4": ("ggd_goat_ssmax", "model.options.position_options.spectral.rank=4"),
            "rank8": ("ggd_goat_ssmax", "model.options.position_options.spectral.rank=8"),
            "alibi-init": ("ggd_goat_ssmax", "model.options.position_options.ggd.init=alibi"),
            "slope-init": ("ggd_goat_ssmax", "model.options.position_options.key_bias.init=seeded"),
            "inside": ("ggd_goat_ssmax", INSIDE),
            "goat-inside": ("goat", INSIDE),
            "alibi-inside": ("alibi", INSIDE),
            "goat-d64-rank8": ("goat", "model.options.position_options.rank=8", "model.options.num_heads=2", INSIDE),
            # GOAT whose slowest period is the training length: none of its terms is a slope that training does not bound
            "goat-period256": (
                "spectral+key_bias",
                "model.options.position_options.key_bias.init=seeded",
                f"model.options.position_options.spectral.base={256 / (2 * math.pi):.4f}",
            ),
        },
    ),
    "lm": Family(
        modality="text",
        run_prefix="text_lm_",
        methods=("ggd_goat", "rope"),
        size="lm",
        tag="english",
        evaluators={"niah": ("free_generation",), "perplexity": ("nll", "bits_per_byte")},
        axis="length",
        calls=(
            Call("perplexity", ("--lengths", "512,1024,2048,4096,8192,16384", "--samples", "16")),
            Call("niah", ("--lengths", "512,1024,2048,4096")),
            Call("ruler", ("--lengths", "1024,2048,4096", "--tasks", "single_1,single_2,multikey_1,vt,fwe"), every_seed=False),
        ),
        describe=describe_text,
        explain="nll: nats per token on held-out documents of all three sources; niah: the passkey sentence in them, generated "
        "exactly.",
        recipe_size="lm",
        against="ggd_goat",
    ),
    "vision": Family(
        modality="vision",
        run_prefix="vision_",
        methods=(
            "goat_ssmax", "ggd2d_separable_ssmax", "ggd2d_ssmax", "alibi_ssmax", "rope2d_axial_ssmax",
            "rope2d_mixed_ssmax", "learned_ssmax", "sinusoidal_ssmax", "nope_ssmax",
        ),
        size="tiny_patch8",
        tag="glyphs",
        evaluators={"resolution": ("top1", "top5", "ratio")},
        axis="size",
        calls=(Call("resolution", ("--sizes", "48,72,96,144,192")),),
        describe=describe_vision,
        explain="Held-out font families, drawn with real detail at every size (pixels of a side), nothing tuned for any size. "
        "ratio: top-1 over top-1 at the training size.",
        seeds=(0, 1, 2),
    ),
    "scenes": scene_family("scenes"),
    "scenes_shapes": scene_family("scenes_shapes"),
    "count": scene_family("count"),
    "dna": Family(
        modality="dna",
        run_prefix="dna_",
        methods=("goat", "rope", "ggd_ssmax", "alibi", "nope", "cable"),
        size="tiny",
        tag="genomes",
        evaluators={"bits": ("nll", "bits_per_base", "accuracy")},
        axis="length",
        calls=(
            Call("bits", ("--stretch", "16384"), beside=("markov-*", *MIXERS, "uniform")),
            Call("contigs", ("--lengths", "4096", "--samples", "64"), ("markov-*", "mixer", "uniform"), every_seed=False),
            Call("strands", ("--lengths", "256,4096"), every_seed=False),
            Call("completion,spectrum", ("--lengths", "256,1024", "--samples", "32"), ("markov-12",), every_seed=False),
        ),
        describe=describe_dna,
        explain=EXPLAIN_DNA,
        seeds=(0, 1, 2),
    ),
    "dna_copy": copy_family(
        "dna_copy_",
        "copy_tiny",
        "genomes",
        ("goat", "rope"),
        stretches=8,
        annotated=(
            Call(
                "parts",
                ("--lengths", "4096", "--samples", "187", "--genbank", "data/genomes/yeast.gb"),
                ("markov-12", "mixer"),
                part="coding",
                every_seed=False,
                paired=True,
            ),
        ),
    ),
    "dna_human": copy_family("dna_human_", "human_tiny", "human", ("goat", "ggd_goat", "rope"), stretches=16),
    "dna_human_3m": copy_family(
        "dna_human_3m_",
        "human_3m",
        "human",
        ("goat", "ggd_goat", "rope"),
        stretches=16,
        size="copy_3m",
        seeds=(0,),
        mixers=("mixer-all", "mixer"),
    ),
}  # fmt: skip


def precision_setting(precision: str) -> tuple[str, ...]:
    return (f"train.precision={precision}",) if precision else ()


Jobs = Annotated[int, typer.Option(help="models at a time, one thread each")]
Methods = Annotated[str, typer.Option(help="comma-separated; default all")]
Precision = Annotated[str, typer.Option(help="bf16 is faster on CPUs with AMX; default: the recipe's")]


@app.command()
def train(
    family: Annotated[str, typer.Argument(help=", ".join(FAMILIES))],
    methods: Methods = "",
    seeds: Annotated[str, typer.Option(help="comma-separated; default all")] = "",
    jobs: Jobs = 2,
    precision: Precision = "",
) -> None:
    """Train each method by its recipe; an interrupted run continues from its last checkpoint."""
    kind = _family(family)
    chosen = [int(seed) for seed in seeds.split(",")] if seeds else kind.seeds
    queue = [(seed, method) for seed in chosen for method in _chosen(kind, methods)]
    same = precision_setting(precision)
    runs = [Run(kind.recipe(method), kind.run(method, seed), seed_settings(seed) + same) for seed, method in queue]
    train_all(runs, jobs)


@app.command()
def sweep(
    family: Annotated[str, typer.Argument(help=", ".join(FAMILIES))],
    steps: Annotated[int, typer.Option(help="of each run; the schedule ends there")] = 300,
    jobs: Jobs = 2,
    precision: Precision = "",
) -> None:
    """One learning rate for the weights of all methods, then, of each method, that of its prior's parameters.

    All methods over the same grid, one seed, judged by held-out loss alone. Short runs rank rates poorly: great ones lead
    before anything is found again in the context, and find it later. So the weights' rate is that of the least mean over
    methods, and the better two of a prior's rates run for all of the recipe's steps. Writes sweep.csv; recipes hold what it
    found.
    """
    kind, rows = _family(family), []
    every = find_recipe(kind.recipe(kind.methods[0])).train.steps

    def folder(method: str, point: tuple[float, float, int]) -> Path:
        lr, scale, length = point
        return RUNS / f"sweep_{family}_{length}" / f"{method}-lr{lr:g}-prior{scale:g}"

    def run_all(points: dict[str, list[tuple[float, float, int]]]) -> None:
        queue = []
        for method, wanted in points.items():
            for lr, scale, length in wanted:
                settings = [f"optim.lr={lr}", f"optim.prior_lr_scale={scale}"]
                if length < every:
                    settings += [f"train.steps={length}", "train.save_every=0", f"evaluate.every={length}"]
                settings += precision_setting(precision)
                queue.append(Run(kind.recipe(method), folder(method, (lr, scale, length)), tuple(settings)))
        train_all([run for run in queue if not (run.folder / "model").is_dir()], jobs)

    def loss(method: str, point: tuple[float, float, int]) -> float:
        records = map(json.loads, (folder(method, point) / "metrics.jsonl").read_text().splitlines())
        return [record["heldout_loss"] for record in records if record.get("heldout_loss") is not None][-1]

    middle = PRIOR_SCALES[len(PRIOR_SCALES) // 2]
    grid = {method: [(lr, middle, steps) for lr in RATES] for method in kind.methods}
    run_all(grid)
    rate = min(RATES, key=lambda lr: statistics.fmean(loss(method, (lr, middle, steps)) for method in kind.methods))
    best = {method: (rate, middle, steps) for method in kind.methods}
    tuned = [method for method in kind.methods if _fresh(kind.recipe(method)).prior_parameters()]
    scales = {method: [(rate, scale, steps) for scale in PRIOR_SCALES] for method in tuned}
    run_all({method: [point for point in scales[method] if point[1] != middle] for method in tuned})
    final = {
        method: [(lr, scale, every) for lr, scale, _ in sorted(scales[method], key=lambda p: loss(method, p))[:2]]
        for method in tuned
    }
    run_all(final)
    for method in tuned:
        grid[method] = sorted({*grid[method], *scales[method]}) + sorted(final[method])
        best[method] = min(final[method], key=lambda point: loss(method, point))
    for method in kind.methods:
        for point in grid[method]:
            row = dict(zip(("method", "lr", "prior_lr_scale", "steps"), (method, *point), strict=True))
            rows.append(row | {"heldout_loss": round(loss(method, point), 5), "best": int(point == best[method])})
    write_table(kind.measured / "sweep.csv", rows)
    console.print(f"written: {kind.measured / 'sweep.csv'}", soft_wrap=True)


def _fresh(name: str, settings: Sequence[str] = ()) -> Any:
    """The model that a recipe trains, with fresh weights."""
    recipe, _ = apply_overrides(find_recipe(name), settings)
    return find_modality(recipe.modality).build(recipe.model.name, recipe.model.options, recipe.data)


@app.command()
def variants(
    family: Annotated[str, typer.Argument(help=", ".join(FAMILIES))],
    names: Annotated[str, typer.Option(help="comma-separated; default all")] = "",
    jobs: Jobs = 2,
    precision: Precision = "",
) -> None:
    """Train the family's variants and measure them as the published models are, in a folder `variants` of their own; draw."""
    kind = _family(family)
    chosen = names.split(",") if names else list(kind.variants)
    if unknown := [name for name in chosen if name not in kind.variants] or not chosen:
        known = ", ".join(kind.variants) or "none of this family"
        raise typer.BadParameter(f"variants {unknown if chosen else family!r}: expected some of {known}")
    folders = {name: kind.variant_run(name) for name in chosen}
    same, found = precision_setting(precision), kind.variants
    train_all([Run(kind.recipe(found[name][0]), folders[name], found[name][1:] + same) for name in chosen], jobs)
    for call_ in kind.calls:
        if call_.every_seed and not call_.methods:
            _evaluate(
                [str(folder) for folder in folders.values()], call_, kind.measured_variants / call_.part, jobs=jobs
            )
    draw(family)


@app.command()
def extend(
    family: Annotated[str, typer.Argument(help=", ".join(FAMILIES))],
    methods: Methods = "",
    jobs: Jobs = 2,
    precision: Precision = "",
) -> None:
    """Train the published weights on at a longer context, by the recipes that end in _extend; measure them before and after.

    In a folder `extended` with a folder a method, where `.paired.csv` has the differences prompt by prompt.
    """
    kind, same = _family(family), precision_setting(precision)
    chosen = _chosen(kind, methods)
    folders = {method: RUNS / f"{kind.run_prefix}extend_{method}" for method in chosen}
    queue = [
        Run(f"{kind.recipe(method)}_extend", folder, (f"model.init_from={kind.weights(method)}", *same))
        for method, folder in folders.items()
    ]
    for run in queue:
        find_recipe(run.recipe)  # an error names the nearest before anything starts
    train_all(queue, jobs)
    for method, folder in folders.items():
        for each in kind.calls:
            if each.every_seed and not each.part:
                _evaluate([str(folder)], each, kind.measured / "extended" / method, ("--against", kind.weights(method)))


@app.command()
def publish(
    family: Annotated[str, typer.Argument(help=", ".join(FAMILIES))],
    methods: Methods = "",
    seeds: Annotated[str, typer.Option(help="comma-separated; default all that are trained here")] = "",
    source: Annotated[str, typer.Option(help="where release/ will be: http(s)://… or hf:OWNER/NAME")] = "",
) -> None:
    """Put the trained weights into the package: bf16 safetensors and the manifest with their digests.

    Files above `BUNDLED` bytes go to release/, where a checkout finds them. Weights of further seeds go to release/seeds.
    """
    kind = _family(family)
    WEIGHTS.mkdir(exist_ok=True)
    path = WEIGHTS / "manifest.json"
    manifest: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    wanted = [int(seed) for seed in seeds.split(",")] if seeds else kind.seeds
    chosen = [(method, seed) for method in _chosen(kind, methods) for seed in wanted]
    trained = [pair for pair in chosen if (kind.run(*pair) / "model" / "config.json").is_file()]
    if not trained or (seeds and trained != chosen):
        missing = ", ".join(str(kind.run(*pair)) for pair in chosen if pair not in trained)
        raise typer.BadParameter(f"no finished run in {missing}; train {family} first")
    for method, seed in trained:
        if seed == kind.seeds[0]:
            manifest[kind.weights(method)] = _publish_first(kind, method, source)
        else:
            _keep_further(kind.run(method, seed))
    write_json(path, manifest)
    console.print(f"{len(manifest)} models, {sum(entry['bytes'] for entry in manifest.values()) / 1e6:.1f} MB")


def _publish_first(kind: Family, method: str, source: str) -> dict[str, Any]:
    """Write the weights of a method's first seed; returns their entry of the manifest."""
    import torch
    from safetensors.torch import save

    from recipes.runs import load_run
    from zoo.registry import model_entry

    name, run = kind.weights(method), kind.run(method, kind.seeds[0])
    model, recipe = load_run(run)
    registered = model_entry(name).build(**model_entry(name).config).config
    if model.config != registered:
        raise typer.BadParameter(f"{run} was not trained as {name} is registered: {model.config} against {registered}")
    precision = recipe["train"]["precision"]
    own = find_recipe(recipe["name"]).train.precision
    changed = "" if precision in (own, {"auto": "fp32"}.get(own)) else f" --set train.precision={precision}"
    content = save(model.storable_state(torch.bfloat16), metadata={"format": "pt"})
    beyond = len(content) > BUNDLED
    (WEIGHTS / f"{name}.safetensors").unlink(missing_ok=True)
    with replacing((RELEASE if beyond else WEIGHTS) / f"{name}.safetensors", "wb") as file:
        file.write(content)
    return {
        **({"source": source} if beyond and source else {}),
        "file": f"{name}.safetensors",
        "sha256": hashlib.sha256(content).hexdigest(),
        "bytes": len(content),
        "dtype": "bfloat16 matrices, float32 vectors and priors",
        "license": "Apache-2.0",
        "optimiser": f"{recipe['optim']['name']}, learning rate {recipe['optim']['lr']:g}, of the priors' parameters "
        f"{recipe['optim']['prior_lr_scale']:g} times that",
        "recipe": recipe["name"],
        "command": f"deepspeed --num_gpus 1 recipes/train.py {recipe['name']}{changed}",
        "steps": recipe["train"]["steps"],
        "seed": recipe["train"]["seed"],
        "commit": json.loads((run / "environment.json").read_text())["commit"],
        "position": f"{model.config.position}, options {json.dumps(model.config.position_options)}, "
        f"SSMax {'on' if model.config.ssmax else 'off'}",
        **kind.describe(recipe),
    }


def _keep_further(run: Path) -> None:
    """Of a run of a further seed: the weights in bf16, its recipe, commit and versions."""
    import torch

    from recipes.runs import load_run

    model, _ = load_run(run)
    kept = FURTHER / run.name
    model.save_pretrained(kept / "model", dtype=torch.bfloat16)
    write_text(kept / "recipe.json", (run / "recipe.json").read_text())
    environment = json.loads((run / "environment.json").read_text())
    write_json(kept / "environment.json", {name: environment[name] for name in ("commit", "versions", "platform")})


@app.command()
def measure(
    family: Annotated[str, typer.Argument(help=", ".join(FAMILIES))], methods: Methods = "", jobs: Jobs = 1
) -> None:
    """All published weights, further seeds that are kept or trained here among them; then `draw`.

    Results are one file per model, seed and evaluator, so those of seeds without weights here stay as they are.
    """
    kind = _family(family)
    for each in kind.calls:
        chosen = [method for method in _chosen(kind, methods) if each.concerns(method)]
        if not chosen:
            continue
        models = [kind.weights(method) for method in chosen]
        further = [kind.measurable(method, seed) for seed in kind.seeds[1:] for method in chosen if each.every_seed]
        models += [str(folder) for folder in further if folder]
        reference = kind.weights(kind.against) if kind.against and (each.paired or not each.part) else ""
        alone = {*models, *each.beside} <= {reference}  # nothing is compared with itself
        against = ("--against", reference) if reference and not alone else ()
        tables = (
            [kind.measured / each.part / f"{name}.paired.csv" for name in each.evaluators.split(",")] if against else []
        )
        before = {path: _read_rows(path) for path in tables}
        _evaluate(models, each, kind.measured / each.part, against, jobs)
        for path, rows in before.items():
            write_paired(kind, path, rows)
    draw(family)


def _read_rows(path: Path) -> list[dict[str, str]]:
    if not path.is_file():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def write_paired(kind: Family, path: Path, before: list[dict[str, str]]) -> None:
    """The rows of a call, and those of `before` about the family's other methods against the same model; in its order."""
    now = _read_rows(path)
    if not now:
        return
    new, against, order = {row["model"] for row in now}, now[0]["against"], list(map(kind.weights, kind.methods))
    kept = [row for row in before if row["model"] in order and row["model"] not in new and row["against"] == against]
    if kept:
        write_table(
            path, sorted(now + kept, key=lambda r: order.index(r["model"]) if r["model"] in order else len(order))
        )


def _evaluate(models: list[str], each: Call, out: Path, more: tuple[str, ...] = (), jobs: int = 1) -> None:
    """One call with all models; where several models are measured at a time, of the cells that a call with each has stored."""

    def command(models: list[str]) -> list[str]:
        words = [sys.executable, str(ROOT / "recipes/evaluate.py"), *models, *each.beside, each.evaluators]
        return [*words, *each.options, "--out", str(out)]

    def alone(model: str) -> None:
        log = RUNS / "measured" / f"{Path(model).name}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("a") as file:
            environment = os.environ | {"OMP_NUM_THREADS": "1"}
            subprocess.run(command([model]), env=environment, stdout=file, stderr=file, check=True)
        console.print(f"{each.evaluators}: measured {model}, see {log}", soft_wrap=True)

    if jobs > 1:
        with ThreadPoolExecutor(jobs) as pool:
            list(pool.map(alone, models))
    subprocess.run([*command(models), *more], check=True)


@app.command()
def draw(family: Annotated[str, typer.Argument(help=", ".join(FAMILIES))]) -> None:
    """CSV tables, figures and cards from the stored results of all seeds."""
    kind = _family(family)
    for part in dict.fromkeys(each.part for each in kind.calls):
        _draw_part(kind, part, kind.measured, _in_order)
        _draw_part(kind, part, kind.measured_variants, _named)
    if kind.summary:
        write_text(kind.measured / "summary.md", summary(kind))
        if kind.measured_variants.is_dir():
            write_text(kind.measured_variants / "summary.md", ablation(kind))
    console.print(f"drawn in {kind.measured}", soft_wrap=True)
    manifest = json.loads((WEIGHTS / "manifest.json").read_text())
    for name, table in measured_tables(kind).items():
        manifest[name]["measured"] = table
        write_text(WEIGHTS / f"{name}.md", card(kind, name, manifest[name]))
    write_json(WEIGHTS / "manifest.json", manifest)


Arrange = Callable[[Family, list[ModelResult]], list[ModelResult]]


def _draw_part(kind: Family, part: str, measured: Path, arrange: Arrange) -> None:
    """Tables and figures of the results of a part, in the order and by the names of `arrange`; nothing where there are none."""
    known, folder = find_modality(kind.modality).evaluators, measured / part
    drawn, evaluators = {}, {}
    for name in (name for each in kind.calls if each.part == part for name in each.evaluators.split(",")):
        if not (found := load_results(known[name], folder)):  # of methods that are not measured yet
            continue
        results = arrange(kind, found)
        drawn[name] = _drawn(kind, results)
        evaluators[name] = known[name](stored_settings(known[name], folder))
        draw_results(evaluators[name], results, folder, drawn=drawn[name])
    if drawn:
        write_overview(evaluators, drawn, folder)


def _drawn(kind: Family, results: list[ModelResult]) -> list[ModelResult]:
    """What figures show: the methods of several seeds, all where none has them, and baselines."""
    methods = {kind.label(method, seed): method for method in kind.methods for seed in kind.seeds}
    seeds = Counter(methods[result.label] for result in results if result.label in methods)
    least = min(2, max(seeds.values(), default=0))
    return [r for r in results if r.label not in methods or seeds[methods[r.label]] >= least]


def _named(kind: Family, results: list[ModelResult]) -> list[ModelResult]:
    """Results of variants by their short names, in the family's order; each of a colour of its own."""
    names = {kind.run_label(method, kind.variant_run(name)): name for name, (method, *_) in kind.variants.items()}
    found = {names[r.label]: r for r in results if r.label in names}
    return [replace(found[name], label=name, method=name) for name in kind.variants if name in found]


def _in_order(kind: Family, results: list[ModelResult]) -> list[ModelResult]:
    """Methods in the family's order, then baselines; the seeds of each are one group, called by the first's name."""
    first = {kind.label(method, seed): kind.weights(method) for seed in kind.seeds for method in kind.methods}
    order = list(first)
    names = [first.get(r.label, without_seed(r.label)) for r in results]
    grouped = [replace(r, group=name if names.count(name) > 1 else "") for r, name in zip(results, names, strict=True)]
    return sorted(grouped, key=lambda r: (order.index(r.label) if r.label in order else len(order), r.label))


@dataclass(frozen=True)
class Line:
    """A row of a summary: a model's name, its recipe with `--set` settings, and the folder that has results of its seeds."""

    name: str
    recipe: str
    settings: tuple[str, ...]
    folder: Path
    labels: tuple[str, ...]


def summary(kind: Family) -> str:
    """All methods: mean ± standard deviation over seeds; a head's columns: content + prior.

    A dagger marks scores that had not converged where the models were trained, by the mean of the seeds (`Score.within`).
    """
    return _table(kind, [_line(kind, method) for method in kind.methods])


def ablation(kind: Family) -> str:
    """The variants, one seed each, below the methods that they are variants of."""
    methods = dict.fromkeys(method for method, *_ in kind.variants.values() if method in kind.methods)
    lines = [_line(kind, method) for method in methods]
    for name, (method, *settings) in kind.variants.items():
        label = kind.run_label(method, kind.variant_run(name))
        lines.append(Line(name, kind.recipe(method), tuple(settings), kind.measured_variants, (label,)))
    return _table(kind, lines)


def _line(kind: Family, method: str) -> Line:
    labels = tuple(kind.label(method, seed) for seed in kind.seeds)
    return Line(method, kind.recipe(method), (), kind.measured, labels)


def _late(kind: Family, column: Column, results: list[ModelResult]) -> set[str]:
    """The methods that have not converged by a column's score; `results` are its evaluator's, of all methods."""
    evaluator = find_modality(kind.modality).evaluators[column.evaluator]
    scores = evaluator(stored_settings(evaluator, kind.measured / column.part)).scores if results else ()
    means = mean_of_seeds(_in_order(kind, results), kind.axis)
    return {
        late.method for score in scores if score.column == column.score for late in unconverged(means, score, kind.axis)
    }


def _table(kind: Family, lines: Sequence[Line]) -> str:
    known = find_modality(kind.modality).evaluators
    stored = {
        (folder, part, name): load_results(known[name], folder / part)
        for folder in dict.fromkeys([kind.measured, *(line.folder for line in lines)])
        for part, name in dict.fromkeys((column.part, column.evaluator) for column in kind.summary)
    }
    late = {
        column: _late(kind, column, stored[kind.measured, column.part, column.evaluator]) for column in kind.summary
    }
    titles = ["method", "columns of a head", *(column.title for column in kind.summary)]
    written = ["| " + " | ".join(titles) + " |", "|---|" + "---:|" * (len(titles) - 1)]
    for line in lines:
        attention = _fresh(line.recipe, line.settings).layers[0].attention
        cells = [f"`{line.name}`", f"{attention.content_dim} + {attention.prior.num_lanes}"]
        for column in kind.summary:
            values = [
                row[column.score]
                for result in stored[line.folder, column.part, column.evaluator]
                for row in result.rows
                if result.label in line.labels and row[kind.axis] == column.place and column.score in row
            ]
            spread = f" ± {statistics.stdev(values):.3f}" if len(values) > 1 else ""
            dagger = "†" if line.name in late[column] else ""
            cells.append(f"{statistics.fmean(values):.3f}{spread}{dagger}" if values else "–")
        written.append("| " + " | ".join(cells) + " |")
    return "\n".join(written) + "\n"


def measured_tables(kind: Family) -> dict[str, list[dict[str, float]]]:
    """Published name → rows of what its evaluators measured."""
    tables: dict[str, dict[int, dict[str, float]]] = {}
    known = find_modality(kind.modality).evaluators
    for evaluator, columns in kind.evaluators.items():
        for result in load_results(known[evaluator], kind.measured):
            if result.label not in map(kind.weights, kind.methods):
                continue  # another seed, or a baseline
            rows = tables.setdefault(result.label, {})
            for row in result.rows:
                kept = {column: round(row[column], 4) for column in columns if column in row}
                rows.setdefault(row[kind.axis], {kind.axis: row[kind.axis]}).update(kept)
    return {name: list(rows.values()) for name, rows in tables.items()}


def card(kind: Family, name: str, entry: dict[str, Any]) -> str:
    """A model card in Markdown."""
    commands = [
        shlex.join(["priorzoo", "evaluate", name, each.evaluators, *each.options])
        for each in kind.calls
        if not each.part and set(each.evaluators.split(",")) & kind.evaluators.keys()
    ]
    return published_card(name, entry, notes=[kind.explain, "", "```bash", *commands, "```"])


def _chosen(kind: Family, methods: str) -> Sequence[str]:
    """The methods of an option, by default all."""
    chosen = methods.split(",") if methods else list(kind.methods)
    if unknown := [method for method in chosen if method not in kind.methods]:
        raise typer.BadParameter(f"methods {', '.join(unknown)}: expected some of {', '.join(kind.methods)}")
    return chosen


def _family(name: str) -> Family:
    if name not in FAMILIES:
        raise typer.BadParameter(f"{name!r} is none of {', '.join(FAMILIES)}")
    return FAMILIES[name]


if __name__ == "__main__":
    sys.exit(call(app, prog="tools/train_zoo.py"))
