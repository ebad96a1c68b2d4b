"""Train the small Flint model on prepared token arrays, in one or two phases.

A phase runs for a given number of seconds (or steps). 'main' warms up and then holds the learning
rate; 'anneal' starts from a saved state and takes it to zero with longer sequences and more
conversations. Both keep the whole corpus on the device, evaluate on held-out packages, write a CSV of
the losses, and save the weights as a model repository holds them.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import time
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor

from network import Flint, Sizes, build_masks, hub_tensors, load_hub
from optim import Optimizer
from prepare import NOT_TARGET

BORN = time.monotonic()


@dataclass
class Stream:
    """Documents of one kind, on the CPU, served as shuffled windows."""

    ids: np.ndarray
    lengths: np.ndarray
    bytes: int
    epochs: float = 0.0

    @classmethod
    def load(cls, path: Path) -> Stream:
        """Read an array file that prepare.py wrote."""
        with np.load(path) as data:
            return cls(data["ids"], data["lengths"], int(data["bytes"]))

    def windows(self, length: int, seed: int, device: torch.device) -> Iterator[Tensor]:
        """Yield windows of length + 1 ids for ever, documents in a new order each time round."""
        starts = np.concatenate([[0], np.cumsum(self.lengths)[:-1]])
        order = np.random.default_rng(seed)
        while True:
            turn = order.permutation(len(starts))
            flat = np.concatenate([self.ids[starts[i] : starts[i] + self.lengths[i]] for i in turn])
            count = (len(flat) - 1) // length
            rows = torch.from_numpy(flat.astype(np.int32)).to(device)
            for i in order.permutation(count):
                self.epochs += 1 / count
                yield rows[i * length : i * length + length + 1]


def split_batch(rows: Tensor, marks: tuple[int, int]) -> tuple[Tensor, Tensor, Tensor]:
    """Cut windows into inputs, targets and document numbers."""
    clean = rows & (NOT_TARGET - 1)
    inputs = clean[:, :-1].contiguous().long()
    targets = torch.where(rows[:, 1:] >= NOT_TARGET, -1, clean[:, 1:]).contiguous().long()
    begins = (inputs == marks[0]) | (inputs == marks[1])
    return inputs, targets, begins.cumsum(1).int()


class Trainer:
    """Everything one phase needs."""

    def __init__(self, args: argparse.Namespace) -> None:
        settings = tomllib.loads(args.settings.read_text())
        self.args = args
        self.options = settings["training"]
        self.phase = {**self.options[args.phase], **json.loads(args.override)}
        self.sizes = Sizes(**settings["model"])
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.flex = self.device.type == "cuda" and not args.plain
        torch.manual_seed(self.options["seed"])
        torch.backends.cuda.matmul.allow_tf32 = True
        torch._dynamo.config.recompile_limit = 64
        self.tokenizer = Tokenizer.from_file(f"{args.tokenizer}/tokenizer.json")
        self.marks = (self.tokenizer.token_to_id("<|endoftext|>"), self.tokenizer.token_to_id("[gMASK]"))
        self.model = Flint(self.sizes)
        self.model.initialise(self.options["seed"])
        self.model.to(self.device)
        self.optimizer = Optimizer(
            self.model,
            self.phase.get("muon_lr", self.options["muon_lr"]),
            self.phase.get("adam_lr", self.options["adam_lr"]),
            self.options["weight_decay"],
        )
        self.step = self.tokens = 0
        self.spent = 0.0
        self.fresh_optimizer = 0
        if args.resume and args.resume.suffix == ".safetensors":
            load_hub(self.model, load_file(args.resume))
            self.fresh_optimizer = 50  # steps of warm-up for moments that start at zero
        elif args.resume:
            state = torch.load(args.resume, map_location=self.device)
            self.model.load_state_dict(state["model"])
            self.optimizer.load(state["optimizer"])
            self.step, self.tokens, self.spent = state["step"], state["tokens"], state["spent"]
        if self.flex:
            self.model.compile()

    def losses(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Run the network on windows; return token losses, targets, balance loss and expert shares."""
        inputs, targets, documents = split_batch(rows, self.marks)
        if not self.options["document_mask"]:
            documents = torch.zeros_like(documents)
        masks = build_masks(documents, self.sizes.sliding_window, self.flex)
        losses, balance, shares = self.model(inputs, targets, masks)
        return losses, targets, balance, shares

    def train_step(self, rows: Tensor, factor: float) -> Tensor:
        """One update; returns the mean loss."""
        losses, targets, balance, _ = self.losses(rows)
        loss = losses.sum() / (targets >= 0).sum()
        (loss + self.options["balance_weight"] * balance).backward()
        self.optimizer.step(factor, 0.85 + 0.1 * min(self.step / 300, 1.0))
        return loss.detach()

    @torch.no_grad()
    def evaluate(self, stream: Stream, limit: int) -> tuple[float, Tensor]:
        """Return the mean loss over at most `limit` tokens from the start, and the expert shares."""
        length, count = self.phase["length"], self.phase["rows"]
        flat = torch.from_numpy(stream.ids[:limit].astype(np.int32)).to(self.device)
        number = max((len(flat) - 1) // length, 1)
        length = min(length, len(flat) - 1)
        rows = torch.stack([flat[i * length : i * length + length + 1] for i in range(number)])
        rows = torch.cat([rows, torch.full_like(rows[:1], NOT_TARGET).expand(-number % count, -1)])
        total, weight, shares = 0.0, 0, []
        for part in rows.split(count):
            losses, targets, _, share = self.losses(part)
            total += float(losses.sum())
            weight += int((targets >= 0).sum())
            shares.append(share)
        return total / weight, torch.stack(shares).mean(0)

    def factor(self, progress: float, done: int) -> float:
        """Learning-rate factor of the phase."""
        if self.args.phase == "anneal":
            return max(1.0 - progress, 0.0) * min(1.0, (done + 1) / max(self.fresh_optimizer, 1))
        return min((self.step + 1) / self.options["warmup_steps"], 1.0)

    def batches(self, text: Stream, chat: Stream) -> Iterator[Tensor]:
        """Mix text and conversation windows in the phase's shares."""
        length, rows = self.phase["length"], self.phase["rows"]
        chats = round(rows * self.phase["chat_share"])
        seed = self.options["seed"] + self.step
        texts_of, chats_of = text.windows(length, seed, self.device), chat.windows(length, seed, self.device)
        while True:
            parts = [next(texts_of) for _ in range(rows - chats)] + [next(chats_of) for _ in range(chats)]
            yield torch.stack(parts)

    def warm(self) -> None:
        """Compile on made-up tokens while the data is still being prepared."""
        if not self.flex:
            return
        shape = (self.phase["rows"], self.phase["length"] + 1)
        rows = torch.randint(0, self.sizes.vocab_size, shape, dtype=torch.int32, device=self.device)
        began = time.monotonic()
        losses, _, balance, _ = self.losses(rows)
        (losses.mean() + balance).backward()
        self.model.zero_grad(set_to_none=True)
        zeros = torch.zeros
        for (low, high), members in self.optimizer.groups.items():
            count = sum(self.optimizer.matrices[i].numel() for i in members) // (low * high)
            self.optimizer.solve(zeros(count, low, high, device=self.device))
        with torch.no_grad():
            self.losses(rows)
        torch.cuda.synchronize()
        print(f"compiled in {time.monotonic() - began:.0f} s", flush=True)

    def run(self) -> None:
        """Train the phase."""
        args = self.args
        args.out.mkdir(parents=True, exist_ok=True)
        self.warm()
        names = ("train", "chat", "heldout-code", "heldout-docs", "heldout-chat")
        while not (args.data / "heldout-chat.npz").exists():  # written last
            time.sleep(0.5)
        streams = {name: Stream.load(args.data / f"{name}.npz") for name in names}
        text, chat = streams["train"], streams["chat"]
        print({n: (len(s.ids), s.bytes) for n, s in streams.items()}, flush=True)
        batches = self.batches(text, chat)
        began = last = time.monotonic()
        if args.deadline:  # compiling can take minutes: what it took is not ours any more
            args.seconds = min(args.seconds, args.deadline - (began - BORN))
        window: list[Tensor] = []
        first_step, first_tokens = self.step, self.tokens
        shares = torch.zeros(0)
        with (args.out / f"losses-{args.phase}.csv").open("w", newline="") as handle:
            log = csv.writer(handle)
            log.writerow(("step", "tokens", "seconds", "factor", "train", *names[2:]))
            while True:
                elapsed = time.monotonic() - began
                done = self.step - first_step
                progress = done / args.steps if args.steps else elapsed / args.seconds
                if progress >= 1:
                    break
                factor = self.factor(progress, done)
                window.append(self.train_step(next(batches), factor))
                self.step += 1
                self.tokens += self.phase["rows"] * self.phase["length"]
                if done % 25 == 24:
                    mean = torch.stack(window).mean().item()
                    window.clear()
                    held: list[str] = []
                    now = time.monotonic()
                    if now - last > args.evaluate_every:
                        values = [self.evaluate(streams[n], 400_000) for n in names[2:]]
                        held, shares = [f"{v[0]:.4f}" for v in values], values[0][1]
                        self.save()
                        last = time.monotonic()
                    row = (
                        self.step,
                        self.tokens,
                        f"{self.spent + now - began:.1f}",
                        f"{factor:.4f}",
                        f"{mean:.4f}",
                        *held,
                    )
                    log.writerow(row)
                    handle.flush()
                    if held or done % 100 == 99:
                        print(*row, flush=True)
                    if not math.isfinite(mean):
                        raise SystemExit("loss is not finite")
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        seconds = time.monotonic() - began
        self.spent += seconds
        rate = (self.tokens - first_tokens) / seconds
        self.save()
        figures: dict[str, object] = {"steps": self.step, "tokens": self.tokens, "seconds": round(self.spent, 1)}
        figures["tokens_per_second"] = round(rate)
        figures["epochs_text"], figures["epochs_chat"] = round(text.epochs, 2), round(chat.epochs, 2)
        for name in names[2:]:
            stream = streams[name]
            loss, shares = self.evaluate(stream, len(stream.ids))
            per_byte = loss * len(stream.ids) / stream.bytes / math.log(2)
            figures[name] = {"loss": round(loss, 4), "perplexity": round(math.exp(loss), 3)}
            if name != "heldout-chat":
                figures[name] |= {"bits_per_byte": round(per_byte, 4)}  # type: ignore[operator]
            figures[f"{name}_tokens"], figures[f"{name}_bytes"] = len(stream.ids), stream.bytes
            if name == "heldout-code":
                figures["expert_share"] = [[round(v, 4) for v in layer.tolist()] for layer in shares]
        if args.sample and args.sample.exists():
            figures["sample_loss_1024"] = round(self.sample_loss(args.sample.read_text("utf-8")), 4)
        (args.out / f"figures-{args.phase}.json").write_text(json.dumps(figures, indent=1))
        print(json.dumps({k: v for k, v in figures.items() if k != "expert_share"}))
        low = min(min(layer) for layer in figures["expert_share"])  # type: ignore[attr-defined]
        print("least used expert's share of tokens", low, "(even would be", 6 / 16, ")")

    @torch.no_grad()
    def sample_loss(self, text: str, window: int = 1024) -> float:
        """Mean loss over a text in windows that see nothing before them; check_model.py makes the same sum."""
        self.tokenizer.encode_special_tokens = True
        ids = torch.tensor(self.tokenizer.encode(text).ids, device=self.device)
        ids = ids[: len(ids) // window * window]
        targets = torch.cat([ids[1:], ids[:1]])
        targets[window - 1 :: window] = -1
        documents = torch.arange(len(ids), device=self.device, dtype=torch.int32) // window
        size = self.phase["rows"] * self.phase["length"]
        total = 0.0
        for i in range(0, len(ids), size):
            parts = [torch.nn.functional.pad(t[i : i + size], (0, max(size - len(t[i:]), 0))) for t in (ids, documents)]
            aims = torch.nn.functional.pad(targets[i : i + size], (0, max(size - len(targets[i:]), 0)), value=-1)
            shaped = [t.view(self.phase["rows"], self.phase["length"]) for t in (*parts, aims)]
            masks = build_masks(shaped[1], self.sizes.sliding_window, self.flex)
            total += float(self.model(shaped[0], shaped[2], masks)[0].sum())
        return total / int((targets >= 0).sum())

    def save(self) -> None:
        """Save the weights for use, and the state for the next phase."""
        out = self.args.out
        save_file(hub_tensors(self.model), out / "model.safetensors", {"format": "pt"})
        ends = [self.tokenizer.token_to_id(t) for t in ("<|endoftext|>", "<|user|>", "<|observation|>")]
        (out / "config.json").write_text(json.dumps(self.sizes.config(ends), indent=2) + "\n")
        state = {"model": self.model.state_dict(), "optimizer": self.optimizer.state()}
        torch.save({**state, "step": self.step, "tokens": self.tokens, "spent": self.spent}, out / "state.pt")


def main() -> None:
    """Read the arguments and train."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("phase", choices=["main", "anneal"])
    parser.add_argument("--settings", type=Path, default=Path(__file__).with_name("settings.toml"))
    parser.add_argument("--tokenizer", required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--resume", type=Path)
    parser.add_argument("--sample", type=Path, help="text whose loss is reported at the end")
    parser.add_argument("--seconds", type=float, default=480)
    parser.add_argument("--deadline", type=float, default=0, help="end training this long after the program's start")
    parser.add_argument("--steps", type=int, default=0, help="instead of seconds: the same result every time")
    parser.add_argument("--evaluate-every", type=float, default=60)
    parser.add_argument("--override", default="{}", help="JSON that replaces settings of the phase")
    parser.add_argument("--plain", action="store_true", help="no compilation, no flex attention")
    args = parser.parse_args()
    Trainer(args).run()


if __name__ == "__main__":
    main()
