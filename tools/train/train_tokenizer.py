"""Train the byte-level BPE tokenizer: Flint's pre-tokenizer, 8192 entries with the control tokens inside.

The vocabulary has no gaps: bytes and merges come first, the control tokens take the last ids. All
control tokens are special, so a caller can encode user text with special tokens off and be sure that
a marker spelled in it stays plain text.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import tomllib
from collections.abc import Iterator
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

CONTROL = [
    "<|endoftext|>",
    "[MASK]",
    "[gMASK]",
    "[sMASK]",
    "<sop>",
    "<eop>",
    "<|system|>",
    "<|user|>",
    "<|assistant|>",
    "<|observation|>",
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
    "<arg_key>",
    "</arg_key>",
    "<arg_value>",
    "</arg_value>",
]
SPLITS = [
    r"\p{N}{1,3}",
    "[一-龥\u3040-ゟ゠-ヿ]+",
    (
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
        r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
        r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
]
END_TOKENS = ("<|endoftext|>", "<|user|>", "<|observation|>")


def sample(files: list[Path], megabytes: float, seed: int) -> Iterator[str]:
    """Yield documents drawn evenly from the corpus files, about the given size in all."""
    documents = [d for f in files for d in f.read_text("utf-8").split("\0") if d]
    random.Random(seed).shuffle(documents)
    left = int(megabytes * 1e6)
    for document in documents:
        if left <= 0:
            return
        left -= len(document)
        yield document[:40_000]


def build(texts: Iterator[str], vocab_size: int) -> Tokenizer:
    """Train the tokenizer on an iterator of texts."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in SPLITS]
        + [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(CONTROL),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        max_token_length=24,
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in CONTROL])
    if tokenizer.get_vocab_size() != vocab_size:
        raise ValueError(f"vocabulary is {tokenizer.get_vocab_size()}, not {vocab_size}")
    return tokenizer


def write_folder(tokenizer: Tokenizer, folder: Path, template: Path, context: int) -> None:
    """Write the tokenizer and its companions as a model repository holds them."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": context,
        "clean_up_tokenization_spaces": False,
        "eos_token": "<|endoftext|>",
        "pad_token": "<|endoftext|>",
        "additional_special_tokens": CONTROL[1:],
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
    ends = [tokenizer.token_to_id(token) for token in END_TOKENS]
    generation = {
        "do_sample": True,
        "temperature": 1.0,
        "top_p": 0.95,
        "top_k": 20,
        "eos_token_id": ends,
        "pad_token_id": ends[0],
    }
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
    shutil.copyfile(template, folder / "chat_template.jinja")


def main() -> None:
    """Train and write the folder."""
    here = Path(__file__).parent
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--settings", type=Path, default=here / "settings.toml")
    parser.add_argument("--texts", type=Path, nargs="+", required=True)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    settings = tomllib.loads(args.settings.read_text())
    options = settings["tokenizer"]
    tokenizer = build(sample(args.texts, options["sample_mb"], 1), options["vocab_size"])
    write_folder(tokenizer, args.out, here / "chat_template.jinja", settings["model"]["max_position_embeddings"])
    size = count = 0
    for text in sample(args.texts, 4, 2):
        size += len(text.encode())
        count += len(tokenizer.encode(text).ids)
    print(f"{size / count:.3f} bytes per token")


if __name__ == "__main__":
    main()
