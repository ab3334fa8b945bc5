"""Recipes: plain dataclasses, found by name; `--set` changes them, and `resolve` settles what
depends on the machine.

Nothing here imports DeepSpeed.
"""

from __future__ import annotations

import copy
import dataclasses
import importlib
import inspect
import json
import math
import re
import typing
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter
from types import ModuleType
from typing import Any, Generic

from typing_extensions import TypeVar

from modalities.contract import find_modality, modality_names
from recipes.commands import ConfigError, replace_setting
from zoo.catalog import import_file, list_models, modality_module, model_entry
from zoo.errors import LARGEST_SEED, bounded, check_fields, nearest
from zoo.files import parse_json

# Of a step, over all ranks.
MOST_SAMPLES = 2**22
# An object of a JSON file.
Json = dict[str, Any]
# A modality's data section.
Data = TypeVar("Data", default=Any)


@dataclass
class Model:
    """A model of the zoo's registry, by name, with overrides of its architecture."""

    name: str
    # --set model.options.dim=64
    options: Json = field(default_factory=dict)
    # Whose weights are the start: a run or save_pretrained folder, a model with weights
    # (text_ggd_ssmax_tiny.facts), or "newest:RECIPE", the newest finished run of that recipe.
    init_from: str = ""


@dataclass
class Optim:
    """Optimiser and learning-rate schedule.

    The rate warms up linearly. Then it falls along a cosine or a line from `lr` to `floor * lr`,
    or it stays constant.
    """

    # adamw, radam, or muon: Muon for the layers' matrices, AdamW for all other parameters.
    name: str = "adamw"
    lr: float = 2e-3
    # Of Adam; Muon's momentum is DeepSpeed's 0.95.
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = bounded(1e-8, 0, 1)
    # On matrices only; see engine.parameter_groups.
    weight_decay: float = bounded(0.1, 0, math.inf)
    # Learning rate of the priors' parameters and SSMax's s, as a multiple of lr.
    prior_lr_scale: float = 1.0
    # Learning rate of the matrices that Muon trains, as a multiple of lr.
    muon_lr_scale: float = 5.0
    schedule: str = "cosine"
    # Steps.
    warmup: int = bounded(50, 0, 2**40)
    # A fraction of lr, reached at the last step.
    floor: float = bounded(0.1, 0, 1)


@dataclass
class Train:
    """The training loop.

    `batch` is the whole batch in samples:
    micro_batch × accumulation × number of ranks / sequence_parallel.
    """

    steps: int = bounded(800, 1, 2**40)
    batch: int = bounded(32, 1, MOST_SAMPLES)
    # Samples per rank and forward pass; derived where it is None.
    micro_batch: int | None = bounded(None, 1, MOST_SAMPLES)
    # Forward passes per step; derived where it is None.
    accumulation: int | None = bounded(None, 1, MOST_SAMPLES)
    # auto is fp32 on the CPU and bf16 on CUDA; fp16 has a dynamic loss scale.
    precision: str = "auto"
    # Compile the model by torch.compile, through DeepSpeed's engine; the first step takes minutes.
    compile: bool = False
    # Ranks that share each line of tokens, by DeepSpeed-Ulysses.
    sequence_parallel: int = bounded(1, 1, 2**12)
    # In bf16 and fp16 0 becomes 1, which shares the optimiser's float32 copies among the ranks.
    zero_stage: int = 0
    # Gradient norm; 0 switches clipping off.
    clip: float = bounded(1.0, 0, math.inf)
    # Decay of a moving average of the weights, which is then evaluated and exported; 0: none.
    ema: float = bounded(0.0, 0, 1)
    seed: int = bounded(0, -LARGEST_SEED, LARGEST_SEED)
    log_every: int = bounded(10, 1, 2**40)
    # Steps; 0: at the end only.
    save_every: int = bounded(200, 0, 2**40)
    # Checkpoints that stay on disk.
    keep: int = bounded(2, 1, 2**20)


