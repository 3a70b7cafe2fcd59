"""Encodes texts with a Hugging Face folder as its user would: `AutoTokenizer` and `pipeline`, offline.

This separate program imports nothing of this project. Each line of stdin is a request, each line of stdout its answer,
both JSON.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any


def main() -> None:
    here = Path(__file__).resolve().parent
    sys.path[:] = [folder for folder in sys.path if Path(folder).resolve() != here]
    os.environ["HF_HUB_OFFLINE"] = "1"
    answers, sys.stdout = sys.stdout, sys.stderr
    for line in sys.stdin:
        try:
            answer = read_with_transformers(json.loads(line))
        except Exception as error:  # any error that a user of transformers would get
            version = getattr(sys.modules.get("transformers"), "__version__", None)
            answer = {"error": f"{type(error).__name__}: {error}", "version": version}
        print(json.dumps(answer), file=answers, flush=True)


def read_with_transformers(request: dict[str, Any]) -> dict[str, Any]:
    import transformers

    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(
        request["folder"], local_files_only=True, trust_remote_code=False
    )
    return {
        "version": transformers.__version__,
        "class": type(tokenizer).__name__,
        "tokens": {role: getattr(tokenizer, f"{role}_id") for role in request["roles"]},
        "texts": [_encoded(tokenizer, text) for text in request["texts"]],
        "pipeline": _pipeline(transformers, request) if request["prompt"] is not None else None,
        "batch": _batch(tokenizer, request["texts"]),
    }


def _encoded(tokenizer: Any, text: str) -> dict[str, Any]:
    plain = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    return {
        "ids": plain["input_ids"],
        "offsets": [list(pair) for pair in plain["offset_mapping"]],
        "whole": tokenizer(text)["input_ids"],
        "decoded": tokenizer.decode(plain["input_ids"]),
    }


def _batch(tokenizer: Any, texts: list[str]) -> dict[str, Any] | None:
    """Returns the padded batch. A tokenizer without a padding token pads with its eos_token."""
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    if tokenizer.pad_token is None:
        return None
    batch = tokenizer(texts, padding=True)
    return {
        "keys": sorted(batch.keys()),
        "ids": batch["input_ids"],
        "mask": batch["attention_mask"],
        "pad": tokenizer.pad_token_id,
    }


def _pipeline(transformers: Any, request: dict[str, Any]) -> dict[str, Any]:
    pipeline = transformers.pipeline("text-generation", model=request["folder"], device="cpu", trust_remote_code=False)
    if hasattr(pipeline.model, "set_experts_implementation"):
        pipeline.model.set_experts_implementation("eager")  # torch's grouped product refuses some widths
    (generated,) = pipeline(request["prompt"], max_new_tokens=1, do_sample=False)
    return {
        "whole": [pipeline.tokenizer(text)["input_ids"] for text in request["texts"]],
        "text": generated["generated_text"],
    }


if __name__ == "__main__":
    main()
