"""Models by name: `<modality>_<method>_<size>`, with weights `<modality>_<method>_<size>.<tag>`.

A modality registers its models when it is imported, and is imported when a name asks for it: the three that ship, and those of
other packages through the entry-point group `priorzoo.modalities`.
"""

from __future__ import annotations

import fnmatch
import importlib
import importlib.util
import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from types import ModuleType
from typing import Any

from zoo.errors import did_you_mean, nearest, require
from zoo.files import file_sha256, read_object, read_tensors, replacing_path, write_json, write_text
from zoo.model import ZooModel

__all__ = [
    "BUNDLED",
    "WEIGHTS",
    "ModelEntry",
    "ModelFamily",
    "cache_folder",
    "create_model",
    "import_file",
    "import_named",
    "list_models",
    "list_weights",
    "load_modality",
    "load_model",
    "load_pretrained",
    "manifest",
    "modality_names",
    "model_entry",
    "register_family",
    "register_model",
    "resolve_tag",
    "saved_modality",
    "verified_file",
    "write_manifest",
]

GROUP = "priorzoo.modalities"
SHIPPED = {
    "text": EntryPoint("text", "modalities.text:MODALITY", GROUP),
    "vision": EntryPoint("vision", "modalities.vision:MODALITY", GROUP),
    "dna": EntryPoint("dna", "modalities.dna:MODALITY", GROUP),
}


@dataclass(frozen=True)
class ModelEntry:
    """A registered architecture: `build(**config)` makes it; `config` is JSON."""

    name: str
    modality: str
    build: Callable[..., ZooModel]
    config: dict[str, Any]


