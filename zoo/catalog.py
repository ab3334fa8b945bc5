"""Models by name: `<modality>_<method>[_ssmax]_<size>`, with a set of weights
`<modality>_<method>[_ssmax]_<size>.<tag>`.

A name is read from its ends. Its modality is imported, which registers families; `ModelFamily.find`
takes size and method; the tag is looked up in weights/manifest.json. Other packages have modalities
through the entry-point group `priorzoo.modalities`, and priors of one's own through `import_named`.
"""

from __future__ import annotations

import fnmatch
import importlib
import importlib.util
import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

from zoo.errors import did_you_mean, nearest, one_line
from zoo.files import file_sha256, read_object, read_tensors
from zoo.model import ZooModel

GROUP = "priorzoo.modalities"
SHIPPED = {
    name: EntryPoint(name, f"modalities.{name}:MODALITY", GROUP)
    for name in ("text", "vision", "dna")
}
WEIGHTS = Path(__file__).parent / "weights"
HEADLINES = (
    "top1",
    "free_generation",
    "bits_per_base",
    "bits_per_byte",
)  # scores of cards, the most telling first
RELEASE = Path(__file__).parents[1] / "release"  # of a checkout: what is too large for the package


@dataclass(frozen=True)
class ModelEntry:
    """A registered architecture: `build(**config)` makes it; `config` is JSON."""

    name: str
    modality: str
    build: Callable[..., ZooModel]
    config: dict[str, Any]


@dataclass(frozen=True)
class ModelFamily:
    """`<modality>_<method>_<size>` and `<modality>_<method>_ssmax_<size>` for every position method
    and size.

    Entries are made when they are asked for, so methods registered later and sums of methods have
    theirs too.

    Attributes:
        build: `build(**config)` makes a model.
        sizes: what a size's models have in common, by its name.
        config: (method, size, ssmax) → the configuration, JSON.
        methods: names that are listed.
        check: raises ValueError for what is no method and no sum of methods.
    """

    modality: str
    build: Callable[..., ZooModel]
    sizes: Mapping[str, object]
    config: Callable[[str, str, bool], dict[str, Any]]
    methods: Callable[[], list[str]]
    check: Callable[[str], None]

    def names(self) -> list[str]:
        """Every name that is listed: sums without a name of their own are not."""
        methods = [f"{method}{ssmax}" for method in self.methods() for ssmax in ("", "_ssmax")]
        return [f"{self.modality}_{method}_{size}" for size in self.sizes for method in methods]

    def find(self, name: str) -> ModelEntry | None:
        """The entry of a name; None where it is none of this family. ValueError for a sum with a
        part that is no method."""
        for size in self.sizes:
            method = name.removeprefix(f"{self.modality}_").removesuffix(f"_{size}")
            if name != f"{self.modality}_{method}_{size}":
                continue
            plain = method.removesuffix("_ssmax")
            try:
                self.check(plain)
            except ValueError:
                if "+" in plain:
                    raise
                continue
            return ModelEntry(
                name, self.modality, self.build, self.config(plain, size, plain != method)
            )
        return None


_ENTRIES: dict[str, ModelEntry] = {}
_FAMILIES: list[ModelFamily] = []


def _find(name: str) -> ModelEntry | None:
    """The entry of an architecture among the modalities that are imported."""
    if name in _ENTRIES:
        return _ENTRIES[name]
    return next((entry for family in _FAMILIES if (entry := family.find(name))), None)


def _listed() -> list[str]:
    return [*_ENTRIES, *(name for family in _FAMILIES for name in family.names())]


def register_model(
    name: str, build: Callable[..., ZooModel], *, modality: str, config: dict[str, Any]
) -> ModelEntry:
    """Add an architecture.

    Raises:
        ValueError: for a name that is taken, or one with a dot, which separates the tag of weights.
    """
    if "." in name:
        raise ValueError(f"model name {name!r} has a dot; the part after a dot is a tag of weights")
    if _find(name) is not None:
        raise ValueError(f"model {name!r} is registered already")
    _ENTRIES[name] = ModelEntry(name, modality, build, dict(config))
    return _ENTRIES[name]


def register_family(family: ModelFamily) -> None:
    """Add the architectures of a modality whose models differ in position method and size."""
    _FAMILIES.append(family)


def model_entry(name: str) -> ModelEntry:
    """The entry of an architecture, with or without a tag of weights behind it. ValueError for an
    unknown name."""
    base = name.partition(".")[0]
    missing = _register_models({base.partition("_")[0]} & set(modality_names()) or modality_names())
    entry = _find(base)
    if entry is None:
        known = f"{did_you_mean(base, _listed(), most=3)}`priorzoo list` prints all"
        raise ValueError("; ".join([f"unknown model {base!r}", known, *dict.fromkeys(missing)]))
    return entry


