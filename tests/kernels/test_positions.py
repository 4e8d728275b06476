"""Regular domains are recognised, and only those; positions far from the origin or in any dtype lose no digits."""

import pytest
import torch

from itnet_kernels import KERNEL_INPUTS, fourier_features, sampled_transform
from itnet_kernels.exact.pair_inputs import POSITIONS, PairInputs
from itnet_kernels.exact.position_bias import PositionBias
from itnet_kernels.exact.tiled import Cells, Place
from itnet_kernels.first_layer import PositionWeights
from itnet_kernels.positions import _PHASE_ERRORS, find_displacements, find_lattice

EPS = torch.finfo(torch.float32).eps


def grid(rows: int, columns: int) -> torch.Tensor:
    row, column = ((torch.arange(count) + 0.5) / count for count in (rows, columns))
    return torch.cartesian_prod(row, column)


def text(count: int) -> torch.Tensor:
    return (torch.arange(count) + 1.0)[:, None] / count


def table_shape(lattice) -> tuple[int, ...]:
    """Displacements along each axis."""
    return tuple(len(axis.unique()) for axis in lattice.table.T)


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
    assert table_shape(lattice) == table
    displacement = lattice.table[lattice.queries[:, None] - lattice.keys + len(lattice.table) // 2]
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
    assert lattice is None or table_shape(lattice) == (1, 1)


@pytest.mark.parametrize("positions", [case[0] for case in REGULAR.values()], ids=REGULAR)
@pytest.mark.parametrize("frequencies", [0, 5])
def test_table_equals_bilinear_form(positions, frequencies):
    positions = positions.double()[:120]
    generator = torch.Generator().manual_seed(0)
    size = 2 * frequencies or positions.shape[1]
    weights = PositionWeights(*(torch.randn(6, k, generator=generator, dtype=torch.float64) for k in (size, size, 1)))
    matrix = 3 * torch.randn(frequencies, positions.shape[1], generator=generator, dtype=torch.float64)
    features = fourier_features(positions, matrix)
    found = find_displacements(positions, positions, matrix, torch.float32)
    assert found is not None
    features = features.unsqueeze(0)
    signal = positions.new_zeros(1, len(positions), 1, 6)
    given = (
        dict.fromkeys(PairInputs._fields)
        | {name: [] for name in ("block_queries", "block_keys", "block_pairs")}
        | dict(zip(("w_y", "w_relative", "w_distance"), weights, strict=True))
    )
    given |= dict.fromkeys(("queries", "keys", "row"), signal) | {"frequencies": matrix, "is_causal": False}
    given |= dict(zip(POSITIONS, (positions[None], positions[None], features, features), strict=True))
    inputs = PairInputs(**given)
    index = torch.cat([torch.tensor([0, len(found.table)]), found.queries, found.keys])[None]
    on_lattice = inputs._replace(displacements=found.table.double(), displacement_index=index)
    elsewhere = inputs._replace(displacements=found.table[:0], displacement_index=torch.zeros_like(index))
    place = Place(slice(0, 1), slice(0, 1), slice(3, 11))
    table, bilinear = (PositionBias(choice).tile(Cells(choice), place) for choice in (on_lattice, elsewhere))
    # The coordinates are float32 roundings; this is how far find_lattice may move phases, coordinates and distances.
    moved = 4 * EPS * float((positions.amax(0) - positions.amin(0)).norm())
    allowed = float(weights.relative.abs().sum(1).max()) * (_PHASE_ERRORS * EPS if frequencies else moved)
    allowed += float(weights.distance.abs().max()) * moved
    torch.testing.assert_close(table, bilinear, rtol=0, atol=allowed)


def column(values: torch.Tensor) -> torch.Tensor:
    return values[:, None]


STEPS = torch.arange(48)
# Coordinates as users have them, each with the shape of the table that serves them, if any.
UNUSUAL = {
    "a level far larger than the other axis": (torch.stack([STEPS / 64, torch.full((48,), 101325.0)], 1), (95, 1)),
    "a level that is not quite constant": (torch.stack([STEPS / 64, 101325 + STEPS % 2 / 128], 1), (95, 3)),
    "far from the origin": (column(5e5 + 0.25 * STEPS), (95,)),
    "rounded far from the origin": (column(1e4 + 0.1 * STEPS), None),
    "bfloat16": (column((STEPS / 64).bfloat16()), (95,)),
    "rounded in bfloat16": (column((STEPS / 49).bfloat16()), None),
    "rounded in float16": (column((STEPS / 196).half()), None),
    "tiny": (column(1e-20 * STEPS), (95,)),
    "almost constant": (column(1 + EPS * (STEPS % 3)), (5,)),
}


@pytest.mark.parametrize(("positions", "table"), UNUSUAL.values(), ids=UNUSUAL)
def test_unusual_coordinates(problem, same, positions, table):
    """Not a digit of the coordinates as given is lost, whether they form a lattice or not, in values and gradients."""
    lattice = find_lattice(positions.double(), positions.double(), EPS)
    assert (None if lattice is None else table_shape(lattice)) == table
    problem_ = problem(n=48, batch=1, heads=1, dim=positions.shape[1])
    problem_.positions = positions
    actual, expected = (problem_.run_backward(backend) for backend in ("tiled", "reference"))
    same({"out": actual["out"], "positions": actual.pop("positions")},
         {"out": expected["out"], "positions": expected.pop("positions")},
         max(1e-10, 4 * torch.finfo(positions.dtype).eps))  # fmt: skip
    same(actual, expected, 1e-10)
    single = problem_.to(torch.float32)
    same(single.run_backward("tiled", position_gradients=False), expected, 100 * EPS)


def test_a_lattice_must_not_move_phases():
    """A float32 grid is on its lattice to half a unit in the last place: enough for slow waves, not for fast ones."""
    positions = grid(14, 14).double()
    assert find_lattice(positions, positions, EPS, torch.full((1, 2), 10.0)) is not None
    assert find_lattice(positions, positions, EPS, torch.full((1, 2), 1000.0)) is None
    exact = grid(16, 16).double()
    assert find_lattice(exact, exact, EPS, torch.full((1, 2), 1000.0)) is not None


@pytest.mark.parametrize("regular", [False, True], ids=["irregular", "lattice"])
def test_raw_differences_far_from_the_origin(problem, same, regular):
    """Without frequencies x - y is taken before it is rounded to the features' dtype, also in the gradients."""
    inputs = tuple(name for name in KERNEL_INPUTS if name not in ("x", "y"))
    problem_ = problem(n=12, batch=1, frequencies=0, inputs=inputs, regular=regular)
    problem_.positions = problem_.positions + 1e6
    expected = problem_.run_backward("reference")
    same(problem_.run_backward("tiled"), expected, 1e-10)
    same(problem_.to(torch.float32).run_backward("tiled"), expected, 100 * EPS)

    def sampled(case):
        indices = torch.arange(12).expand(1, 12, 12)
        coefficients = case.measure[:, None].expand(1, 12, 12)
        return sampled_transform(case.u, case.positions, case.weights, indices=indices, coefficients=coefficients)

    torch.testing.assert_close(sampled(problem_), expected["out"], rtol=1e-10, atol=1e-10)
    single = {"out": sampled(problem_.to(torch.float32))}
    same(single, {"out": expected["out"]}, 100 * EPS)
