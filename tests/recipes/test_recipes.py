"""Every recipe resolves; the papers' set-ups have the papers' numbers; the optimiser decays matrices and nothing else."""

import itertools
import math
from dataclasses import replace

import pytest
import torch
from torch import nn

from modalities.contract import find_modality
from modalities.text.rows import RowMix
from recipes import find_recipe, list_recipes
from recipes.config import ConfigError, Model, Optim, Recipe, resolve
from recipes.estimate import build_on_meta, describe
from recipes.optim import lr_factor, parameter_groups
from recipes.registry import Recipes
from recipes.runs import load_weights
from zoo import create_model, list_models
from zoo.layers import SSMax
from zoo.priors import Prior


def test_every_recipe_is_planned_and_one_of_each_family_is_counted():
    """Plans of all; without data, memory or a network, figures of one recipe a size, and of each of the papers'."""
    models = {modality: set(list_models(modality=modality)) for modality in ("text", "vision", "dna")}
    families = {}
    for name in list_recipes():
        recipe = find_recipe(name)
        assert recipe.name == name and recipe.model.name in models[recipe.modality]
        plan = resolve(recipe, world=8 if recipe.train.zero_stage else 1)
        families[recipe.modality, recipe.model.name.rpartition("_")[2], recipe.train.zero_stage] = plan
    assert len(families) > 12
    for (modality, *_), plan in families.items():
        wanted = {"model", "batch", find_modality(modality).unit, "estimated FLOPs", "estimated memory per rank"}
        assert set(describe(plan)) >= wanted


def test_every_model_of_a_size_has_a_recipe():
    """And language models are trained on the same terms."""
    names = set(list_recipes())
    for modality, size in [("text", "tiny"), ("dna", "tiny"), ("text", "small"), ("dna", "small"), ("text", "lm")]:
        models = list_models(f"{modality}_*_{size}", modality=modality)
        assert {model.replace("_", ".", 1) for model in models} <= names
    for model in list_models("vision_*_tiny_patch8", modality="vision"):
        assert model.replace("_", ".", 1).removesuffix("_patch8") in names
    terms = [replace(find_recipe(f"text.{name}_lm"), name="", model=Model("")) for name in ("rope", "ggd_ssmax")]
    assert terms[0] == terms[1] and terms[0].data.row_mix == RowMix()
    assert sum(p.numel() for p in build_on_meta(find_recipe("text.rope_lm")).parameters()) == 3_443_136


def test_goats_imagenet_set_up():
    """AdamW (0.9, 0.999), 1e-3 cosine, decay 0.05, 150 epochs, warm-up 20, batch 1024, and the augmentation."""
    recipe = find_recipe("vision.goat_imagenet_goat_vits16")
    optim, train, data = recipe.optim, recipe.train, recipe.data
    assert (optim.name, optim.betas, optim.lr, optim.weight_decay) == ("adamw", (0.9, 0.999), 1e-3, 0.05)
    epoch = 1_281_167 / train.batch
    assert train.batch == 1024 and round(train.steps / epoch) == 150 and round(optim.warmup / epoch) == 20
    assert (data.mixup, data.cutmix, data.label_smoothing, data.random_erasing) == (0.8, 1.0, 0.1, 0.25)
    assert data.rand_augment.startswith("rand-m9-n2") and data.image_size == 224 and data.hflip == 0.5
    model = build_on_meta(recipe)
    config, prior = model.config, model.layers[0].attention.prior
    assert (config.num_layers, config.num_heads, config.dim, config.mlp) == (12, 6, 384, "swiglu")
    assert (config.position, config.drop_path_rate, config.patch_size) == ("goat", 0.1, 16)
    assert prior.spectral.y.rank + prior.spectral.x.rank == 16  # pairs in all
    assert config.position_options["init"] == "uniform" and train.precision == "fp16"
    beside = [find_recipe(f"vision.goat_imagenet_{name}_vits16") for name in ("ape", "rope2d")]
    assert [build_on_meta(other).config.position for other in beside] == ["learned", "rope2d_axial"]
    assert all(replace(other, name="", model=None) == replace(recipe, name="", model=None) for other in beside)


