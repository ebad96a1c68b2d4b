"""Turn corpus files and synthetic conversations into arrays of token ids.

Text is encoded with special tokens off, so a marker that some source file spells stays plain text.
Conversations are encoded with them on. An id's top bit says 'not a target': only what the assistant
writes, and the role marker that ends its turn, is learned from conversations. When a conversation
thinks, the turns before the last request are no targets either: the template drops their thoughts.
"""

from __future__ import annotations

import argparse
import multiprocessing as mp
import tomllib
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

import chat_samples

Ids = NDArray[np.uint16]
NOT_TARGET = 0x8000
state: dict[str, object] = {}


def start(folder: str) -> None:
    """Load the tokenizer once in each worker."""
    text = Tokenizer.from_file(f"{folder}/tokenizer.json")
    text.encode_special_tokens = True
    state["text"] = text
    state["chat"] = Tokenizer.from_file(f"{folder}/tokenizer.json")
    state["template"] = chat_samples.renderer(Path(folder) / "chat_template.jinja")


def encode_texts(texts: list[str]) -> tuple[Ids, list[int], int]:
    """Encode documents, each behind an end-of-text token; return ids, lengths and the bytes encoded."""
    tokenizer = state["text"]
    assert isinstance(tokenizer, Tokenizer)
    end = tokenizer.token_to_id("<|endoftext|>")
    rows = [np.array([end, *tokenizer.encode(t).ids], dtype=np.uint16) for t in texts]
    return np.concatenate(rows), [len(r) for r in rows], sum(len(t.encode()) for t in texts)


def target_flags(ids: list[int], marks: dict[str, int], thinking: bool) -> list[bool]:
    """Tell for each id whether it is to be learned."""
    roles = {marks[m] for m in ("<|system|>", "<|user|>", "<|observation|>", "<|assistant|>")}
    users = [i for i, t in enumerate(ids) if t == marks["<|user|>"]]
    first = users[-2] if thinking and len(users) > 1 else 0
    flags, speaking = [], False
    for i, token in enumerate(ids):
        flags.append(speaking and i > first)
        if token in roles:
            speaking = token == marks["<|assistant|>"]
    return flags


def encode_chats(seeds: range) -> tuple[Ids, list[int], int]:
    """Make, render and encode conversations."""
    tokenizer, template = state["chat"], state["template"]
    assert isinstance(tokenizer, Tokenizer)
    vocabulary = tokenizer.get_vocab()
    marks = {m: vocabulary[m] for m in ("<|system|>", "<|user|>", "<|observation|>", "<|assistant|>")}
    end = vocabulary["<|endoftext|>"]
    rows, size = [], 0
    for seed in seeds:
        conversation = chat_samples.conversation(seed)
        text = template.render(**conversation) + "<|user|>"  # type: ignore[attr-defined]
        thinking = any("reasoning_content" in m for m in conversation["messages"])
        ids = tokenizer.encode(text).ids
        flags = target_flags(ids, marks, thinking)
        coded = [t if keep else t | NOT_TARGET for t, keep in zip(ids, flags, strict=True)]
        rows.append(np.array([end | NOT_TARGET, *coded], dtype=np.uint16))
        size += len(text.encode())
    return np.concatenate(rows), [len(r) for r in rows], size


def pieces(path: Path, size: int = 400_000) -> list[list[str]]:
    """Cut a corpus file into lists of documents of about the given size."""
    out: list[list[str]] = [[]]
    filled = 0
    for document in path.read_text("utf-8").split("\0"):
        if document:
            out[-1].append(document)
            filled += len(document)
            if filled >= size:
                out.append([])
                filled = 0
    return [p for p in out if p]


def save(path: Path, parts: list[tuple[Ids, list[int], int]]) -> None:
    """Write ids and document lengths; the file appears whole or not at all."""
    ids = np.concatenate([p[0] for p in parts])
    lengths = np.array([n for p in parts for n in p[1]], dtype=np.int32)
    size = sum(p[2] for p in parts)
    part = path.with_suffix(".part")
    with part.open("wb") as handle:
        np.savez(handle, ids=ids, lengths=lengths, bytes=np.int64(size))
    part.rename(path)
    print(f"{path.name}: {len(lengths)} documents, {size / 1e6:.1f} MB, {len(ids) / 1e6:.2f} M tokens", flush=True)


def main() -> None:
    """Encode everything."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--settings", type=Path, default=Path(__file__).with_name("settings.toml"))
    parser.add_argument("--tokenizer", required=True, help="folder with tokenizer.json and chat_template.jinja")
    parser.add_argument("--corpus", type=Path, nargs="+", required=True, help="folders that corpus.py wrote")
    parser.add_argument("--workers", type=int, default=mp.cpu_count())
    parser.add_argument("--conversations", type=int)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    chat = tomllib.loads(args.settings.read_text())["chat"]
    first, count = chat["first_seed"], args.conversations or chat["conversations"]
    args.out.mkdir(parents=True, exist_ok=True)
    with mp.get_context("fork").Pool(args.workers, start, (args.tokenizer,)) as pool:
        for name in ("heldout-code", "heldout-docs", "train"):
            files = [f for folder in args.corpus for f in sorted(folder.glob(f"{name}*.txt0"))]
            work = [p for f in files for p in pieces(f)]
            save(args.out / f"{name}.npz", pool.map(encode_texts, work, chunksize=2))
        seeds = [range(s, min(s + 250, first + count)) for s in range(first, first + count, 250)]
        save(args.out / "chat.npz", pool.map(encode_chats, seeds, chunksize=1))
        held = [range(s, s + 50) for s in range(50_000, 50_500, 50)]
        save(args.out / "heldout-chat.npz", pool.map(encode_chats, held))


if __name__ == "__main__":
    main()
