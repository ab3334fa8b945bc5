"""Overrides, batch arithmetic and a user's DeepSpeed file: what is accepted, and what the errors say."""

import json

import pytest

from recipes import find_recipe
from recipes.config import ConfigError, apply_overrides, resolve, resolve_batch
from recipes.deepspeed_json import check_with_deepspeed, load_deepspeed_json
from recipes.estimate import schedule_in_words
from recipes.train import CALIBRATION_STEPS, launcher_words


def changed(*settings):
    return apply_overrides(find_recipe("text.ggd_ssmax_tiny"), settings)[0]


def test_overrides_take_their_fields_types():
    recipe = changed(
        "train.steps=1e3", "optim.lr=3e-4", "optim.betas=0.9,0.99", "train.report_to=wandb", "train.micro_batch=8",
        "data.source=a=b.txt", "data.facts_fraction=0.25", "model.options.dim=32", "model.options.position_options={}",
        'evaluate.during={"passkey": {"every": 2, "lengths": [96]}}',
    )  # fmt: skip
    assert recipe.train.steps == 1000 and isinstance(recipe.train.steps, int)
    assert recipe.optim.lr == 3e-4 and recipe.optim.betas == (0.9, 0.99) and recipe.train.report_to == "wandb"
    assert recipe.train.micro_batch == 8 and recipe.data.source == "a=b.txt" and recipe.data.facts_fraction == 0.25
    assert recipe.model.options == {"dim": 32, "position_options": {}}
    assert recipe.evaluate.during == {"passkey": {"every": 2, "lengths": [96]}}
    assert changed("train.micro_batch=none").train.micro_batch is None


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("train.stps=3", ["train.stps", "'train.steps'"]),
        ("trian.steps=3", ["trian.steps", "'train.steps'"]),
        ("steps=3", ["'steps'"]),
        ("train.steps", ["'train.steps'"]),
        ("train.steps=many", ["a whole number", "'many'"]),
        ("train.steps=1.5", ["a whole number", "1.5"]),
        ("optim.lr=fast", ["a number", "'fast'"]),
        ("optim.betas=0.9", ["optim.betas=0.9", "2 values"]),
        ("data.contxt=3", ["'data.context'"]),
        ("data.context=0", ["data.context=0", "context=0", "from 1 to 16,777,216"]),
        ("data.passkey_fraction=0.5", ["data.passkey_fraction", "'data.facts_fraction'"]),
        ("data.copies_fraction=0.6", ["facts_fraction 0.6", "copies_fraction 0.6", "at most 1"]),
        ("model.dim=3", ["model.options.dim"]),
    ],
)
def test_a_wrong_override_is_named(setting, words):
    with pytest.raises(ConfigError) as error:
        changed(setting)
    for word in words:
        assert word in str(error.value), error.value


@pytest.mark.parametrize(
    ("setting", "word"),
    [
        ("optim.name=adamw2", "'adamw'"),
        ("optim.muon_lr_scale=0", "a positive number"),
        ("optim.schedule=cosin", "'cosine'"),
        ("train.zero_stage=4", "0, 1, 2, 3"),
        ("train.precision=fp61", "'fp16'"),
        ("train.steps=0", r"train\.steps=0"),
        ("train.ema=1", r"train\.ema=1"),
        ("evaluate.samples=0", r"evaluate\.samples=0"),
    ],
)
def test_a_value_out_of_range_is_named(setting, word):
    with pytest.raises(ConfigError, match=word):
        resolve(changed(setting), world=1)


def test_batch_is_micro_times_accumulation_times_ranks():
    assert resolve_batch(32, None, None, 2) == (16, 1)
    assert resolve_batch(1152, 36, None, 8) == (36, 4)
    assert resolve_batch(32, None, 4, 2) == (4, 4)
    with pytest.raises(ConfigError, match=r"\b32\b.* 10 × 1 × 3\b.* 30\b"):
        resolve_batch(32, None, None, 3)
    with pytest.raises(ConfigError, match=r"8 × 2 × 4 = 64"):
        resolve_batch(32, 8, 2, 4)


