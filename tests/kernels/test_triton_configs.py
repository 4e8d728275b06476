"""Which tile configurations are tried where. No kernel runs here."""

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton", reason="the triton package is not installed")

from itnet_kernels.triton_backward import itnet_bwd_kernel
from itnet_kernels.triton_configs import (
    BACKWARD,
    FORWARD,
    KEY_MULTIPLE,
    Problem,
    autotune,
    fitting_settings,
    pinned_settings,
    shared_memory_bytes,
)
from itnet_kernels.triton_forward import itnet_fwd_kernel

FAMILIES = [FORWARD, BACKWARD]
HOPPER = Problem(head_dim=64, itemsize=2, major=9, shared_limit=232448)


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_keys_hold_no_lengths(family):
    """A new length must not start a new search."""
    assert not {"num_queries", "num_keys", "padded_keys", "samples", "causal_offset"} & set(family.keys)


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_every_tile_divides_the_padding(family):
    assert all(KEY_MULTIPLE % config.settings["BK"] == 0 for config in family.configs)


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
@pytest.mark.parametrize("limit", [65536, 101376, 166912, 232448])
@pytest.mark.parametrize("head_dim", [16, 32, 64, 128])
def test_what_fits_stays_within_the_limit(family, limit, head_dim):
    problem = HOPPER._replace(shared_limit=limit, head_dim=head_dim)
    first, *_ = fitting = fitting_settings(family, problem)
    smallest = family.configs[-1].settings
    assert all(s == smallest or shared_memory_bytes(family, s, problem) <= limit for s in fitting)
    assert first == next(config.settings for config in family.configs if config.settings in fitting)


def test_pinned(monkeypatch):
    monkeypatch.setenv("ITNET_FORWARD_CONFIG", "ROWS=64, BK=32, num_warps=4, num_stages=2")
    settings = {"ROWS": 64, "BK": 32, "num_warps": 4, "num_stages": 2}
    assert pinned_settings(FORWARD) == settings
    assert pinned_settings(BACKWARD) is None
    tuner = autotune(FORWARD)(itnet_fwd_kernel.fn)
    (config,) = tuner.configs
    assert settings.items() <= config.all_kwargs().items()


@pytest.mark.parametrize("text", ["ROWS=64", "ROWS=64,BK=x,num_warps=4,num_stages=2", "fast"])
def test_pinned_wrongly(monkeypatch, text):
    monkeypatch.setenv("ITNET_FORWARD_CONFIG", text)
    with pytest.raises(ValueError, match=r"`ITNET_FORWARD_CONFIG` .* must give \['BK', 'ROWS'"):
        pinned_settings(FORWARD)


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_pruning_by_device(monkeypatch, family):
    def active(backend: str, arch, limit: int):
        target = SimpleNamespace(backend=backend, arch=arch)
        utils = SimpleNamespace(get_device_properties=lambda index: {"max_shared_mem": limit})
        return SimpleNamespace(active=SimpleNamespace(get_current_target=lambda: target, utils=utils))

    tuner = itnet_fwd_kernel if family is FORWARD else itnet_bwd_kernel
    arguments = {"p_keys": torch.empty(1, dtype=torch.bfloat16), "D": 64, "IS_CAUSAL": False}

    def left() -> list[int]:
        return [tuner.configs.index(config) for config in tuner.early_config_prune(tuner.configs, {}, **arguments)]

    monkeypatch.setattr("triton.runtime.driver", active("cuda", 90, 232448))
    assert left() == [0, 1, 2, 3]
    monkeypatch.setenv("ITNET_AUTOTUNE", "0")
    assert left() == [0]
    monkeypatch.delenv("ITNET_AUTOTUNE")
    torch.use_deterministic_algorithms(True)
    assert left() == [0]
    torch.use_deterministic_algorithms(False)
    monkeypatch.setattr("triton.runtime.driver", active("cuda", 80, 166912))
    assert left() == ([0, 1, 2, 3] if family is FORWARD else [2, 3])
    monkeypatch.setattr("triton.runtime.driver", active("hip", "gfx942", 65536))
    assert left()[-1] == 3