@dataclass(frozen=True)
class ModelFamily:
    """`<modality>_<method>_<size>` and `<modality>_<method>_ssmax_<size>` for every position method and size.

    Entries are made when they are asked for, so methods registered later and sums of methods have theirs too.

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
        return [
            f"{self.modality}_{method}{ssmax}_{size}"
            for size in self.sizes
            for method in self.methods()
            for ssmax in ("", "_ssmax")
        ]

    def find(self, name: str) -> ModelEntry | None:
        """The entry of a name; None where it is none of this family.

        Raises:
            ValueError: for a sum with a part that is no method.
        """
        for size in self.sizes:
            start, end = f"{self.modality}_", f"_{size}"
            if name.startswith(start) and name.endswith(end) and len(name) > len(start) + len(end):
                method = name.removeprefix(start).removesuffix(end)
                plain = method.removesuffix("_ssmax")
                try:
                    self.check(plain)
                except ValueError:
                    if "+" in plain:
                        raise
                    continue
                return ModelEntry(name, self.modality, self.build, self.config(plain, size, plain != method))
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


def register_model(name: str, build: Callable[..., ZooModel], *, modality: str, config: dict[str, Any]) -> ModelEntry:
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


@cache
def _points() -> dict[str, EntryPoint]:
    """Entry points of all modalities by name; those that ship win over installed ones of the same name."""
    return {point.name: point for point in entry_points(group=GROUP)} | SHIPPED


def modality_names() -> list[str]:
    """Every modality, whether or not the packages it needs are installed."""
    return list(SHIPPED) + sorted(_points().keys() - SHIPPED.keys())


@cache
def load_modality(name: str) -> Any:
    """The object that a modality's entry point names; importing it registers the modality's models.

    Raises:
        ValueError: for an unknown name; it names the nearest.
        ImportError: where a package it needs is missing.
    """
    points = _points()
    if name not in points:
        raise ValueError(f"no modality {name!r}; {did_you_mean(name, points)}there are {', '.join(modality_names())}")
    return _load(points[name])


def _load(point: EntryPoint, *, module_only: bool = False) -> Any:
    """A modality, or its module. ImportError with the pip command, where its packages are not installed."""
    try:
        return import_module(point.module) if module_only else point.load()
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] in {"zoo", "modalities", "recipes", point.module.partition(".")[0]}:
            raise
        extra = f": pip install 'priorzoo[{point.name}]'" if point.name in SHIPPED else ""
        raise ImportError(f"{point.name} needs the package {error.name}{extra}") from error


def _register_models(names: Iterable[str]) -> list[str]:
    """Import the modules of modalities, which register their models; returns what those that cannot be imported lack."""
    missing = []
    for name in names:
        try:
            _load(_points()[name], module_only=True)
        except ImportError as error:
            missing.append(str(error))
    return missing


def model_entry(name: str) -> ModelEntry:
    """The entry of an architecture, with or without a tag of weights behind it.

    Raises:
        ValueError: for an unknown name, with the nearest known ones.
    """
    base = name.partition(".")[0]
    missing = _register_models({base.partition("_")[0]} & set(modality_names()) or modality_names())
    entry = _find(base)
    if entry is None:
        names = _listed()
        known = f"{did_you_mean(base, names, most=3)}`priorzoo list` prints all {len(names)}"
        raise ValueError("; ".join([f"unknown model {base!r}", known, *dict.fromkeys(missing)]))
    return entry


def create_model(name: str, *, pretrained: bool = False, **overrides: Any) -> ZooModel:
    """Make a model.

    Args:
        name: an architecture, or `<architecture>.<tag>`, which loads those weights.
        pretrained: load the architecture's shipped weights (the only tag, or the first listed in the manifest).
        overrides: entries of its config to replace, such as `position_options={"scaling": "yarn", "factor": 8.0}`.

    Raises:
        ValueError: for an unknown name, override, or tag.
    """
    entry = model_entry(name)
    unknown = [key for key in overrides if key not in entry.config]
    if unknown:
        hint = did_you_mean(unknown[0], entry.config)
        raise ValueError(f"{entry.name} has no setting {unknown[0]!r}; {hint}It has: {', '.join(entry.config)}")
    tagged = resolve_tag(name) if pretrained or "." in name else None
    model = entry.build(**{**entry.config, **overrides})
    if tagged is not None:
        load_pretrained(model, tagged)
    return model


def list_models(pattern: str = "*", *, modality: str | None = None, pretrained: bool = False) -> list[str]:
    """Names that match a shell pattern: architectures, or with `pretrained` the tagged names that have weights."""
    if modality is not None and modality not in modality_names():
        raise ValueError(f"no modality {modality!r}; {nearest(modality, modality_names())}")
    # What every match starts with tells which modalities need not be imported.
    start = re.split(r"[*?[]", pattern)[0]
    names = [modality] if modality else modality_names()
    _register_models(name for name in names if f"{name}_".startswith(start) or start.startswith(f"{name}_"))
    known = list_weights() if pretrained else _listed()
    entries = {name: _find(name.partition(".")[0]) for name in fnmatch.filter(known, pattern)}
    return sorted(name for name, entry in entries.items() if entry and modality in (None, entry.modality))


def load_model(folder: str | os.PathLike[str]) -> ZooModel:
    """The model in a folder written by `save_pretrained`, of the modality that its config.json names.

    A folder that holds one as model/, such as a finished run or a checkpoint, stands for it, and so does a name with weights.

    Raises:
        ValueError: where there is no config.json, or it is of no modality known here.
        FileNotFoundError, ImportError: see `ZooModel.from_pretrained` and `load_modality`.
    """
    if not os.path.isdir(folder) and str(folder) in list_weights():
        return create_model(str(folder))
    inner = Path(folder) / "model"
    if not (Path(folder) / "config.json").is_file() and (inner / "config.json").is_file():
        folder = inner
    modality = saved_modality(folder)
    if modality is None:
        raise ValueError(f"{folder}: no config.json of a known model; expected a folder written by save_pretrained")
    return load_modality(modality).model.from_pretrained(folder)


def saved_modality(folder: str | os.PathLike[str]) -> str | None:
    """The modality that a folder's config.json names; None where there is none, or it names none. ValueError for a damaged
    one."""
    try:
        modality = read_object(Path(folder) / "config.json").get("modality")
    except OSError:
        return None
    return modality if isinstance(modality, str) else None


WEIGHTS = Path(__file__).parent / "weights"
RELEASE = Path(__file__).parents[1] / "release"  # of a checkout: what is too large for the package
BUNDLED = 2_000_000  # bytes of the largest file in the package; others are in a release folder or a hub repository


def manifest(folder: Path | None = None) -> dict[str, dict[str, Any]]:
    """Tagged name → {file, sha256, license, recipe, seed, commit, data, …} of `folder`, by default of the weights that ship."""
    return _read_manifest(folder or WEIGHTS)


@cache
def _read_manifest(folder: Path) -> dict[str, dict[str, Any]]:
    path, digest = folder / "manifest.json", folder / "manifest.sha256"
    if not path.exists():
        return {}
    if digest.exists() and file_sha256(path) != digest.read_text().strip():
        raise ValueError(f"{path} is damaged: its SHA-256 is not that in {digest.name}; install the package again")
    return read_object(path)


def write_manifest(entries: Mapping[str, Any], folder: Path = WEIGHTS) -> None:
    """Write manifest.json, and manifest.sha256 that verifies it."""
    write_json(folder / "manifest.json", entries)
    write_text(folder / "manifest.sha256", file_sha256(folder / "manifest.json") + "\n")


def list_weights(folder: Path | None = None) -> list[str]:
    """Tagged names with weights."""
    return list(manifest(folder))


def resolve_tag(name: str, folder: Path | None = None) -> str:
    """`name` with its tag: itself, or the architecture's first tag in the manifest.

    Raises:
        ValueError: if there are no such weights, with those that exist.
    """
    known = list_weights(folder)
    if name in known:
        return name
    base, _, tag = name.partition(".")
    tags = [full.partition(".")[2] for full in known if full.partition(".")[0] == base]
    if not tag and tags:
        return f"{base}.{tags[0]}"
    if tags:
        raise ValueError(f"{base} has no weights {tag!r}; it has: {', '.join(tags)}")
    hint = did_you_mean(base, dict.fromkeys(full.partition(".")[0] for full in known), most=3)
    raise ValueError(f"no weights ship for {base!r}; {hint}`priorzoo list --pretrained` prints all")


def verified_file(name: str, folder: Path | None = None) -> Path:
    """The weights file of a tagged name, after its digest matched.

    Files above `BUNDLED` bytes are not in the package but in a checkout's folder `release`, or where $PRIORZOO_WEIGHTS or the
    manifest's entry `source` says: a folder, an http(s) address, or `hf:OWNER/NAME[@REVISION]`, a repository of the hub. What
    was fetched is not fetched again: `cache_folder()`, or the hub library's own cache, has it.

    Raises:
        OSError: if the file is nowhere, or does not come; one line says what to set.
        ValueError: if its digest differs from the manifest.
        ImportError: for a repository of the hub without huggingface_hub.
    """
    entry = manifest(folder)[name]
    path = (folder or WEIGHTS) / entry["file"]
    if not path.exists():
        path = _outside_package(name, entry)
    digest = file_sha256(path)
    if digest != entry["sha256"]:
        raise ValueError(f"{path} is damaged: its SHA-256 is {digest}, the manifest says {entry['sha256']}")
    return path


def cache_folder() -> Path:
    """Where fetched weights are, in the user's cache folder."""
    from platformdirs import user_cache_path

    return user_cache_path("priorzoo", appauthor=False) / "weights"


