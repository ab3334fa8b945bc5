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
from typing import Any, Generic

from typing_extensions import TypeVar

from modalities.contract import find_modality, modality_names
from recipes.commands import ConfigError, replace_setting
from zoo.catalog import import_file, list_models, modality_module, model_entry
from zoo.errors import LARGEST_SEED, bounded, check_fields, nearest
from zoo.files import parse_json

MOST_SAMPLES = 2**22  # of a step, over all ranks
Json = dict[str, Any]  # an object of a JSON file
Data = TypeVar("Data", default=Any)  # a modality's data section


@dataclass
class Model:
    """A model of the zoo's registry, by name, with overrides of its architecture."""

    name: str
    options: Json = field(default_factory=dict)  # --set model.options.dim=64
    # Whose weights are the start: a run or save_pretrained folder, a model with weights
    # (text_ggd_ssmax_tiny.facts), or "newest:RECIPE", the newest finished run of that recipe.
    init_from: str = ""


@dataclass
class Optim:
    """Optimiser and learning-rate schedule: linear warm-up, then cosine or linear from `lr` to
    `floor * lr`, or constant."""

    name: str = "adamw"  # or radam; or muon, of the layers' matrices, beside AdamW for all else
    lr: float = 2e-3
    betas: tuple[float, float] = (0.9, 0.95)  # of Adam; Muon's momentum is DeepSpeed's 0.95
    eps: float = bounded(1e-8, 0, 1)
    weight_decay: float = bounded(0.1, 0, math.inf)  # on matrices only; see engine.parameter_groups
    prior_lr_scale: float = (
        1.0  # learning rate of the priors' parameters and SSMax's s, as a multiple of lr
    )
    muon_lr_scale: float = (
        5.0  # learning rate of the matrices that muon trains, as a multiple of lr
    )
    schedule: str = "cosine"
    warmup: int = bounded(50, 0, 2**40)  # steps
    floor: float = bounded(0.1, 0, 1)  # of lr, reached at the last step


@dataclass
class Train:
    """The loop. `batch` is the whole batch in samples: micro_batch × accumulation × number of ranks
    / sequence_parallel."""

    steps: int = bounded(800, 1, 2**40)
    batch: int = bounded(32, 1, MOST_SAMPLES)
    micro_batch: int | None = bounded(
        None, 1, MOST_SAMPLES
    )  # samples per rank and forward; derived where it is None
    accumulation: int | None = bounded(
        None, 1, MOST_SAMPLES
    )  # forwards per step; derived where it is None
    precision: str = "auto"  # fp32 on the CPU, bf16 on CUDA; fp16 has a dynamic loss scale
    compile: bool = False  # the model by torch.compile, through DeepSpeed's engine; the first step takes minutes
    sequence_parallel: int = bounded(
        1, 1, 2**12
    )  # ranks that share each line of tokens, by DeepSpeed-Ulysses
    zero_stage: int = (
        0  # in bf16 and fp16 0 becomes 1, which shares the optimiser's float32 copies out
    )
    clip: float = bounded(1.0, 0, math.inf)  # gradient norm; 0 switches clipping off
    # Decay of a moving average of the weights, which is then evaluated and exported; 0: none.
    ema: float = bounded(0.0, 0, 1)
    seed: int = bounded(0, -LARGEST_SEED, LARGEST_SEED)
    log_every: int = bounded(10, 1, 2**40)
    save_every: int = bounded(200, 0, 2**40)  # steps; 0: at the end only
    keep: int = bounded(2, 1, 2**20)  # checkpoints left on disk


@dataclass
class Evaluate:
    """What is measured during training.

    every, samples: held-out loss over `samples` samples every `every` steps (0: never) and at the
    end.
    during: evaluators of `priorzoo evaluate` by name, each with the number of steps between its
    runs, or with its
        settings and "every": {"passkey": 200}, {"passkey": {"every": 200, "lengths": [128, 512],
        "samples": 1}}.
    """

    every: int = bounded(100, 0, 2**40)
    samples: int = bounded(128, 1, 2**40)
    during: Json = field(default_factory=dict)


