"""Which tile configurations are tried where. No kernel runs here."""

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton", reason="the triton package is not installed")

from itnet_kernels.exact.triton.backward import itnet_bwd_kernel
from itnet_kernels.exact.triton.configs import (
    BACKWARD,
    FAMILIES,
    FORWARD,
    FUSED_BACKWARD,
    KEY_MULTIPLE,
    POSITION_GRADIENT,
    POSITION_WEIGHTS,
    Problem,
    autotune,
    pinned_settings,
    size_class,
    suitable_settings,
)
from itnet_kernels.exact.triton.forward import itnet_fwd_kernel
from itnet_kernels.exact.triton.fused_backward import itnet_fused_bwd_kernel
from itnet_kernels.exact.triton.position_gradient import itnet_position_gradient_kernel
from itnet_kernels.exact.triton.position_weights import itnet_position_weights_kernel

KERNELS = {
    FORWARD.name: itnet_fwd_kernel,
    BACKWARD.name: itnet_bwd_kernel,
    FUSED_BACKWARD.name: itnet_fused_bwd_kernel,
    POSITION_GRADIENT.name: itnet_position_gradient_kernel,
    POSITION_WEIGHTS.name: itnet_position_weights_kernel,
}
HOPPER = Problem(head_dim=64, itemsize=2, major=9, shared_limit=232448)
AMPERE = Problem(head_dim=64, itemsize=2, major=8, shared_limit=166912)


def tiles(family, problem) -> list[tuple[int, ...]]:
    """(BP, ROWS, BK, warps, stages), without BP and ROWS for the backward that is not fused."""
    return [tuple(settings.values()) for settings in suitable_settings(family, problem)]


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_keys_hold_a_size_class_and_no_lengths(family):
    """A new length must not start a new search, and a small problem's winner must not serve a large one."""
    assert not {"num_queries", "num_keys", "padded_keys", "samples", "causal_offset"} & set(family.keys)
    assert "size" in family.keys
    tuner = KERNELS[family.name]
    assert tuner.keys == list(family.keys)


def test_a_uniform_measure_has_no_kernel_of_its_own():
    """Models always give a measure: what is timed without one must be what they run."""
    assert all("UNIFORM" not in kernel.arg_names for kernel in KERNELS.values())


def test_size_classes():
    assert size_class(1) == size_class(2**24 - 1) == 0
    assert size_class(2**24) == size_class(2**28 - 1) == 1
    assert [size_class(2**power) for power in (28, 31, 32, 40)] == [2, 2, 3, 5]


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_every_tile_divides_the_padding(family):
    assert all(KEY_MULTIPLE % config.settings["BK"] == 0 for config in family.configs)


