"""The Flint network, written for fast training, with its weights saved as the class in transformers reads them.

Two things differ from the reference in form, not in value. Routed experts run as one wide SwiGLU whose
activations are multiplied by each token's routing weights (zero for experts not chosen): with sixteen
experts this costs 2.7 times the arithmetic of the chosen ones, but needs no sorting and no grouped
product, and the compiler fuses it. Attention uses flex attention on a GPU, the learned sink applied
through the log-sum-exp, and a plain masked softmax elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention


@dataclass(frozen=True)
class Sizes:
    """Sizes of the network, named as in the model's config.json."""

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    num_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    shared_expert_intermediate_size: int
    sliding_window: int
    max_position_embeddings: int
    rope_theta: float
    rms_norm_eps: float

    def is_full(self, layer: int) -> bool:
        """Tell whether a layer attends to everything before it, without positions."""
        return layer < 2 or layer % 4 == 1 or layer == self.num_hidden_layers - 1

    def config(self, end_ids: list[int]) -> dict[str, object]:
        """Return the content of config.json."""
        kinds = ["full_attention" if self.is_full(i) else "sliding_attention" for i in range(self.num_hidden_layers)]
        fields = asdict(self)
        theta = fields.pop("rope_theta")
        return {
            "architectures": ["FlintForCausalLM"],
            "model_type": "flint",
            **fields,
            "layer_types": kinds,
            "no_rope_layer_indices": [i for i, kind in enumerate(kinds) if kind == "full_attention"],
            "mlp_only_layers": [0, 1],
            "router_score_function": "sigmoid",
            "softmax_type": "learnable",
            "rope_parameters": {"rope_type": "default", "rope_theta": theta},
            "hidden_act": "silu",
            "norm_topk_prob": True,
            "attention_bias": False,
            "tie_word_embeddings": False,
            "eos_token_id": end_ids,
            "pad_token_id": end_ids[0],
            "dtype": "bfloat16",
        }


@dataclass
class Masks:
    """What attention needs beside q, k and v: block masks for flex attention, boolean masks without it."""

    full: BlockMask | Tensor
    sliding: BlockMask | Tensor


def build_masks(documents: Tensor, window: int, flex: bool, compiled: bool = True) -> Masks:
    """Build the masks of packed sequences; `documents` numbers each token's document, row by row."""
    rows, length = documents.shape
    if flex:

        def full_rule(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            return (q >= k) & (documents[b, q] == documents[b, k])

        def sliding_rule(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            return (q >= k) & (q - k < window) & (documents[b, q] == documents[b, k])

        make = compiled_block_mask if compiled else create_block_mask
        size = (rows, None, length, length)
        device = documents.device.type
        return Masks(make(full_rule, *size, device=device), make(sliding_rule, *size, device=device))
    place = torch.arange(length, device=documents.device)
    ahead = place[:, None] - place[None, :]
    same = documents[:, :, None] == documents[:, None, :]
    full = (same & (ahead >= 0))[:, None]
    return Masks(full, full & (ahead < window))


compiled_block_mask: Callable[..., BlockMask] = torch.compile(create_block_mask, dynamic=False)


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMS norm in float32, rounded once."""
    wide = x.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps) * weight).to(x.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the two halves of each head in float32."""
    low, high = x.float().chunk(2, dim=-1)
    return torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1).to(x.dtype)


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """Multiply by a float32 master weight in the activation's type."""
    return F.linear(x, weight.to(x.dtype))


def attend(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, mask: BlockMask | Tensor, scale: float) -> Tensor:
    """Attention with a learned sink per query head, one key and value head shared by all."""
    if isinstance(mask, BlockMask):
        out, lse = flex_attention(q, k, v, block_mask=mask, scale=scale, enable_gqa=True, return_lse=True)
        return (out.float() * torch.sigmoid(lse - sinks[None, :, None])[..., None]).to(q.dtype)
    repeat = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1)
    scores = (q.float() @ k.float().transpose(2, 3) * scale).masked_fill(~mask, float("-inf"))
    sink = sinks[None, :, None, None].expand(*scores.shape[:-1], 1)
    weights = torch.cat([scores, sink], -1).softmax(-1)[..., :-1]
    return weights.to(v.dtype) @ v