def create_model(name: str, **overrides: object) -> ZooModel:
    """Make a model.

    Args:
        name: an architecture, or `<architecture>.<tag>`, which loads those weights.
        overrides: entries of its config to replace, such as
            `position_options={"scaling": "yarn", "factor": 8.0}`.

    Raises:
        ValueError: for an unknown name, override, or tag, a damaged file of weights, or weights
        that an override does not fit.
    """
    entry = model_entry(name)
    unknown = [key for key in overrides if key not in entry.config]
    if unknown:
        hint = did_you_mean(unknown[0], entry.config)
        raise ValueError(
            f"{entry.name} has no setting {unknown[0]!r}; {hint}It has: {', '.join(entry.config)}"
        )
    tensors = read_tensors(verified_file(name)) if "." in name else None
    model = entry.build(**{**entry.config, **overrides})
    if tensors is not None:
        try:
            model.load_state_dict(tensors)
        except RuntimeError as error:
            raise ValueError(
                f"the weights of {name} do not fit this model: {one_line(error)}"
            ) from error
        model.class_names = tuple(weights_entry(name).get("class_names", ()))
    return model


def list_models(pattern: str = "*", *, pretrained: bool = False) -> list[str]:
    """Names that match a shell pattern: architectures, or with `pretrained` the tagged names that
    have weights."""
    # What every match starts with tells which modalities need not be imported.
    start = re.split(r"[*?[]", pattern)[0]
    _register_models(
        name
        for name in modality_names()
        if f"{name}_".startswith(start) or start.startswith(f"{name}_")
    )
    names = fnmatch.filter(manifest() if pretrained else _listed(), pattern)
    return sorted(name for name in names if _find(name.partition(".")[0]))


def load_model(folder: str | os.PathLike[str]) -> ZooModel:
    """The model in a folder written by `save_pretrained`, of the modality that its config.json
    names.

    A folder that holds one as model/, such as a finished run or a checkpoint, stands for it, and so
    does a name with weights.

    Raises:
        ValueError: where there is no config.json, or it is of no modality known here.
        FileNotFoundError, ImportError: see `ZooModel.from_pretrained` and `load_modality`.
    """
    if not os.path.isdir(folder) and str(folder) in manifest():
        return create_model(str(folder))
    inner = Path(folder) / "model"
    if not (Path(folder) / "config.json").is_file() and (inner / "config.json").is_file():
        folder = inner
    modality = saved_modality(folder)
    if modality is None:
        raise ValueError(
            f"{folder}: no config.json of a known model; expected a folder written by save_pretrained"
        )
    return load_modality(modality).model.from_pretrained(folder)


def saved_modality(folder: str | os.PathLike[str]) -> str | None:
    """The modality that a folder's config.json names; None where neither is there. ValueError for a
    damaged one."""
    try:
        modality = read_object(Path(folder) / "config.json").get("modality")
    except OSError:
        return None
    return modality if isinstance(modality, str) else None


class HasModel(Protocol):
    """What this module knows of a `modalities.contract.Modality`."""

    model: type[ZooModel]


@cache
def _modalities() -> dict[str, EntryPoint]:
    """Entry points by name: of those that ship, then of installed ones with other names."""
    installed = sorted(entry_points(group=GROUP), key=lambda point: point.name)
    return SHIPPED | {point.name: point for point in installed if point.name not in SHIPPED}


def modality_names() -> list[str]:
    """Every modality, whether or not the packages it needs are installed."""
    return list(_modalities())


@cache
def load_modality(name: str) -> HasModel:
    """The object that a modality's entry point names; importing it registers the modality's models.

    Raises:
        ValueError: for an unknown name; it names the nearest.
        ImportError: where a package it needs is missing.
    """
    if name not in _modalities():
        raise ValueError(f"no modality {name!r}; {nearest(name, modality_names())}")
    return _load(_modalities()[name], EntryPoint.load)


def modality_module(name: str) -> ModuleType:
    """The module that a modality's entry point names; cheaper than `load_modality` where that makes
    its object lazily."""
    return _load(_modalities()[name], lambda point: importlib.import_module(point.module))


def _load(point: EntryPoint, load: Callable[[EntryPoint], Any]) -> Any:
    """What `load` gives. ImportError with the pip command, where a package of another project is
    missing."""
    try:
        return load(point)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] in {
            "zoo",
            "modalities",
            "recipes",
            point.module.partition(".")[0],
        }:
            raise
        extra = f": pip install 'priorzoo[{point.name}]'" if point.name in SHIPPED else ""
        raise ImportError(f"{point.name} needs the package {error.name}{extra}") from error