@dataclass
class Evaluate:
    """What is measured during training.

    every, samples: held-out loss over `samples` samples every `every` steps (0: never) and at the
        end.
    during: evaluators of `priorzoo evaluate` by name, each with the number of steps between its
        runs, or with its settings and "every":
        {"passkey": 200}, {"passkey": {"every": 200, "lengths": [128, 512], "samples": 1}}.
    """

    every: int = bounded(100, 0, 2**40)
    samples: int = bounded(128, 1, 2**40)
    during: Json = field(default_factory=dict)


@dataclass
class Recipe(Generic[Data]):
    """One training set-up.

    `data` is the modality's own dataclass (for text: modalities.text.data.TextDataConfig).
    """

    name: str
    modality: str
    model: Model
    data: Data
    optim: Optim = field(default_factory=Optim)
    train: Train = field(default_factory=Train)
    evaluate: Evaluate = field(default_factory=Evaluate)


@dataclass(frozen=True)
class Plan:
    """A recipe with nothing left open, and the DeepSpeed configuration that runs it."""

    recipe: Recipe
    deepspeed: Json
    world: int

    @property
    def groups(self) -> int:
        """How many groups of ranks there are, each with its own samples.

        It is ranks / train.sequence_parallel.
        """
        return self.world // self.recipe.train.sequence_parallel

    def to_dict(self) -> Json:
        return {**dataclasses.asdict(self.recipe), "world": self.world}


# -------------------------------------------------------------------------------------------------
# by name


@dataclass(frozen=True)
class RecipeFamily:
    """Recipes `<prefix><method>_<size>` of the registered models
    `<modality>_<method>_<model_size>`.

    A recipe that is registered under such a name itself comes first. text.ggd_ssmax_tiny is method
    ggd_ssmax and size tiny, so `build("ggd_ssmax")` makes it; its model is text_ggd_ssmax_tiny.

    build: makes the recipe of a method.
    model_size: `size` where empty.
    without: methods that the family does not fit.
    listed: methods whose recipes are listed; None: all registered ones.
    """

    size: str
    build: Callable[[str], Recipe]
    model_size: str = ""
    without: Collection[str] = ()
    prefix: str = ""
    listed: Collection[str] | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "model_size", self.model_size or self.size)

    def name(self, method: str) -> str:
        return f"{self.prefix}{method}_{self.size}"

    def fits(self, method: str) -> bool:
        return method.removesuffix("_ssmax") not in self.without


class Recipes(Mapping[str, Callable[[], Recipe]]):
    """The named recipes of a modality: functions that return a `Recipe`.

        RECIPES = Recipes("text")
        # tiny("alibi") is text.alibi_tiny, and so for each method
        RECIPES.add_family("tiny", tiny)

        @RECIPES.add
        def speeches() -> Recipe: ...    # text.speeches

    Iterating gives the recipes of models that are listed; those of other models, such as sums of
    methods, are found by name.
    """

    def __init__(self, modality: str) -> None:
        self.modality = modality
        self._functions: dict[str, Callable[[], Recipe]] = {}
        self._families: list[RecipeFamily] = []

    def add(self, function: Callable[[], Recipe]) -> Callable[[], Recipe]:
        """Register a recipe under its function's name; a decorator."""
        self[function.__name__] = function
        return function

    def __setitem__(self, name: str, function: Callable[[], Recipe]) -> None:
        self._functions[name] = function

    def add_family(self, size: str, build: Callable[[str], Recipe], **options: Any) -> None:
        """Register a `RecipeFamily`."""
        self._families.append(RecipeFamily(size, build, **options))

    def __getitem__(self, name: str) -> Callable[[], Recipe]:
        """The function that makes a recipe.

        Raises:
            ValueError: for a sum of methods with a part that is no method.
            KeyError: for other unknown names.
        """
        if name in self._functions:
            return self._functions[name]
        # Kept while other families are tried: a longer prefix may still fit.
        wrong_part: ValueError | None = None
        for family in self._families:
            method = name.removeprefix(family.prefix).removesuffix(f"_{family.size}")
            if family.name(method) != name or not family.fits(method):
                continue
            try:
                model_entry(f"{self.modality}_{method}_{family.model_size}")
            except ValueError as error:
                if "+" in method:
                    wrong_part = error
            else:
                return partial(family.build, method)
        raise wrong_part or KeyError(name)

    def methods_of(self, family: RecipeFamily) -> list[str]:
        """The methods whose recipes are listed."""
        methods = family.listed
        if methods is None:
            methods = self._modelled_methods(family)
        return [method for method in methods if family.fits(method)]

    def _modelled_methods(self, family: RecipeFamily) -> list[str]:
        """The methods of the registered models of a family's size."""
        start = f"{self.modality}_"
        end = f"_{family.model_size}"
        models = list_models(f"{start}*{end}")
        return [model.removeprefix(start).removesuffix(end) for model in models]

    def __iter__(self) -> Iterator[str]:
        names = list(self._functions)
        for family in self._families:
            names += [family.name(method) for method in self.methods_of(family)]
        # A recipe's own name may also be one of a family.
        return iter(dict.fromkeys(names))

    def __len__(self) -> int:
        return len(list(iter(self)))

    def described(self) -> Iterator[tuple[str, str, list[str]]]:
        """(name, first line of the docstring, methods) of each recipe and each family.

        A family has `<method>` in its name.
        """
        for name, function in self._functions.items():
            yield name, _summary(function), []
        for family in self._families:
            yield family.name("<method>"), _summary(family.build), self.methods_of(family)


