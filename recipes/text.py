"""Text recipes by name, and what the training loop asks of the text modality.

`text.<method>_tiny` and `text.<method>_small` exist for every method in the registry (`python recipes/train.py --list`);
the functions below that are not generated are the papers' own set-ups. A new recipe is one decorated function.

Papers' data: allenai/c4 and FineWeb stream from the Hugging Face hub, so those recipes need the network or a local copy
(`--set data.source='c4/*.json.gz'`), the named tokenizer file, and GPUs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from modalities.text.data import TextDataConfig
from recipes.config import Evaluate, Model, Optim, Recipe, Train
from recipes.decoder import decoder_cost, every_method, first_held_out, target_weight, tokenizer_of
from recipes.initial import load_weights

UNIT = "tokens"  # what throughput is counted in: next-token targets
FIGURES = ()  # what `loss` measures besides the loss, for held-out data
cost, weight = decoder_cost, target_weight
RECIPES: dict[str, Callable[[], Recipe]] = {}

# The tokenizer.json of Mistral-7B-v0.3 (32,768 entries), which the hub gives to those who accept its terms.
MISTRAL_TOKENIZER = "data/mistral-v0.3/tokenizer.json"
FINEWEB = "hf:HuggingFaceFW/fineweb:sample-10BT:train"


def recipe(function: Callable[[], Recipe]) -> Callable[[], Recipe]:
    """Make a recipe known under its function's name."""
    RECIPES[function.__name__] = function
    return function


# ------------------------------------------------------------------------------------------ tiny and small


def tiny(method: str) -> Recipe:
    """0.8M parameters, context 128: byte-level State of the Union speeches with passkey documents mixed in.

    deepspeed --num_gpus 1 recipes/train.py text.<method>_tiny
    """
    return Recipe(
        name=f"text.{method}_tiny",
        modality="text",
        model=Model(f"text_{method}_tiny"),
        data=TextDataConfig(
            source="sotu-excerpt", tokenizer="bytes", context=128, passkey_fraction=0.5, passkey_weight=20.0
        ),
        optim=Optim("adamw", lr=2e-3, betas=(0.9, 0.95), weight_decay=0.1, prior_lr_scale=20.0, warmup=50, floor=0.1),
        train=Train(steps=800, batch=32, save_every=200),
        evaluate=Evaluate(every=200, samples=256),
    )


def small(method: str) -> Recipe:
    """About 10M parameters, context 512, on the RFC corpus (`python tools/fetch_data.py text rfc`).

    deepspeed --num_gpus 1 recipes/train.py text.<method>_small         one GPU
    """
    return Recipe(
        name=f"text.{method}_small",
        modality="text",
        model=Model(f"text_{method}_small"),
        data=TextDataConfig(source="rfc", tokenizer="bytes", context=512, passkey_fraction=0.1, cache_dir="data/cache"),
        optim=Optim(name="adamw", lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1, warmup=200, floor=0.1),
        train=Train(steps=10_000, batch=64, save_every=1000, log_every=50),
        evaluate=Evaluate(every=500, samples=512),
    )


@recipe
def ggd_ssmax_tiny() -> Recipe:
    """The demo's model: GGD-BAM with SSMax, 0.8M parameters, trained at context 128.

    deepspeed --num_gpus 1 recipes/train.py text.ggd_ssmax_tiny

    Hardware: two CPU cores. Expected: passkey answers exact in context and far beyond it.
    """
    return tiny("ggd_ssmax")


# ------------------------------------------------------------------------------------------ the papers' set-ups


@recipe
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
        train=Train(steps=61_035, batch=32, precision="bf16", zero_stage=1, clip=1.0, save_every=2000, log_every=50),
        evaluate=Evaluate(every=1000, samples=512),
    )


def bam_fineweb(size: str, lr: float, micro_batch: int, **model_options: Any) -> Recipe:
    """BAM on FineWeb-10BT (arXiv 2505.22842): L 512, 589,824 tokens a step (1152 × 512), 19,251 steps, RAdam."""
    return Recipe(
        name=f"text.bam_fineweb_{size}",
        modality="text",
        model=Model(f"text_ggd_ssmax_{size}", options=model_options),
        data=TextDataConfig(source=FINEWEB, tokenizer=MISTRAL_TOKENIZER, context=512, num_workers=2),
        optim=Optim("radam", lr=lr, betas=(0.9, 0.95), weight_decay=0.1, warmup=0, floor=0.1),
        train=Train(
            steps=19_251,
            batch=1152,
            micro_batch=micro_batch,
            precision="bf16",
            zero_stage=1,
            clip=1.0,
            save_every=1000,
            log_every=50,
        ),
        evaluate=Evaluate(every=500, samples=1152),
    )


@recipe
def bam_fineweb_120m() -> Recipe:
    """BAM-SSMax 120M: 12 layers, 16 heads, 768, untied, 1.14e10 tokens.

    deepspeed --num_gpus 8 recipes/train.py text.bam_fineweb_120m

    Hardware: 8 × 40 GB GPUs; any number of ranks that divides 1152 / micro_batch. Needs Mistral-v0.3's tokenizer.json.
    Expected: passkey 1.0 to 102k tokens, 0.8 at 256k; RULER single_1 1.0 to 4k.
    """
    return bam_fineweb("120m", lr=1e-3, micro_batch=36)


