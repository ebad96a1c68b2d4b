"""Check a finished model folder with transformers: held-out loss, and how well it keeps the chat format.

This reads the folder as any user would, so it also proves that the saved weights are those trained.
"""

from __future__ import annotations

import argparse
import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from transformers import FlintForCausalLM

from chat_judge import ENDS, judge, load_prompts


def sample_loss(model: FlintForCausalLM, tokenizer: Tokenizer, text: str, window: int = 1024) -> float:
    """Mean loss of each token but the first of every window."""
    tokenizer.encode_special_tokens = True
    ids = torch.tensor(tokenizer.encode(text).ids)
    tokenizer.encode_special_tokens = False
    total, count = 0.0, 0
    for row in ids[: len(ids) // window * window].view(-1, window):
        with torch.no_grad():
            logits = model(row[None].to(model.device)).logits[0, :-1].float().cpu()
        total += float(torch.nn.functional.cross_entropy(logits, row[1:], reduction="sum"))
        count += window - 1
    return total / count


def generate(model: FlintForCausalLM, tokenizer: Tokenizer, prompts: list[str], limit: int) -> list[str]:
    """Sample one answer for each prompt as the generation settings say."""
    rows = [tokenizer.encode(p).ids for p in prompts]
    longest = max(map(len, rows))
    pad = tokenizer.token_to_id("<|endoftext|>")
    ids = torch.tensor([[pad] * (longest - len(r)) + r for r in rows], device=model.device)
    mask = torch.tensor([[0] * (longest - len(r)) + [1] * len(r) for r in rows], device=model.device)
    with torch.no_grad():
        out = model.generate(
            input_ids=ids,
            attention_mask=mask,
            max_new_tokens=limit,
            do_sample=True,
            temperature=1.0,
            top_p=0.95,
            top_k=20,
        )
    answers = []
    for row in out[:, longest:].tolist():
        end = next((i + 1 for i, t in enumerate(row) if tokenizer.id_to_token(t) in ENDS), len(row))
        answers.append(tokenizer.decode(row[:end], skip_special_tokens=False))
    return answers


def main() -> None:
    """Run the checks and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--sample", type=Path)
    parser.add_argument("--prompts", type=int, default=200)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--limit", type=int, default=224)
    parser.add_argument("--batch", type=int, default=40)
    parser.add_argument("--show", type=int, default=4)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.manual_seed(1)
    tokenizer = Tokenizer.from_file(str(args.model / "tokenizer.json"))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = FlintForCausalLM.from_pretrained(args.model, dtype=torch.float32).to(device).eval()
    figures: dict[str, Any] = {"parameters": sum(p.numel() for p in model.parameters())}
    if args.sample:
        loss = sample_loss(model, tokenizer, args.sample.read_text("utf-8"))
        figures["sample_loss_1024"], figures["sample_perplexity"] = round(loss, 4), round(math.exp(loss), 3)
        print(figures, flush=True)
    counts: Counter[str] = Counter()
    prompts = load_prompts(args.model / "chat_template.jinja", args.first_seed, args.prompts)
    for i in range(0, len(prompts), args.batch):
        part = prompts[i : i + args.batch]
        answers = generate(model, tokenizer, [p[0] for p in part], args.limit)
        for (_, tools, expected), answer in zip(part, answers, strict=True):
            counts += judge(answer, tools, expected)
        for (text, _, _), answer in list(zip(part, answers, strict=True))[: args.show]:
            print(f"--- ...{text[-120:]!r}\n{answer!r}", flush=True)
    figures["chat"] = dict(counts)
    print(json.dumps(figures, indent=1))
    if args.out:
        args.out.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
