"""NVFP4 against the `gguf` package: what it decodes, and how much plain nearest rounding would lose."""

from __future__ import annotations

from pathlib import Path

import flint_rs
import gguf
import numpy as np
import pytest
import reference
import torch
from gguf.quants import NVFP4, dequantize
from reference import SHAPES

NVFP4_TYPE = gguf.GGMLQuantizationType.NVFP4
SEED = 11


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return reference.save_safetensors(reference.random_flint(SHAPES[0], SEED), tmp_path_factory.mktemp("safetensors"))


def decoded(path: Path) -> dict[str, np.ndarray]:
    """Every NVFP4 tensor of a file with its companion, as the `gguf` package reads it; experts outermost."""
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    values = {}
    for name, tensor in tensors.items():
        if tensor.tensor_type == NVFP4_TYPE:
            scale = np.array(tensors[name.replace(".weight", ".scale")].data)
            stack = dequantize(tensor.data, tensor.tensor_type).reshape(len(scale), -1)
            values[name] = stack * scale[:, None]
    return values


def test_every_byte_decodes_as_in_gguf(folder: Path, tmp_path: Path) -> None:
    packed, plain = tmp_path / "nvfp4.gguf", tmp_path / "bf16.gguf"
    flint_rs.convert(folder, packed, type="nvfp4")
    random = np.random.default_rng(SEED)
    scales, codes = set(), set()
    for tensor in gguf.GGUFReader(packed, "r+").tensors:
        if tensor.tensor_type == NVFP4_TYPE:
            blocks = tensor.data.reshape(-1, 36)
            blocks[:, :4] = random.integers(0, 255, (len(blocks), 4))  # 0xFF is refused
            blocks[:, 4:] = random.integers(0, 256, (len(blocks), 32))
            scales.update(blocks[:, :4].ravel().tolist())
            codes.update(blocks[:, 4:].ravel().tolist())
            tensor.data.flush()
    assert (len(scales), len(codes)) == (255, 256)
    flint_rs.convert(packed, plain, type="bf16")
    rounded = {tensor.name: tensor for tensor in gguf.GGUFReader(plain).tensors}
    for name, values in decoded(packed).items():
        expected = torch.from_numpy(values).bfloat16().float().numpy()
        found = dequantize(rounded[name].data, rounded[name].tensor_type).reshape(expected.shape)
        assert np.array_equal(found, expected), name


def nearest(values: np.ndarray) -> np.ndarray:
    """Plain rounding of `[rows, n]`: the scale by gguf's own rule from each group's largest value, the nearest code."""
    tensor_scale = np.abs(values).max(axis=1, keepdims=True) / (6 * 448)
    groups = (values / tensor_scale).reshape(len(values), -1, 16)
    scale = NVFP4.ue4m3_to_fp32(NVFP4.fp32_to_ue4m3(np.abs(groups).max(axis=2, keepdims=True) / 6))
    codes = np.array(NVFP4.kvalues, dtype=np.float32)
    with np.errstate(divide="ignore", invalid="ignore"):
        best = np.abs((groups / scale)[..., None] - codes).argmin(axis=3)
    return (codes[best] * scale).reshape(values.shape) * tensor_scale


def test_loses_less_than_nearest_rounding(folder: Path, tmp_path: Path) -> None:
    packed, plain = tmp_path / "nvfp4.gguf", tmp_path / "bf16.gguf"
    flint_rs.convert(folder, packed, type="nvfp4")
    flint_rs.convert(folder, plain, type="bf16")
    exact = {tensor.name: tensor for tensor in gguf.GGUFReader(plain).tensors}
    for name, found in decoded(packed).items():
        values = dequantize(exact[name].data, exact[name].tensor_type).reshape(found.shape)
        ours, theirs = ((found - values) ** 2).sum(), ((nearest(values) - values) ** 2).sum()
        assert 0 < ours < 0.9 * theirs, f"{name}: {ours} against {theirs}"