def _summary(function: Callable[..., Recipe]) -> str:
    """The first line of a function's docstring, also where arguments are bound to it."""
    while isinstance(function, partial):
        function = function.func
    return (inspect.getdoc(function) or "").partition("\n")[0]


def _recipes_of(modality: str) -> Recipes:
    module = getattr(modality_module(modality), "RECIPES_MODULE", None)
    if not module:
        module = find_modality(modality).recipes
    if not module:
        return Recipes(modality)
    return importlib.import_module(module).RECIPES


def installed_recipes() -> Iterator[Recipes]:
    """The recipes of every modality whose packages are installed."""
    for modality in modality_names():
        try:
            yield _recipes_of(modality)
        except ModuleNotFoundError:
            # A module of the modality itself is missing.
            raise
        except ImportError:
            continue


def list_recipes() -> list[str]:
    """Every recipe by name."""
    return [f"{recipes.modality}.{name}" for recipes in installed_recipes() for name in recipes]


def find_recipe(name: str) -> Recipe:
    """The recipe of this name.

    ConfigError names the nearest recipe, or the package that its modality lacks.
    """
    modality, _, short_name = name.partition(".")
    if modality not in modality_names():
        raise ConfigError(f"no recipe {name!r}; {nearest(name, list_recipes())}")
    try:
        recipes = _recipes_of(modality)
        function = recipes.get(short_name)
        if function is None:
            names = [f"{modality}.{other}" for other in recipes]
            raise ConfigError(f"no recipe {name!r}; {nearest(name, names)}")
        # ImportError where the modality's packages are missing.
        find_modality(modality)
        return function()
    except (ImportError, ValueError) as error:
        raise ConfigError(str(error)) from error


def open_recipe(name: str) -> Recipe:
    """The recipe that a command line names.

    A name is looked up by `find_recipe`. FILE.py[:function] is a recipe in that file, which is
    imported. The file holds a table, `RECIPES = Recipes("text")` with functions added by
    `@RECIPES.add`, or functions without arguments annotated `-> Recipe`. ConfigError where there
    is no such recipe, or the file cannot be imported.
    """
    match = re.fullmatch(r"(.*\.py)(?::(\w*))?", name)
    if not match:
        return find_recipe(name)
    path = match[1]
    function_name = match[2] or ""
    try:
        module = import_file(path)
    except (OSError, ImportError) as error:
        raise ConfigError(str(error)) from error
    functions = getattr(module, "RECIPES", None) or _recipe_functions(module)
    if not function_name and len(functions) == 1:
        function_name = next(iter(functions))
    if function_name not in functions:
        names = ", ".join(functions) or "(none)"
        raise ConfigError(
            f"{name}: the file has the recipes {names}; expected {path}:NAME of one. "
            "A recipe is a function without arguments annotated `-> Recipe`, "
            "or one added to `RECIPES = Recipes(MODALITY)`"
        )
    recipe = functions[function_name]()
    if not isinstance(recipe, Recipe):
        kind = type(recipe).__name__
        raise ConfigError(f"the recipe in {name} returns {kind}, expected a recipes.config.Recipe")
    return recipe


