"""Overrides, batch arithmetic and a user's DeepSpeed file: what is accepted, and what the errors
say."""

import json
import re

import pytest

from recipes import deepspeed_json, find_recipe
from recipes.commands import ConfigError
from recipes.deepspeed_json import UNUSED, check_with_deepspeed
from recipes.estimate import schedule_in_words
from recipes.plan import resolve, resolve_batch
from recipes.settings import apply_overrides
from tests.refusals import refuses


def plan(*settings, user_config=None, **where):
    recipe, overridden = apply_overrides(find_recipe("text.ggd_ssmax_tiny"), settings)
    return resolve(
        recipe, **{"world": 1} | where, user_config=user_config, overridden_keys=overridden
    )


def test_overrides_take_their_fields_types():
    recipe, _ = apply_overrides(find_recipe("text.ggd_ssmax_tiny"), [
        "train.steps=1e3", "optim.lr=3e-4", "optim.betas=0.9,0.99", "train.micro_batch=none",
        "data.source=a=b.txt", "data.facts_fraction=0.25", "model.options.dim=32", "model.options.position_options={}",
        'evaluate.during={"passkey": {"every": 2, "lengths": [96]}}',
    ])  # fmt: skip
    assert recipe.train.steps == 1000
    assert isinstance(recipe.train.steps, int)
    assert recipe.optim.lr == 3e-4
    assert recipe.optim.betas == (0.9, 0.99)
    assert recipe.train.micro_batch is None
    assert recipe.data.source == "a=b.txt"
    assert recipe.data.facts_fraction == 0.25
    assert recipe.model.options == {"dim": 32, "position_options": {}}
    assert recipe.evaluate.during == {"passkey": {"every": 2, "lengths": [96]}}


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("train.stps=3", ["train.stps", "'train.steps'"]),
        ("train.lr=1", ["'train.lr'", "optim.lr"]),
        ("train.steps=many", ["a whole number", "'many'"]),
        ("optim.betas=0.9", ["optim.betas=0.9", "2 values"]),
        ("data.context=1e9", ["data.context=1e9", "from 1 to 16,777,216"]),
        ("model.dim=3", ["model.options.dim"]),
        ("optim.name=adamw2", ["'adamw'"]),
        ("optim.muon_lr_scale=0", ["a positive number"]),
        ("train.zero_stage=4", ["0, 1, 2, 3"]),
        ("train.precision=fp61", ["'fp16'"]),
        ("train.sequence_parallel=3", ["sequence_parallel=3", "divisor"]),
    ],
)
def test_a_wrong_override_is_named(setting, words):
    message = refuses(None, plan, setting, error=ConfigError)
    assert all(word in message for word in words), message


def test_batch_is_a_product():
    """Batch is micro times accumulation times ranks."""
    assert resolve_batch(32, None, None, 2) == (16, 1)
    assert resolve_batch(1152, 36, None, 8) == (36, 4)
    assert resolve_batch(32, None, 4, 2) == (4, 4)
    refuses(r"\b32\b.* 10 × 1 × 3\b.* 30\b", resolve_batch, 32, None, None, 3, error=ConfigError)
    refuses(
        r"groups of ranks = 2 × 1 × 2", resolve_batch, 3, 2, None, 4, shared=2, error=ConfigError
    )


def test_bf16_begins_at_stage_1():
    def stage(*settings, user_config=None, **where):
        chosen = plan(*settings, user_config=user_config, **where)
        assert chosen.deepspeed["zero_optimization"]["stage"] == chosen.recipe.train.zero_stage
        return chosen.recipe.train.zero_stage

    assert stage() == 0
    assert stage(device="cuda") == 1
    assert stage("train.precision=bf16") == 1
    assert stage("optim.name=muon", "train.zero_stage=2", "train.clip=0") == 2
    with pytest.raises(ConfigError, match=r"train\.clip=1.*expected 0 .*muon"):
        stage(
            "optim.name=muon", "train.clip=1", device="cuda"
        )  # where the precision chooses the stage
    assert stage(user_config={"fp16": {"enabled": True}}) == 1
    for settings, user_config in (
        (["train.zero_stage=0"], {}),
        ([], {"zero_optimization": {"stage": 0}}),
    ):
        with pytest.raises(ConfigError, match=r"train\.zero_stage=0 is not served in bf16"):
            stage("train.precision=bf16", *settings, user_config=user_config)


ADAMW = {"type": "AdamW"}
DECAY = {"type": "WarmupDecayLR"}
WARMUP = {"type": "WarmupLR"}


