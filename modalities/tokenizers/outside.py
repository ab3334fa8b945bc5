"""The bridge to tokenizers of `transformers`, which is imported when it is needed: names are opened
with errors in one line, and our ids are given in its form."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, TypeVar

from modalities.tokenizers.files import check_tokenizer_file, no_panic
from zoo.adapters import ADAPTER, find_folder, hub_name
from zoo.errors import did_you_mean, require
from zoo.files import read_object

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

_T = TypeVar("_T")


def call_transformers(name: str, what: str, load: Callable[[ModuleType], _T]) -> _T:
    """`load(transformers)`. ImportError without that library; ValueError for a name that cannot be
    opened, in one line."""
    check_place(name)
    import transformers

    logging = transformers.utils.logging
    verbosity = logging.get_verbosity()
    bars = logging.is_progress_bar_enabled()
    # What is wrong is an error here, in one line.
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        with no_panic(f"hf:{name}"):
            return load(transformers)
    except (OSError, ValueError, KeyError, ImportError) as error:
        if "trust_remote_code" in str(error) or "custom code" in str(error):
            raise ValueError(
                f"hf:{name}: its {what} is code of its own, which is never run"
            ) from error
        message = " ".join(str(error).split())
        if len(message) > 200:
            message = f"{message[:200]}…"
        raise ValueError(f"hf:{name}: no {what} can be opened: {message}") from error
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


def check_place(name: str) -> None:
    """Before transformers is imported: ValueError for a name that is no folder, GGUF file or name
    of the hub, by one request; ImportError without a package that reading it needs."""
    require("transformers", f"hf:{name}", "hf")
    if name.endswith(".gguf") and Path(name).is_file():
        require("gguf", f"hf:{name}", "hf")
        return
    if name and Path(name).is_dir():
        return
    import huggingface_hub

    expected = did_you_mean(Path(name).name, _neighbours(name)).strip()
    if not expected:
        expected = (
            "expected a folder of save_pretrained, a GGUF file, a name of the hub, "
            "or what `priorzoo fetch-data text` fetches"
        )
    missing = f"hf:{name}: no such folder; {expected}"
    if name.startswith((".", "/", "~")) or name.count("/") > 1 or not name:
        raise ValueError(missing)
    if isinstance(huggingface_hub.try_to_load_from_cache(name, "config.json"), str):
        return
    try:
        huggingface_hub.model_info(name, timeout=10)
    # Any error, since those of the HTTP library in use are among them.
    except Exception as error:
        raise ValueError(f"{missing} (the hub: {type(error).__name__})") from error


def _neighbours(name: str) -> list[str]:
    """Names of the folders and GGUF files beside a path that does not exist."""
    if not name:
        return []
    names = []
    for path in Path(name).parent.glob("*"):
        if path.is_dir() or path.suffix == ".gguf":
            names.append(path.name)
    return names


def split_arm(name: str) -> tuple[str, dict[str, str]]:
    """("FOLDER", {"yarn": "2"}) of FOLDER@yarn=2[,KEY=VALUE…]; a name without settings has none.
    Names that `zoo.adapters.find_folder` knows are folders."""
    match = None if Path(name).exists() else re.fullmatch(r"(.+?)@([\w.]+=.*)", name)
    if match is None:
        return find_folder(name), {}
    settings = {}
    for part in match[2].split(","):
        key, _, value = part.partition("=")
        settings[key] = value
    return find_folder(match[1]), settings


@lru_cache(maxsize=8)
def open_tokenizer(name: str) -> PreTrainedTokenizerBase:
    """The tokenizer of a folder or repository; the same object for the same name. Errors as in
    `call_transformers`."""
    name, _ = split_arm(name)
    adapter = Path(name) / ADAPTER
    if adapter.is_file():
        name = find_folder(read_object(adapter)["base"]["name"])
    file = Path(name) / "tokenizer.json"
    if file.is_file():
        check_tokenizer_file(file)
    source, gguf = hub_name(name)

    def load(transformers: ModuleType) -> PreTrainedTokenizerBase:
        auto = transformers.AutoTokenizer
        return auto.from_pretrained(source, trust_remote_code=False, **gguf)

    return call_transformers(name, "tokenizer", load)


def start_id(tokenizer: PreTrainedTokenizerBase, name: str) -> int:
    """The token that begins a text: BOS, else EOS, else [CLS]. ValueError for a tokenizer with none
    of them."""
    for role in ("bos", "eos", "cls"):
        number = getattr(tokenizer, f"{role}_token_id", None)
        if number is not None:
            return int(number)
    raise ValueError(
        f"hf:{name}: its tokenizer has no bos_token, eos_token or cls_token to begin a text with"
    )


def spells(tokenizer: PreTrainedTokenizerBase, text: str) -> bool:
    """Whether a text comes back from its tokens, but for case and spaces."""
    ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    if tokenizer.unk_token_id is not None and tokenizer.unk_token_id in ids:
        return False
    back = str(tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))
    return "".join(back.split()).lower() == "".join(text.split()).lower()


def fingerprint_of_tokenizer(tokenizer: PreTrainedTokenizerBase) -> str:
    """Hex digits, equal for tokenizers that give equal ids for every text."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        content = backend.to_str()
    else:
        content = json.dumps(sorted(tokenizer.get_vocab().items()))
    kind = [type(tokenizer).__name__, tokenizer.bos_token_id, tokenizer.eos_token_id]
    return hashlib.blake2b(f"{kind}{content}".encode(), digest_size=16).hexdigest()


def make_fast(
    backend: Tokenizer, *, bos: int, pad: int, eos: int | None = None
) -> PreTrainedTokenizerFast:
    """A tokenizer of `transformers` that puts the id `bos` before a text and pads on the left with
    `pad`."""
    from tokenizers import processors
    from transformers import PreTrainedTokenizerFast

    bos_token = backend.id_to_token(bos)
    backend.post_processor = processors.TemplateProcessing(
        single=f"{bos_token} $A",
        pair=f"{bos_token} $A $B",
        special_tokens=[(bos_token, bos)],
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=bos_token,
        eos_token=None if eos is None else backend.id_to_token(eos),
        pad_token=backend.id_to_token(pad),
        padding_side="left",
        clean_up_tokenization_spaces=False,
        model_input_names=["input_ids", "attention_mask"],
        split_special_tokens=True,
    )