def _recipe_functions(module: ModuleType) -> dict[str, Callable[[], Recipe]]:
    """The functions of a module annotated `-> Recipe`, by name."""
    functions = {}
    for name, function in inspect.getmembers(module, inspect.isfunction):
        returns = function.__annotations__.get("return")
        if function.__module__ == module.__name__ and returns in (Recipe, "Recipe"):
            functions[name] = function
    return functions


# -------------------------------------------------------------------------------------------------
# overrides


def apply_overrides(recipe: Recipe, settings: Sequence[str]) -> tuple[Recipe, set[str]]:
    """Apply `key=value` strings; returns a changed copy and the set of keys.

    `model.options.KEY` takes any JSON value (a bare word is a string). `model.options.A.B.C`
    changes one entry of the option A, which is otherwise as the recipe or the registered model has
    it.
    """
    recipe = copy.deepcopy(recipe)
    overridden_keys = set()
    for setting in sorted(settings, key=_is_entry_of_option):
        key, separator, text = setting.partition("=")
        key = key.strip()
        if not separator or not key:
            raise ConfigError(f"--set {setting!r}: expected key=value, such as train.steps=200")
        if key.startswith("model.options."):
            _set_option(recipe, setting, key.removeprefix("model.options."), text)
        else:
            _set_field(recipe, setting, key, text)
        overridden_keys.add(key)
    return recipe, overridden_keys


def _is_entry_of_option(setting: str) -> bool:
    """Sorts whole options before entries of them."""
    key = setting.partition("=")[0]
    return key.count(".") > 2


def _set_option(recipe: Recipe, setting: str, name: str, text: str) -> None:
    """Set an option of the model, or an entry of one by its path with dots."""
    path = name.split(".")
    if not all(path):
        raise ConfigError(
            f"--set {setting!r}: expected model.options.NAME=value, or NAME.KEY of one with keys"
        )
    option = path[0]
    if len(path) > 1 and option not in recipe.model.options:
        # Its other entries are those of the registered model.
        try:
            config = model_entry(recipe.model.name).config
        except (ImportError, ValueError) as error:
            raise ConfigError(f"--set {setting!r}: {error}") from None
        if option not in config:
            near = nearest(option, config)
            raise ConfigError(
                f"--set {setting!r}: {recipe.model.name} has no option {option!r}; {near}"
            )
        recipe.model.options[option] = copy.deepcopy(config[option])
    set_nested(recipe.model.options, path, parse_value(text), setting)


def _set_field(recipe: Recipe, setting: str, key: str, text: str) -> None:
    """Set `section.name` of a recipe."""
    keys = _field_keys(recipe)
    section, _, name = key.partition(".")
    if key not in keys:
        same_name = [choice for choice in keys if choice.endswith(f".{name}")]
        near = nearest(key, same_name or keys)
        hint = f"; the model's own are model.options.{name}" if section == "model" else ""
        raise ConfigError(f"--set {setting!r}: no setting {key!r}; {near}{hint}")
    hints = typing.get_type_hints(type(getattr(recipe, section)))
    replace_setting(recipe, key, parse_field(text, hints[name]), f"--set {setting!r}")


def _field_keys(recipe: Recipe) -> list[str]:
    """Every `section.name` of a recipe that --set can change, without the model's options."""
    keys = []
    for section, value in vars(recipe).items():
        if dataclasses.is_dataclass(value):
            keys += [f"{section}.{field.name}" for field in dataclasses.fields(value)]
    keys.remove("model.options")
    return keys


def set_nested(tree: Json, path: Sequence[str], value: object, setting: str) -> None:
    """Set the entry at `path` of nested dictionaries, making those on the way.

    ConfigError where one on the way is a value.
    """
    branch = tree
    for n, part in enumerate(path[:-1]):
        branch = branch.setdefault(part, {})
        if not isinstance(branch, dict):
            name = ".".join(path[: n + 1])
            raise ConfigError(f"--set {setting!r}: {name} is {branch!r}, which has no entries")
    branch[path[-1]] = value


