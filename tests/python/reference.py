"""Independent references: random Flints of transformers, and GGUF files written and read by the `gguf` package.

Nothing here uses flint_rs, so that what the tests compare with was not written by this project.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf.quants import dequantize
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import FlintConfig, FlintForCausalLM

FLINT_SPLITS = (
    r"\p{N}{1,3}",
    r"[一-龥぀-ゟ゠-ヿ]+",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)
CONTROL_TOKENS = (
    "<|endoftext|>",
    "[gMASK]",
    "<sop>",
    "<|system|>",
    "<|user|>",
    "<|assistant|>",
    "<|observation|>",
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
)
MERGES = (("t", "h"), ("th", "e"), ("i", "n"), ("Ġ", "the"), ("e", "r"), ("r", "e"), ("re", "t"), ("1", "2"))


@dataclass(frozen=True)
class Shape:
    """Dimensions of a small Flint; the kind of each layer follows FlintConfig's own rule."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    dense: int
    experts: int
    top_k: int
    expert: int
    shared: int
    window: int

    def __str__(self) -> str:
        attention = f"h{self.heads}/{self.kv_heads}x{self.head_dim}-w{self.window}"
        return f"{self.layers}x{self.hidden}-{attention}-e{self.experts}/{self.top_k}"


# Odd layer counts, both head dimensions, 1, 2 and 4 KV heads, several expert counts and windows. All input widths are
# multiples of 64, so that each shape can also be NVFP4.
SHAPES = (
    Shape(5, 128, 4, 2, 64, 192, 8, 2, 64, 128, 17),
    Shape(7, 192, 8, 1, 128, 256, 16, 6, 64, 64, 33),
    Shape(4, 256, 8, 4, 64, 320, 5, 3, 128, 192, 8),
    # top-1 is left out: one flipped choice swaps the whole output, and mean KL then counts flips, not rounding.
    Shape(3, 128, 2, 2, 128, 128, 3, 2, 64, 64, 1),
    Shape(9, 128, 16, 4, 128, 256, 32, 4, 64, 128, 65),
    Shape(6, 320, 6, 1, 64, 448, 12, 12, 128, 64, 100),
)


