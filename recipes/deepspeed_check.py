"""A DeepSpeed configuration read by DeepSpeed's own classes before anything starts, and the keys that it never looks at."""

from __future__ import annotations

import os
import typing
from collections.abc import Iterator
from typing import Any

from recipes.config import ConfigError
from zoo.naming import nearest

__all__ = ["check_with_deepspeed"]

FILE = "--deepspeed_config"


def check_with_deepspeed(config: dict[str, Any]) -> None:
    """Validate a resolved configuration.

    Raises:
        ConfigError: in one line, for a value that DeepSpeed refuses, and for a key that it does not know: those inside
            sections of its pydantic classes, which it refuses, and all others, which it reads past in silence.
    """
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # nothing is computed
    from deepspeed.runtime.config import DeepSpeedConfig
    from deepspeed.utils import logger
    from pydantic import ValidationError

    # One rank: the batch equation of all of them is `recipes.config.resolve_batch`'s.
    alone = config["train_micro_batch_size_per_gpu"] * config["gradient_accumulation_steps"]
    read = _Read()
    section = _Section(config | {"train_batch_size": alone}, (), read)
    level = logger.level
    logger.setLevel("ERROR")
    try:
        DeepSpeedConfig(section, mpu=_OneRank())
    except ValidationError as error:
        raise ConfigError(_refusal(error, config, read.latest)) from None
    except Exception as error:  # assertions and whatever a value of another type meets in DeepSpeed's code
        raise ConfigError(f"{FILE}: {read.latest}: DeepSpeed refuses it: {error}") from None
    finally:
        logger.setLevel(level)
    for path in _unread(config, (), read):
        siblings = [name[-1] for name in read.paths if name[:-1] == path[:-1]]
        raise ConfigError(
            f"{FILE}: {'.'.join(path)} is no key of DeepSpeed's, which would ignore it; {nearest(path[-1], siblings)}"
        )


class _OneRank:
    def get_data_parallel_world_size(self) -> int:
        return 1


class _Read:
    """What was looked at: paths by name, sections as a whole, and the latest key of the file itself."""

    def __init__(self) -> None:
        self.paths: set[tuple[str, ...]] = set()
        self.whole: set[tuple[str, ...]] = set()
        self.latest = ""


class _Section(dict[str, Any]):
    """A dictionary that notes which of its keys are looked at."""

    def __init__(self, values: dict[str, Any], place: tuple[str, ...], read: _Read) -> None:
        self._place, self._read = place, read
        super().__init__({k: _Section(v, (*place, k), read) if isinstance(v, dict) else v for k, v in values.items()})

    def _note(self, key: Any) -> None:
        self._read.paths.add((*self._place, str(key)))
        if not self._place and dict.__contains__(self, key):
            self._read.latest = str(key)

    def get(self, key: Any, default: Any = None) -> Any:
        self._note(key)
        return super().get(key, default)

    def __getitem__(self, key: str) -> Any:
        self._note(key)
        return super().__getitem__(key)

    def __contains__(self, key: object) -> bool:
        self._note(key)
        return super().__contains__(key)

    def keys(self) -> Any:
        return _Keys(self)

    def __iter__(self) -> Iterator[str]:  # `**section` comes here: pydantic's class is given all of it
        self._read.whole.add(self._place)
        return super().__iter__()

    def __copy__(self) -> _Section:
        return self


class _Keys:
    """Keys of a section: `key in section.keys()` looks at one of them."""

    def __init__(self, section: _Section) -> None:
        self._section = section

    def __iter__(self) -> Iterator[str]:
        return iter(self._section)

    def __contains__(self, key: object) -> bool:
        return key in self._section


def _unread(tree: dict[str, Any], place: tuple[str, ...], read: _Read) -> Iterator[tuple[str, ...]]:
    """Keys beside which DeepSpeed looked at others by name; a section that it took as a whole has none."""
    named = any(path[:-1] == place for path in read.paths)
    if place in read.whole or not named:
        return
    for key, value in tree.items():
        if (*place, key) not in read.paths:
            yield (*place, key)
        elif isinstance(value, dict):
            yield from _unread(value, (*place, key), read)


def _refusal(error: Any, config: dict[str, Any], latest: str) -> str:
    """The first finding of a pydantic class, with the place in the file and the nearest valid key."""
    first = error.errors()[0]
    inner = tuple(str(part) for part in first["loc"])
    place = inner if inner and inner[0] in config else (latest, *inner)
    name = ".".join(place)
    if first["type"] != "extra_forbidden":
        return f"{FILE}: {name}={first['input']!r}: {first['msg']}"
    return f"{FILE}: unknown key {name}; {nearest(inner[-1], _fields(error.title, inner[:-1]))}"


def _fields(title: str, inside: tuple[str, ...]) -> list[str]:
    """The keys that the class called `title` takes, or the class of its field at `inside`."""
    from deepspeed.runtime.config_utils import DeepSpeedConfigModel

    kind: Any = next(kind for kind in DeepSpeedConfigModel.__subclasses__() if kind.__name__ == title)
    for part in inside:
        hint = next(f.annotation for n, f in kind.model_fields.items() if part in (n, f.alias))
        kind = next(one for one in (hint, *typing.get_args(hint)) if hasattr(one, "model_fields"))
    return [field.alias or name for name, field in kind.model_fields.items()]