@dataclass
class Recipe(Generic[Data]):
    """One training set-up. `data` is the modality's own dataclass (for text:
    modalities.text.data.TextDataConfig)."""

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
        """Groups of ranks, each with samples of its own: ranks / train.sequence_parallel."""
        return self.world // self.recipe.train.sequence_parallel

    def to_dict(self) -> Json:
        return {**dataclasses.asdict(self.recipe), "world": self.world}


# -------------------------------------------------------------------------------------------------
# by name


@dataclass(frozen=True)
class RecipeFamily:
    """`<prefix><method>_<size>` for every registered model `<modality>_<method>_<model_size>` that
    has no recipe so named.

    text.ggd_ssmax_tiny is method ggd_ssmax and size tiny, so `build("ggd_ssmax")`; its model is
    text_ggd_ssmax_tiny.

    build: makes the recipe of a method. model_size: `size` where empty. without: methods that it
    does not fit.
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
        RECIPES.add_family("tiny", tiny)          # tiny("alibi") is text.alibi_tiny, for each
        method

        @RECIPES.add
        def speeches() -> Recipe: ...             # text.speeches

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
        """Raises ValueError for a sum of methods with a part that is no method, KeyError for other
        unknown names."""
        if name in self._functions:
            return self._functions[name]
        wrong_part: ValueError | None = None  # where a longer prefix may still fit
        for family in self._families:
            method = name.removeprefix(family.prefix).removesuffix(f"_{family.size}")
            if family.name(method) == name and family.fits(method):
                try:
                    model_entry(f"{self.modality}_{method}_{family.model_size}")
                    return partial(family.build, method)
                except ValueError as error:
                    wrong_part = error if "+" in method else wrong_part
        raise wrong_part or KeyError(name)

    def methods_of(self, family: RecipeFamily) -> list[str]:
        """The methods whose recipes are listed."""
        start = f"{self.modality}_"
        end = f"_{family.model_size}"
        models = list_models(f"{start}*{end}") if family.listed is None else ()
        methods = family.listed or [model.removeprefix(start).removesuffix(end) for model in models]
        return [method for method in methods if family.fits(method)]

    def __iter__(self) -> Iterator[str]:
        families = (
            family.name(method) for family in self._families for method in self.methods_of(family)
        )
        return iter(dict.fromkeys([*self._functions, *families]))

    def __len__(self) -> int:
        return len(list(iter(self)))

    def described(self) -> Iterator[tuple[str, str, list[str]]]:
        """(name, first line of the docstring, methods) of each recipe, and of each family with
        `<method>` in its name."""
        families = [
            (family.name("<method>"), family.build, self.methods_of(family))
            for family in self._families
        ]
        for name, function, methods in [
            *((name, f, []) for name, f in self._functions.items()),
            *families,
        ]:
            while isinstance(function, partial):
                function = function.func
            yield name, (inspect.getdoc(function) or "").partition("\n")[0], methods


def _recipes_of(modality: str) -> Recipes:
    module = (
        getattr(modality_module(modality), "RECIPES_MODULE", None)
        or find_modality(modality).recipes
    )
    return importlib.import_module(module).RECIPES if module else Recipes(modality)


def installed_recipes() -> Iterator[Recipes]:
    """The recipes of every modality whose packages are installed."""
    for modality in modality_names():
        try:
            yield _recipes_of(modality)
        except ModuleNotFoundError:  # a module of the modality itself
            raise
        except ImportError:
            continue


def list_recipes() -> list[str]:
    """Every recipe by name."""
    return [f"{recipes.modality}.{name}" for recipes in installed_recipes() for name in recipes]


def find_recipe(name: str) -> Recipe:
    """The recipe of this name; ConfigError names the nearest one, or the package that its modality
    lacks."""
    modality, _, short = name.partition(".")
    if modality in modality_names():
        try:
            recipes = _recipes_of(modality)
            if function := recipes.get(short):
                find_modality(modality)  # ImportError where its packages are missing
                return function()
            raise ConfigError(
                f"no recipe {name!r}; {nearest(name, [f'{modality}.{other}' for other in recipes])}"
            )
        except (ImportError, ValueError) as error:
            raise ConfigError(str(error)) from error
    raise ConfigError(f"no recipe {name!r}; {nearest(name, list_recipes())}")


def open_recipe(name: str) -> Recipe:
    """The recipe that a command line names: `find_recipe`, or for FILE.py[:function] one in that
    file, which is imported.

    The file holds a table, `RECIPES = Recipes("text")` with functions added by `@RECIPES.add`, or
    functions without arguments annotated `-> Recipe`. ConfigError where there is no such recipe, or
    the file cannot be imported.
    """
    match = re.fullmatch(r"(.*\.py)(?::(\w*))?", name)
    if not match:
        return find_recipe(name)
    path = match[1]
    function = match[2] or ""
    try:
        module = import_file(path)
    except (OSError, ImportError) as error:
        raise ConfigError(str(error)) from error
    functions: Mapping[str, Callable[[], Recipe]] = getattr(module, "RECIPES", None) or {
        key: value
        for key, value in inspect.getmembers(module, inspect.isfunction)
        if value.__module__ == module.__name__
        and value.__annotations__.get("return") in (Recipe, "Recipe")
    }
    if not function and len(functions) == 1:
        function = next(iter(functions))
    if function not in functions:
        raise ConfigError(
            f"{name}: the file has the recipes {', '.join(functions) or '(none)'}; expected {path}:NAME of one. A recipe is a "
            "function without arguments annotated `-> Recipe`, or one added to `RECIPES = Recipes(MODALITY)`"
        )
    recipe = functions[function]()
    if not isinstance(recipe, Recipe):
        raise ConfigError(
            f"the recipe in {name} returns {type(recipe).__name__}, expected a recipes.config.Recipe"
        )
    return recipe


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
    sections = {
        name: value for name, value in vars(recipe).items() if dataclasses.is_dataclass(value)
    }
    known = [
        f"{name}.{field.name}"
        for name, value in sections.items()
        for field in dataclasses.fields(value)
    ]
    known.remove("model.options")
    # whole options before entries of them
    for setting in sorted(settings, key=lambda setting: setting.partition("=")[0].count(".") > 2):
        key, separator, text = setting.partition("=")
        key = key.strip()
        section, _, name = key.partition(".")
        if not separator or not key:
            raise ConfigError(f"--set {setting!r}: expected key=value, such as train.steps=200")
        if section == "model" and name.startswith("options."):
            path = name.split(".")[1:]
            if not all(path):
                raise ConfigError(
                    f"--set {setting!r}: expected model.options.NAME=value, or NAME.KEY of one with keys"
                )
            if (
                len(path) > 1 and path[0] not in recipe.model.options
            ):  # begin with the registered value
                try:
                    config = model_entry(recipe.model.name).config
                except (ImportError, ValueError) as error:
                    raise ConfigError(f"--set {setting!r}: {error}") from None
                if path[0] not in config:
                    near = nearest(path[0], config)
                    raise ConfigError(
                        f"--set {setting!r}: {recipe.model.name} has no option {path[0]!r}; {near}"
                    )
                recipe.model.options[path[0]] = copy.deepcopy(config[path[0]])
            set_nested(recipe.model.options, path, parse_value(text), setting)
        else:
            if key not in known:
                near = nearest(
                    key, [choice for choice in known if choice.endswith(f".{name}")] or known
                )
                hint = f"; the model's own are model.options.{name}" if section == "model" else ""
                raise ConfigError(f"--set {setting!r}: no setting {key!r}; {near}{hint}")
            value = parse_field(text, typing.get_type_hints(type(getattr(recipe, section)))[name])
            replace_setting(recipe, key, value, f"--set {setting!r}")
        overridden_keys.add(key)
    return recipe, overridden_keys


def set_nested(tree: Json, path: Sequence[str], value: object, setting: str) -> None:
    """Set the entry at `path` of nested dictionaries, making those on the way; ConfigError where
    one is a value."""
    place = tree
    for n, part in enumerate(path[:-1]):
        place = place.setdefault(part, {})
        if not isinstance(place, dict):
            raise ConfigError(
                f"--set {setting!r}: {'.'.join(path[: n + 1])} is {place!r}, which has no entries"
            )
    place[path[-1]] = value


def parse_value(text: str) -> object:
    """JSON, or a bare word: none, true, false or a string."""
    try:
        return parse_json(text, "the value")
    except ValueError:
        return {"none": None, "true": True, "false": False}.get(text.strip().lower(), text)


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
        return tuple(
            parse_field(part, kinds[0]) for part in text.strip("()[] ").split(",") if part.strip()
        )
    try:
        value = float(text) if hint is float else parse_value(text)
    except ValueError:
        return text
    # 1e4 steps is a fair way to write an int.
    return int(value) if hint is int and isinstance(value, float) and value.is_integer() else value


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
            f"train.batch={batch} is not micro_batch × accumulation × {ranks} = {micro} × {steps} × {world} = {product}; "
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
        if (value := attrgetter(name)(recipe)) not in choices:
            raise ConfigError(f"{name}={value!r}: {nearest(str(value), map(str, choices))}")
    for name in ("lr", "prior_lr_scale", "muon_lr_scale"):
        if not 0 < (value := getattr(optim, name)) < math.inf:
            raise ConfigError(f"optim.{name}={value}: expected a positive number")
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
        if (
            "train.micro_batch" in file_keys and "train.batch" not in chosen_keys
        ):  # as DeepSpeed derives it
            ranks = world // recipe.train.sequence_parallel
            recipe.train.batch = (
                (recipe.train.micro_batch or 1) * (recipe.train.accumulation or 1) * max(ranks, 1)
            )
    _settle_positions(recipe)
    check_values(recipe)
    train = recipe.train
    if train.precision == "auto":
        train.precision = "bf16" if device == "cuda" else "fp32"
    if train.precision != "fp32" and train.zero_stage == 0:
        if "train.zero_stage" in chosen_keys:
            raise ConfigError(
                f"train.zero_stage=0 is not served in {train.precision}; expected 1, 2 or 3"
            )
        train.zero_stage = 1
    if recipe.optim.name == "muon" and train.zero_stage and train.clip:
        where = f"with optim.name='muon' at zero_stage={train.zero_stage}, where DeepSpeed would clip Muon's updates"
        raise ConfigError(f"train.clip={train.clip}: expected 0 {where}; or optim.name=adamw")
    shared = train.sequence_parallel
    sizes = resolve_batch(train.batch, train.micro_batch, train.accumulation, world, shared)
    train.micro_batch, train.accumulation = sizes
    config: Json = {
        "train_batch_size": train.batch,
        "train_micro_batch_size_per_gpu": train.micro_batch,
        "gradient_accumulation_steps": train.accumulation,
        **(
            {"sequence_parallel_size": shared} if shared > 1 else {}
        ),  # DeepSpeed checks the batch's sizes by it
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
    if recipe.optim.name == "muon":
        config["zero_optimization"]["reduce_scatter"] = False  # Muon needs whole matrices
    plan = Plan(recipe, merge(config, user_config), world)
    if user_config:
        from recipes.deepspeed_json import check_with_deepspeed

        check_with_deepspeed(plan.deepspeed)
    return plan


def _settle_positions(recipe: Recipe) -> None:
    """Turn tensors and arrays among `position_options` into lists: a recipe is stored as JSON."""

    def numbers(value: object) -> object:
        if not hasattr(value, "tolist"):
            raise ConfigError(
                f"model.options.position_options: {value!r} is not JSON: expected numbers or tensors"
            )
        return value.tolist()

    options = recipe.model.options
    if "position_options" in options:
        options["position_options"] = json.loads(
            json.dumps(options["position_options"], default=numbers)
        )


def merge(base: Json, extra: Json) -> Json:
    """`base` with the entries of `extra`, dictionaries inside merged alike."""
    merged = dict(base)
    for key, value in extra.items():
        merged[key] = (
            merge(base[key], value)
            if isinstance(base.get(key), dict) and isinstance(value, dict)
            else value
        )
    return merged
