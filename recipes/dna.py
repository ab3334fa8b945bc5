"""DNA recipes by name.

`dna.<method>_tiny`, `_copy_tiny`, `_human_tiny`, `_human_3m` and `_small` exist for every method in
the registry (`priorzoo train --list`); `goat_human` and `human_125m` are the paper's set-ups.

tiny needs the genomes (`priorzoo fetch-data dna genomes`), or `--set data.source=yeast-chr01`, the
chromosome that ships with the package.
"""

from __future__ import annotations

from dataclasses import replace

from modalities.dna.config import DnaDataConfig
from recipes import Evaluate, Model, Optim, Recipe, Recipes, Train
from zoo.files import data_folder

RECIPES = Recipes("dna")

# Two Plasmodium, two fungi and yeast: 121 Mb, 19% to 54% GC. A tiny model gains most from a
# window's composition and codons.
SMALL_GENOMES = "genomes:falciparum,knowlesi,ustilago,zymoseptoria,yeast"


def tiny(method: str) -> Recipe:
    """0.75M parameters, context 256: 8.2M bases of five small genomes, one base a token.

    Either strand. Hardware: two CPU cores.
    """
    return Recipe(
        name=f"dna.{method}_tiny",
        modality="dna",
        model=Model(f"dna_{method}_tiny"),
        data=DnaDataConfig(
            source=SMALL_GENOMES,
            context=256,
        ),
        optim=Optim(
            lr=2e-3,
            prior_lr_scale=20.0,
        ),
        train=Train(
            steps=2000,
            batch=16,
            save_every=500,
        ),
        evaluate=Evaluate(every=500, samples=192),
    )


def copy_tiny(method: str) -> Recipe:
    """The tiny model with a copy expert that remembers what training reads: context 1024.

    It reads the same 8.2M bases of five genomes. One process: the memory is written by one.
    Hardware: one CPU core, half an hour. No base is read twice, which the expert needs
    (`DnaConfig.copy_memory`): on a smaller source take fewer steps.
    """
    base = tiny(method)
    return replace(
        base,
        name=f"dna.{method}_copy_tiny",
        model=Model(f"dna_{method}_copy_tiny"),
        data=replace(base.data, context=1024),
        train=replace(base.train, batch=4),
        evaluate=replace(base.evaluate, samples=48),
    )


def human_tiny(method: str) -> Recipe:
    """The tiny model with a copy expert on 8.2M bases of human DNA: 70 Mb of chromosome X.

    They are the first 70 Mb; chromosome 20 is held out whole.
    """
    base = copy_tiny(method)
    return replace(
        base,
        name=f"dna.{method}_human_tiny",
        data=replace(base.data, source="genomes:human"),
    )


def human_3m(method: str) -> Recipe:
    """3.2M parameters with a copy expert on 65.5M bases of human DNA: 70 Mb of chromosome X.

    They are the first 70 Mb, and each base is read once. Hardware: one GPU for minutes, or CPU
    cores for most of a day.
    """
    base = human_tiny(method)
    return replace(
        base,
        name=f"dna.{method}_human_3m",
        model=Model(f"dna_{method}_copy_3m"),
        optim=replace(
            base.optim,
            lr=1.5e-3,
            warmup=100,
        ),
        train=replace(base.train, batch=32),
    )


def small(method: str) -> Recipe:
    """About 10M parameters, context 1024, on all genomes of `priorzoo fetch-data dna genomes`."""
    return Recipe(
        name=f"dna.{method}_small",
        modality="dna",
        model=Model(f"dna_{method}_small"),
        data=DnaDataConfig(
            source="genomes",
            context=1024,
            num_workers=2,
        ),
        optim=Optim(
            lr=1e-3,
            warmup=200,
        ),
        train=Train(
            steps=10_000,
            batch=64,
            save_every=1000,
            log_every=50,
        ),
        evaluate=Evaluate(every=500, samples=512),
    )


def human(name: str, model: Model) -> Recipe:
    """The human reference genome by single bases at L 1024."""
    folder = data_folder() / "human"
    return Recipe(
        name=f"dna.{name}",
        modality="dna",
        model=model,
        data=DnaDataConfig(
            source=f"{folder}/genome.fa",
            split=f"{folder}/split.bed",
            context=1024,
            num_workers=4,
        ),
        optim=Optim(lr=3e-4),
        train=Train(
            precision="bf16",
            zero_stage=1,
            save_every=2000,
            log_every=50,
        ),
        evaluate=Evaluate(every=1000, samples=1024),
    )


@RECIPES.add
def goat_human() -> Recipe:
    """GOAT-DNA as its script has it (arXiv 2601.15380): 8 layers, 8 heads, 512, L 1024.

    deepspeed --num_gpus 1 --module priorzoo.train dna.goat_human

    For comparison, with the same budget: --set model.name=dna_rope_25m. The paper reports 1.83 GB
    of peak memory against RoPE's 2.86, and a Pearson r of GC trajectories of 0.466 against 0.320.
    Needs data/human (docs/DATA.md), or --set data.source=genomes:human and --set data.split=none.
    As released: R = 2, M = 8, key bias; LayerNorm, GELU, biases, tied; 1,000 steps of 8 × 1024
    bases, AdamW (0.9, 0.999), 3e-4, warm-up 100, cosine to 0. Hardware: one 24 GB GPU.

    Differences: GELU is its tanh form. GOAT's attention starts by Xavier's rule there and as
    torch's layers here. A head has 55 content columns of 64 (released: 59). Windows come from all
    of the genome; there from the first 1,225 of every 6,000 bases. Unknown bases are no targets
    here, vectors do not decay, and no measurement stops training early.
    """
    model = Model(
        "dna_goat_25m",
        options={
            "style": "gpt2",
            "hidden_dim": 2048,
            "weight_init": "torch",
        },
    )
    base = human("goat_human", model)
    return replace(
        base,
        optim=replace(
            base.optim,
            betas=(0.9, 0.999),
            warmup=100,
            floor=0.0,
        ),
        train=replace(
            base.train,
            steps=1000,
            batch=8,
        ),
    )


@RECIPES.add
def human_125m() -> Recipe:
    """125M parameters on a whole human assembly (GRCh38 or T2T): 18 layers, 12 heads, 768, L 1024.

    deepspeed --num_gpus 8 --module priorzoo.train dna.human_125m

    The size that the GOAT paper names; its layers are not printed. For comparison:
    --set model.name=dna_rope_125m. Needs data/human: genome.fa and split.bed (docs/DATA.md). 75,000
    steps of 512 × 1024 bases, 3.9e10 in all, are about 13 passes over one strand. Hardware: 8 × 80
    GB GPUs. Not run yet.
    """
    base = human("human_125m", Model("dna_goat_125m"))
    return replace(
        base,
        optim=replace(base.optim, warmup=1000),
        train=replace(
            base.train,
            steps=75_000,
            batch=512,
            micro_batch=32,
        ),
    )


RECIPES.add_family("human_tiny", human_tiny, model_size="copy_tiny")
RECIPES.add_family("human_3m", human_3m, model_size="copy_3m")
# Before "tiny", since its recipes' names end in "tiny" too; so do those of "human_tiny".
RECIPES.add_family("copy_tiny", copy_tiny)
RECIPES.add_family("tiny", tiny)
RECIPES.add_family("small", small)