@pytest.mark.parametrize(
    ("user_config", "settings", "word"),
    [
        ({"zero_optimization": {"reduce_bucket_siz": 8}}, [], "zero_optimization: reduce_bucket_siz=8"),
        ({"optimizer": {"type": "Lamb"}}, [], "optimizer.type='Lamb' has no counterpart in the recipe"),
        ({"optimizer": ADAMW | {"params": {"weight_decy": 0}}}, [], "'weight_decay'"),
        ({"optimizer": {"type": "Adam", "params": {"adam_w_mode": False}}}, [], "adam_w_mode=False"),
        ({"optimizer": ADAMW | {"params": {"lr": 0.1}}}, ["optim.lr=0.2"], "optim.lr=0.2 and optimizer.params.lr"),
        ({"scheduler": {"type": "OneCycle"}}, [], "optim.schedule"),
        ({"scheduler": DECAY | {"params": {"total_num_steps": 9}}}, ["train.steps=8"], "train.steps=8"),
        ({"scheduler": DECAY}, ["optim.floor=0.5"], "means optim.floor=0.0"),
        ({"optimizer": ADAMW | {"params": {"lr": 0.1}}, "scheduler": WARMUP | {"params": {"warmup_max_lr": 0.2}}},
         [], "optimizer.params.lr=0.1 and scheduler.params.warmup_max_lr=0.2 disagree"),
        ({"fp16": {"enabled": True}, "bf16": {"enabled": True}}, [], "disagree; keep one"),
        ({"fp16": {"enabled": True}}, ["train.precision=bf16"], "train.precision=bf16"),
        ({"zero_optimization": {"offload_optimizer": {"pin_memry": True}}}, [], "offload_optimizer.pin_memry=True"),
        ({"wall_clock_brekdown": True}, [], "'wall_clock_breakdown'"),
        ({"compile": {"deepcompile": True}}, [], "train.compile=true"),
        ({"tensor_parallel": {"autotp_size": 2}}, [], "'tensor_parallel' cuts layers"),
        ({"activation_checkpointing": {"cpu_checkpointing": True}}, [], "model.options.activation_checkpointing=true"),
        ({"curriculum_learning": {"enabled": True}}, [], "'curriculum_learning' is for batches of DeepSpeed's loader"),
        ({"elasticity": {"enabled": True}}, [], "'elasticity' would change the batch"),
    ],
)  # fmt: skip
def test_conflicting_deepspeed_file_refused(user_config, settings, word):
    """A deepspeed file in conflict is refused."""
    refuses(re.escape(word), plan, *settings, user_config=user_config, error=ConfigError)


@pytest.mark.parametrize("name", UNUSED)
def test_switched_off_section_passes(name):
    """A section that asks for nothing is no reason to refuse a file."""
    off = {"enabled": False, "other": 3} if name != "activation_checkpointing" else {"number": 0}
    assert plan(user_config={name: off})


def test_every_section_is_used_or_refused():
    """What DeepSpeed reads and this project neither passes on nor refuses is a new key: it needs a
    line in UNUSED, or here."""
    config = {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 1}
    recorder = deepspeed_json._one_rank_config(config)
    from deepspeed.runtime.config import DeepSpeedConfig

    DeepSpeedConfig(recorder, mpu=deepspeed_json._OneRank())
    unknown = set(recorder.reads) - PASSED_ON - set(UNUSED) - set(deepspeed_json.REFUSED)
    assert unknown == set()


# Sections and keys of DeepSpeed's that its engine applies by itself.
PASSED_ON = {
    *("aio", "bf16", "bfloat16", "checkpoint", "comet", "comms_logger", "communication_data_type"),
    *("csv_monitor", "data_types", "disable_allgather", "disable_python_gc", "dump_state"),
    *("flops_profiler", "fp16", "gradient_accumulation_steps", "gradient_allreduce_op"),
    *("gradient_clipping", "gradient_predivide_factor", "graph_harvesting", "log_level"),
    *("managed_gradient_accumulation", "memory_breakdown", "optimizer", "prescale_gradients"),
    *("scheduler", "seq_parallel_communication_data_type", "steps_per_print", "tensorboard"),
    *("timers", "train_batch_size", "train_micro_batch_size_per_gpu", "wall_clock_breakdown"),
    *("wandb", "zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer"),
    "zero_optimization",
}


@pytest.mark.parametrize(("world", "micro_batch"), [(8, 12), (64, 9), (96, 12), (128, 9)])
def test_micro_batch_fits_ranks(world, micro_batch):
    """The recipe's micro-batch of 12 shrinks to a divisor of a rank's share of 1,152 rows."""
    recipe = find_recipe("text.bam_ggd_ssmax_1100m")
    train = resolve(recipe, world).recipe.train
    assert train.micro_batch == micro_batch
    assert train.micro_batch * train.accumulation * world == 1152


