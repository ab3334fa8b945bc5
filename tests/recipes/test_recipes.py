"""Every recipe resolves; the papers' set-ups have the papers' numbers; the optimiser decays
matrices and nothing else."""

import itertools
import math
from dataclasses import replace

import pytest
import torch
from torch import nn

from modalities.contract import find_modality
from modalities.text.rows import RowMix
from recipes import find_recipe, list_recipes
from recipes.commands import ConfigError
from recipes.estimate import build_on_meta, describe, memory_per_rank
from recipes.optim import lr_factor, parameter_groups
from recipes.plan import resolve
from recipes.recipe import Model, Optim
from zoo import create_model, list_models
from zoo.layers import SSMax
from zoo.priors import Prior


@pytest.mark.slow
def test_every_recipe_is_planned():
    """Plans of all; without data, memory or a network, figures of one recipe a size, and of each of
    the papers'."""
    models = {modality: set(list_models(f"{modality}_*")) for modality in ("text", "vision", "dna")}
    families = {}
    for name in list_recipes():
        recipe = find_recipe(name)
        assert recipe.name == name
        assert recipe.model.name in models[recipe.modality]
        plan = resolve(recipe, world=8 if recipe.train.zero_stage else 1)
        families[recipe.modality, recipe.train.zero_stage] = plan
    assert len(families) >= 5
    for (modality, _), plan in families.items():
        wanted = {
            "model",
            "batch",
            find_modality(modality).unit,
            "estimated FLOPs",
            "estimated memory per rank",
        }
        assert set(describe(plan)) >= wanted


@pytest.mark.parametrize("name", ["text.ggd_ssmax_tiny", "text.rope_tiny"])
def test_estimated_activations_are_those_kept(name):
    """Within a quarter: what autograd keeps of a forward, the weights aside, and the backward pass
    adds of 1.5 blocks."""
    recipe = find_recipe(name)
    modality = find_modality(recipe.modality)
    rows = 2
    model = modality.build(recipe.model.name, recipe.model.options, recipe.data).train()
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept = {}

    def pack(x):
        storage = x.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return x

    tokens = torch.randint(0, 256, (rows, recipe.data.context + 1))
    segments = (torch.arange(tokens.shape[1]) > 100).long().expand_as(tokens)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        value = modality.loss(model, {"tokens": tokens, "segments": segments})  # noqa: F841  keeps the graph
    train = replace(recipe.train, batch=rows, precision="fp32")
    memory = memory_per_rank(
        0, resolve(replace(recipe, train=train), world=1), modality.cost(model, recipe.data, 4)
    )
    forward = memory["activations"] * (layers := len(model.layers)) / (layers + 1.5)
    assert forward + memory["logits"] == pytest.approx(sum(kept.values()), rel=0.25)


def test_every_model_has_a_recipe():
    """Every model of a size has a recipe."""
    names = set(list_recipes())
    for size in ("text_*_tiny", "dna_*_tiny", "dna_*_small", "text_*_lm", "vision_*_tiny_patch8"):
        models = list_models(size)
        assert models
        assert {model.replace("_", ".", 1).removesuffix("_patch8") for model in models} <= names
    terms = [
        replace(find_recipe(f"text.{name}_lm"), name="", model=Model(""))
        for name in ("rope", "ggd_ssmax")
    ]
    assert terms[0] == terms[1]
    assert terms[0].data.row_mix == RowMix()
    assert (
        sum(p.numel() for p in build_on_meta(find_recipe("text.rope_lm")).parameters()) == 3_443_136
    )


@pytest.mark.parametrize(
    ("name", "context", "tokens_per_step", "steps", "optimizer", "lr", "floor_lr", "warmup"),
    [
        ("goat_c4_goat_125m", 2048, 32 * 2048, 61_035, "adamw", 1e-4, 3e-5, 2000),
        ("bam_ggd_ssmax_120m", 512, 589_824, 19_251, "radam", 1e-3, 1e-4, 0),
        ("cable_cable_124m", 1024, 524_288, 19_073, "adamw", 6e-4, 6e-5, 715),
        ("bam_extend_ggd_ssmax_120m", 1024, 589_824, 256, "radam", 1e-4, None, 16),
    ],
)
def test_the_papers_set_ups(name, context, tokens_per_step, steps, optimizer, lr, floor_lr, warmup):
    recipe = find_recipe(f"text.{name}")
    optim = recipe.optim
    train = recipe.train
    assert recipe.data.context == context
    assert train.batch * context == tokens_per_step
    assert train.steps == steps
    assert (optim.name, optim.warmup, optim.weight_decay, train.clip) == (
        optimizer,
        warmup,
        0.1,
        1.0,
    )
    assert optim.lr == pytest.approx(lr)
    assert optim.betas == (0.9, 0.95)
    assert train.precision == "bf16"
    if floor_lr:
        assert optim.lr * lr_factor(steps - 1, optim, steps) == pytest.approx(floor_lr)


