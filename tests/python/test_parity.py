"""Logits against transformers' FlintForCausalLM: other people's code for the same model."""

from __future__ import annotations

from pathlib import Path

import flint_rs
import numpy as np
import pytest
import reference
import torch
from reference import SHAPES, Shape
from transformers import FlintForCausalLM

# Longer than every window in SHAPES but the last, whose window it still passes.
PROMPT_TOKENS = 150
# transformers and llama.cpp agree within 8e-6 of the largest logit on such models.
FP32_BOUND = 2e-5
BF16_PROMPTS = 16


def prompt(seed: int, tokens: int = PROMPT_TOKENS) -> list[int]:
    return np.random.default_rng(seed).integers(0, reference.VOCAB_SIZE, tokens).tolist()


def relative(found: np.ndarray, expected: np.ndarray) -> float:
    assert found.shape == expected.shape
    assert found.dtype == np.float32
    return float(np.abs(found - expected).max() / np.abs(expected).max())


def mean_kl(expected: np.ndarray, found: np.ndarray) -> float:
    """Mean over positions of KL(expected || found), in nats."""
    p = torch.log_softmax(torch.from_numpy(expected).double(), dim=-1)
    q = torch.log_softmax(torch.from_numpy(found).double(), dim=-1)
    return float((p.exp() * (p - q)).sum(dim=-1).mean())


@pytest.fixture(scope="module", params=SHAPES, ids=str)
def shape(request: pytest.FixtureRequest) -> Shape:
    return request.param


@pytest.fixture(scope="module")
def model(shape: Shape) -> FlintForCausalLM:
    return reference.random_flint(shape, seed=SHAPES.index(shape))


@pytest.fixture(scope="module")
def folder(model: FlintForCausalLM, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return reference.save_safetensors(model, tmp_path_factory.mktemp("safetensors"))


@pytest.fixture(scope="module")
def gguf_file(model: FlintForCausalLM, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return reference.write_flint_gguf(model, tmp_path_factory.mktemp("gguf") / "model.gguf")


@pytest.mark.parametrize("device", ["reference", "cpu"])
@pytest.mark.parametrize("source", ["folder", "gguf_file"])
def test_fp32_logits(model: FlintForCausalLM, source: str, device: str, request: pytest.FixtureRequest) -> None:
    ids = prompt(1)
    with flint_rs.Flint(request.getfixturevalue(source), device=device, dtype="float32") as flint:
        assert relative(flint.logits(ids), reference.logits(model, ids)) <= FP32_BOUND


@pytest.mark.parametrize("device", ["reference", "cpu"])
def test_bf16_is_as_close_as_transformers_own(model: FlintForCausalLM, folder: Path, device: str) -> None:
    half = reference.runnable(FlintForCausalLM.from_pretrained(folder, dtype=torch.bfloat16))
    assert half.model.layers[-1].mlp.gate.weight.dtype == torch.float32
    ours, theirs = [], []
    with flint_rs.Flint(folder, device=device, dtype="bfloat16") as flint:
        # One prompt's divergence varies threefold: which tokens flip an expert is chance.
        for seed in range(BF16_PROMPTS):
            ids = prompt(seed)
            exact = reference.logits(model, ids)
            ours.append(mean_kl(exact, flint.logits(ids)))
            theirs.append(mean_kl(exact, reference.logits(half, ids)))
    assert 0.0 < np.mean(ours) <= 1.1 * np.mean(theirs)


@pytest.mark.parametrize("device", ["reference", "cpu"])
def test_nvfp4_equals_transformers_on_gguf_decoded_weights(
    model: FlintForCausalLM, folder: Path, tmp_path: Path, device: str
) -> None:
    path = tmp_path / "nvfp4.gguf"
    flint_rs.convert(folder, path, type="nvfp4")
    decoded = reference.read_flint_gguf(path, model.config)
    ids = prompt(2)
    expected = reference.logits(decoded, ids)
    assert relative(expected, reference.logits(model, ids)) > 100 * FP32_BOUND, "the file holds 4-bit weights"
    with flint_rs.Flint(path, device=device, dtype="float32") as flint:
        assert relative(flint.logits(ids), expected) <= FP32_BOUND


def test_convert_to_bf16_keeps_the_numbers(model: FlintForCausalLM, folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "bf16.gguf"
    flint_rs.convert(folder, path, type="bf16")
    decoded = reference.read_flint_gguf(path, model.config).state_dict()
    expected = model.state_dict()
    assert decoded.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(decoded[name], value), name


def test_greedy_text_follows_transformers(model: FlintForCausalLM, folder: Path) -> None:
    """Token by token through the KV cache, as long as transformers' own choice is clear."""
    ids = prompt(3, tokens=40)
    with flint_rs.Flint(folder, device="cpu", dtype="float32") as flint:
        result = flint.generate(ids, temperature=0.0, max_tokens=120, ignore_eos=True)
    rows = reference.logits(model, ids + result.token_ids)[len(ids) - 1 : -1]
    best_two = np.sort(rows, axis=-1)[:, -2:]
    clear = best_two[:, 1] - best_two[:, 0] > 1e-4 * np.abs(rows).max()
    assert clear.mean() > 0.9
    assert (np.array(result.token_ids) == rows.argmax(axis=-1))[clear].all()


def test_a_window_edge_matters(model: FlintForCausalLM, shape: Shape) -> None:
    """A model with a window one position shorter gives other logits: the tests above would see an edge off by one."""
    if shape.window == 1:
        pytest.skip("a window of one position cannot be shorter")
    ids = prompt(4)
    expected = reference.logits(model, ids)
    model.config.sliding_window -= 1
    try:
        assert relative(reference.logits(model, ids), expected) > 10 * FP32_BOUND
    finally:
        model.config.sliding_window += 1