def test_unfit_micro_batch_names_fitting_ones():
    recipe = find_recipe("text.bam_ggd_ssmax_1100m")
    recipe.train.micro_batch = 12
    with pytest.raises(ConfigError, match=r"or train\.micro_batch=9 or 6$"):
        resolve(recipe, 64, overridden_keys={"train.micro_batch"})


@pytest.mark.parametrize(
    ("key", "setting"),
    [
        ("train.checkpoint_every", "train.save_every"),
        ("train.learning_rate", "optim.lr"),
        ("optim.warmup_steps", "optim.warmup"),
        ("data.seq_len", "data.context"),
    ],
)
def test_other_trainers_words_are_known(key, setting):
    with pytest.raises(ConfigError, match=re.escape(f"did you mean '{setting}'")):
        apply_overrides(find_recipe("text.ggd_tiny"), [f"{key}=5"])


HUGGING_FACE = json.loads("""{
    "fp16": {"enabled": "auto", "loss_scale": 0, "loss_scale_window": 1000, "initial_scale_power": 16, "hysteresis": 2},
    "bf16": {"enabled": "auto"},
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}},
    "scheduler": {"type": "WarmupDecayLR", "params": {"warmup_min_lr": "auto", "warmup_max_lr": "auto",
        "warmup_num_steps": "auto", "total_num_steps": "auto"}},
    "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu", "pin_memory": true}, "overlap_comm": true,
        "sub_group_size": 1e9, "reduce_bucket_size": "auto", "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto", "stage3_gather_16bit_weights_on_model_save": true},
    "gradient_accumulation_steps": "auto", "gradient_clipping": "auto", "steps_per_print": 2000,
    "train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto", "wall_clock_breakdown": false
}""")


def test_hugging_face_example_runs():
    """The example of hugging face runs as it is."""
    chosen = plan("model.options.dim=32", "train.batch=32", user_config=HUGGING_FACE, world=2)
    check_with_deepspeed(chosen.deepspeed)
    defaults = find_recipe("text.ggd_ssmax_tiny").optim
    optim = chosen.recipe.optim
    assert (optim.name, optim.schedule, optim.floor) == ("adamw", "linear", 0)
    assert (optim.lr, optim.betas, optim.warmup) == (defaults.lr, defaults.betas, defaults.warmup)
    values = chosen.deepspeed
    assert not {"optimizer", "scheduler"} & set(values)
    assert values["bf16"] == {"enabled": False}
    assert (values["train_batch_size"], values["train_micro_batch_size_per_gpu"]) == (32, 16)
    assert values["zero_optimization"].items() >= {"stage": 3, "overlap_comm": True}.items()
    json.dumps(chosen.to_dict())


def test_deepspeed_file_gives_batch():
    """The batch is micro × accumulation × ranks, as DeepSpeed derives it, unless the file or a
    --set names it."""
    file = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2}
    assert [plan(user_config=file, world=n).recipe.train.batch for n in (1, 2, 4)] == [4, 8, 16]
    assert (
        plan(user_config={"train_micro_batch_size_per_gpu": 3}, world=2).deepspeed[
            "train_batch_size"
        ]
        == 6
    )
    assert plan("train.sequence_parallel=2", user_config=file, world=4).recipe.train.batch == 8
    assert plan("train.batch=8", user_config=file, world=2).recipe.train.batch == 8
    assert plan(user_config=file | {"train_batch_size": 8}, world=2).recipe.train.batch == 8
    refuses("2 × 2 × 1 = 4", plan, "train.batch=8", user_config=file, error=ConfigError)


def test_deepspeed_numbers_reach_recipe():
    """Numbers of a deepspeed optimizer and scheduler are the recipes."""
    adam = {"lr": 3e-4, "betas": [0.8, 0.999], "eps": 1e-6, "weight_decay": 0, "torch_adam": True}
    cosine = {
        "total_num_steps": 70,
        "warmup_num_steps": 7,
        "cos_min_ratio": 0.25,
        "warmup_type": "linear",
    }
    user_config = {
        "optimizer": {"type": "Adam", "params": adam},
        "scheduler": {"type": "WarmupCosineLR", "params": cosine},
        "gradient_clipping": 0.5,
    }
    recipe = plan(user_config=user_config).recipe
    optim = recipe.optim
    assert (optim.name, optim.lr, optim.betas, optim.eps, optim.weight_decay) == (
        "adamw",
        3e-4,
        (0.8, 0.999),
        1e-6,
        0,
    )
    assert (optim.schedule, optim.warmup, optim.floor, recipe.train.steps) == (
        "cosine",
        7,
        0.25,
        70,
    )
    assert recipe.train.clip == 0.5
    words = "adamw, learning rate 0.0003: linear warm-up over 7 steps, then cosine to 7.5e-05 at step 70"
    assert schedule_in_words(optim, 70) == words
    assert "rate 0.000214286 at the end" in schedule_in_words(optim, 5)