def tokenizer() -> Tokenizer:
    """A byte-level BPE over Flint's pre-tokenizer: 256 bytes, a few merges, control tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = alphabet + ["".join(pair) for pair in MERGES]
    bpe = models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=list(MERGES))
    result = Tokenizer(bpe)
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in FLINT_SPLITS]
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    result.pre_tokenizer = pre_tokenizers.Sequence([*splits, byte_level])
    result.decoder = decoders.ByteLevel()
    result.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in CONTROL_TOKENS])
    return result


VOCAB_SIZE = 256 + len(MERGES) + len(CONTROL_TOKENS)


def config(shape: Shape) -> FlintConfig:
    """The transformers configuration of `shape`."""
    return FlintConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=shape.hidden,
        intermediate_size=shape.dense,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        num_experts=shape.experts,
        num_experts_per_tok=shape.top_k,
        moe_intermediate_size=shape.expert,
        shared_expert_intermediate_size=shape.shared,
        sliding_window=shape.window,
        max_position_embeddings=512,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        eos_token_id=256 + len(MERGES),
    )


def random_flint(shape: Shape, seed: int) -> FlintForCausalLM:
    """A Flint in fp32 whose weights are random BF16 values, of a size that makes every part matter.

    Projections keep the variance of their input; q and k norms are above 1 so that attention is peaked; sinks compete
    with the scores.
    """
    generator = torch.Generator().manual_seed(seed)
    model = FlintForCausalLM(config(shape)).float().eval()

    def normal(parameter: torch.Tensor, std: float, mean: float = 0.0) -> None:
        values = torch.randn(parameter.shape, generator=generator) * std + mean
        parameter.copy_(values.bfloat16().float())

    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("q_norm.weight", "k_norm.weight")):
                normal(parameter, 0.2, mean=1.5)
            elif "norm.weight" in name:
                normal(parameter, 0.2, mean=1.0)
            elif name.endswith(("sinks", "embed_tokens.weight")):
                normal(parameter, 1.0)
            else:
                normal(parameter, parameter.shape[-1] ** -0.5)
    return runnable(model)


def runnable(model: FlintForCausalLM) -> FlintForCausalLM:
    """Sets the plain implementations: attention with sinks, and one expert after the other."""
    model.set_attn_implementation("eager")
    model.config._experts_implementation = "eager"
    return model.eval()


def logits(model: FlintForCausalLM, token_ids: list[int]) -> np.ndarray:
    """Logits after each token, `[T, V]`, in fp32."""
    with torch.no_grad():
        return model(torch.tensor([token_ids]), use_cache=False).logits[0].float().numpy()


def save_safetensors(model: FlintForCausalLM, folder: Path, dtype: torch.dtype = torch.bfloat16) -> Path:
    """Writes `model` as transformers does, with a tokenizer.json beside it."""
    folder.mkdir(parents=True, exist_ok=True)
    state = {name: value.to(dtype) for name, value in model.state_dict().items()}
    model.save_pretrained(folder, state_dict=state)
    tokenizer().save(str(folder / "tokenizer.json"))
    return folder


def read_flint_gguf(path: Path, config: FlintConfig) -> FlintForCausalLM:
    """A Flint in fp32 with the weights of a GGUF as the `gguf` package decodes them."""
    reader = gguf.GGUFReader(path)
    tensors: dict[str, torch.Tensor] = {}
    for tensor in reader.tensors:
        values = dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        shape = tuple(int(n) for n in reversed(tensor.shape))
        tensors[tensor.name] = torch.from_numpy(values.reshape(shape).copy())

    def scaled(name: str) -> torch.Tensor:
        weight = tensors[f"{name}.weight"]
        scale = tensors.get(f"{name}.scale")
        if scale is None:
            return weight
        return weight * scale.reshape(-1, *([1] * (weight.dim() - 1)))

    state = {
        "model.embed_tokens.weight": scaled("token_embd"),
        "model.norm.weight": tensors["output_norm.weight"],
        "lm_head.weight": scaled("output"),
    }
    for i in range(config.num_hidden_layers):
        ours, theirs = f"blk.{i}", f"model.layers.{i}"
        state[f"{theirs}.input_layernorm.weight"] = tensors[f"{ours}.attn_norm.weight"]
        state[f"{theirs}.post_attention_layernorm.weight"] = tensors[f"{ours}.ffn_norm.weight"]
        for part, name in (("q", "attn_q"), ("k", "attn_k"), ("v", "attn_v"), ("o", "attn_output")):
            state[f"{theirs}.self_attn.{part}_proj.weight"] = scaled(f"{ours}.{name}")
        state[f"{theirs}.self_attn.q_norm.weight"] = tensors[f"{ours}.attn_q_norm.weight"]
        state[f"{theirs}.self_attn.k_norm.weight"] = tensors[f"{ours}.attn_k_norm.weight"]
        state[f"{theirs}.self_attn.sinks"] = tensors[f"{ours}.attn_sinks.weight"]
        if i in config.mlp_only_layers:
            for part in ("gate", "up", "down"):
                state[f"{theirs}.mlp.{part}_proj.weight"] = scaled(f"{ours}.ffn_{part}")
            continue
        state[f"{theirs}.mlp.gate.weight"] = tensors[f"{ours}.ffn_gate_inp.weight"]
        gate, up = scaled(f"{ours}.ffn_gate_exps"), scaled(f"{ours}.ffn_up_exps")
        state[f"{theirs}.mlp.experts.gate_up_proj"] = torch.cat([gate, up], dim=1)
        state[f"{theirs}.mlp.experts.down_proj"] = scaled(f"{ours}.ffn_down_exps")
        for part in ("gate", "up", "down"):
            state[f"{theirs}.mlp.shared_expert.{part}_proj.weight"] = scaled(f"{ours}.ffn_{part}_shexp")
    model = FlintForCausalLM(config).float()
    model.load_state_dict(state, strict=True)
    return runnable(model)


def write_flint_gguf(model: FlintForCausalLM, path: Path) -> Path:
    """Writes `model` as a BF16 GGUF with the `gguf` package's own writer."""
    c = model.config
    writer = gguf.GGUFWriter(path, "flint")
    add_config(writer, c)
    add_tokenizer(writer)

    def matrix(name: str, value: torch.Tensor) -> None:
        bits = value.detach().bfloat16().contiguous().view(torch.uint8).numpy()
        writer.add_tensor(name, bits, raw_dtype=gguf.GGMLQuantizationType.BF16)

    def single(name: str, value: torch.Tensor) -> None:
        writer.add_tensor(name, value.detach().float().contiguous().numpy())

    matrix("token_embd.weight", model.model.embed_tokens.weight)
    single("output_norm.weight", model.model.norm.weight)
    matrix("output.weight", model.lm_head.weight)
    for i, layer in enumerate(model.model.layers):
        attention, mlp, name = layer.self_attn, layer.mlp, f"blk.{i}"
        single(f"{name}.attn_norm.weight", layer.input_layernorm.weight)
        single(f"{name}.ffn_norm.weight", layer.post_attention_layernorm.weight)
        for part, projection in (("q", "q_proj"), ("k", "k_proj"), ("v", "v_proj"), ("output", "o_proj")):
            matrix(f"{name}.attn_{part}.weight", getattr(attention, projection).weight)
        single(f"{name}.attn_q_norm.weight", attention.q_norm.weight)
        single(f"{name}.attn_k_norm.weight", attention.k_norm.weight)
        single(f"{name}.attn_sinks.weight", attention.sinks)
        if i in c.mlp_only_layers:
            for part in ("gate", "up", "down"):
                matrix(f"{name}.ffn_{part}.weight", getattr(mlp, f"{part}_proj").weight)
            continue
        single(f"{name}.ffn_gate_inp.weight", mlp.gate.weight)
        gate, up = mlp.experts.gate_up_proj.chunk(2, dim=1)
        matrix(f"{name}.ffn_gate_exps.weight", gate)
        matrix(f"{name}.ffn_up_exps.weight", up)
        matrix(f"{name}.ffn_down_exps.weight", mlp.experts.down_proj)
        for part in ("gate", "up", "down"):
            matrix(f"{name}.ffn_{part}_shexp.weight", getattr(mlp.shared_expert, f"{part}_proj").weight)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def add_config(writer: gguf.GGUFWriter, c: FlintConfig) -> None:
    """Writes the `flint.` keys of a configuration."""
    sliding = [kind == "sliding_attention" for kind in c.layer_types]
    facts: dict[str, Any] = {
        "block_count": c.num_hidden_layers,
        "context_length": c.max_position_embeddings,
        "embedding_length": c.hidden_size,
        "feed_forward_length": c.intermediate_size,
        "attention.head_count": c.num_attention_heads,
        "attention.head_count_kv": c.num_key_value_heads,
        "attention.key_length": c.head_dim,
        "attention.value_length": c.head_dim,
        "attention.sliding_window": c.sliding_window,
        "leading_dense_block_count": len(c.mlp_only_layers),
        "expert_count": c.num_experts,
        "expert_used_count": c.num_experts_per_tok,
        "expert_feed_forward_length": c.moe_intermediate_size,
        "expert_shared_feed_forward_length": c.shared_expert_intermediate_size,
        "expert_shared_count": 1,
        "expert_gating_func": 2,
        "vocab_size": c.vocab_size,
    }
    for key, value in facts.items():
        writer.add_uint32(f"flint.{key}", value)
    writer.add_float32("flint.attention.layer_norm_rms_epsilon", c.rms_norm_eps)
    writer.add_float32("flint.rope.freq_base", c.rope_parameters["rope_theta"])
    writer.add_string("flint.rope.scaling.type", "none")
    writer.add_bool("flint.expert_weights_norm", True)
    writer.add_float32("flint.expert_weights_scale", 1.0)
    writer.add_array("flint.attention.sliding_window_pattern", sliding)
    writer.add_array("flint.attention.rope_pattern", sliding)


def add_tokenizer(writer: gguf.GGUFWriter) -> None:
    """Writes the tokenizer of `tokenizer()` as llama.cpp's converter spells it."""
    source = tokenizer()
    by_id = {i: token for token, i in source.get_vocab(with_added_tokens=True).items()}
    control = set(CONTROL_TOKENS)
    tokens = [by_id[i] for i in range(len(by_id))]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("flint")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in control else 1 for token in tokens])
    writer.add_token_merges([" ".join(pair) for pair in MERGES])
    writer.add_eos_token_id(source.token_to_id("<|endoftext|>"))
