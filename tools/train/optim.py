"""Muon for the weight matrices, AdamW for everything else.

Muon takes the momentum of a matrix to its nearest orthogonal matrix (five Newton-Schulz steps in
BF16) and scales it so that its entries are as large as AdamW's usual step. Each expert is a matrix of
its own. Matrices of one shape are handled in one batch, so a step costs a few dozen products.
"""

from __future__ import annotations

from collections import defaultdict

import torch
from torch import Tensor, nn


def orthogonal(x: Tensor) -> Tensor:
    """Approximate the orthogonal factor of each matrix of a batch, rows not more than columns."""
    a, b, c = 3.4445, -4.7750, 2.0315
    y = x.bfloat16()
    y = y / (y.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        square = y @ y.mT
        y = a * y + (b * square + c * square @ square) @ y
    return y


class Optimizer:
    """Both rules over one network, with one schedule factor."""

    def __init__(self, model: nn.Module, muon_lr: float, adam_lr: float, decay: float) -> None:
        self.muon_lr, self.adam_lr, self.decay = muon_lr, adam_lr, decay
        names = dict(model.named_parameters())
        plain = ("embed", "head", "router")
        self.matrices = [p for n, p in names.items() if p.dim() >= 2 and not n.endswith(plain)]
        rest = [p for n, p in names.items() if p.dim() < 2 or n.endswith(plain)]
        self.momentum = [torch.zeros_like(p) for p in self.matrices]
        self.groups: dict[tuple[int, int], list[int]] = defaultdict(list)
        for i, p in enumerate(self.matrices):
            low, high = sorted(p.shape[-2:])
            self.groups[low, high].append(i)
        fused = next(model.parameters()).is_cuda
        self.adam = torch.optim.AdamW(rest, lr=adam_lr, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0, fused=fused)
        self.solve = torch.compile(orthogonal, dynamic=False) if fused else orthogonal

    @torch.no_grad()
    def step(self, factor: float, momentum: float = 0.95) -> None:
        """Apply one update and clear the gradients."""
        for group in self.adam.param_groups:
            group["lr"] = self.adam_lr * factor
        self.adam.step()
        self.adam.zero_grad(set_to_none=True)
        grads = [p.grad for p in self.matrices if p.grad is not None]
        torch._foreach_lerp_(self.momentum, grads, 1 - momentum)
        torch._foreach_lerp_(grads, self.momentum, momentum)  # Nesterov
        torch._foreach_mul_(self.matrices, 1 - self.muon_lr * factor * self.decay)
        for (low, high), members in self.groups.items():
            flat = [grads[i] if grads[i].shape[-2] == low else grads[i].mT for i in members]
            batch = torch.cat([g.reshape(-1, low, high) for g in flat])
            update = self.solve(batch).float() * (-0.2 * high**0.5 * self.muon_lr * factor)
            sizes = [g.numel() // (low * high) for g in flat]
            for i, part in zip(members, update.split(sizes), strict=True):
                p = self.matrices[i]
                shaped = part if p.shape[-2] == low else part.mT
                p.add_(shaped.reshape(p.shape))
        for p in self.matrices:
            p.grad = None

    def state(self) -> dict[str, object]:
        """Return what is needed to go on."""
        return {"momentum": self.momentum, "adam": self.adam.state_dict()}

    def load(self, state: dict[str, object]) -> None:
        """Take up a saved state."""
        saved = state["momentum"]
        assert isinstance(saved, list)
        for mine, other in zip(self.momentum, saved, strict=True):
            mine.copy_(other)
        adam = state["adam"]
        assert isinstance(adam, dict)
        self.adam.load_state_dict(adam)
