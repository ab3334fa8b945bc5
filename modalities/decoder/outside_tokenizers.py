"""Tokenizers of `transformers`, by the name of a folder or of a repository, as decoders that are not the zoo's need them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

from modalities.decoder.tokenizer_files import check_tokenizer_file, no_panic

__all__ = ["fingerprint_of_tokenizer", "open_tokenizer", "opened", "spells", "start_id"]

_T = TypeVar("_T")


def opened(name: str, what: str, load: Callable[[Any], _T]) -> _T:
    """`load(transformers)`; what it raises becomes one line that names the model.

    Raises:
        ImportError: without `transformers`.
        ValueError: for a name that cannot be opened; code of a folder or a repository is never run.
    """
    try:
        import transformers
    except ImportError as error:
        raise ImportError(f"hf:{name} needs the package transformers: pip install 'priorzoo[hf]'") from error
    if not Path(name).is_dir() and (name.startswith((".", "/", "~")) or name.count("/") > 1 or not name):
        raise ValueError(f"hf:{name}: no such folder; expected a folder of save_pretrained, or a name of the hub")
    logging = transformers.utils.logging
    before, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()  # what is wrong is an error here, in one line
    logging.disable_progress_bar()
    try:
        with no_panic(f"hf:{name}"):
            return load(transformers)
    except (OSError, ValueError, KeyError, ImportError) as error:
        if "trust_remote_code" in str(error) or "custom code" in str(error):
            raise ValueError(f"hf:{name}: its {what} is code of its own, which is never run") from error
        told = " ".join(str(error).split())
        raise ValueError(f"hf:{name}: no {what} can be opened: {told[:200]}{'…' * (len(told) > 200)}") from error
    finally:
        logging.set_verbosity(before)
        if bars:
            logging.enable_progress_bar()


@lru_cache(maxsize=8)
def open_tokenizer(name: str) -> Any:
    """The tokenizer of a folder or repository; the same object for the same name. Errors as in `opened`."""
    if (file := Path(name) / "tokenizer.json").is_file():
        check_tokenizer_file(file)
    return opened(name, "tokenizer", lambda t: t.AutoTokenizer.from_pretrained(name, trust_remote_code=False))


def start_id(tokenizer: Any, name: str) -> int:
    """The token that begins a text: BOS, else EOS, which then stands between documents, else [CLS].

    Raises ValueError for a tokenizer with none of them.
    """
    for role in ("bos", "eos", "cls"):
        number = getattr(tokenizer, f"{role}_token_id", None)
        if number is not None:
            return int(number)
    raise ValueError(f"hf:{name}: its tokenizer has no bos_token, eos_token or cls_token to begin a text with")


def spells(tokenizer: Any, text: str) -> bool:
    """Whether a text comes back from its tokens, but for case and spaces."""
    ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    if tokenizer.unk_token_id is not None and tokenizer.unk_token_id in ids:
        return False
    back = tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    return "".join(back.split()).lower() == "".join(text.split()).lower()


def fingerprint_of_tokenizer(tokenizer: Any) -> str:
    """Hex digits, equal for tokenizers that give equal ids for every text."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    content = backend.to_str() if backend is not None else json.dumps(sorted(tokenizer.get_vocab().items()))
    kind = [type(tokenizer).__name__, tokenizer.bos_token_id, tokenizer.eos_token_id]
    return hashlib.blake2b(f"{kind}{content}".encode(), digest_size=16).hexdigest()