def _register_models(names: Iterable[str]) -> list[str]:
    """Import the modules of modalities, which register their models; returns what those that cannot
    be imported lack."""
    missing = []
    for name in names:
        try:
            modality_module(name)
        except ImportError as error:
            missing.append(str(error))
    return missing


def manifest() -> dict[str, dict[str, Any]]:
    """Tagged name → {file, sha256, license, recipe, seed, commit, data, …} of the weights that
    ship."""
    return _read_manifest(WEIGHTS)


@cache
def _read_manifest(folder: Path) -> dict[str, dict[str, Any]]:
    path = folder / "manifest.json"
    digest = folder / "manifest.sha256"
    if digest.exists() and file_sha256(path) != digest.read_text().strip():
        raise ValueError(
            f"{path} is damaged: its SHA-256 is not that in {digest.name}; install the package again"
        )
    return read_object(path)


def weights_entry(name: str) -> dict[str, Any]:
    """What the manifest says of a tagged name. ValueError, with the nearest names, where it has no
    weights."""
    if name in manifest():
        return manifest()[name]
    tagged = [full for full in manifest() if full.partition(".")[0] == name.partition(".")[0]]
    near = f"there are {', '.join(tagged)}" if tagged else did_you_mean(name, manifest(), most=3)
    raise ValueError(f"no weights {name!r}; {near or '`priorzoo list --pretrained` prints all'}")


def pretrained_tables(names: Sequence[str]) -> list[tuple[str, list[str], list[list[str]]]]:
    """(title, columns, rows) for the weights of each kind of data, with scores of the cards at the
    first and last place."""
    groups: dict[tuple[str, str], list[str]] = {}
    for name in names:
        groups.setdefault((name.partition("_")[0], name.rpartition(".")[2]), []).append(name)
    tables = []
    for (modality, tag), members in groups.items():
        cards = [weights_entry(name) for name in members]
        measured = cards[0]["measured"]
        axis = next(iter(measured[0]))
        score = next(
            name for name in HEADLINES if max(row.get(name, 0.0) for row in measured) > 0.5
        )
        places = [row[axis] for row in measured if score in row]
        ends = list(dict.fromkeys([places[0], places[-1]]))
        trained = dict.fromkeys(
            str(card.get("train_context", card.get("image_size"))) for card in cards
        )
        title = f"{modality}, {tag}: {cards[0]['data'].partition(';')[0].partition(' (')[0]}"
        title += f"\ntrained at {axis} {', '.join(trained)}; {score} at {axis} {' and '.join(map(str, ends))}"
        rows = []
        for name, card in zip(members, cards, strict=True):
            scores = {row[axis]: f"{row[score]:.3f}" for row in card["measured"] if score in row}
            size = [f"{card['parameters'] / 1e6:.2f}M", f"{card['bytes'] / 1e6:.1f}"]
            rows.append([name, *size, *(scores.get(end, "–") for end in ends)])
        tables.append((title, ["name", "params", "MB", *map(str, ends)], rows))
    return tables


def verified_file(name: str) -> Path:
    """The weights file of a tagged name; ValueError where its digest differs from the manifest.

    It is in the package, or in the folder that $PRIORZOO_WEIGHTS names, by default `release` in a
    checkout.
    """
    entry = weights_entry(name)
    path = WEIGHTS / entry["file"]
    if not path.is_file():
        path = Path(os.environ.get("PRIORZOO_WEIGHTS") or RELEASE) / entry["file"]
    if not path.is_file():
        raise FileNotFoundError(
            f"the weights of {name} ({entry['bytes'] / 1e6:.1f} MB) are neither in the package nor at {path}: "
            "set PRIORZOO_WEIGHTS to a folder that has them"
        )
    if (digest := file_sha256(path)) != entry["sha256"]:
        raise ValueError(
            f"{path} is damaged: its SHA-256 is {digest}, the manifest says {entry['sha256']}"
        )
    return path


def import_named(names: list[str]) -> None:
    """Import what `--import` names: files that end in .py, and modules by their dotted names."""
    for name in names:
        if name.endswith(".py"):
            import_file(name)
        else:
            importlib.import_module(name)


def import_file(path: str | Path) -> ModuleType:
    """The module in a file. Named twice, it is imported once. ImportError with the cause where that
    fails."""
    file = Path(path).resolve()
    if not file.is_file():
        raise FileNotFoundError(f"no file {str(path)!r} to import")
    name = "outside" + re.sub(r"\W", "_", str(file.with_suffix("")))  # unlike any module's own name
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is no Python file: expected a name that ends in .py")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        raise ImportError(f"importing {path} fails: {type(error).__name__}: {error}") from error
    return module
