"""Text recipes by name.

`text.<method>_tiny` and `_lm` exist for every method in the registry (`priorzoo train --list`); the
other functions are the papers' set-ups. Their data stream from the Hugging Face hub: they need the
network or a local copy (`--set data.source='c4/*.json.gz'`), the named tokenizer file, and GPUs.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from modalities.text.config import TextDataConfig
from modalities.text.tasks import TASKS
from recipes import Evaluate, Model, Optim, Recipe, Recipes, Train
from zoo.errors import Options
from zoo.files import data_folder
from zoo.methods import pinned_context

RECIPES = Recipes("text")
# Methods made for one training context, which have no recipe that extends it.
NOT_EXTENDED = ("learned", "local")

# The prior's learning rate, as a multiple of the weights'. After 300 steps 1 is the worst of 1, 5
# and 20 for every prior; between 5 and 20 held-out loss after all 4,500 steps decides
# (benchmarks/text_tiny/sweep.csv). Other methods take 5, ggd_ssmax too: keys are whole names of
# methods. No rate of `sink`, `fox`, hybrids and DroPE is tuned.
PRIOR_RATES = {"ggd": 20.0, "t5": 20.0}


def plain_method(method: str) -> str:
    """A method without its row scale: ggd of ggd_ssmax."""
    return method.removesuffix("_ssmax")


def fox_options(method: str) -> Options:
    """Longer half-lives where `fox` is in the method: with the published one of one token it
    learned no answer."""
    parts = plain_method(method).split("+")
    half_lives = {"half_lives": [4, 256]}
    if "fox" not in parts:
        return {}
    if len(parts) == 1:
        return {"position_options": half_lives}
    return {"position_options": {"fox": half_lives}}


def tiny(method: str) -> Recipe:
    """0.9M parameters, context 256: speeches in 1,024 word pieces, mixed with facts to find again.

    deepspeed --num_gpus 1 --module priorzoo.train text.<method>_tiny

    The text is that of State of the Union speeches. Most rows state facts and ask for them
    (`modalities.text.facts`), or hold a stretch of text that comes again. Hardware: one CPU core
    for half an hour.
    """
    return Recipe(
        name=f"text.{method}_tiny",
        modality="text",
        model=Model(f"text_{method}_tiny", options=fox_options(method)),
        data=TextDataConfig(
            "sotu-excerpt",
            tokenizer="bpe-1k",
            context=256,
            facts_fraction=0.65,
            facts_weight=10.0,
            copies_fraction=0.2,
        ),
        optim=Optim(
            "muon",
            lr=4e-3,
            prior_lr_scale=PRIOR_RATES.get(method, 5.0),
            warmup=100,
            floor=0.02,
        ),
        train=Train(
            steps=4500,
            batch=8,
            clip=0.0,
            save_every=500,
        ),
        evaluate=Evaluate(every=500, samples=256),
    )


def tiny_extend(method: str) -> Recipe:
    """Context extension: 200 more steps of `text.<method>_tiny` at four times its context.

    The rate is a tenth of the first training's. Starts from the newest finished run of
    text.<method>_tiny under runs/, or from --set model.init_from=….
    """
    base = tiny(method)
    pinned = pinned_context(plain_method(method), base.data.context)
    return replace(
        base,
        name=f"text.{method}_tiny_extend",
        model=replace(
            base.model,
            # Half-lives of `fox_options` only set a start, which the loaded weights replace.
            options={"position_options": pinned},
            init_from=f"newest:text.{method}_tiny",
        ),
        data=replace(
            base.data,
            context=4 * base.data.context,
            seed=1,
        ),
        optim=replace(
            base.optim,
            lr=0.1 * base.optim.lr,
            schedule="constant",
            warmup=16,
        ),
        train=replace(
            base.train,
            steps=200,
            batch=max(1, base.train.batch // 4),
            save_every=0,
        ),
        evaluate=Evaluate(every=100, samples=64),
    )


@RECIPES.add
def drope_tiny() -> Recipe:
    """DroPE (arXiv 2512.12167): `text.rope_tiny` trained on without its rotation, at its length.

    deepspeed --num_gpus 1 --module priorzoo.train text.drope_tiny

    A tenth of the steps. Starts from the newest finished run of text.rope_tiny under runs/, or from
    --set model.init_from=…. Of the paper's method the temperature for longer texts is not here:
    `text_nope_ssmax_tiny` has a row scale that is trained.
    """
    base = tiny("nope")
    return replace(
        base,
        name="text.drope_tiny",
        model=replace(base.model, init_from="newest:text.rope_tiny"),
        data=replace(base.data, seed=1),
        train=replace(base.train, steps=base.train.steps // 10),
    )


def lm(method: str) -> Recipe:
    """3.4M parameters, context 512, that write English: speeches, verse and RFCs, plain text alone.

    4,096 word pieces. Hardware: one CPU core with AMX for three to four hours. The corpus is
    tokenised once, into the data folder's cache. Needs `python -m tools.offline sotu poetry rfc`.
    """
    return Recipe(
        name=f"text.{method}_lm",
        modality="text",
        model=Model(f"text_{method}_lm", options=fox_options(method)),
        data=TextDataConfig(
            "english",
            tokenizer="bpe-4k",
            context=512,
            cache_dir=str(data_folder() / "cache"),
        ),
        optim=Optim(
            "muon",
            lr=2e-3,
            prior_lr_scale=5.0,
            warmup=200,
            floor=0.05,
        ),
        train=Train(
            steps=2500,
            batch=16,
            micro_batch=4,
            clip=0.0,
            precision="bf16",
            save_every=250,
            log_every=25,
        ),
        evaluate=Evaluate(every=500, samples=128),
    )


# The length suite of ASEntmax. Its layers, columns, heads and MLP, and steps, by task; the three
# tasks that the paper's text gives no size for take MQMTAR's.
SUITE_SIZES: dict[str, tuple[int, int, int, int, int]] = {
    "copy": (2, 256, 8, 1024, 156_250),
    "reverse": (6, 256, 8, 1024, 234_375),
    "sort": (2, 256, 8, 1024, 312_500),
    "mqmtar": (4, 512, 16, 2048, 390_625),
}


def suite(method: str, task: str, *, normaliser: str = "softmax") -> Recipe:
    """A sequence task of the length suite of ASEntmax (arXiv 2506.16640) at 0.8M parameters.

    deepspeed --num_gpus 1 --module priorzoo.train text.<method>_<task>

    Tasks: copy, reverse, sort, mqmtar, two_back, local_count, flip_flop, of sources of 32 to 64
    symbols (local_count: 64 to 128). `priorzoo evaluate RUN exact_match` measures longer sources.
    text.entmax_<method>_<task> is the same with ASEntmax attention; its positions are `nape` in the
    paper. Hardware: one CPU core for about an hour.
    """
    rules = TASKS[task]
    prefix = "entmax_" if normaliser == "entmax" else ""
    options: Options = fox_options(method)
    if normaliser != "softmax":
        options = options | {"normaliser": normaliser}
    return Recipe(
        name=f"text.{prefix}{method}_{task}",
        modality="text",
        model=Model(f"text_{method}_tiny", options=options),
        data=TextDataConfig(
            f"task:{task}",
            tokenizer=rules.tokenizer,
            context=rules.context,
        ),
        optim=Optim(
            "muon",
            lr=2e-3,
            prior_lr_scale=PRIOR_RATES.get(method, 5.0),
            warmup=200,
            floor=0.02,
        ),
        train=Train(
            steps=10_000,
            batch=32,
            save_every=500,
            log_every=50,
        ),
        evaluate=Evaluate(every=1000, samples=256),
    )


def suite_paper(method: str, task: str, *, normaliser: str = "softmax") -> Recipe:
    """ASEntmax's set-up of a sequence task (arXiv 2506.16640), at the paper's size.

    deepspeed --num_gpus 1 --module priorzoo.train text.asentmax_<method>_<task>

    Batch 128, AdamW at 2e-4 without weight decay, 20,000 steps of warm-up. Hardware: one GPU for
    hours. Published with NAPE positions, exact match at 2 and 4 times the training length: reverse
    0 and 0 (softmax), 99.8 and 96.4 (ASEntmax); sort 0 and 0, 100 and 79.7. Differences: layers are
    Llama's, the paper's Gemma 2's. text.asentmax_entmax_<method>_<task> has ASEntmax attention.
    """
    base = suite(method, task, normaliser=normaliser)
    layers, dim, heads, hidden_dim, steps = SUITE_SIZES.get(task, SUITE_SIZES["mqmtar"])
    sizes: Options = {
        "num_layers": layers,
        "dim": dim,
        "num_heads": heads,
        "hidden_dim": hidden_dim,
    }
    return replace(
        base,
        name=base.name.replace("text.", "text.asentmax_"),
        model=replace(base.model, options=base.model.options | sizes),
        optim=Optim(
            lr=2e-4,
            weight_decay=0.0,
            warmup=20_000,
            floor=0.0,
        ),
        train=replace(
            base.train,
            steps=steps,
            batch=128,
            precision="bf16",
            save_every=10_000,
            log_every=500,
        ),
        evaluate=Evaluate(every=10_000, samples=1024),
    )


# Lanes: columns of q and k that hold a prior. GOAT's take columns of the heads, as in the paper;
# other biases are added to logits of whole heads there, so their lanes stand beside them.
BESIDE = {"lanes": "beside"}
# The loaders of GOAT and CABLE join documents and mask nothing; BAM's masks.
PACKED: dict[str, Any] = {
    "tokenizer": "gpt2",
    "num_workers": 2,
    "documents": "packed",
}
GPU: dict[str, Any] = {
    "precision": "bf16",
    "zero_stage": 1,
    "log_every": 50,
}


def goat_c4(method: str) -> Recipe:
    """GOAT's C4 set-up (arXiv 2601.15380): 12 layers, 12 heads, 768, L 2048, 4.0e9 tokens.

    deepspeed --num_gpus 8 --module priorzoo.train text.goat_c4_<method>_125m

    Methods: goat, alibi, rope; any other, also sums of methods. R = 2, M = 8, key bias. Hardware: 8
    × 80 GB GPUs (or fewer with train.accumulation). Expected of goat: validation perplexity 1.55
    below ALiBi's. 4.0e9 tokens = 61,035 steps of 32 × 2048. Needs GPT-2's tokenizer
    (`priorzoo fetch-data text gpt2`). As released: documents packed, weights of deviation 0.02.
    `priorzoo evaluate RUN perplexity --documents joined` measures as its script does.

    Differences: a head of goat has 55 content columns of 64 (released: 59;
    model.options.lanes=beside: 64). Not every row begins with BOS. The sink's MLP ends in zeros at
    the start (released: deviation 1e-3), and the prior's vectors do not decay. Its script's
    defaults, R = M = 4 and a rate of 1.5e-4, are not the paper's table, which is taken here.
    """
    lanes = {} if plain_method(method) == "goat" else BESIDE
    return Recipe(
        name=f"text.goat_c4_{method}_125m",
        modality="text",
        model=Model(
            f"text_{method}_125m",
            options={"weight_init": "normal", **lanes},
        ),
        data=TextDataConfig(
            "hf:allenai/c4:en:train",
            heldout_source="hf:allenai/c4:en:validation",
            context=2048,
            **PACKED,
        ),
        optim=Optim(
            lr=1e-4,
            warmup=2000,
            floor=0.3,
        ),
        train=Train(
            steps=61_035,
            batch=32,
            save_every=2000,
            **GPU,
        ),
        evaluate=Evaluate(every=1000, samples=512),
    )


# Rate, micro-batch and options by size. Layers, heads and columns: 120m 12, 16 and 768; 432m 14,
# 24 and 1536; 1100m 15, 32 and 2048.
BAM: dict[str, tuple[float, int, Options]] = {
    "120m": (1e-3, 36, {}),
    "432m": (5e-4, 24, {}),
    "1100m": (3e-4, 12, {"activation_checkpointing": True}),
}
# What BAM's released code sets of a method; a method that is not here takes BESIDE. ALiBi's bias is
# added outside SSMax's scale, whose s starts at 1 (`bam_options`).
BAM_METHODS: dict[str, Options] = {
    "ggd": {},
    "alibi": BESIDE,
    "rope": {"position_options": {"theta": 500_000.0}},
    "sinusoidal": {"position_options": {"columns": "alternating"}},
    "nope": {},
}


def bam_options(method: str, size: str) -> Options:
    """The model's options, as the released code has them."""
    plain = plain_method(method)
    _, _, size_options = BAM[size]
    options: Options = {"weight_init": "torch"}
    options |= size_options
    options |= BAM_METHODS.get(plain, BESIDE)
    if plain != method:
        options["ssmax_start"] = 1.0
        if plain == "alibi":
            options["scale_prior"] = False
    return options