RELEASED = {  # of a recipe: how weights start, documents, GPT-2's layers or attention's biases, and 1/√d of the content
    "text.goat_c4_goat_125m": ("normal", "packed", True, True),
    "text.bam_ggd_ssmax_120m": ("torch", "masked", False, True),
    "text.cable_cable_124m": ("gpt2", "packed", True, False),
    "text.cable_alibi_124m": ("gpt2", "packed", True, True),
    "dna.goat_human": ("torch", None, True, True),
    "vision.goat_imagenet_goat_vits16": ("normal", None, True, True),
    "text.ggd_ssmax_tiny": ("small", "masked", False, True),
}


@pytest.mark.parametrize("name", RELEASED)
def test_paper_setups_are_as_released(name):
    """The papers models and rows are as released."""
    recipe = find_recipe(name)
    model = build_on_meta(recipe)
    attention = model.layers[0].attention
    biased = attention.query.bias is not None
    documents = getattr(recipe.data, "documents", None)
    assert (model.config.weight_init, documents, biased, attention.scale_content) == RELEASED[name]
    if name == "dna.goat_human":
        assert (recipe.train.steps, recipe.train.batch, recipe.optim.warmup) == (1000, 8, 100)
        assert recipe.optim.betas == (0.9, 0.999)
        assert model.layers[0].mlp.up.weight.shape == (
            2048,
            512,
        )


def test_warm_up_then_cosine():
    """Warm up then cosine to the floor."""
    factors = [lr_factor(step, Optim(lr=1.0, warmup=10, floor=0.1), 111) for step in range(111)]
    assert factors[:10] == pytest.approx([(n + 1) / 10 for n in range(10)])
    assert factors[10] == 1.0
    assert factors[60] == pytest.approx(0.55)
    assert factors[-1] == pytest.approx(0.1)
    assert all(a >= b for a, b in itertools.pairwise(factors[10:]))
    assert lr_factor(50, Optim(warmup=10, schedule="constant"), 100) == 1.0
    line = [
        lr_factor(step, Optim(warmup=10, floor=0.1, schedule="linear"), 111) for step in range(111)
    ]
    assert line[:11] == factors[:11]
    assert line[35] == pytest.approx(0.775)
    assert line[-1] == pytest.approx(0.1)
    assert math.isfinite(lr_factor(0, Optim(warmup=0), 1))


@pytest.mark.parametrize(
    "name", ["text_learned_tiny", "text_ggd_goat_ssmax_tiny", "vision_lookhere_tiny_patch8"]
)
def test_only_matrices_decay(name):
    model = create_model(name, num_layers=1)
    groups = parameter_groups(model, Optim(lr=1e-3, weight_decay=0.1, prior_lr_scale=20.0))
    fast = {
        id(p) for group in groups if group.get("lr") == pytest.approx(0.02) for p in group["params"]
    }
    assert fast == {
        id(p)
        for n, p in model.named_parameters()
        if n in model.prior_parameters() and p.requires_grad
    }
    decayed = {id(p) for group in groups if group["weight_decay"] for p in group["params"]}
    spared = {id(p) for group in groups if not group["weight_decay"] for p in group["params"]}
    assert decayed | spared == {id(p) for p in model.parameters() if p.requires_grad}
    assert not decayed & spared
    inside = {
        id(p) for m in model.modules() if isinstance(m, (Prior, SSMax)) for p in m.parameters()
    }
    norms = {
        id(p)
        for m in model.modules()
        if isinstance(m, (nn.RMSNorm, nn.LayerNorm))
        for p in m.parameters()
    }
    matrices = {id(m.weight) for m in model.modules() if isinstance(m, nn.Linear)} - inside
    assert matrices <= decayed
    assert not decayed & (inside | norms)
    position = getattr(model, "position_embedding", None)
    assert position is None or not decayed & {id(p) for p in position.parameters()}


@pytest.mark.parametrize(
    "name", ["text_cable_ssmax_tiny", "text_learned_tiny", "vision_goat_tiny_patch8"]
)
def test_muon_trains_the_layers_matrices(name):
    model = create_model(name, num_layers=1)
    optim = Optim("muon", lr=1e-3, weight_decay=0.1, muon_lr_scale=4.0)
    groups = parameter_groups(model, optim)
    assert sum(len(group["params"]) for group in groups) == sum(
        p.requires_grad for p in model.parameters()
    )
    (muon,) = [group for group in groups if group["use_muon"]]
    assert (muon["lr"], muon["weight_decay"]) == (4e-3, 0.025)
    assert muon is groups[-1]
    linear = (
        m.weight
        for n, m in model.layers.named_modules()
        if isinstance(m, nn.Linear) and "prior" not in n
    )
    assert {id(p) for p in muon["params"]} == {id(p) for p in linear}


def test_extension_keeps_position():
    """A context is extended with the position that was trained."""
    recipe = find_recipe("text.ggd_goat_ssmax_tiny_extend")
    context = find_recipe("text.ggd_goat_ssmax_tiny").data.context
    assert recipe.data.context == 4 * context
    assert recipe.model.init_from == "newest:text.ggd_goat_ssmax_tiny"
    assert recipe.model.options["position_options"] == {"key_bias": {"train_context": context}}
    for name in ("text.learned_tiny_extend", "text.ggd+learned_tiny_extend"):
        with pytest.raises(ConfigError, match="learned"):
            find_recipe(name)
