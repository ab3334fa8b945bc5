"""Position methods by the name they have in model names: a prior, an encoding with the uniform
prior, or a sum of methods.

`create_position("ggd", ...)` returns the four parts a method may have. On a line of tokens every
1-D prior is a method under its own name; methods that are not priors are listed in `ENCODINGS`. On
a grid of patches a prior NAME2d is the method NAME, apart from the exceptions in `GRID_NAMES`.
Names joined by "+" are a sum, "ggd+spectral+key_bias": any priors, at most one rotation and at most
one embedding; `SUMS` are sums with a name of their own.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from torch import nn

from zoo.embeddings import Learned, Learned2d, Sinusoidal, Sinusoidal2d
from zoo.errors import Options, check_grid, check_options, check_whole, did_you_mean, nearest
from zoo.priors import PRIORS, SUM_OPTIONS, SUMS, Prior, create_prior, on_grid
from zoo.rotary import NormalisedRotary2d, Rotary, Rotary2d, Rotation


@dataclass(frozen=True)
class LayerPosition:
    """The parts of one layer's position method; `embedding` belongs to the model and is made once.

    Attributes:
        prior: the log-prior of attention; uniform if the method is not a prior.
        rotary: rotates q and k, or None.
        embedding: adds to the token embedding, or None.
        window: sliding window in tokens, or None.
        sinks: tokens at the start of each document that are exempt from the prior and in every
            window.
        options: the method's options as a saved model keeps them, see `Prior.stored_options`.
    """

    prior: Prior
    rotary: Rotation | None = None
    embedding: nn.Module | None = None
    window: int | None = None
    sinks: int = 0
    options: Options = field(default_factory=dict)

    @property
    def reach(self) -> int | None:
        """Keys that a query sees: the window and the sinks; None: all."""
        return None if self.window is None else self.window + self.sinks


@dataclass(frozen=True)
class Method:
    """A method, which `make` makes the part of.

    Attributes:
        part: the field of `LayerPosition` that it fills.
        maker: `make`, or the name of a prior, whose file is imported when `make` is read.
        fixed: options that the name fixes.
        windowed: whether a query sees the last train_context keys only.
    """

    part: str
    maker: Callable[..., nn.Module] | str
    fixed: Options = field(default_factory=dict)
    windowed: bool = False

    @property
    def make(self) -> Callable[..., nn.Module]:
        return PRIORS[self.maker] if isinstance(self.maker, str) else self.maker

    def takes(self, option: str) -> bool:
        """Whether `make` has a parameter of that name."""
        return option in inspect.signature(self.make).parameters


# `local` is RoPE whose queries see the last train_context keys only.
ENCODINGS: dict[str, Method] = {
    "rope": Method("rotary", Rotary),
    "local": Method("rotary", Rotary, windowed=True),
    "sinusoidal": Method("embedding", Sinusoidal),
    "learned": Method("embedding", Learned),
}
GRID_ENCODINGS: dict[str, Method] = {
    "rope2d_axial": Method("rotary", Rotary2d, {"form": "axial"}),
    "rope2d_mixed": Method("rotary", Rotary2d, {"form": "mixed"}),
    "rope2d_normalised": Method("rotary", NormalisedRotary2d),
    "sinusoidal": Method("embedding", Sinusoidal2d),
    "learned": Method("embedding", Learned2d),
}
# The methods of 2-D priors whose names do not follow the rule, with the options that a name fixes.
GRID_NAMES: dict[str, dict[str, Options]] = {
    "spectral2d": {"spectral2d": {}},
    "ggd2d": {"ggd2d": {"form": "isotropic"}, "ggd2d_separable": {"form": "separable"}},
}

# Lists of methods, one per layer and repeated, with their options. A window is a share of the
# training context here. RoPE with every fourth layer without (SmolLM3), the same with windows in
# RoPE's layers (RNoPE-SWA, arXiv 2501.18795; Command A), and windows by turns (gpt-oss, Gemma).
HYBRIDS: dict[str, tuple[tuple[str, ...], dict[str, Options]]] = {
    "rnope": (("rope", "rope", "rope", "nope"), {}),
    "rnope_swa": (("local", "local", "local", "nope"), {"local": {"window": 0.25}}),
    "swa_rope": (("local", "rope"), {"local": {"window": 0.25}}),
}
# In a sum on a grid these names of a line stand for the grid's methods, so that a sum has one name
# in every modality.
GRID_PARTS = {
    "ggd": "ggd2d_separable",
    "spectral": "spectral2d",
    "key_bias2d": "key_bias",
    "rope": "rope2d_axial",
}

# What a model supplies to its methods; a method whose `make` needs anything else is made with
# options only.
LINE_SUPPLIED = ("num_heads", "dim", "d_model", "head_dim", "train_context")
GRID_SUPPLIED = ("num_heads", "dim", "head_dim", "train_grid", "depth")

# Names that no registered prior may take: methods that are no priors of that name, and the suffix
# of models with SSMax.
RESERVED = {"nope", "ssmax", *SUMS, *HYBRIDS, *ENCODINGS, *GRID_ENCODINGS, *GRID_NAMES}
RESERVED.update(*GRID_NAMES.values())


def _grid_method(name: str) -> str:
    """The method of grids that a 2-D prior is, where its name follows the rule."""
    return name.removesuffix("2d").removesuffix("_")


def register_prior(name: str, prior: type[Prior]) -> None:
    """Add a prior from outside this package. It is a position method from then on, with its models
    and recipes.

    Args:
        name: lower-case letters, digits and underscores; NAME2d is the method NAME of grids, as is
            a `GridPrior`.
        prior: its class, made by prior(num_heads, **options); options named d_model, head_dim,
            train_context (on a line) or train_grid (on a grid) are given by the model.

    Raises:
        ValueError: for a name that is taken or cannot be part of a model's name, or a class that is
            no `Prior`.
    """
    if not (isinstance(prior, type) and issubclass(prior, Prior)):
        raise ValueError(f"prior {name!r} must be a class derived from zoo.Prior, got {prior!r}")
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name) or name.endswith(("_", "_ssmax")):
        raise ValueError(
            f"{name!r} cannot name a prior: expected a lower-case letter, then lower-case letters, "
            "digits and underscores, and neither '_' nor '_ssmax' at the end"
        )
    if name in PRIORS and PRIORS[name] is prior:
        return
    taken = name in PRIORS or name in RESERVED
    if on_grid(name, prior):
        method = _grid_method(name)
        grid_priors = {_grid_method(known) for known in PRIORS if on_grid(known)}
        taken = taken or method in RESERVED or method in grid_priors
    if taken:
        raise ValueError(f"the name {name!r} is taken; known priors: {', '.join(sorted(PRIORS))}")
    PRIORS[name] = prior


def line_methods() -> dict[str, Method]:
    """Every method of a line by name, registered priors included."""
    methods = {}
    for name in PRIORS:
        if not on_grid(name):
            method = "nope" if name == "uniform" else name
            methods[method] = Method("prior", name)
    return methods | ENCODINGS


def grid_methods() -> dict[str, Method]:
    """Every method of a grid by name, registered priors included."""
    methods = {"nope": Method("prior", "uniform"), "sink": Method("prior", "sink")}
    for name in PRIORS:
        if on_grid(name):
            by_rule: dict[str, Options] = {_grid_method(name): {}}
            for method, fixed in GRID_NAMES.get(name, by_rule).items():
                methods[method] = Method("prior", name, fixed)
    return methods | GRID_ENCODINGS


def list_positions() -> list[str]:
    """Methods of a line of tokens that need no options: every 1-D prior, the encodings, and the
    sums with a name."""
    return _complete(line_methods(), LINE_SUPPLIED)


def list_layered_positions() -> list[str]:
    """Names of models along a line: methods, and hybrids, which have a method for each layer."""
    return [*list_positions(), *HYBRIDS]


def list_grid_positions() -> list[str]:
    """Methods of a grid of patches that need no options."""
    return _complete(grid_methods(), GRID_SUPPLIED)


def _complete(methods: Mapping[str, Method], supplied: Sequence[str]) -> list[str]:
    """Names of sums, and of methods that need nothing but what a model supplies."""
    names = [*SUMS]
    for name, method in methods.items():
        if _required(method.make) <= {*supplied, *method.fixed}:
            names.append(name)
    return sorted(names)


def _required(make: Callable[..., nn.Module]) -> set[str]:
    """Names of the parameters of `make` that have no default."""
    parameters = inspect.signature(make).parameters.values()
    named = [p for p in parameters if p.kind is not p.VAR_KEYWORD]
    return {p.name for p in named if p.default is p.empty}


def check_position(name: str) -> None:
    """ValueError unless `name` is a method of a line, a sum of them or a hybrid; it names the
    nearest."""
    if name not in HYBRIDS:
        _parts(name, line_methods(), {})


def check_grid_position(name: str) -> None:
    """ValueError unless `name` is a method of a grid or a sum of them; it names the nearest."""
    _parts(name, grid_methods(), GRID_PARTS)


def layer_methods(
    position: str | Sequence[str], options: Options, num_layers: int
) -> list[tuple[str, Options]]:
    """(method, its options) of each layer.

    Args:
        position: a name; or a list with a name per layer, or a shorter one that is repeated; or one
            of `HYBRIDS`, whose last repetition may be cut short.
        options: of the one name; for a list, options by name: {"ggd": {"init": "alibi"}}.
    """
    if isinstance(position, str) and position in HYBRIDS:
        cycle, defaults = HYBRIDS[position]
        options = dict(options)
        for name, default in defaults.items():
            options[name] = default | dict(options.get(name, {}))
        return layer_methods((cycle * num_layers)[:num_layers], options, num_layers)
    if isinstance(position, str):
        return [(position, dict(options))] * num_layers
    names = list(position)
    if not names or num_layers % len(names) or not all(isinstance(name, str) for name in names):
        raise ValueError(
            f"position={position!r}: expected a method, or a list of as many methods as layers or "
            f"a number of them that divides {num_layers}"
        )
    for name, value in options.items():
        if name not in names:
            raise ValueError(
                f"position_options of {name!r}, which is not in position={names}; "
                f"{nearest(name, names)}"
            )
        if not isinstance(value, Mapping):
            raise ValueError(
                f"position_options[{name!r}] must hold that method's options by name, got {value!r}"
            )
    return [(name, dict(options.get(name, {}))) for name in names * (num_layers // len(names))]


def shared_embedding(
    methods: Sequence[tuple[str, object]], positions: Sequence[LayerPosition]
) -> nn.Module | None:
    """The embedding that layers' positions have in common, which a model adds once; ValueError
    where they have several."""
    embeddings: dict[str, nn.Module] = {}
    for (name, _), position in zip(methods, positions, strict=True):
        if position.embedding is not None:
            embeddings.setdefault(name, position.embedding)
    if len(embeddings) > 1:
        raise ValueError(
            f"layers have the embeddings of {' and '.join(embeddings)}; a model has at most one"
        )
    return next(iter(embeddings.values()), None)


def stored_options(position: str | Sequence[str], positions: Iterable[LayerPosition]) -> Options:
    """`position_options` as a saved model has them, from the positions of all layers."""
    if not isinstance(position, str):
        names = position
    elif position in HYBRIDS:
        names, _ = HYBRIDS[position]
    else:
        return next(iter(positions)).options
    # A layer of a repeated list has the same options as the first of its name.
    options: Options = {}
    for name, layer in zip(names, positions, strict=False):
        if layer.options:
            options.setdefault(name, layer.options)
    return options


def create_position(
    name: str,
    *,
    dim: int,
    num_heads: int,
    train_context: int,
    options: Options | None = None,
    lanes: str = "inside",
) -> LayerPosition:
    """The parts of a position method for one layer of a model along a line.

    Args:
        name: one of `list_positions()`, or a sum of them such as "alibi+spectral".
        dim: C, the model's width.
        num_heads: H.
        train_context: tokens seen in training; passed to methods that take it.
        options: the method's options, as its class documents them; of a sum, each part's options
            under the part's name, {"spectral": {"rank": 4}}. Parts of a sum start as they do alone,
            but for `SUM_OPTIONS`. Beside them every method has the options `sinks` and `window`,
            see `LayerPosition`; a window below 1 is a share of the training context.
        lanes: "inside" or "beside" the head width, as in `zoo.layers.Attention`; which columns a
            rotation turns follows.

    Raises:
        ValueError: for an unknown method, part or option, a part that occurs twice, or a second
            rotation or embedding.
    """
    check_whole("train_context", train_context, 1)
    supplied = {"dim": dim, "d_model": dim, "num_heads": num_heads, "train_context": train_context}
    if name in HYBRIDS:
        raise ValueError(
            f"{name!r} has a method for each layer, {list(HYBRIDS[name][0])}: "
            "a layer takes one of them"
        )
    options = dict(options or {})
    limits = {key: options.pop(key) for key in ("sinks", "window") if key in options}
    sinks = limits.get("sinks", 0)
    window = limits.get("window")
    check_whole(f"sinks of {name!r}", sinks, 0)
    position = _create(name, line_methods(), {}, supplied, options, lanes, pairs=2)
    if isinstance(window, float) and 0 < window < 1:
        window = max(round(window * train_context), 1)
    if window is not None:
        check_whole(f"window of {name!r}", window, 1)
        position = replace(position, window=window)
    if sinks and position.prior.is_zero and position.window is None:
        raise ValueError(
            f"sinks={sinks}: {name!r} has neither a prior nor a window "
            "that they could be exempt from"
        )
    return replace(position, sinks=sinks, options=position.options | limits)


def create_grid_position(
    name: str,
    *,
    dim: int,
    num_heads: int,
    train_grid: tuple[int, int],
    options: Options | None = None,
    lanes: str = "inside",
    depth: tuple[int, int] | None = None,
) -> LayerPosition:
    """The parts of a position method for one layer of a model over patches; `train_grid` is
    (height, width) in patches, `depth` (layer from 0, number of layers) for a method that differs
    by layer.

    The rest, and errors, as in `create_position`; names are those of `list_grid_positions()`. In a
    sum `ggd`, `spectral` and `rope` are the separable ggd2d, spectral2d and rope2d_axial. A part's
    name in options and state dict is its method's without "2d" and what follows it, so that options
    read alike in every modality.
    """
    check_grid("train_grid", train_grid)
    if isinstance(options, Mapping) and "sinks" in options:
        raise ValueError(
            f"sinks of {name!r}: they are of a line of tokens; "
            "on a grid prefix tokens have no prior"
        )
    supplied = {"dim": dim, "num_heads": num_heads, "train_grid": tuple(train_grid), "depth": depth}
    return _create(name, grid_methods(), GRID_PARTS, supplied, options, lanes, pairs=4)


def pinned_context(name: str, train_context: int) -> Options:
    """Options with which a method of a line is as it was trained at `train_context` in a model of a
    longer one.

    A key bias, for one, divides positions by it. ValueError for a method that ends at its context,
    or whose window that is.
    """
    if name in HYBRIDS:
        layer_names, defaults = HYBRIDS[name]
        options: Options = {}
        for layer_name in layer_names:
            if layer_name in defaults:
                # A share becomes the number of tokens that it was.
                tokens = round(defaults[layer_name]["window"] * train_context)
                pinned: Options = {"window": tokens}
            else:
                pinned = pinned_context(layer_name, train_context)
            if pinned:
                options[layer_name] = pinned
        return options
    parts = _parts(name, line_methods(), {})
    for part, method in parts.items():
        if method.windowed or part == "learned":
            raise ValueError(f"{part!r} is made for one training context and cannot be extended")
    takers = [part for part, method in parts.items() if method.takes("train_context")]
    options = {part: {"train_context": train_context} for part in takers}
    return options if _is_sum(name) else options.get(name, {})


def uniform_options(name: str, options: Options, *, grid: bool = False) -> Options:
    """`options` of a method with which every part that has an option `init`, and has it not among
    them, starts uniform."""
    parts = _parts(name, grid_methods(), GRID_PARTS) if grid else _parts(name, line_methods(), {})
    starting = [part for part, method in parts.items() if method.takes("init")]
    uniform: Options = {"init": "uniform"}
    if not _is_sum(name):
        return (uniform if starting else {}) | dict(options)
    return dict(options) | {part: uniform | dict(options.get(part, {})) for part in starting}


def _is_sum(name: str) -> bool:
    return "+" in name or name in SUMS


def _parts(
    name: str, methods: Mapping[str, Method], stand_for: Mapping[str, str]
) -> dict[str, Method]:
    """The methods that a name consists of, by the names of its parts; one for a method that is no
    sum."""
    is_sum = _is_sum(name)
    parts: dict[str, Method] = {}
    for word in _words(name):
        method = stand_for.get(word, word) if is_sum else word
        if method not in methods:
            known = sorted({*methods, *SUMS, *(stand_for if is_sum else ())})
            what = f"unknown part {word!r} of the position" if is_sum else "unknown position"
            raise ValueError(
                f"{what} method {name!r}; {_hint(word, methods, known)}Known: {', '.join(known)}, "
                "and sums of them joined by '+'. One from outside is known once the module that "
                "registers it is imported (commands: --import FILE.py)"
            )
        part = re.sub(r"2d(_.*)?$", "", method) if is_sum else name
        if part in parts:
            raise ValueError(
                f"position method {name!r} has the part {part!r} twice; a sum has each part once"
            )
        parts[part] = methods[method]
    for kind, what in (("rotary", "rotation"), ("embedding", "embedding")):
        several = [part for part, method in parts.items() if method.part == kind]
        if len(several) > 1:
            raise ValueError(
                f"position method {name!r} has the {what}s {' and '.join(several)}; "
                "a sum has at most one"
            )
    return parts


def _words(name: str) -> list[str]:
    """The names of a sum's parts as they are written, with those of a named sum in its place."""
    words: list[str] = []
    for word in name.split("+"):
        words += SUMS.get(word, word).split("+")
    return words