@pytest.mark.parametrize("name", ["goat_human", "human_125m"])
def test_goats_dna_set_ups(name):
    """Single bases at L 1024, AdamW at 3e-4, R = 2, M = 8; the released script's 8/8/512 and the paper's 125M."""
    recipe = find_recipe(f"dna.{name}")
    assert (recipe.data.tokenizer, recipe.data.context) == ("bases", 1024)
    assert (recipe.optim.name, recipe.optim.lr) == ("adamw", 3e-4)
    model = build_on_meta(recipe)
    config, prior = model.config, model.layers[0].attention.prior
    shape = (config.num_layers, config.num_heads, config.dim)
    assert shape == {"goat_human": (8, 8, 512), "human_125m": (18, 12, 768)}[name]
    assert (prior.spectral.rank, prior.key_bias.rank) == (2, 8)


@pytest.mark.parametrize(
    ("name", "context", "tokens_per_step", "steps", "optimizer", "lr", "floor_lr", "warmup"),
    [
        ("goat_c4_goat_125m", 2048, 32 * 2048, 61_035, "adamw", 1e-4, 3e-5, 2000),
        ("bam_ggd_ssmax_120m", 512, 589_824, 19_251, "radam", 1e-3, 1e-4, 0),
        ("bam_rope_432m", 512, 589_824, 19_251, "radam", 5e-4, 5e-5, 0),
        ("bam_alibi_ssmax_1100m", 512, 589_824, 19_251, "radam", 3e-4, 3e-5, 0),
        ("cable_cable_124m", 1024, 524_288, 19_073, "adamw", 6e-4, 6e-5, 715),
        ("bam_extend_ggd_ssmax_120m", 1024, 589_824, 256, "radam", 1e-4, None, 16),
    ],
)
def test_the_papers_set_ups(name, context, tokens_per_step, steps, optimizer, lr, floor_lr, warmup):
    recipe = find_recipe(f"text.{name}")
    optim, train = recipe.optim, recipe.train
    assert recipe.data.context == context and train.batch * context == tokens_per_step and train.steps == steps
    assert (optim.name, optim.warmup, optim.weight_decay, train.clip) == (optimizer, warmup, 0.1, 1.0)
    assert optim.lr == pytest.approx(lr) and optim.betas == (0.9, 0.95) and train.precision == "bf16"
    if floor_lr:
        assert optim.lr * lr_factor(steps - 1, optim, steps) == pytest.approx(floor_lr)


def test_the_tokenizer_of_the_data_is_the_models():
    def config(**options):
        recipe.model.options = options
        return build_on_meta(recipe).config

    recipe = find_recipe("text.goat_c4_goat_125m")
    recipe.data = replace(
        recipe.data, tokenizer="gpt2?split_digits=true"
    )  # the same vocabulary: no file is read for it
    assert (config().tokenizer, config().vocab_size) == ("gpt2?split_digits=true", 50257)
    recipe.data = replace(recipe.data, tokenizer="bytes")
    assert (config().tokenizer, config().vocab_size) == ("bytes", 264)
    assert config(vocab_size=512).vocab_size == 512
    with pytest.raises(ValueError, match=r"tokenizer=gpt2\b.*data\.tokenizer=bytes"):
        config(tokenizer="gpt2")
    recipe.data = replace(recipe.data, tokenizer="nowhere.json")
    with pytest.raises(FileNotFoundError, match=r"nowhere\.json"):
        config()
    assert config(vocab_size=300).vocab_size == 300  # known: its file need not be there


def test_context_extension_starts_from_a_finished_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    recipe = find_recipe("text.bam_extend_ggd_ssmax_120m")
    describe(resolve(recipe, world=8))  # a dry run needs none
    with pytest.raises(ConfigError, match=r"text\.bam_ggd_ssmax_120m"):
        load_weights(None, recipe.model.init_from)