@pytest.mark.parametrize("family", [family for family in FAMILIES if family is not BACKWARD], ids=lambda f: f.name)
def test_tiles_have_no_more_hidden_units_than_their_family(family):
    assert all(config.settings["ROWS"] // config.settings["BP"] <= family.most_units for config in family.configs)


def test_timing_puts_back_what_a_launch_adds_to():
    assert set(FUSED_BACKWARD.added_to) <= set(itnet_fused_bwd_kernel.arg_names)
    assert set(POSITION_WEIGHTS.added_to) <= set(itnet_position_weights_kernel.arg_names)
    assert not FORWARD.added_to + BACKWARD.added_to + POSITION_GRADIENT.added_to


def test_what_suits_a_device():
    assert tiles(FORWARD, HOPPER) == [(16, 128, 64, 4, 3), (16, 128, 64, 8, 2), (16, 64, 64, 4, 2), (16, 64, 32, 4, 1)]
    assert tiles(BACKWARD, HOPPER) == [(64, 8, 2), (64, 8, 1)]
    assert tiles(FUSED_BACKWARD, HOPPER) == [(128, 128, 64, 8, 2)]
    assert tiles(FORWARD, AMPERE) == [(16, 128, 64, 4, 3), (16, 128, 64, 8, 2), (16, 64, 64, 4, 2), (16, 64, 32, 4, 1)]
    assert tiles(BACKWARD, AMPERE) == [(32, 4, 2)]
    assert tiles(FORWARD, AMPERE._replace(itemsize=4)) == [(16, 128, 16, 8, 1)]
    assert tiles(BACKWARD, HOPPER._replace(itemsize=4)) == [(32, 4, 1)]
    amd = HOPPER._replace(major=None, shared_limit=65536)
    assert tiles(FORWARD, amd) == [(16, 128, 64, 4, 3), (16, 128, 64, 8, 2), (16, 64, 64, 4, 2), (16, 64, 32, 4, 1)]
    assert tiles(BACKWARD, amd) == [(16, 4, 1)]


@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("major", [None, 8, 9, 10, 12])
@pytest.mark.parametrize("head_dim", [16, 32, 64, 128])
@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_more_shared_memory_takes_nothing_away(family, head_dim, major, itemsize):
    problem = HOPPER._replace(head_dim=head_dim, major=major, itemsize=itemsize)
    smallest = tuple(family.configs[-1].settings.values())
    assert tiles(family, problem._replace(shared_limit=0)) == [smallest]
    allowed = []
    for limit in (65536, 101376, 166912, 232448):
        wider = tiles(family, problem._replace(shared_limit=limit))
        assert set(allowed) <= set(wider) | {smallest}
        allowed = wider


def test_pinned(monkeypatch):
    monkeypatch.setenv("ITNET_FORWARD_CONFIG", "BP=16, ROWS=64, BK=32, num_warps=4, num_stages=2")
    settings = {"BP": 16, "ROWS": 64, "BK": 32, "num_warps": 4, "num_stages": 2}
    assert pinned_settings(FORWARD) == settings
    assert pinned_settings(BACKWARD) is None
    tuner = autotune(FORWARD)(itnet_fwd_kernel.fn)
    (config,) = tuner.configs
    assert settings.items() <= config.all_kwargs().items()


@pytest.mark.parametrize("text", ["ROWS=64", "ROWS=64,BK=x,num_warps=4,num_stages=2", "fast"])
def test_pinned_wrongly(monkeypatch, text):
    monkeypatch.setenv("ITNET_FORWARD_CONFIG", text)
    with pytest.raises(ValueError, match=r"`ITNET_FORWARD_CONFIG` .* must give \['BK', 'BP', 'ROWS'"):
        pinned_settings(FORWARD)


@pytest.fixture
def timed(monkeypatch):
    """(family, problem, size class) -> the tiles that autotuning would time on such a device."""

    def run(family, problem: Problem, size: int = 1) -> list[tuple[int, ...]]:
        is_nvidia = problem.major is not None
        backend, arch = ("cuda", 10 * problem.major) if is_nvidia else ("hip", "gfx942")
        target = SimpleNamespace(backend=backend, arch=arch)
        utils = SimpleNamespace(get_device_properties=lambda index: {"max_shared_mem": problem.shared_limit})
        active = SimpleNamespace(get_current_target=lambda: target, utils=utils)
        monkeypatch.setattr("triton.runtime.driver", SimpleNamespace(active=active))
        tuner = KERNELS[family.name]
        keys = torch.empty(1, dtype=torch.bfloat16 if problem.itemsize == 2 else torch.float32)
        arguments = {"p_keys": keys, "D": problem.head_dim, "W": 128, "IS_CAUSAL": False, "size": size}
        left = tuner.early_config_prune(tuner.configs, {}, **arguments)
        return [(*config.kwargs.values(), config.num_warps, config.num_stages) for config in left]

    return run


@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("problem", [HOPPER, AMPERE, HOPPER._replace(major=None)], ids=["sm_90", "sm_80", "gfx942"])
@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_what_is_timed(timed, family, problem, itemsize):
    problem = problem._replace(itemsize=itemsize)
    assert timed(family, problem) == tiles(family, problem)


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_nothing_is_timed(timed, monkeypatch, family):
    """Small launches, deterministic algorithms and ITNET_AUTOTUNE=0 take the default, which Triton does not store."""
    default = tiles(family, HOPPER)[:1]
    assert timed(family, HOPPER, size=0) == default
    with monkeypatch.context() as patch:
        patch.setenv("ITNET_AUTOTUNE", "0")
        assert timed(family, HOPPER) == default
    with monkeypatch.context() as patch:
        patch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
        assert timed(family, HOPPER) == default
    assert (timed(family, HOPPER) != default) == (len(tiles(family, HOPPER)) > 1)