def _hint(word: str, methods: Mapping[str, Method], known: Iterable[str]) -> str:
    """What may be meant by a word that is no method: those of the same name on a grid, one without
    SSMax, or the nearest."""
    grid_names = [repr(method) for method in methods if method.startswith(f"{word}2d")]
    if grid_names:
        return f"did you mean {', '.join(grid_names)}? "
    plain = word.removesuffix("_ssmax")
    if plain != word and plain in known:
        return (
            f"expected {plain!r}: '_ssmax' ends the name of a model, and its option is ssmax=True. "
        )
    return did_you_mean(word, known)


def _create(
    name: str,
    methods: Mapping[str, Method],
    stand_for: Mapping[str, str],
    supplied: Options,
    options: Options | None,
    lanes: str,
    *,
    pairs: int,
) -> LayerPosition:
    """The position of a method, or of a sum. pairs: a rotation turns a multiple of so many
    columns."""
    for size in ("dim", "num_heads"):
        check_whole(size, supplied[size], 1)
    is_sum = _is_sum(name)
    parts = _parts(name, methods, stand_for)
    part_options: Options = dict(options or {}) if is_sum else {name: dict(options or {})}
    _check_part_options(name, parts, part_options)

    # Priors first: a rotation turns the columns that their lanes leave, but for an odd one at the
    # end.
    head_dim = supplied["dim"] // supplied["num_heads"]
    priors: dict[str, Prior] = {}
    others: Options = {}
    for part, method in sorted(parts.items(), key=lambda item: item[1].part != "prior"):
        width = head_dim
        if is_sum and method.part == "rotary":
            lane_count = sum(prior.num_lanes for prior in priors.values())
            columns = head_dim - lane_count if lanes == "inside" else head_dim
            width = max(columns, 0) // pairs * pairs
        module = _make_part(
            method,
            supplied | {"head_dim": width},
            part_options.get(part, {}),
            start=SUM_OPTIONS.get(part, {}) if is_sum else {},
            owner=f"part {part!r} of {name!r}" if is_sum else repr(name),
        )
        if isinstance(module, Prior):
            priors[part] = module
        else:
            others[method.part] = module

    if not priors:
        prior = create_prior("uniform", num_heads=supplied["num_heads"])
    elif is_sum:
        from zoo.priors.compose import Compose

        prior = Compose(**priors)
    else:
        prior = priors[name]
    stored = {part: dict(values) for part, values in part_options.items()}
    for part in stored.keys() & priors.keys():
        stored[part] = dict(priors[part].stored_options(stored[part]))
    window = None
    for part, method in parts.items():
        if method.windowed:
            window = part_options.get(part, {}).get("train_context", supplied["train_context"])
            break
    return LayerPosition(
        prior,
        **others,
        window=window,
        options=stored if is_sum else stored[name],
    )


def _check_part_options(name: str, parts: Mapping[str, Method], part_options: Options) -> None:
    """ValueError for options of a part that the method `name` does not have, or that are no
    mapping."""
    for part, options in part_options.items():
        if part not in parts:
            raise ValueError(
                f"{name!r} has no part {part!r}; {did_you_mean(part, parts)}"
                f"Its parts: {', '.join(parts)}"
            )
        if not isinstance(options, Mapping):
            raise ValueError(
                f"the options of {part!r} in {name!r} must be given by name, got {options!r}"
            )


def _make_part(
    method: Method, supplied: Options, options: Mapping[str, object], *, start: Options, owner: str
) -> nn.Module:
    """The module of a part: from what the model supplies and the method takes, what the part starts
    with, and its options. ValueError in the name of `owner`."""
    values = {key: value for key, value in start.items() if method.takes(key)}
    values |= options
    fixed = {key: value for key, value in supplied.items() if method.takes(key)}
    fixed |= method.fixed
    # Options may replace the context of training, and nothing else that the model supplies.
    defaults = {"train_context", "train_grid"} & fixed.keys()
    check_options(owner, method.make, values, fixed=fixed.keys() - defaults, defaults=defaults)
    return method.make(**fixed | values)
