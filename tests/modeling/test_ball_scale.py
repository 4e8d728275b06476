"""The measure of a ball is restricted to it and multiplied by a constant, whatever the positions of a sample."""

import math

import pytest
import torch

from itnet_kernels.measure import uniform_measure
from modeling_itnet import ITNetConfig
from modeling_itnet.domain import Domain
from modeling_itnet.integration.near import ball_scale, find_near

CONFIG = ITNetConfig(modality="signal", position_dim=2, integration_mode="near_far", near_radius=0.3)


def near_of(positions):
    """The neighbourhoods of positions [B, n, 2], and their measure [B, n]."""
    measure = uniform_measure(positions)
    near = find_near(CONFIG, Domain(positions, measure, torch.zeros(1, 2)))
    return near, sum(part.mass(measure, positions.shape[1]) for part in near.blocks)


@pytest.mark.parametrize(("dimension", "volume"), [(1, 2 * 0.3), (2, math.pi * 0.3**2), (3, 4 / 3 * math.pi * 0.3**3)])
def test_scale_is_one_over_the_volume_of_a_ball(dimension, volume):
    assert math.isclose(ball_scale(0.3, dimension), 1 / volume, rel_tol=1e-12)
    assert ball_scale(math.sqrt(dimension), dimension) == 1  # a ball that holds the unit cube


def test_scale_does_not_vary_with_the_positions():
    for count in (5, 64):
        near, _ = near_of(torch.rand(3, count, 2))
        torch.testing.assert_close(near.scale, torch.full((3, count), 1 / (math.pi * 0.3**2)))


def test_a_ball_inside_of_an_even_grid_weighs_one():
    steps = (torch.arange(40) + 0.5) / 40
    grid = torch.cartesian_prod(steps, steps)
    near, mass = near_of(grid.unsqueeze(0))
    inside = ((grid > 0.3) & (grid < 0.7)).all(-1)
    weights = (near.scale * mass)[0, inside]
    assert inside.sum() == 256
    assert (weights - 1).abs().max() < 0.04  # a circle of area 144 π = 452 holds 441 points, with those on its edge
