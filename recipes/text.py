"""Text recipes by name.

`text.<method>_tiny`, `_small` and `_lm` exist for every method in the registry (`python recipes/train.py --list`);
the functions below that are not generated are the papers' own set-ups. A new recipe is one decorated function.

Papers' data: allenai/c4 and FineWeb stream from the Hugging Face hub, so those recipes need the network or a local copy
(`--set data.source='c4/*.json.gz'`), the named tokenizer file, and GPUs.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from modalities.files import data_folder
from modalities.text.config import TextDataConfig
from recipes.config import Evaluate, Model, Optim, Recipe, Train
from recipes.registry import Recipes
from zoo.methods import pinned_context

RECIPES = Recipes("text")

# The tokenizer.json of Mistral-7B-v0.3 (32,768 entries), which the hub gives to those who accept its terms.
MISTRAL_TOKENIZER = "data/mistral-v0.3/tokenizer.json"
FINEWEB = "hf:HuggingFaceFW/fineweb:sample-10BT:train"


# ------------------------------------------------------------------------------------------ tiny, small, lm

# How many times the weights' rate the prior's parameters learn at, where held-out loss was least of 1, 5 and 20
# (`tools/train_zoo.py sweep text`, benchmarks/text_tiny/sweep.csv). Other methods take 5.
PRIOR_RATES = {"ggd": 20.0, "t5": 20.0}


def tiny(method: str) -> Recipe:
    """0.9M parameters, context 256: State of the Union speeches in 1,024 word pieces, facts to be found again mixed in.

    deepspeed --num_gpus 1 recipes/train.py text.<method>_tiny

    Most rows state facts and ask for them, in none of the words of `--template heldout` (`modalities.text.grammars`), or hold a
    stretch of text that comes again. Hardware: one CPU core for half an hour.
    """
    return Recipe(
        name=f"text.{method}_tiny",
        modality="text",
        model=Model(f"text_{method}_tiny"),
        data=TextDataConfig(
            source="sotu-excerpt",
            tokenizer="bpe-1k",
            context=256,
            facts_fraction=0.65,
            facts_weight=10.0,
            copies_fraction=0.2,
        ),
        optim=Optim(
            "muon",
            lr=4e-3,
            betas=(0.9, 0.95),
            weight_decay=0.1,
            prior_lr_scale=PRIOR_RATES.get(method, 5.0),
            warmup=100,
            floor=0.02,
        ),
        train=Train(steps=4500, batch=8, clip=0.0, save_every=500),
        evaluate=Evaluate(every=500, samples=256),
    )


def tiny_extend(method: str) -> Recipe:
    """Context extension at tiny size: 200 more steps of `text.<method>_tiny` at four times its context, at a tenth of its rate.

    python recipes/train.py text.<method>_tiny_extend

    Starts from the newest finished run of text.<method>_tiny under runs/, or from --set model.init_from=…. Hardware: one CPU
    core for two minutes.
    """
    recipe = tiny(method)
    position = method.removesuffix("_ssmax")
    recipe.name, recipe.model.init_from = f"text.{method}_tiny_extend", f"newest:text.{method}_tiny"
    recipe.model.options = {"position_options": pinned_context(position, recipe.data.context)}
    recipe.data = replace(recipe.data, context=4 * recipe.data.context, seed=1)
    recipe.optim.lr, recipe.optim.schedule, recipe.optim.warmup = 0.1 * recipe.optim.lr, "constant", 16
    recipe.train.steps, recipe.train.batch, recipe.train.save_every = 200, max(1, recipe.train.batch // 4), 0
    recipe.evaluate = Evaluate(every=100, samples=64)
    return recipe


def small(method: str) -> Recipe:
    """About 10M parameters, context 512, on the RFC corpus (`python tools/fetch_data.py text rfc --offline`).

    deepspeed --num_gpus 1 recipes/train.py text.<method>_small         one GPU
    """
    return Recipe(
        name=f"text.{method}_small",
        modality="text",
        model=Model(f"text_{method}_small"),
        data=TextDataConfig(
            source="rfc", tokenizer="bytes", context=512, facts_fraction=0.1, cache_dir=str(data_folder() / "cache")
        ),
        optim=Optim(name="adamw", lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1, warmup=200, floor=0.1),
        train=Train(steps=10_000, batch=64, save_every=1000, log_every=50),
        evaluate=Evaluate(every=500, samples=512),
    )


def lm(method: str) -> Recipe:
    """3.4M parameters, context 512, that write English: speeches, verse and RFCs in 4,096 word pieces, plain text alone.

    OMP_NUM_THREADS=1 python recipes/train.py text.<method>_lm --resume auto

    Hardware: one CPU core with AMX for three hours (others are faster in fp32: --set train.precision=fp32). Needs `python
    tools/fetch_data.py text sotu poetry rfc --offline`; the corpus is tokenised once, into the data folder's cache.
    """
    return Recipe(
        name=f"text.{method}_lm",
        modality="text",
        model=Model(f"text_{method}_lm"),
        data=TextDataConfig(source="english", tokenizer="bpe-4k", context=512, cache_dir=str(data_folder() / "cache")),
        optim=Optim("muon", lr=2e-3, betas=(0.9, 0.95), weight_decay=0.1, prior_lr_scale=5.0, warmup=200, floor=0.05),
        train=Train(steps=4500, batch=16, micro_batch=4, clip=0.0, precision="bf16", save_every=250, log_every=25),
        evaluate=Evaluate(every=500, samples=128),
    )


# ------------------------------------------------------------------------------------------ the papers' set-ups


@RECIPES.add
def goat_c4_125m() -> Recipe:
    """GOAT-C4 125M (arXiv 2601.15380): 12 layers, 12 heads, 768, R = 2, M = 8, key bias, L 2048, 4.0e9 tokens.

    deepspeed --num_gpus 8 recipes/train.py text.goat_c4_125m

    Hardware: 8 × 80 GB GPUs (or fewer with train.accumulation). Expected: validation perplexity 1.55 below ALiBi's.
    4.0e9 tokens = 61,035 steps of 32 × 2048. Needs GPT-2's tokenizer (`python tools/fetch_data.py text gpt2`).
    """
    return Recipe(
        name="text.goat_c4_125m",
        modality="text",
        model=Model("text_goat_125m"),
        data=TextDataConfig(
            source="hf:allenai/c4:en:train",
            heldout_source="hf:allenai/c4:en:validation",
            tokenizer="gpt2",
            context=2048,
            num_workers=2,
        ),
        optim=Optim("adamw", lr=1e-4, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, warmup=2000, floor=0.3),
        train=Train(steps=61_035, batch=32, precision="bf16", zero_stage=1, save_every=2000, log_every=50),
        evaluate=Evaluate(every=1000, samples=512),
    )


# Learning rate, micro-batch and model options by size. 120M: 12 layers, 16 heads, 768; 432M: 14, 24, 1536; 1.1B: 15, 32, 2048,
# hidden 4×.
BAM: dict[str, tuple[float, int, dict[str, Any]]] = {
    "120m": (1e-3, 36, {}),
    "432m": (5e-4, 24, {}),
    "1100m": (3e-4, 12, {"activation_checkpointing": True}),
}


def bam_fineweb(size: str) -> Recipe:
    """BAM-SSMax on FineWeb-10BT (arXiv 2505.22842): L 512, untied, 589,824 tokens a step (1152 × 512), 1.14e10 in all, RAdam.

    deepspeed --num_gpus 8 recipes/train.py text.bam_fineweb_120m          or _432m, _1100m

    Hardware: 8 × 40 GB GPUs for 120M, 8 × 80 GB for the others; any number of ranks that divides 1152 / micro_batch. Needs
    Mistral-v0.3's tokenizer.json. Expected of 120M: passkey 1.0 to 102k tokens, 0.8 at 256k; RULER single_1 1.0 to 4k; of
    the larger ones the same at lower perplexity.
    """
    lr, micro_batch, model_options = BAM[size]
    return Recipe(
        name=f"text.bam_fineweb_{size}",
        modality="text",
        model=Model(f"text_ggd_ssmax_{size}", options={**model_options}),
        data=TextDataConfig(source=FINEWEB, tokenizer=MISTRAL_TOKENIZER, context=512, num_workers=2),
        optim=Optim("radam", lr=lr, betas=(0.9, 0.95), weight_decay=0.1, warmup=0, floor=0.1),
        train=Train(
            steps=19_251,
            batch=1152,
            micro_batch=micro_batch,
            precision="bf16",
            zero_stage=1,
            save_every=1000,
            log_every=50,
        ),
        evaluate=Evaluate(every=500, samples=1152),
    )


def bam_extend(size: str) -> Recipe:
    """BAM context extension: 256 more steps at L 1024 (576 × 1024 tokens a step), at the rate the first training ended with.

    deepspeed --num_gpus 8 recipes/train.py text.bam_extend_120m          or _432m, _1100m

    Starts from the newest finished run of text.bam_fineweb_<size> under runs/, or from --set model.init_from=….
    Hardware: as bam_fineweb. Expected: passkey 1.0 at 512k tokens.
    """
    extended = bam_fineweb(size)
    extended.name = f"text.bam_extend_{size}"
    extended.model.init_from = f"newest:text.bam_fineweb_{size}"
    extended.data = replace(extended.data, context=1024, seed=1)  # other rows than the first training saw first
    extended.optim = Optim("radam", lr=0.1 * extended.optim.lr, betas=(0.9, 0.95), schedule="constant", warmup=16)
    train = extended.train
    train.steps, train.batch, train.micro_batch, train.save_every = 256, 576, max(1, (train.micro_batch or 1) // 2), 64
    extended.evaluate = Evaluate(every=64, samples=576)
    return extended


@RECIPES.add
def cable_124m() -> Recipe:
    """CABLE 124M (arXiv 2503.08067): 12 layers, 12 heads, 768, L 1024, FineWeb-Edu-10B, 524,288 tokens a step.

    deepspeed --num_gpus 8 recipes/train.py text.cable_124m

    Hardware: 8 × 40 GB GPUs. Expected perplexity at 1024/2048/4096/8192/15360: 20.63/20.02/19.24/19.31/19.28.
    """
    return Recipe(
        name="text.cable_124m",
        modality="text",
        model=Model("text_cable_124m"),
        data=TextDataConfig(
            source="hf:HuggingFaceFW/fineweb-edu:sample-10BT:train", tokenizer="gpt2", context=1024, num_workers=2
        ),
        optim=Optim("adamw", lr=6e-4, betas=(0.9, 0.95), weight_decay=0.1, warmup=715, floor=0.1),
        train=Train(
            steps=19_073, batch=512, micro_batch=16, precision="bf16", zero_stage=1, save_every=1000, log_every=50
        ),
        evaluate=Evaluate(every=500, samples=512),
    )


for _size in BAM:
    RECIPES[f"bam_fineweb_{_size}"] = partial(bam_fineweb, _size)
    RECIPES[f"bam_extend_{_size}"] = partial(bam_extend, _size)
RECIPES.add_methods("tiny", tiny)
RECIPES.add_methods("tiny_extend", tiny_extend, model_size="tiny", without=("learned", "local"))  # end at their context
RECIPES.add_methods("small", small)
RECIPES.add_methods("lm", lm)
