"""The model that ships, against transformers on the weights as the `gguf` package decodes them."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import flint_rs
import jinja2
import numpy as np
import pytest
import reference
import torch
from transformers import FlintConfig, FlintForCausalLM

HELD_OUT = Path(__file__).parent.parent / "data" / "heldout.txt"
WINDOW_TOKENS = 512
WINDOWS = 4


@pytest.fixture(scope="module")
def model() -> FlintForCausalLM:
    facts = flint_rs.inspect(flint_rs.SMALL_MODEL)["config"]
    layers = facts["layers"]
    config = FlintConfig(
        vocab_size=facts["vocab_size"],
        hidden_size=facts["hidden_size"],
        intermediate_size=facts["dense_intermediate_size"],
        num_hidden_layers=len(layers),
        num_attention_heads=facts["n_heads"],
        num_key_value_heads=facts["n_kv_heads"],
        head_dim=facts["head_dim"],
        num_experts=facts["n_experts"],
        num_experts_per_tok=facts["n_experts_per_token"],
        moe_intermediate_size=facts["expert_intermediate_size"],
        shared_expert_intermediate_size=facts["shared_intermediate_size"],
        sliding_window=facts["sliding_window"],
        max_position_embeddings=facts["context_length"],
        rope_parameters={"rope_type": "default", "rope_theta": facts["rope_theta"]},
    )
    return reference.read_flint_gguf(flint_rs.SMALL_MODEL, config)


@pytest.fixture(scope="module")
def windows() -> list[list[int]]:
    with flint_rs.Flint(flint_rs.SMALL_MODEL, device="cpu") as flint:
        ids = flint.tokenize(HELD_OUT.read_text(encoding="utf-8"))
    return [ids[i * WINDOW_TOKENS : (i + 1) * WINDOW_TOKENS] for i in range(WINDOWS)]


def perplexity(rows: list[np.ndarray], windows: list[list[int]]) -> float:
    losses = [
        torch.nn.functional.cross_entropy(torch.from_numpy(logits[:-1]).double(), torch.tensor(ids[1:]))
        for logits, ids in zip(rows, windows, strict=True)
    ]
    return math.exp(float(torch.stack(losses).mean()))


def test_perplexity_equals_transformers(model: FlintForCausalLM, windows: list[list[int]]) -> None:
    expected = perplexity([reference.logits(model, ids) for ids in windows], windows)
    with flint_rs.Flint(flint_rs.SMALL_MODEL, device="cpu", dtype="float32") as flint:
        found = perplexity([flint.logits(ids) for ids in windows], windows)
    with flint_rs.Flint(flint_rs.SMALL_MODEL, device="cpu", dtype="bfloat16") as flint:
        rounded = perplexity([flint.logits(ids) for ids in windows], windows)
    assert found == pytest.approx(expected, rel=1e-3)
    assert rounded == pytest.approx(expected, rel=1e-2), "BF16 activations cost less than a hundredth"
    assert found < 10.0


def test_logits_equal_transformers(model: FlintForCausalLM, windows: list[list[int]]) -> None:
    expected = reference.logits(model, windows[0])
    with flint_rs.Flint(flint_rs.SMALL_MODEL, device="cpu", dtype="float32") as flint:
        found = flint.logits(windows[0])
    assert np.abs(found - expected).max() <= 2e-5 * np.abs(expected).max()


def test_it_fits_the_package() -> None:
    assert 10e6 < Path(flint_rs.SMALL_MODEL).stat().st_size < 25e6


def render(messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> str:
    """The prompt of `messages` by the file's own template, with transformers' meaning of `tojson`."""
    environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True, autoescape=False)
    environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
    template = flint_rs.inspect(flint_rs.SMALL_MODEL)["tokenizer"]["chat_template"]
    return environment.from_string(template).render(messages=messages, tools=tools, add_generation_prompt=True)


def test_it_thinks_and_calls_tools() -> None:
    """Most answers to a question that needs the offered tool are a well-formed call; think blocks are whole."""
    path = {"type": "string", "description": "Path of the file"}
    parameters = {"type": "object", "properties": {"path": path}, "required": ["path"]}
    tool = {"name": "read_file", "description": "Read a text file", "parameters": parameters}
    text = render(
        [{"role": "user", "content": "Show me what is in src/main.py."}], [{"type": "function", "function": tool}]
    )
    call = re.compile(r"<tool_call>read_file<arg_key>path</arg_key><arg_value>[^<]+</arg_value></tool_call>$")
    with flint_rs.Flint(flint_rs.SMALL_MODEL, device="cpu") as flint:
        prompt = flint.tokenize(text, control=True)
        results = [flint.generate(prompt, seed=seed, max_tokens=160) for seed in range(12)]
    texts = [result.text for result in results]
    assert sum(call.search(text) is not None for text in texts) >= 8, texts
    assert any(re.match(r"<think>[^<]+</think>", text) for text in texts), texts
    assert all(text.count("<think>") == text.count("</think>") for text in texts), texts
    assert sum(result.finish_reason == "stop" for result in results) >= 10, texts