def _outside_package(name: str, entry: Mapping[str, Any]) -> Path:
    """The file of an entry that the package does not have, fetched where it must be."""
    file, source = entry["file"], os.environ.get("PRIORZOO_WEIGHTS", "")
    if not source and (RELEASE / file).is_file():
        return RELEASE / file
    source = source or entry.get("source", "")
    cached = cache_folder() / entry["sha256"][:16] / file
    if source.startswith("hf:"):
        return _from_hub(name, source.removeprefix("hf:"), file)
    if source.startswith(("http://", "https://")):
        if not cached.is_file() or file_sha256(cached) != entry["sha256"]:
            from zoo.download import download

            with replacing_path(cached) as temporary:
                download(f"{source.rstrip('/')}/{file}", temporary, size=entry["bytes"])
                if (digest := file_sha256(temporary)) != entry["sha256"]:
                    raise ValueError(f"{source}/{file}: its SHA-256 is {digest}, the manifest says {entry['sha256']}")
        return cached
    if "://" in source:
        raise ValueError(f"PRIORZOO_WEIGHTS={source!r}: expected a folder, an http(s) address or hf:OWNER/NAME")
    place = Path(source) / file if source else cached
    if place.is_file():
        return place
    if source:
        raise FileNotFoundError(f"the weights of {name} should be at {place}, by PRIORZOO_WEIGHTS")
    raise FileNotFoundError(
        f"the weights of {name} ({file}, {entry['bytes'] / 1e6:.1f} MB) are neither in the package nor in a checkout's "
        f"release/ nor in {cached.parent}: set PRIORZOO_WEIGHTS to a folder, http(s) address or hf:OWNER/NAME that has it"
    )


def _from_hub(name: str, repository: str, file: str) -> Path:
    """A file of a repository, in the hub library's own cache, which resumes and locks."""
    require("huggingface_hub", f"PRIORZOO_WEIGHTS=hf:{repository}", "hub")
    from huggingface_hub import hf_hub_download

    owner_name, _, revision = repository.partition("@")
    try:
        return Path(hf_hub_download(owner_name, file, revision=revision or None))
    except (OSError, ValueError) as error:
        # The library's errors are of these two kinds.
        reason = " ".join(str(error).split())[:300]
        raise FileNotFoundError(f"the weights of {name} do not come from hf:{repository}: {reason}") from error


def load_pretrained(model: ZooModel, name: str, folder: Path | None = None) -> ZooModel:
    """Load the weights of a tagged name into `model`, strictly, and the names of its classes.

    Raises:
        ValueError: for a damaged file, or weights that are not finite or do not match the model (for example after an
            override).
    """
    state = read_tensors(verified_file(name, folder))
    try:
        model.load_state_dict(state)
    except RuntimeError as error:
        raise ValueError(f"the weights of {name} do not fit this model: {error}") from error
    model.class_names = tuple(manifest(folder)[name].get("class_names", ()))
    return model


def import_file(path: str | Path) -> ModuleType:
    """The module in a file. Named twice, it is imported once.

    Raises:
        FileNotFoundError: where there is no such file.
        ImportError: where the file cannot be imported; the cause is attached.
    """
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
    except BaseException as error:
        del sys.modules[name]
        if isinstance(error, Exception):
            raise ImportError(f"importing {path} fails: {type(error).__name__}: {error}") from error
        raise
    return module


def import_named(names: list[str]) -> None:
    """Import what `--import` names: files that end in .py, and modules by their dotted names.

    Raises:
        FileNotFoundError, ImportError: see `import_file`.
    """
    for name in names:
        if name.endswith(".py"):
            import_file(name)
        else:
            importlib.import_module(name)
