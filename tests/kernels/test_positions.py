"""Regular domains are recognised, and only those."""

import pytest
import torch

from itnet_kernels import fourier_features
from itnet_kernels.positions import PositionBias, PositionWeights, find_lattice

EPS = torch.finfo(torch.float32).eps


def grid(rows: int, columns: int) -> torch.Tensor:
    row, column = ((torch.arange(count) + 0.5) / count for count in (rows, columns))
    return torch.cartesian_prod(row, column)


def text(count: int) -> torch.Tensor:
    return (torch.arange(count) + 1.0)[:, None] / count


CENTRE = torch.tensor([[0.5, 0.5]])
REGULAR = {
    "text": (text(37), (73,)),
    "grid": (grid(14, 14), (27, 27)),
    "oblong grid": (grid(6, 9), (11, 17)),
    "even grid with the centre": (torch.cat([CENTRE, grid(14, 14)]), (53, 53)),
    "odd grid with the centre": (torch.cat([CENTRE, grid(7, 7)]), (13, 13)),
    "two scales": (torch.cat([grid(28, 28), grid(14, 14)]), (109, 109)),
    "plane in space": (torch.nn.functional.pad(grid(8, 8), (0, 1), value=0.3), (15, 15, 1)),
}


@pytest.mark.parametrize(("positions", "table"), REGULAR.values(), ids=REGULAR)
def test_lattice_of_regular_domains(positions, table):
    positions = positions.double()
    lattice = find_lattice(positions, positions, EPS)
    assert lattice.table_shape == table
    displacement = lattice.displacements()[lattice.rows(0, len(positions))]
    torch.testing.assert_close(displacement, positions[:, None] - positions, rtol=0, atol=2e-6)


@pytest.mark.parametrize(
    "positions",
    [
        torch.rand(50, 3, generator=torch.Generator().manual_seed(0)),
        torch.cat([grid(10, 10), torch.tensor([[0.123, 0.4567]])]),
        grid(10, 10) + 1e-4 * torch.rand(100, 2, generator=torch.Generator().manual_seed(0)),
        text(40) ** 2,
        torch.zeros(1, 2),
    ],
    ids=["random", "grid with a stray point", "jittered grid", "squares", "one point"],
)
def test_no_lattice_elsewhere(positions):
    lattice = find_lattice(positions.double(), positions.double(), EPS)
    assert lattice is None or lattice.table_shape == (1, 1)


@pytest.mark.parametrize("positions", [case[0] for case in REGULAR.values()], ids=REGULAR)
@pytest.mark.parametrize("frequencies", [0, 5])
def test_table_equals_bilinear_form(positions, frequencies):
    positions = positions.double()[:120]
    generator = torch.Generator().manual_seed(0)
    size = 2 * frequencies or positions.shape[1]
    weights = PositionWeights(*(torch.randn(6, k, generator=generator, dtype=torch.float64) for k in (size, size, 1)))
    matrix = 3 * torch.randn(frequencies, positions.shape[1], generator=generator, dtype=torch.float64)
    features = fourier_features(positions, matrix)
    lattice = find_lattice(positions, positions, EPS)
    table, bilinear = (
        PositionBias(positions, positions, features, features, weights, matrix, choice).tile(3, 11)
        for choice in (lattice, None)
    )
    torch.testing.assert_close(table, bilinear, rtol=0, atol=1e-4)  # the coordinates are float32 roundings