@recipe
def bam_fineweb_432m() -> Recipe:
    """BAM-SSMax 432M: 14 layers, 24 heads, 1536.

    deepspeed --num_gpus 8 recipes/train.py text.bam_fineweb_432m

    Hardware: 8 × 80 GB GPUs. Expected: as 120M, at lower perplexity.
    """
    return bam_fineweb("432m", lr=5e-4, micro_batch=24)


@recipe
def bam_fineweb_1100m() -> Recipe:
    """BAM-SSMax 1.1B: 15 layers, 32 heads, 2048, hidden 4×.

    deepspeed --num_gpus 8 recipes/train.py text.bam_fineweb_1100m

    Hardware: 8 × 80 GB GPUs. Expected: as 432M, at lower perplexity.
    """
    return bam_fineweb("1100m", lr=3e-4, micro_batch=12, activation_checkpointing=True)


def bam_context_extension(size: str) -> Recipe:
    """256 more steps at L 1024 from a finished `bam_fineweb_<size>` run, at the learning rate that run ended with."""
    extended = {"120m": bam_fineweb_120m, "432m": bam_fineweb_432m, "1100m": bam_fineweb_1100m}[size]()
    extended.name = f"text.bam_extend_{size}"
    extended.model.init_from = f"newest:text.bam_fineweb_{size}"
    extended.data = extended.data.with_options(context=1024, seed=1)  # other rows than the first training saw first
    extended.optim = Optim("radam", lr=0.1 * extended.optim.lr, betas=(0.9, 0.95), schedule="constant", warmup=16)
    train = extended.train
    train.steps, train.batch, train.micro_batch, train.save_every = 256, 576, max(1, train.micro_batch // 2), 64
    extended.evaluate = Evaluate(every=64, samples=576)
    return extended


@recipe
def bam_extend_120m() -> Recipe:
    """BAM context extension of the 120M model: 256 steps at L 1024 (576 × 1024 tokens a step).

    deepspeed --num_gpus 8 recipes/train.py text.bam_extend_120m

    Starts from the newest finished run of text.bam_fineweb_120m under runs/, or from --set model.init_from=….
    Hardware: as bam_fineweb_120m. Expected: passkey 1.0 at 512k tokens.
    """
    return bam_context_extension("120m")


@recipe
def bam_extend_432m() -> Recipe:
    """BAM context extension of the 432M model; see bam_extend_120m.

    deepspeed --num_gpus 8 recipes/train.py text.bam_extend_432m

    Hardware: as bam_fineweb_432m. Expected: as the 120M model, or better.
    """
    return bam_context_extension("432m")


@recipe
def bam_extend_1100m() -> Recipe:
    """BAM context extension of the 1.1B model; see bam_extend_120m.

    deepspeed --num_gpus 8 recipes/train.py text.bam_extend_1100m

    Hardware: as bam_fineweb_1100m. Expected: as the 120M model, or better.
    """
    return bam_context_extension("1100m")


@recipe
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
            steps=19_073,
            batch=512,
            micro_batch=16,
            precision="bf16",
            zero_stage=1,
            clip=1.0,
            save_every=1000,
            log_every=50,
        ),
        evaluate=Evaluate(every=500, samples=512),
    )


for _name, _build in every_method("text", {"tiny": tiny, "small": small}).items():
    RECIPES.setdefault(_name, _build)


# ------------------------------------------------------------------------------------------ what the loop asks for


def build_model(recipe: Recipe, *, start: bool = True) -> Any:
    """The recipe's model: the registry's entry at the recipe's context and tokenizer, with the weights of `init_from`.

    start=False leaves those out, for a model that gets a checkpoint's weights or none.
    """
    from zoo import create_model

    options = {"train_context": recipe.data.context, **vocabulary(recipe), **recipe.model.options}
    model = create_model(recipe.model.name, **options)
    if start and recipe.model.init_from:
        load_weights(model, recipe.model.init_from)
    return model


def vocabulary(recipe: Recipe) -> dict[str, Any]:
    """{"tokenizer", "vocab_size"} of the data, where its tokenizer is not the one the registry's entry was made for.

    The tokenizer's files are read only for the size of a vocabulary that neither the entry nor model.options knows.
    """
    from modalities.text.tokenizers import load_tokenizer
    from zoo.registry import model_entry

    spec, entry, given = tokenizer_of(recipe), model_entry(recipe.model.name).config, recipe.model.options
    if spec == entry["tokenizer"]:
        return {}
    if "vocab_size" in given or spec.partition("?")[0] == entry["tokenizer"].partition("?")[0]:
        return {"tokenizer": spec}  # options after "?" change how text is cut, and no vocabulary
    return {"tokenizer": spec, "vocab_size": load_tokenizer(spec).vocab_size}


def load_model(folder: Any) -> Any:
    """A model from its save_pretrained folder."""
    from modalities.text.model import CausalLM

    return CausalLM.from_pretrained(folder)


def train_loader(recipe: Recipe, *, rank: int, world: int) -> Any:
    """Endless batches of this rank, with state_dict() and load_state_dict()."""
    from modalities.text.data import build_loader

    return build_loader(recipe.data, split="train", rank=rank, world=world, micro_batch=recipe.train.micro_batch)


def held_out_batches(recipe: Recipe, *, rank: int, world: int) -> list[dict[str, Any]]:
    """What is measured on the way."""
    from modalities.text.data import build_loader

    return first_held_out(recipe, build_loader, rank=rank, world=world)


def loss(model: Any, batch: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Mean next-token loss of a batch, and further figures."""
    from modalities.text.model import causal_lm_loss

    return causal_lm_loss(model, batch)