def test_an_unknown_recipe_names_the_nearest():
    with pytest.raises(ConfigError, match=r"text\.ggd_ssmax_tiny"):
        find_recipe("text.ggd_ssmx_tiny")
    for name in ("audio.ggd_tiny", "tiny", ""):
        with pytest.raises(ConfigError, match=repr(name)):
            find_recipe(name)


def test_recipes_are_added_by_name_and_for_every_model():
    table = Recipes("text")

    @table.add
    def ggd_tiny() -> Recipe:
        return Recipe("text.ggd_tiny", "text", Model("text_ggd_tiny"), None)

    table.add_methods("tiny", lambda method: method)
    assert table["ggd_tiny"] is ggd_tiny and table["rope_ssmax_tiny"]() == "rope_ssmax"
    assert len(table) == len(list_models("text_*_tiny", modality="text"))
    table.add_methods("long", lambda method: method, model_size="tiny")
    assert table["rope_long"]() == "rope"


def test_a_recipe_is_made_anew_each_time():
    first = find_recipe("text.ggd_ssmax_tiny")
    first.train.steps, first.model.options["dim"] = 1, 8
    assert find_recipe("text.ggd_ssmax_tiny").train.steps == 4500
    assert find_recipe("text.ggd_ssmax_tiny").model.options == {}


def test_warm_up_then_cosine_to_the_floor():
    optim = Optim(lr=1.0, warmup=10, floor=0.1)
    factors = [lr_factor(step, optim, 111) for step in range(111)]
    assert factors[:10] == pytest.approx([(n + 1) / 10 for n in range(10)])
    assert factors[10] == 1.0 and factors[60] == pytest.approx(0.55) and factors[-1] == pytest.approx(0.1)
    assert all(a >= b for a, b in itertools.pairwise(factors[10:]))
    assert lr_factor(50, Optim(warmup=10, schedule="constant"), 100) == 1.0
    line = [lr_factor(step, Optim(warmup=10, floor=0.1, schedule="linear"), 111) for step in range(111)]
    assert line[:11] == factors[:11] and line[35] == pytest.approx(0.775) and line[-1] == pytest.approx(0.1)
    assert math.isfinite(lr_factor(0, Optim(warmup=0), 1))


@pytest.mark.parametrize(
    "name",
    [f"text_{method}_tiny" for method in ("ggd_ssmax", "fire", "learned", "ggd_goat_ssmax")]
    + [f"vision_{method}_tiny_patch8" for method in ("goat_ssmax", "lookhere")],
)
def test_only_matrices_decay(name):
    model = create_model(name, num_layers=1)
    groups = parameter_groups(model, Optim(lr=1e-3, weight_decay=0.1, prior_lr_scale=20.0))
    fast = {id(p) for group in groups if group.get("lr") == pytest.approx(0.02) for p in group["params"]}
    assert fast == {id(p) for n, p in model.named_parameters() if n in model.prior_parameters() and p.requires_grad}
    assert all({"prior", "rotary", "ssmax"} & set(n.split(".")) for n in model.prior_parameters())
    decayed = {id(p) for group in groups if group["weight_decay"] for p in group["params"]}
    spared = {id(p) for group in groups if not group["weight_decay"] for p in group["params"]}
    assert decayed | spared == {id(p) for p in model.parameters() if p.requires_grad} and not decayed & spared
    for module in model.modules():
        if isinstance(module, (Prior, SSMax, nn.RMSNorm, nn.LayerNorm)):
            assert not decayed & {id(p) for p in module.parameters()}
        if isinstance(module, nn.Linear) and not any(
            m is module for prior in model.modules() if isinstance(prior, Prior) for m in prior.modules()
        ):
            assert id(module.weight) in decayed
    position = getattr(model, "position_embedding", None)
    assert position is None or not decayed & {id(p) for p in position.parameters()}


