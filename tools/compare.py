"""Compares two checkpoints of one model over a text: perplexities, KL divergence, agreement on the next token.

    python tools/compare.py checkpoint/ flint-small.gguf tests/data/heldout.txt

Activations stay fp32, so what differs is the weights.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import flint_rs
import numpy as np

WINDOW_TOKENS = 1024


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """Natural logarithms of the probabilities, `[T, V]`, in float64."""
    shifted = logits.astype(np.float64) - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


def main() -> None:
    """Prints one line a figure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("reference", type=Path, help="the checkpoint to compare with")
    parser.add_argument("checkpoint", type=Path, help="the checkpoint to judge")
    parser.add_argument("text", type=Path, help="a UTF-8 text")
    args = parser.parse_args()
    losses: list[tuple[float, float, float, float]] = []
    with (
        flint_rs.Flint(args.reference, device="cpu", dtype="float32") as reference,
        flint_rs.Flint(args.checkpoint, device="cpu", dtype="float32") as checkpoint,
    ):
        ids = reference.tokenize(args.text.read_text(encoding="utf-8"))
        for start in range(0, len(ids) - 1, WINDOW_TOKENS):
            window = ids[start : start + WINDOW_TOKENS]
            p, q = log_softmax(reference.logits(window)), log_softmax(checkpoint.logits(window))
            rows, following = np.arange(len(window) - 1), window[1:]
            losses += zip(
                -p[rows, following],
                -q[rows, following],
                (np.exp(p) * (p - q)).sum(axis=-1)[:-1],
                (p.argmax(axis=-1) == q.argmax(axis=-1))[:-1],
                strict=True,
            )
    reference_loss, loss, divergence, agreement = np.mean(losses, axis=0)
    print(f"tokens scored          {len(losses)}, in windows of {WINDOW_TOKENS}")
    print(f"perplexity, reference  {np.exp(reference_loss):.4f}")
    print(f"perplexity, checkpoint {np.exp(loss):.4f}")
    print(f"mean KL divergence     {divergence:.5f} nats")
    print(f"same next token        {100 * agreement:.2f} %")


if __name__ == "__main__":
    main()
