"""End to end from Python on a GPU: a synthetic Flint of full size, prompts of several lengths, and the tokens after.

Appends rows to a CSV: time to the first token, and tokens/s over all sequences of the batch. Prompts are random tokens.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import random
import sys
import threading
import time
from pathlib import Path
from typing import Any

import flint_rs

COLUMNS = [
    "date",
    "device",
    "format",
    "layers",
    "prompt_tokens",
    "batch",
    "new_tokens",
    "load_s",
    "first_token_ms",
    "prefill_tokens_s",
    "token_ms",
    "tokens_s",
    "stream_token_ms",
]


def numbers(text: str) -> list[int]:
    """Integers with commas between them."""
    return [int(number) for number in text.split(",")]


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--synthetic", choices=["nvfp4", "bf16"], default="nvfp4")
    parser.add_argument("--layers", type=int, default=49)
    parser.add_argument("--prompts", type=numbers, default=[16, 512, 2048], help="tokens of a prompt")
    parser.add_argument("--batches", type=numbers, default=[1, 2, 4, 8], help="sequences at a time")
    parser.add_argument("--new-tokens", type=int, default=256)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path, required=True, help="the CSV, which gets more rows")
    return parser.parse_args()


def streamed(flint: flint_rs.Flint, prompt: list[int], new_tokens: int) -> float:
    """Seconds a token as the reader of a stream sees them, the first left out."""
    times = []
    for _ in flint.stream(prompt, max_tokens=new_tokens):
        times.append(time.perf_counter())
    return (times[-1] - times[0]) / (len(times) - 1)


def measure(flint: flint_rs.Flint, prompt_tokens: int, batch: int, new_tokens: int) -> dict[str, Any]:
    """One row."""
    vocab = flint.config["vocab_size"]
    source = random.Random(prompt_tokens)
    prompts = [source.choices(range(vocab), k=prompt_tokens) for _ in range(batch)]
    flint.generate(prompts, max_tokens=8)  # graphs are recorded, clocks go up
    results = flint.generate(prompts, max_tokens=new_tokens)
    first = [result.timings.time_to_first_token for result in results]
    # All of them decode from when the last one has joined.
    token = min(result.timings.decode / (new_tokens - 1) for result in results)
    stream = [0.0] * batch

    def read(index: int) -> None:
        stream[index] = streamed(flint, prompts[index], new_tokens)

    threads = [threading.Thread(target=read, args=(index,)) for index in range(batch)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return {
        "prompt_tokens": prompt_tokens,
        "batch": batch,
        "new_tokens": new_tokens,
        "first_token_ms": f"{1e3 * max(first):.2f}",
        "prefill_tokens_s": f"{batch * prompt_tokens / max(first):.0f}",
        "token_ms": f"{1e3 * token:.4f}",
        "tokens_s": f"{batch / token:.1f}",
        "stream_token_ms": f"{1e3 * min(stream):.4f}",
    }


def main() -> int:
    """Measures and appends."""
    args = arguments()
    start = time.perf_counter()
    flint = flint_rs.Flint.synthetic(
        dims={"num_hidden_layers": args.layers},
        format=args.synthetic,
        device=args.device,
        max_sequences=max(args.batches),
        context_tokens=max(args.prompts) + args.new_tokens,
    )
    load = time.perf_counter() - start
    fixed = {
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "device": flint.device.removeprefix("device cuda: ").split(";")[0],
        "format": args.synthetic.upper(),
        "layers": args.layers,
        "load_s": f"{load:.2f}",
    }
    with flint, args.out.open("a", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        if file.tell() == 0:
            writer.writeheader()
        for prompt_tokens in args.prompts:
            for batch in args.batches:
                row = {**fixed, **measure(flint, prompt_tokens, batch, args.new_tokens)}
                writer.writerow(row)
                file.flush()
                print(row, file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
