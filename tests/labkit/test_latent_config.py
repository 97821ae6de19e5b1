"""The sizes of latent attention: DeepSeek's as defaults, and nothing that no model can have."""

from __future__ import annotations

import dataclasses

import pytest

from labkit.latent_config import LatentConfig


def test_defaults_are_those_of_deepseek() -> None:
    transformers = pytest.importorskip("transformers")
    config = LatentConfig(num_layers=60, num_heads=128)
    for version in (2, 3):
        theirs = getattr(transformers, f"DeepseekV{version}Config")()
        for name in ("kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim", "qk_head_dim"):
            assert getattr(config, name) == getattr(theirs, name), name


def test_tiny_sizes_differ() -> None:
    sizes = dataclasses.astuple(LatentConfig.tiny())
    assert len(set(sizes)) == len(sizes)
    assert LatentConfig.tiny(v_head_dim=9).v_head_dim == 9


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(LatentConfig)])
@pytest.mark.parametrize("value", [0, -2, 2.0, True, None])
def test_impossible_sizes_are_refused(name: str, value: object) -> None:
    with pytest.raises(ValueError, match=name):
        LatentConfig.tiny(**{name: value})


def test_rotated_numbers_come_in_pairs() -> None:
    with pytest.raises(ValueError, match="even"):
        LatentConfig.tiny(qk_rope_head_dim=5)