def test_the_recipe_is_settled_before_deepspeed_sees_it():
    plan = resolve(changed("train.batch=32", "train.accumulation=2"), world=2)
    assert plan.deepspeed["train_batch_size"] == 32 and plan.deepspeed["train_micro_batch_size_per_gpu"] == 8
    assert plan.recipe.train.precision == "fp32" and plan.deepspeed["bf16"] == {"enabled": False}
    cuda = resolve(changed(), world=1, device="cuda").recipe.train
    assert (cuda.precision, cuda.zero_stage) == ("bf16", 1)
    json.dumps(plan.to_dict())


def test_stage_0_in_bf16_has_to_be_asked_for():
    def stage(*settings, user_config=None):
        recipe, overridden_keys = apply_overrides(find_recipe("text.ggd_ssmax_tiny"), settings)
        plan = resolve(recipe, world=1, user_config=user_config, overridden_keys=overridden_keys)
        assert plan.deepspeed["zero_optimization"]["stage"] == plan.recipe.train.zero_stage
        return plan.recipe.train.zero_stage

    assert stage() == 0 and stage("train.precision=bf16") == 1 and stage(user_config={"bf16": {"enabled": True}}) == 1
    assert stage("train.precision=bf16", "train.zero_stage=0") == 0
    assert stage("optim.name=muon", "train.zero_stage=2", "train.clip=0") == 2
    with pytest.raises(ConfigError, match=r"train\.clip=1.*expected 0 .*muon"):
        stage("optim.name=muon", "train.zero_stage=2", "train.clip=1")
    assert stage("train.precision=bf16", user_config={"zero_optimization": {"stage": 0}}) == 0
    assert stage("train.precision=fp16") == 1 and stage(user_config={"fp16": {"enabled": True}}) == 1
    with pytest.raises(ConfigError, match=r"train\.zero_stage=0 is not served in fp16"):
        stage("train.precision=fp16", "train.zero_stage=0")


def test_a_users_deepspeed_file_is_merged_and_wins_over_defaults():
    user_config = {
        "zero_optimization": {"stage": 2, "overlap_comm": True},
        "gradient_clipping": 0.5,
        "wall_clock_breakdown": True,
    }
    plan = resolve(changed("optim.name=adamw"), world=1, user_config=user_config)
    assert plan.recipe.train.zero_stage == 2 and plan.recipe.train.clip == 0.5
    assert plan.deepspeed["zero_optimization"] == {"stage": 2, "overlap_comm": True}
    assert plan.deepspeed["wall_clock_breakdown"] is True