@pytest.mark.parametrize("optimizer", ["radam", "muon"])
def test_parameters_have_rates_of_their_own(optimizer):
    """As BAM's code has one each for shape, scale and location; every other group stays as it is."""
    model = create_model("text_ggd_ssmax_tiny", num_layers=2, position_options={"train_mu": True})
    own = {"theta_beta": 7.0, "prior.theta_mu": 0.5, "embedding.weight": 3.0}
    groups = parameter_groups(model, Optim(optimizer, lr=1e-3, prior_lr_scale=20.0, lr_scales=own))
    rate = {id(p): group.get("lr", 1e-3) for group in groups for p in group["params"]}
    decay = {id(p): group["weight_decay"] for group in groups for p in group["params"]}
    found = {n: rate[id(p)] / 1e-3 for n, p in model.named_parameters()}
    assert {n.rpartition(".")[2]: round(found[n], 9) for n in found if ".prior." in n or "ssmax" in n} == {
        "theta_alpha": 20.0,
        "theta_beta": 7.0,
        "theta_mu": 0.5,
        "s": 20.0,
    }
    assert found["embedding.weight"] == pytest.approx(3.0) and decay[id(model.embedding.weight)] == 0.1
    with pytest.raises(ConfigError, match="called 'theta_bata'; did you mean 'theta_beta'"):
        parameter_groups(model, Optim(lr_scales={"theta_bata": 2.0}))


@pytest.mark.parametrize("name", ["text_cable_ssmax_tiny", "text_learned_tiny", "vision_goat_tiny_patch8"])
def test_muon_trains_the_layers_matrices(name):
    model, optim = create_model(name, num_layers=1), Optim("muon", lr=1e-3, weight_decay=0.1, muon_lr_scale=4.0)
    groups = parameter_groups(model, optim)
    assert sum(len(group["params"]) for group in groups) == sum(p.requires_grad for p in model.parameters())
    (muon,) = [group for group in groups if group["use_muon"]]
    assert (muon["lr"], muon["weight_decay"]) == (4e-3, 0.025) and muon is groups[-1]
    linear = (m.weight for n, m in model.layers.named_modules() if isinstance(m, nn.Linear) and "prior" not in n)
    assert {id(p) for p in muon["params"]} == {id(p) for p in linear}


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("text.ggd_ssmax_tiny", {}),
        ("vision.goat_ssmax_tiny", {"source": "glyphs-builtin", "mixup": 0.0, "image_size": 24}),
        ("dna.ggd_ssmax_tiny", {"source": "yeast-chr01"}),
    ],
)
def test_two_ranks_share_the_samples_of_one(name, changes):
    """Sample n is on rank n mod 2, with the same random numbers: two ranks train on what one trains on."""
    recipe, steps = find_recipe(name), 3
    modality, data = find_modality(recipe.modality), replace(recipe.data, **changes)
    whole = modality.loader(data, rank=0, world=1, micro_batch=4)
    ranks = [modality.loader(data, rank=rank, world=2, micro_batch=2) for rank in range(2)]
    for one, first, second in itertools.islice(zip(whole, *ranks, strict=False), steps):
        tensors = [key for key, value in one.items() if torch.is_tensor(value)]
        assert tensors
        for key in tensors:  # a batch whose targets all count has no weights
            halves = [part.get(key, torch.ones_like(one[key][:2])) for part in (first, second)]
            torch.testing.assert_close(torch.stack(halves, 1).flatten(0, 1), one[key], rtol=0, atol=0)


def test_a_context_is_extended_with_the_position_that_was_trained():
    recipe = find_recipe("text.ggd_goat_ssmax_tiny_extend")
    trained = find_recipe("text.ggd_goat_ssmax_tiny")
    assert (
        recipe.data.context == 4 * trained.data.context and recipe.model.init_from == "newest:text.ggd_goat_ssmax_tiny"
    )
    assert recipe.model.options["position_options"] == {"key_bias": {"train_context": trained.data.context}}
    for name in ("text.learned_tiny_extend", "text.local_ssmax_tiny_extend", "text.ggd+learned_tiny_extend"):
        with pytest.raises(ConfigError, match=r"learned|local"):
            find_recipe(name)
