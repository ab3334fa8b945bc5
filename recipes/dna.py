"""DNA recipes by name, and what the training loop asks of the DNA modality.

`dna.<method>_tiny` and `dna.<method>_small` exist for every method in the registry (`python recipes/train.py --list`); the
functions below that are not generated are the papers' own set-ups. A new recipe is one decorated function.

tiny needs the genomes (`python tools/fetch_data.py dna genomes`), or `--set data.source=yeast-chr01`, the chromosome that ships
with the package. The human recipes run on any FASTA of the genome: `python tools/prepare_genome.py hg38.fa --out data/human
--primary` writes the split and the statistics, and prints the command.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from modalities.dna.data import DnaDataConfig
from recipes.config import Evaluate, Model, Optim, Recipe, Train
from recipes.decoder import decoder_cost, every_method, first_held_out, target_weight, tokenizer_of
from recipes.initial import load_weights

UNIT = "tokens"  # what throughput is counted in: next-token targets; with the default tokenizer, bases
FIGURES = ("bits_per_base",)  # what `loss` measures besides the loss, for held-out data
cost, weight = decoder_cost, target_weight
RECIPES: dict[str, Callable[[], Recipe]] = {}

# Two Plasmodium, two fungi and yeast: 121 Mb from 19% to 54% GC. What decides how a tiny model does on it is reading the
# composition and the codons of a window.
SMALL_GENOMES = "genomes:falciparum,knowlesi,ustilago,zymoseptoria,yeast"


def recipe(function: Callable[[], Recipe]) -> Callable[[], Recipe]:
    """Make a recipe known under its function's name."""
    RECIPES[function.__name__] = function
    return function


# ------------------------------------------------------------------------------------------ tiny and small


def tiny(method: str) -> Recipe:
    """0.75M parameters, context 256: 8.2M bases of five small genomes, either strand, one base a token.

    deepspeed --num_gpus 1 recipes/train.py dna.<method>_tiny

    Hardware: two CPU cores.
    """
    return Recipe(
        name=f"dna.{method}_tiny",
        modality="dna",
        model=Model(f"dna_{method}_tiny"),
        data=DnaDataConfig(source=SMALL_GENOMES, context=256),
        optim=Optim("adamw", lr=2e-3, betas=(0.9, 0.95), weight_decay=0.1, prior_lr_scale=20.0, warmup=50, floor=0.1),
        train=Train(steps=2000, batch=16, save_every=500),
        evaluate=Evaluate(every=500, samples=192),
    )


def small(method: str) -> Recipe:
    """About 10M parameters, context 1024, on every genome that `python tools/fetch_data.py dna genomes` brings.

    deepspeed --num_gpus 1 recipes/train.py dna.<method>_small         one GPU
    """
    return Recipe(
        name=f"dna.{method}_small",
        modality="dna",
        model=Model(f"dna_{method}_small"),
        data=DnaDataConfig(source="genomes", context=1024, num_workers=2),
        optim=Optim("adamw", lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1, warmup=200, floor=0.1),
        train=Train(steps=10_000, batch=64, save_every=1000, log_every=50),
        evaluate=Evaluate(every=500, samples=512),
    )


# ------------------------------------------------------------------------------------------ the papers' set-ups


def human(name: str, model: str, *, steps: int, batch: int, micro_batch: int) -> Recipe:
    """The human reference genome by single bases at L 1024: AdamW, 3e-4."""
    return Recipe(
        name=f"dna.{name}",
        modality="dna",
        model=Model(model),
        data=DnaDataConfig(source="data/human/genome.fa", split="data/human/split.bed", context=1024, num_workers=4),
        optim=Optim("adamw", lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, warmup=1000, floor=0.1),
        train=Train(
            steps=steps,
            batch=batch,
            micro_batch=micro_batch,
            precision="bf16",
            zero_stage=1,
            clip=1.0,
            save_every=2000,
            log_every=50,
        ),
        evaluate=Evaluate(every=1000, samples=1024),
    )


@recipe
def goat_human() -> Recipe:
    """GOAT-DNA as its script has it (arXiv 2601.15380): 8 layers, 8 heads, 512, R = 2, M = 8, key bias, L 1024.

    deepspeed --num_gpus 1 recipes/train.py dna.goat_human

    Beside it, with the same budget: --set model.name=dna_rope_25m. The paper reports 1.83 GB of peak memory against RoPE's
    2.86, and a Pearson r of GC trajectories of 0.466 against 0.320. Its schedule is not published: 20,000 steps of 64 × 1024
    bases here. Needs data/human (`tools/prepare_genome.py`), or --set data.source=genomes:human --set data.split=none for
    the part of it that `tools/fetch_data.py dna genomes` brings. Hardware: one 24 GB GPU.
    """
    return human("goat_human", "dna_goat_25m", steps=20_000, batch=64, micro_batch=8)


@recipe
def human_125m() -> Recipe:
    """The paper's size, 125M, on a whole human assembly (GRCh38 or T2T): 12 layers, 12 heads, 768, L 1024, 3.9e10 bases.

    deepspeed --num_gpus 8 recipes/train.py dna.human_125m

    Needs data/human: `python tools/prepare_genome.py GENOME.fa.gz --out data/human --primary` writes the split and prints the
    two settings that name the FASTA. 75,000 steps of 512 × 1024 bases are about 13 passes over one strand. Hardware: 8 × 80
    GB GPUs. Not run yet.
    """
    return human("human_125m", "dna_goat_125m", steps=75_000, batch=512, micro_batch=32)


for _name, _build in every_method("dna", {"tiny": tiny, "small": small}).items():
    RECIPES.setdefault(_name, _build)


# ------------------------------------------------------------------------------------------ what the loop asks for


def build_model(recipe: Recipe, *, start: bool = True) -> Any:
    """The recipe's model: the registry's entry at the data's context and tokenizer, with the weights of `init_from`.

    start=False leaves those out, for a model that gets a checkpoint's weights or none.
    """
    from modalities.dna.tokenizers import load_tokenizer
    from zoo import create_model

    spec = tokenizer_of(recipe)
    tokenizer = load_tokenizer(spec)
    vocabulary = {"tokenizer": spec, "vocab_size": tokenizer.vocab_size, "num_targets": tokenizer.num_targets}
    model = create_model(
        recipe.model.name, **{"train_context": recipe.data.context, **vocabulary, **recipe.model.options}
    )
    if start and recipe.model.init_from:
        load_weights(model, recipe.model.init_from)
    return model


def load_model(folder: Any) -> Any:
    """A model from its save_pretrained folder."""
    from modalities.dna.model import DnaDecoder

    return DnaDecoder.from_pretrained(folder)


def train_loader(recipe: Recipe, *, rank: int, world: int) -> Any:
    """Endless batches of this rank, with state_dict() and load_state_dict()."""
    from modalities.dna.data import build_loader

    return build_loader(recipe.data, split="train", rank=rank, world=world, micro_batch=recipe.train.micro_batch)


def held_out_batches(recipe: Recipe, *, rank: int, world: int) -> list[dict[str, Any]]:
    """What is measured on the way."""
    from modalities.dna.data import build_loader

    return first_held_out(recipe, build_loader, rank=rank, world=world)


def loss(model: Any, batch: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Mean next-token loss of a batch in nats, of both strands where the model's likelihood counts both; bits per base."""
    from modalities.dna.model import next_token_loss

    return next_token_loss(model, batch)