def bam(method: str, size: str) -> Recipe:
    """BAM's FineWeb-10BT set-up (arXiv 2505.22842): L 512, untied, 589,824 tokens a step, RAdam.

    deepspeed --num_gpus 8 --module priorzoo.train text.bam_<method>_<size>

    Methods: ggd (BAM), alibi, rope, …, with _ssmax; also sums of methods. A step has 1152 × 512
    tokens, all steps 1.14e10. Sizes 120m, 432m, 1100m. As released: RoPE at theta 500,000, which
    the paper raises after training for RoPE-SSMax
    (`priorzoo evaluate RUN … --set position_options.theta=25000000`, and 50000000); local RoPE is
    RoPE measured with `--set position=local`. Hardware: 8 × 40 GB GPUs for 120M, 8 × 80 GB for the
    others. Needs Mistral-v0.3's tokenizer.json.

    Expected of ggd_ssmax at 120m: passkey 1.0 to 51k tokens, 0.8 at 256k. As released: documents
    masked, weights as torch makes them; no other difference is known.
    `priorzoo evaluate RUN perplexity --documents upto --lengths 512` measures its table 2.
    """
    lr, micro_batch, _ = BAM[size]
    return Recipe(
        name=f"text.bam_{method}_{size}",
        modality="text",
        model=Model(f"text_{method}_{size}", options=bam_options(method, size)),
        data=TextDataConfig(
            "hf:HuggingFaceFW/fineweb:sample-10BT:train",
            tokenizer="data/mistral-v0.3/tokenizer.json",
            context=512,
            num_workers=2,
        ),
        optim=Optim(
            "radam",
            lr=lr,
            warmup=0,
        ),
        train=Train(
            steps=19_251,
            batch=1152,
            micro_batch=micro_batch,
            save_every=1000,
            **GPU,
        ),
        evaluate=Evaluate(every=500, samples=1152),
    )


