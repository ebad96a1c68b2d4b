"""Sample answers to held-out prompts with the training network itself, and judge them.

The quick form of check_model.py for the machine that trained: no transformers needed, the whole prefix is
run again for each token, all prompts at once.
"""

from __future__ import annotations

import argparse
import json
import tomllib
from collections import Counter
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Tensor

from chat_judge import ENDS, judge, load_prompts
from network import Flint, Sizes, build_masks, linear, load_hub, norm


def next_logits(model: Flint, ids: Tensor, last: Tensor) -> Tensor:
    """Logits after each row's last token; rows are padded on the right."""
    sizes = model.sizes
    masks = build_masks(torch.zeros_like(ids), sizes.sliding_window, False)
    x = F.embedding(ids, model.embed).to(torch.bfloat16 if ids.is_cuda else torch.float32)
    for index, layer in enumerate(model.layers):
        mask = masks.full if sizes.is_full(index) else masks.sliding
        x = layer(x, mask, model.cos[: ids.shape[1]], model.sin[: ids.shape[1]])[0]
    x = x[torch.arange(len(ids), device=ids.device), last]
    return linear(norm(x, model.final_norm, sizes.rms_norm_eps), model.head).float()


def draw(logits: Tensor, top_k: int, top_p: float, generator: torch.Generator) -> Tensor:
    """Sample at temperature 1 from the top k, then the smallest set that holds top p."""
    best, places = logits.topk(top_k, dim=-1)
    shares = best.softmax(-1)
    shares = shares * (shares.cumsum(-1) - shares < top_p)
    return places.gather(1, torch.multinomial(shares, 1, generator=generator))[:, 0]


def main() -> None:
    """Sample, judge and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("weights", type=Path)
    parser.add_argument("--settings", type=Path, default=Path(__file__).with_name("settings.toml"))
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--prompts", type=int, default=200)
    parser.add_argument("--limit", type=int, default=160)
    parser.add_argument("--show", type=int, default=10)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    tokenizer = Tokenizer.from_file(str(args.tokenizer / "tokenizer.json"))
    model = Flint(Sizes(**tomllib.loads(args.settings.read_text())["model"]))
    load_hub(model, load_file(args.weights))
    model.to(device)
    prompts = load_prompts(args.tokenizer / "chat_template.jinja", 0, args.prompts)
    rows = [tokenizer.encode(p[0]).ids for p in prompts]
    ends = torch.tensor([tokenizer.token_to_id(e) for e in ENDS], device=device)
    ids = torch.zeros(len(rows), max(map(len, rows)) + args.limit, dtype=torch.long, device=device)
    for i, row in enumerate(rows):
        ids[i, : len(row)] = torch.tensor(row)
    length = torch.tensor([len(r) for r in rows], device=device)
    live = torch.ones(len(rows), dtype=torch.bool, device=device)
    generator = torch.Generator(device).manual_seed(1)
    with torch.no_grad():
        for _ in range(args.limit):
            active = live.nonzero()[:, 0]
            if not len(active):
                break
            chosen = []
            for part in active.split(32):
                width = int(length[part].max())
                chosen.append(draw(next_logits(model, ids[part, :width], length[part] - 1), 20, 0.95, generator))
            tokens = torch.cat(chosen)
            ids[active, length[active]] = tokens
            length[active] += 1
            live[active] = ~torch.isin(tokens, ends)
    counts: Counter[str] = Counter()
    for i, (text, tools, expected) in enumerate(prompts):
        answer = tokenizer.decode(ids[i, len(rows[i]) : length[i]].tolist(), skip_special_tokens=False)
        counts += judge(answer, tools, expected)
        if i % max(len(prompts) // args.show, 1) == 0:
            print(f"...{text[-100:]!r} => {answer!r}")
    print(json.dumps(counts))
    if args.out:
        args.out.write_text(json.dumps(counts, indent=1) + "\n")


if __name__ == "__main__":
    main()