@pytest.mark.parametrize(
    ("user_config", "settings", "word"),
    [
        ({"zero_optimization": {"reduce_bucket_siz": "auto"}}, [], "'zero_optimization.reduce_bucket_size'"),
        ({"optimizer": {"type": "Lamb"}}, [], "optimizer.type='Lamb' has no counterpart in the recipe"),
        ({"optimizer": {"type": "Muon"}}, [], "optim.name (adamw, radam or muon)"),
        ({"optimizer": {"type": "AdamW", "params": {"weight_decy": 0}}}, [], "'weight_decay'"),
        ({"optimizer": {"type": "Adam", "params": {"adam_w_mode": False}}}, [], "adam_w_mode=False"),
        ({"optimizer": {"type": "AdamW", "params": {"lr": "1e-3"}}}, [], "optimizer.params.lr: optim.lr='1e-3'"),
        (
            {"optimizer": {"type": "AdamW", "params": {"lr": 0.1}}},
            ["optim.lr=0.2"],
            "--set optim.lr=0.2 and optimizer.params.lr",
        ),
        ({"optimizer": {"type": "AdamW"}}, ["optim.name=radam"], "--set optim.name=radam and optimizer.type"),
        ({"optimizer": {"typ": "AdamW"}}, [], "optimizer.typ"),
        ({"optimizer": []}, [], "expected an object"),
        ({"scheduler": {"type": "OneCycle"}}, [], "optim.schedule"),
        ({"scheduler": {"type": "WarmupLR", "params": {"warmup_type": "log"}}}, [], "expected 'linear'"),
        (
            {"scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": 9}}},
            ["train.steps=8"],
            "train.steps=8",
        ),
        ({"scheduler": {"type": "WarmupDecayLR"}}, ["optim.floor=0.5"], "means optim.floor=0.0"),
        (
            {
                "optimizer": {"type": "AdamW", "params": {"lr": 0.1}},
                "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 0.2}},
            },
            [],
            "optimizer.params.lr=0.1 and scheduler.params.warmup_max_lr=0.2 disagree",
        ),
        ({"fp16": {"enabled": True}, "bf16": {"enabled": True}}, [], "keep one"),
        ({"fp16": {"enabled": True}}, ["train.precision=bf16"], "train.precision=bf16"),
        ({"zero_optimization": {"stage": 2}}, ["train.zero_stage=1"], "train.zero_stage=1"),
        ({"train_micro_batch_size_per_gpu": 5}, ["train.batch=32"], "5 × 6 × 1 = 30"),
        ({"train_batch_size": "32"}, [], "train_batch_size: train.batch='32'"),
        ({"sequence_parallel_size": 2}, [], "sequence_parallel=2"),
        ({"data_parallel_size": 1}, [], "data_parallel_size"),
    ],
)
def test_a_deepspeed_file_in_conflict_is_refused(user_config, settings, word):
    recipe, overridden_keys = apply_overrides(find_recipe("text.ggd_ssmax_tiny"), settings)
    with pytest.raises(ConfigError) as error:
        resolve(recipe, world=1, user_config=user_config, overridden_keys=overridden_keys)
    assert word in str(error.value), error.value


HUGGING_FACE = {  # the example of its documentation for ZeRO-3
    "fp16": {"enabled": "auto", "loss_scale": 0, "loss_scale_window": 1000, "initial_scale_power": 16, "hysteresis": 2},
    "bf16": {"enabled": "auto"},
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}},
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": {
            "warmup_min_lr": "auto",
            "warmup_max_lr": "auto",
            "warmup_num_steps": "auto",
            "total_num_steps": "auto",
        },
    },
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "overlap_comm": True,
        "contiguous_gradients": True,
        "sub_group_size": 1e9,
        "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto",
        "stage3_gather_16bit_weights_on_model_save": True,
    },
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "steps_per_print": 2000,
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "wall_clock_breakdown": False,
}


def test_a_file_of_hugging_face_runs_as_it_is():
    plan = resolve(changed(), world=2, user_config=HUGGING_FACE)
    check_with_deepspeed(plan.deepspeed)
    own, optim = find_recipe("text.ggd_ssmax_tiny").optim, plan.recipe.optim
    assert (optim.name, optim.schedule, optim.floor) == ("adamw", "linear", 0)
    assert (optim.lr, optim.betas, optim.warmup) == (own.lr, own.betas, own.warmup)
    assert not {"optimizer", "scheduler"} & set(plan.deepspeed) and HUGGING_FACE["scheduler"]


def test_numbers_of_a_deepspeed_optimizer_and_scheduler_are_the_recipes():
    user_config = {
        "optimizer": {
            "type": "Adam",
            "params": {"lr": 3e-4, "betas": [0.8, 0.999], "eps": 1e-6, "weight_decay": 0, "torch_adam": True},
        },
        "scheduler": {
            "type": "WarmupCosineLR",
            "params": {"total_num_steps": 70, "warmup_num_steps": 7, "cos_min_ratio": 0.25, "warmup_type": "linear"},
        },
    }
    recipe = resolve(changed(), world=1, user_config=user_config).recipe
    optim = recipe.optim
    assert (optim.name, optim.lr, optim.betas, optim.eps, optim.weight_decay) == ("adamw", 3e-4, (0.8, 0.999), 1e-6, 0)
    assert (optim.schedule, optim.warmup, optim.floor, recipe.train.steps) == ("cosine", 7, 0.25, 70)
    assert schedule_in_words(optim, 70) == (
        "adamw, learning rate 0.0003: linear warm-up over 7 steps, then cosine to 7.5e-05 at step 70"
    )
    given = changed("optim.lr=3e-4")
    same = resolve(given, world=1, user_config=user_config, overridden_keys={"optim.lr"})  # said twice alike
    assert same.recipe.optim == optim
    constant = resolve(changed(), world=1, user_config={"scheduler": {"type": "WarmupLR"}}).recipe.optim
    assert constant.schedule == "constant" and constant.name == find_recipe("text.ggd_ssmax_tiny").optim.name