def bam_extend(method: str, size: str) -> Recipe:
    """BAM context extension: 256 more steps at L 1024, at the rate the first training ended with.

    A step has 576 × 1024 tokens. Starts from the newest finished run of text.bam_<method>_<size>
    under runs/, or from --set model.init_from=….
    Expected of ggd_ssmax at 120m and 432m: passkey 1.0 at 512k tokens; at 1100m 0.7.
    """
    base = bam(method, size)
    options = base.model.options
    pinned = pinned_context(plain_method(method), base.data.context)
    if pinned:
        position_options = options.get("position_options", {})
        options = options | {"position_options": position_options | pinned}
    return replace(
        base,
        name=f"text.bam_extend_{method}_{size}",
        model=replace(
            base.model,
            options=options,
            init_from=f"newest:text.bam_{method}_{size}",
        ),
        # The seed gives other rows than the first training saw first.
        data=replace(
            base.data,
            context=1024,
            seed=1,
        ),
        optim=Optim(
            "radam",
            lr=0.1 * base.optim.lr,
            schedule="constant",
            warmup=16,
        ),
        train=replace(
            base.train,
            steps=256,
            batch=576,
            micro_batch=max(1, (base.train.micro_batch or 1) // 2),
            save_every=64,
        ),
        evaluate=Evaluate(every=64, samples=576),
    )


CABLE_METHODS = ("cable", "alibi", "kerple", "fire", "t5", "rope", "sinusoidal")


def cable(method: str, size: str) -> Recipe:
    """CABLE's FineWeb-Edu-10B set-up (arXiv 2503.08067): L 1024, 524,288 tokens a step.

    deepspeed --num_gpus 8 --module priorzoo.train text.cable_<method>_<size>

    Methods: cable, alibi, kerple, …; also sums of methods. GPT-2's layers, 1.0e10 tokens in all.
    Sizes 44m (trained on WikiText-103 by the authors), 124m and 354m (which they call 334M).
    Hardware: 8 × 40 GB GPUs. Expected perplexity at 124M and 1024/2048/4096/8192/15360:
    cable 20.63/20.02/19.24/19.31/19.28, alibi 20.99/20.67/21.23/22.42/22.89.

    As released: documents packed, weights of deviation 0.02 (outputs ÷ √(2·layers)), cable's
    content not divided by √d. cable's bias is as the paper prints it; as its code has it:
    --set model.options.position_options.gate=softplus
    --set model.options.position_options.weighted=false.

    Differences: cable's matrix W_c has weight decay there and none here; no prior's parameter has.
    """
    return Recipe(
        name=f"text.cable_{method}_{size}",
        modality="text",
        model=Model(
            f"text_{method}_{size}",
            options={
                **BESIDE,
                "weight_init": "gpt2",
                "scale_content": plain_method(method) != "cable",
            },
        ),
        data=TextDataConfig(
            "hf:HuggingFaceFW/fineweb-edu:sample-10BT:train",
            context=1024,
            **PACKED,
        ),
        optim=Optim(
            lr=6e-4,
            warmup=715,
        ),
        train=Train(
            steps=19_073,
            batch=512,
            micro_batch=16,
            save_every=1000,
            **GPU,
        ),
        evaluate=Evaluate(every=500, samples=512),
    )


RECIPES.add_family("125m", goat_c4, prefix="goat_c4_", listed=("goat", "ggd_goat", "alibi", "rope"))
_plain_listed = [*BAM_METHODS, "ggd_goat"]
_bam_listed = _plain_listed + [f"{method}_ssmax" for method in _plain_listed]
for _size in BAM:
    RECIPES.add_family(
        _size,
        partial(bam, size=_size),
        prefix="bam_",
        listed=_bam_listed,
    )
    RECIPES.add_family(
        _size,
        partial(bam_extend, size=_size),
        prefix="bam_extend_",
        listed=_bam_listed,
        without=NOT_EXTENDED,
    )
for _size in ("44m", "124m", "354m"):
    RECIPES.add_family(
        _size,
        partial(cable, size=_size),
        prefix="cable_",
        listed=(*CABLE_METHODS, "ggd_goat"),
    )
SUITE_METHODS = ("nape", "nope", "alibi", "rope", "ggd", "goat", "ggd_goat", "cable", "fox")
for _task in TASKS:
    for _make, _prefix in ((suite, ""), (suite_paper, "asentmax_")):
        # The longer prefix first: "entmax_nape" is no method.
        for _normaliser, _inner in (("entmax", "entmax_"), ("softmax", "")):
            # Lists have one task, whose text names the others.
            _listed: tuple[str, ...] = ()
            if _task == "reverse":
                _listed = ("nape",) if _prefix + _inner else SUITE_METHODS
            RECIPES.add_family(
                _task,
                partial(_make, task=_task, normaliser=_normaliser),
                model_size="tiny",
                prefix=_prefix + _inner,
                listed=_listed,
            )
RECIPES.add_family("tiny", tiny)
RECIPES.add_family("tiny_extend", tiny_extend, model_size="tiny", without=NOT_EXTENDED)
RECIPES.add_family("lm", lm)