class Attention(nn.Module):
    """Grouped-query attention with normed queries and keys, rotary on sliding layers only."""

    def __init__(self, sizes: Sizes, full: bool) -> None:
        super().__init__()
        self.sizes, self.full = sizes, full
        width, head = sizes.hidden_size, sizes.head_dim
        self.q = nn.Parameter(torch.empty(sizes.num_attention_heads * head, width))
        self.k = nn.Parameter(torch.empty(sizes.num_key_value_heads * head, width))
        self.v = nn.Parameter(torch.empty(sizes.num_key_value_heads * head, width))
        self.o = nn.Parameter(torch.empty(width, sizes.num_attention_heads * head))
        self.q_norm = nn.Parameter(torch.ones(head))
        self.k_norm = nn.Parameter(torch.ones(head))
        self.sinks = nn.Parameter(torch.zeros(sizes.num_attention_heads))

    def forward(self, x: Tensor, mask: BlockMask | Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        rows, length, _ = x.shape
        head, eps = self.sizes.head_dim, self.sizes.rms_norm_eps
        q = norm(linear(x, self.q).view(rows, length, -1, head), self.q_norm, eps).transpose(1, 2)
        k = norm(linear(x, self.k).view(rows, length, -1, head), self.k_norm, eps).transpose(1, 2)
        v = linear(x, self.v).view(rows, length, -1, head).transpose(1, 2)
        if not self.full:
            q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        out = attend(q, k, v, self.sinks, mask, head**-0.5)
        return linear(out.transpose(1, 2).reshape(rows, length, -1), self.o)


class Dense(nn.Module):
    """SwiGLU."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.empty(inner, width))
        self.up = nn.Parameter(torch.empty(inner, width))
        self.down = nn.Parameter(torch.empty(width, inner))

    def forward(self, x: Tensor) -> Tensor:
        return linear((F.silu(linear(x, self.gate).float()) * linear(x, self.up).float()).to(x.dtype), self.down)


class Experts(nn.Module):
    """Routed experts and the shared expert; also returns the balance loss and each expert's share of tokens."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.sizes = sizes
        count, inner, width = sizes.num_experts, sizes.moe_intermediate_size, sizes.hidden_size
        self.router = nn.Parameter(torch.empty(count, width))
        self.gate = nn.Parameter(torch.empty(count, inner, width))
        self.up = nn.Parameter(torch.empty(count, inner, width))
        self.down = nn.Parameter(torch.empty(count, width, inner))
        self.shared = Dense(width, sizes.shared_expert_intermediate_size)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        count, top = self.sizes.num_experts, self.sizes.num_experts_per_tok
        with torch.autocast(x.device.type, enabled=False):
            scores = F.linear(x.float(), self.router).sigmoid()
        # The rank of each score, ties to the lower index: counted rather than sorted, so that it fuses.
        other, own = scores.detach()[..., None, :], scores.detach()[..., :, None]
        index = torch.arange(count, device=x.device)
        rank = ((other > own) | ((other == own) & (index[None, :] < index[:, None]))).sum(-1)
        kept = scores * (rank < top)
        weights = kept / kept.sum(-1, keepdim=True)
        share = (rank < top).float().flatten(0, -2).mean(0)
        mean_score = (scores / scores.sum(-1, keepdim=True)).flatten(0, -2).mean(0)
        balance = count * (share / top * mean_score).sum()
        gate = linear(x, self.gate.flatten(0, 1)).float()
        up = linear(x, self.up.flatten(0, 1)).float()
        inner = (F.silu(gate) * up).unflatten(-1, (count, -1)) * weights[..., None]
        down = self.down.transpose(0, 1).flatten(1, 2)  # [width, expert * inner]
        routed = linear(inner.flatten(-2).to(x.dtype), down)
        return routed + self.shared(x), balance, share.detach()


class Layer(nn.Module):
    """One pre-norm decoder layer."""

    def __init__(self, sizes: Sizes, index: int) -> None:
        super().__init__()
        self.eps = sizes.rms_norm_eps
        self.attention_norm = nn.Parameter(torch.ones(sizes.hidden_size))
        self.mlp_norm = nn.Parameter(torch.ones(sizes.hidden_size))
        self.attention = Attention(sizes, sizes.is_full(index))
        self.mlp = Dense(sizes.hidden_size, sizes.intermediate_size) if index < 2 else Experts(sizes)

    def forward(
        self, x: Tensor, mask: BlockMask | Tensor, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        x = x + self.attention(norm(x, self.attention_norm, self.eps), mask, cos, sin)
        inner = norm(x, self.mlp_norm, self.eps)
        if isinstance(self.mlp, Experts):
            out, balance, share = self.mlp(inner)
            return x + out, balance, share
        return x + self.mlp(inner), None, None


class Flint(nn.Module):
    """The whole network; forward returns summed token losses and their count, not logits."""

    cos: Tensor
    sin: Tensor

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.sizes = sizes
        self.embed = nn.Parameter(torch.empty(sizes.vocab_size, sizes.hidden_size))
        self.layers = nn.ModuleList(Layer(sizes, i) for i in range(sizes.num_hidden_layers))
        self.final_norm = nn.Parameter(torch.ones(sizes.hidden_size))
        self.head = nn.Parameter(torch.empty(sizes.vocab_size, sizes.hidden_size))
        angles = sizes.rope_theta ** -(torch.arange(0, sizes.head_dim, 2).float() / sizes.head_dim)
        turns = torch.outer(torch.arange(sizes.max_position_embeddings).float(), angles)
        self.register_buffer("cos", turns.cos(), persistent=False)
        self.register_buffer("sin", turns.sin(), persistent=False)
        self.run_layer: list[Callable[..., tuple[Tensor, Tensor | None, Tensor | None]]] = list(self.layers)
        self.run_loss: Callable[..., Tensor] = token_losses

    def compile(self) -> None:  # type: ignore[override]
        """Compile layer by layer: three distinct graphs, so far quicker to build than the whole."""
        self.run_layer = [torch.compile(layer, dynamic=False) for layer in self.layers]
        self.run_loss = torch.compile(token_losses, dynamic=False)

    def initialise(self, seed: int) -> None:
        """Draw the first weights: fan-in scaled, block outputs at zero."""
        draw = torch.Generator().manual_seed(seed)
        for name, p in self.named_parameters():
            if p.dim() < 2:
                continue
            if name.endswith((".o", ".down")):
                p.data.zero_()
            else:
                std = 0.02 if name.endswith((".router", "head")) else 0.05 if name == "embed" else p.shape[-1] ** -0.5
                p.data.copy_(torch.randn(p.shape, generator=draw) * std)

    def forward(self, tokens: Tensor, targets: Tensor, masks: Masks) -> tuple[Tensor, Tensor, Tensor]:
        """Return each token's loss (zero where the target is negative), the mean balance loss, the expert shares."""
        length = tokens.shape[1]
        cos, sin = self.cos[:length], self.sin[:length]
        x = F.embedding(tokens, self.embed).to(torch.bfloat16 if tokens.is_cuda else torch.float32)
        balances, shares = [], []
        for index, layer in enumerate(self.run_layer):
            mask = masks.full if self.sizes.is_full(index) else masks.sliding
            x, balance, share = layer(x, mask, cos, sin)
            if balance is not None and share is not None:
                balances.append(balance)
                shares.append(share)
        losses = self.run_loss(x, self.final_norm, self.head, targets, self.sizes.rms_norm_eps)
        return losses, torch.stack(balances).mean(), torch.stack(shares)


def token_losses(x: Tensor, weight: Tensor, head: Tensor, targets: Tensor, eps: float) -> Tensor:
    """Final norm, head and cross-entropy of each token in float32."""
    logits = linear(norm(x, weight, eps), head).float()
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1, reduction="none")


def hub_tensors(model: Flint) -> dict[str, Tensor]:
    """Return the weights under the names and in the types that a model repository uses."""
    half = torch.bfloat16
    out = {
        "model.embed_tokens.weight": model.embed.to(half),
        "model.norm.weight": model.final_norm.to(half),
        "lm_head.weight": model.head.to(half),
    }
    for index, layer in enumerate(model.layers):
        base = f"model.layers.{index}."
        attention, mlp = layer.attention, layer.mlp
        out[base + "input_layernorm.weight"] = layer.attention_norm.to(half)
        out[base + "post_attention_layernorm.weight"] = layer.mlp_norm.to(half)
        for part in ("q", "k", "v", "o"):
            out[f"{base}self_attn.{part}_proj.weight"] = getattr(attention, part).to(half)
        out[base + "self_attn.q_norm.weight"] = attention.q_norm.to(half)
        out[base + "self_attn.k_norm.weight"] = attention.k_norm.to(half)
        out[base + "self_attn.softmax_offset"] = attention.sinks.float()
        dense = mlp.shared if isinstance(mlp, Experts) else mlp
        name = "mlp.shared_expert." if isinstance(mlp, Experts) else "mlp."
        for part in ("gate", "up", "down"):
            out[f"{base}{name}{part}_proj.weight"] = getattr(dense, part).to(half)
        if isinstance(mlp, Experts):
            out[base + "mlp.gate.weight"] = mlp.router.float()
            for part in ("gate", "up", "down"):
                for expert, matrix in enumerate(getattr(mlp, part)):
                    out[f"{base}mlp.experts.{expert}.{part}_proj.weight"] = matrix.to(half)
    return {name: tensor.detach().cpu().contiguous() for name, tensor in out.items()}


@torch.no_grad()
def load_hub(model: Flint, tensors: dict[str, Tensor]) -> None:
    """Take up weights that `hub_tensors` wrote."""
    model.embed.copy_(tensors["model.embed_tokens.weight"])
    model.final_norm.copy_(tensors["model.norm.weight"])
    model.head.copy_(tensors["lm_head.weight"])
    for index, layer in enumerate(model.layers):
        base = f"model.layers.{index}."
        layer.attention_norm.copy_(tensors[base + "input_layernorm.weight"])
        layer.mlp_norm.copy_(tensors[base + "post_attention_layernorm.weight"])
        for part in ("q", "k", "v", "o"):
            getattr(layer.attention, part).copy_(tensors[f"{base}self_attn.{part}_proj.weight"])
        layer.attention.q_norm.copy_(tensors[base + "self_attn.q_norm.weight"])
        layer.attention.k_norm.copy_(tensors[base + "self_attn.k_norm.weight"])
        layer.attention.sinks.copy_(tensors[base + "self_attn.softmax_offset"])
        routed = isinstance(layer.mlp, Experts)
        dense = layer.mlp.shared if routed else layer.mlp
        for part in ("gate", "up", "down"):
            name = "mlp.shared_expert." if routed else "mlp."
            getattr(dense, part).copy_(tensors[f"{base}{name}{part}_proj.weight"])
            if routed:
                names = [f"{base}mlp.experts.{e}.{part}_proj.weight" for e in range(model.sizes.num_experts)]
                getattr(layer.mlp, part).copy_(torch.stack([tensors[n] for n in names]))
        if routed:
            layer.mlp.router.copy_(tensors[base + "mlp.gate.weight"])