def test_auto_is_the_recipes_value():
    auto = {
        "train_batch_size": "auto",
        "bf16": {"enabled": "auto"},
        "zero_optimization": {
            "stage": "auto",
            "reduce_bucket_size": "auto",
            "stage3_param_persistence_threshold": "auto",
        },
    }
    plan = resolve(changed("model.options.dim=32", "train.zero_stage=3"), world=1, user_config=auto)
    assert plan.deepspeed["train_batch_size"] == plan.recipe.train.batch and plan.deepspeed["bf16"] == {
        "enabled": False
    }
    buckets = {"reduce_bucket_size": 1024, "stage3_param_persistence_threshold": 320}
    assert plan.deepspeed["zero_optimization"].items() >= {"stage": 3, **buckets}.items()
    assert auto["bf16"] == {"enabled": "auto"}


@pytest.mark.parametrize(
    ("user_config", "words"),
    [
        ({"zero_optimization": {"offload_optimzer": {"device": "cpu"}}}, ["offload_optimzer", "'offload_optimizer'"]),
        ({"zero_optimization": {"offload_optimizer": {"pin_memry": True}}}, ["offload_optimizer.pin_memry", "'pin_memory'"]),
        ({"zero_optimization": {"reduce_bucket_size": -1}}, ["zero_optimization.reduce_bucket_size=-1"]),
        ({"wandb": {"projct": "x"}}, ["wandb.projct", "'project'"]),
        ({"wall_clock_brekdown": True}, ["wall_clock_brekdown", "'wall_clock_breakdown'"]),
        ({"flops_profiler": {"enabld": True}}, ["flops_profiler.enabld", "'enabled'"]),
        ({"amp": {"enabled": True}}, ["amp", "bf16"]),
        ({"aio": 3}, ["aio"]),
    ],
)  # fmt: skip
def test_deepspeeds_own_classes_read_the_whole_file(user_config, words):
    with pytest.raises(ConfigError) as error:
        resolve(changed(), world=4, user_config=user_config)
    assert all(word in str(error.value) for word in words) and "\n" not in str(error.value), error.value


def test_what_deepspeed_knows_passes():
    user_config = {
        "zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}, "leaf_module": {"names": []}},
        "timers": {"throughput": {"enabled": False}},
        "activation_checkpointing": {"profile": True},
        "data_types": {"keep_in_fp32_modules": "auto"},
        "csv_monitor": {"enabled": False, "job_name": "x"},
        "comms_logger": {"enabled": False},
        "checkpoint": {"writer": {"io_buffer_size": 1024}},
        "aio": {"queue_depth": 4},
    }
    check_with_deepspeed(resolve(changed(), world=4, user_config=user_config).deepspeed)


def test_a_broken_deepspeed_file_is_named(tmp_path):
    (tmp_path / "bad.json").write_text("{")
    (tmp_path / "list.json").write_text("[]")
    for name in ("bad.json", "list.json", "none.json"):
        with pytest.raises(ConfigError, match=name):
            load_deepspeed_json(str(tmp_path / name))


def test_words_of_other_launchers():
    name = "text.ggd_tiny"
    assert launcher_words(["--deepspeed", name]) == [name]
    assert launcher_words(["--calibrate", name]) == ["--calibrate", str(CALIBRATION_STEPS), name]
    assert launcher_words([name, "--calibrate", "9"]) == [name, "--calibrate", "9"]
    for words in (["--deepspeed", "a.json"], ["--deepspeed_config", "a.json"]):
        assert launcher_words([name, *words]) == [name, "--deepspeed_config", "a.json"]
    assert launcher_words(["--deepspeed=a.json"]) == ["--deepspeed_config=a.json"]