def parse_value(text: str) -> object:
    """JSON, or a bare word: none, true, false or a string."""
    words = {"none": None, "true": True, "false": False}
    try:
        return parse_json(text, "the value")
    except ValueError:
        return words.get(text.strip().lower(), text)


def parse_field(text: str, hint: object) -> object:
    """A value for a field with this annotation, not checked."""
    text = text.strip()
    kinds = typing.get_args(hint)
    if type(None) in kinds:
        if text.lower() in ("none", "null"):
            return None
        hint = next(kind for kind in kinds if kind is not type(None))
    if hint is str:
        return text
    if typing.get_origin(hint) is tuple:
        parts = text.strip("()[] ").split(",")
        return tuple(parse_field(part, kinds[0]) for part in parts if part.strip())
    try:
        value = float(text) if hint is float else parse_value(text)
    except ValueError:
        return text
    if hint is int and isinstance(value, float) and value.is_integer():
        # 1e4 steps is a fair way to write an int.
        return int(value)
    return value


# -------------------------------------------------------------------------------------------------
# resolution


def resolve_batch(
    batch: int, micro_batch: int | None, accumulation: int | None, world: int, shared: int = 1
) -> tuple[int, int]:
    """(micro_batch, accumulation) such that batch = micro_batch × accumulation × world / shared.

    shared: ranks that share the tokens of their samples; they count as one.
    """
    if world % shared:
        raise ConfigError(
            f"train.sequence_parallel={shared}: expected a divisor of the number of ranks, {world}"
        )
    world //= shared
    micro = micro_batch
    steps = accumulation
    if micro is None:
        steps = steps or 1
        micro = max(1, batch // (steps * world))
    elif steps is None:
        steps = max(1, batch // (micro * world))
    product = micro * steps * world
    if product != batch:
        ranks = "ranks" if shared == 1 else "groups of ranks"
        raise ConfigError(
            f"train.batch={batch} is not micro_batch × accumulation × {ranks} "
            f"= {micro} × {steps} × {world} = {product}; "
            f"set train.batch={product}, or a number of ranks that divides {batch}"
        )
    return micro, steps


CHOICES = {
    "train.precision": ("auto", "fp32", "bf16", "fp16"),
    "train.zero_stage": (0, 1, 2, 3),
    "optim.name": ("adamw", "radam", "muon"),
    "optim.schedule": ("cosine", "linear", "constant"),
}


def check_values(recipe: Recipe) -> None:
    """ConfigError for a value that can never be right, whatever the machine."""
    optim = recipe.optim
    train = recipe.train
    try:
        for section in ("optim", "train", "evaluate"):
            check_fields(getattr(recipe, section), f"{section}.")
    except ValueError as error:
        raise ConfigError(str(error)) from None
    for name, choices in CHOICES.items():
        value = attrgetter(name)(recipe)
        if value not in choices:
            raise ConfigError(f"{name}={value!r}: {nearest(str(value), map(str, choices))}")
    for name in ("lr", "prior_lr_scale", "muon_lr_scale"):
        rate = getattr(optim, name)
        if not 0 < rate < math.inf:
            raise ConfigError(f"optim.{name}={rate}: expected a positive number")
    if not all(0 <= beta < 1 for beta in optim.betas):
        raise ConfigError(f"optim.betas={optim.betas}: expected two numbers in [0, 1)")
    if train.ema == 1:
        raise ConfigError("train.ema=1: expected a decay below 1, or 0 for none")
    if train.ema and train.zero_stage == 3:
        raise ConfigError(
            f"train.ema={train.ema}: expected 0 at zero_stage 3, which cuts the weights up"
        )


def resolve(
    recipe: Recipe,
    world: int,
    device: str = "cpu",
    user_config: Json | None = None,
    overridden_keys: Collection[str] = (),
) -> Plan:
    """Settle a copy of a recipe for `world` ranks on `device` ("cpu" or "cuda") and write its
    DeepSpeed configuration.

    user_config: the user's DeepSpeed JSON. It wins over the recipe, and must not contradict a
    `--set` (`overridden_keys`).
    """
    recipe = copy.deepcopy(recipe)
    user_config = copy.deepcopy(user_config or {})
    chosen_keys = set(overridden_keys)
    if user_config:
        from recipes.deepspeed_json import apply_user_config

        file_keys = apply_user_config(recipe, user_config, chosen_keys)
        chosen_keys |= file_keys
        if "train.micro_batch" in file_keys and "train.batch" not in chosen_keys:
            recipe.train.batch = _batch_of_parts(recipe.train, world)
    _settle_positions(recipe)
    check_values(recipe)
    train = recipe.train
    _settle_precision(train, device, chosen_keys)
    if recipe.optim.name == "muon" and train.zero_stage and train.clip:
        raise ConfigError(
            f"train.clip={train.clip}: expected 0 with optim.name='muon' "
            f"at zero_stage={train.zero_stage}, where DeepSpeed would clip Muon's updates; "
            "or optim.name=adamw"
        )
    micro_batch, accumulation = resolve_batch(
        train.batch,
        train.micro_batch,
        train.accumulation,
        world,
        train.sequence_parallel,
    )
    train.micro_batch = micro_batch
    train.accumulation = accumulation
    plan = Plan(recipe, merge(deepspeed_config(recipe), user_config), world)
    if user_config:
        from recipes.deepspeed_json import check_with_deepspeed

        check_with_deepspeed(plan.deepspeed)
    return plan


def _batch_of_parts(train: Train, world: int) -> int:
    """The whole batch that follows from its parts, as DeepSpeed derives it."""
    micro_batch = train.micro_batch or 1
    accumulation = train.accumulation or 1
    groups = max(world // train.sequence_parallel, 1)
    return micro_batch * accumulation * groups


def _settle_precision(train: Train, device: str, chosen_keys: Collection[str]) -> None:
    """Settle the precision of "auto", and the ZeRO stage that the precision needs."""
    if train.precision == "auto":
        train.precision = "bf16" if device == "cuda" else "fp32"
    if train.precision == "fp32" or train.zero_stage != 0:
        return
    if "train.zero_stage" in chosen_keys:
        raise ConfigError(
            f"train.zero_stage=0 is not served in {train.precision}; expected 1, 2 or 3"
        )
    train.zero_stage = 1


def deepspeed_config(recipe: Recipe) -> Json:
    """DeepSpeed's configuration of a recipe whose batch, precision and stage are settled."""
    train = recipe.train
    config: Json = {
        "train_batch_size": train.batch,
        "train_micro_batch_size_per_gpu": train.micro_batch,
        "gradient_accumulation_steps": train.accumulation,
        "gradient_clipping": train.clip,
        "bf16": {"enabled": train.precision == "bf16"},
        "fp16": {"enabled": train.precision == "fp16"},
        "zero_optimization": {"stage": train.zero_stage},
        # The engine hands DeepSpeed an optimiser with the recipe's decay groups. RAdam is not on
        # DeepSpeed's list of optimisers tried with ZeRO, and none needs DeepSpeed's compiled CPU
        # Adam.
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 1_000_000_000,
    }
    if train.sequence_parallel > 1:
        # DeepSpeed checks the batch's sizes by it.
        config["sequence_parallel_size"] = train.sequence_parallel
    if recipe.optim.name == "muon":
        # Muon needs whole matrices.
        config["zero_optimization"]["reduce_scatter"] = False
    return config


def _settle_positions(recipe: Recipe) -> None:
    """Turn tensors and arrays among `position_options` into lists: a recipe is stored as JSON."""
    options = recipe.model.options
    if "position_options" in options:
        text = json.dumps(options["position_options"], default=_numbers)
        options["position_options"] = json.loads(text)


def _numbers(value: object) -> object:
    """A tensor or an array as a list."""
    if not hasattr(value, "tolist"):
        raise ConfigError(
            f"model.options.position_options: {value!r} is not JSON: expected numbers or tensors"
        )
    return value.tolist()


def merge(base: Json, extra: Json) -> Json:
    """`base` with the entries of `extra`, dictionaries inside merged alike."""
    merged = dict(base)
    for key, value in extra.items():
        before = base.get(key)
        if isinstance(before, dict) and isinstance(value, dict):
            value = merge(before, value)
        merged[key] = value
    return merged
