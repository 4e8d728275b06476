"""Sums over neighbourhoods: which pairs the blocks list, and what the exact sum makes of them."""

import itertools
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.func import grad, hessian, jvp, vmap

from itnet_kernels import (
    Blocks,
    Coordinates,
    ball_blocks,
    integral_transform,
    kernel_matrices,
    listed_blocks,
    window_blocks,
)
from itnet_kernels.near.balls import nearest_keys
from itnet_kernels.validation import batched


def counted(blocks: list[Blocks], num_queries: int, num_keys: int) -> Tensor:
    """How often each pair is listed, [B or 1, n_q, n_k], by a walk through the lists."""
    sets = max((len(part) for each in blocks for part in each), default=1)
    table = torch.zeros(sets, num_queries, num_keys, dtype=torch.long)
    for each in blocks:
        queries, keys, pairs = (part.expand(sets, *part.shape[1:]) for part in each)
        sample, number, row, column = pairs.nonzero(as_tuple=True)
        where = sample, queries[sample, number, row], keys[sample, number, column]
        table.index_put_(where, torch.ones_like(sample), accumulate=True)
    return table


def window_table(shape, reach, *, first=0, is_causal=False, middle=()) -> Tensor:
    """Which pairs are in a window, [n, n], position by position; ``first`` positions come before the grid.

    Position k of an axis is the interval [k, k + 1], and the middle a point.
    """
    places = list(itertools.product(*map(range, shape)))
    table = torch.zeros(first + len(places), first + len(places), dtype=torch.bool)
    for i, x in enumerate(places):
        for j, y in enumerate(places):
            steps = [a - b for a, b in zip(x, y, strict=True)]
            table[first + i, first + j] = all(-(0 if is_causal else reach) <= step <= reach for step in steps)
        extends = [k - reach <= count / 2 <= k + 1 + reach for k, count in zip(x, shape, strict=True)]
        table[first + i, list(middle)] = all(extends)
    return table


def ball_table(x: Tensor, y: Tensor, radius: float) -> Tensor:
    """[B, n_q, s], [B, n_k, s] -> [B, n_q, n_k]."""
    return (x.double().unsqueeze(2) - y.double().unsqueeze(1)).norm(dim=-1) <= radius


class TestWindows:
    @pytest.mark.parametrize("is_causal", [False, True], ids=["both sides", "past"])
    @pytest.mark.parametrize("reach", [0, 1, 3, 20])
    @pytest.mark.parametrize("shape", [(1,), (2,), (7,), (33,), (70,)], ids=str)
    def test_a_line(self, shape, reach, is_causal):
        blocks = window_blocks(shape, reach, is_causal=is_causal)
        expected = window_table(shape, reach, is_causal=is_causal)
        assert torch.equal(counted(blocks, *expected.shape)[0], expected.long())

    @pytest.mark.parametrize("reach", [0, 1, 2, 9])
    @pytest.mark.parametrize("shape", [(1, 1), (1, 6), (5, 4), (9, 7), (3, 4, 5)], ids=str)
    def test_grids(self, shape, reach):
        blocks = window_blocks(shape, reach)
        expected = window_table(shape, reach)
        assert torch.equal(counted(blocks, *expected.shape)[0], expected.long())

    @pytest.mark.parametrize("reach", [0, 1, 2, 9])
    @pytest.mark.parametrize("shape", [(1, 1), (2, 2), (3, 3), (4, 5), (9, 7), (8, 12)], ids=str)
    def test_positions_in_the_middle(self, shape, reach):
        """A grid behind three positions, two of which lie in its middle, and have no windows themselves."""
        middle = torch.tensor([0, 2])
        blocks = window_blocks(shape, reach, first=3, middle=middle)
        expected = window_table(shape, reach, first=3, middle=middle)
        assert not expected[:3].any() and expected[3:, [0, 2]].any() and not expected[:, 1].any()
        assert torch.equal(counted(blocks, *expected.shape)[0], expected.long())

    def test_nothing_in_the_middle(self):
        (blocks,) = window_blocks((4, 5), 1, middle=torch.tensor([], dtype=torch.long))
        assert torch.equal(counted([blocks], 20, 20)[0], window_table((4, 5), 1).long())

    def test_few_pairs_do_not_count(self):
        """The blocks of long windows are mostly full: what is computed is within twice of what counts."""
        for shape, reach in (((1000,), 2), ((1000,), 12), ((1000,), 100), ((50, 50), 2)):
            (blocks,) = window_blocks(shape, reach)
            assert blocks.pairs.float().mean() > 0.5, shape


class TestBalls:
    @pytest.fixture(params=["scipy", "torch"], autouse=True)
    def library(self, request, monkeypatch):
        if request.param == "torch":
            monkeypatch.setattr("itnet_kernels.near.balls._tree_class", lambda: None)
        else:
            pytest.importorskip("scipy")

    @pytest.mark.parametrize(
        ("n", "dim", "radius"), [(1, 2, 0.1), (5, 1, 0.3), (50, 3, 0.4), (50, 2, 9.0), (1100, 2, 0.05)]
    )
    def test_all_pairs_once(self, n, dim, radius):
        x = torch.rand(2, n, dim)
        assert torch.equal(counted(ball_blocks(x, x, radius), n, n), ball_table(x, x, radius).long())

    @pytest.mark.parametrize("n", [40, 1100])
    def test_padding(self, n):
        x, real = torch.rand(3, n, 2), torch.rand(3, n) > 0.3
        real[2] = False
        expected = ball_table(x, x, 0.1) & real.unsqueeze(2) & real.unsqueeze(1)
        blocks = ball_blocks(x, x, 0.1, real, real)
        assert torch.equal(counted(blocks, n, n), expected.long())
        garbage = x.where(real.unsqueeze(-1), 1e6)
        assert torch.equal(counted(ball_blocks(garbage, garbage, 0.1, real, real), n, n), expected.long())

    @pytest.mark.parametrize("n", [40, 1100])
    def test_a_query_domain(self, n):
        """Shared by samples that have keys of their own; some queries have none at all."""
        x, y, real = torch.rand(1, 30, 2) * 2, torch.rand(2, n, 2), torch.rand(2, n) > 0.2
        expected = ball_table(x, y, 0.15) & real.unsqueeze(1)
        assert (~expected.any(2)).any()
        assert torch.equal(counted(ball_blocks(x, y, 0.15, None, real), 30, n), expected.long())

    def test_nobody_is_near(self):
        far = torch.full((1, 3, 2), 9.0)
        blocks = ball_blocks(far, torch.rand(1, 5, 2), 0.1)
        assert len(blocks) == 1 and not blocks[0].pairs.any()

    @pytest.mark.parametrize("size", [6, 36], ids=["dense", "tree"])
    def test_points_at_the_radius_are_inside(self, size):
        """Whole numbers, so that 3-4-5 triangles have a side of exactly 5."""
        x = torch.cartesian_prod(torch.arange(size), torch.arange(size)).float()[None]
        counts = counted(ball_blocks(x, x, 5.0), size**2, size**2)[0]
        assert counts[0, 3 * size + 4] == counts[0, 5] == counts[3 * size + 4, 0] == 1
        assert counts[0].sum() == sum(a * a + b * b <= 25 for a in range(min(size, 6)) for b in range(6))

    @pytest.mark.parametrize("n", [30, 1200])
    def test_points_that_coincide(self, n):
        x = torch.rand(1, n // 2, 2).repeat(1, 2, 1)
        expected = ball_table(x, x, 0.05)
        assert torch.equal(counted(ball_blocks(x, x, 0.05), n, n), expected.long())
        same = torch.zeros(1, n, 2)
        assert counted(ball_blocks(same, same, 0.05), n, n).all()

    @pytest.mark.parametrize("n", [40, 1100])
    def test_the_order_of_the_points_does_not_matter(self, n):
        x, order = (torch.rand(1, n, 3) * 8).round() / 8, torch.randperm(n)  # on a lattice, with many ties
        radius = 0.125 * 3**0.5
        before, after = (counted(ball_blocks(y, y, radius), n, n) for y in (x, x[:, order]))
        assert torch.equal(before[:, order][:, :, order], after)

    def test_few_pairs_do_not_count(self):
        x = torch.rand(1, 4000, 2)
        blocks = ball_blocks(x, x, 0.05)
        counts = sum(int(each.pairs.sum()) for each in blocks)
        assert counts > 0.3 * sum(each.pairs.numel() for each in blocks)

    @pytest.mark.parametrize("n", [40, 1100])
    def test_nearest_keys(self, n):
        """Their distances: which of several at the same distance is taken is nobody's business."""
        x, y, real = torch.rand(2, 9, 2), torch.rand(2, n, 2), torch.rand(2, n) > 0.5
        real[1] = False
        real[1, [3, 7]] = True
        found = nearest_keys(x, y, real, 5)
        distances = (x.double().unsqueeze(2) - y.double().unsqueeze(1)).norm(dim=-1)
        expected = distances.masked_fill(~real.unsqueeze(1), torch.inf).sort(dim=2).values[..., :5]
        actual = distances.gather(2, found)
        torch.testing.assert_close(actual[0], expected[0], rtol=1e-12, atol=0)
        torch.testing.assert_close(actual[1, :, :2], expected[1, :, :2], rtol=1e-12, atol=0)
        assert not real[1, found[1, :, 2:]].any()


def test_listed_blocks():
    indices = torch.tensor([[[1, 2], [-1, 0], [-1, -1]], [[0, -1], [2, 1], [1, 0]]])
    expected = torch.tensor([[[0, 1, 1], [1, 0, 0], [0, 0, 0]], [[1, 0, 0], [0, 1, 1], [1, 1, 0]]])
    assert torch.equal(counted([listed_blocks(indices)], 3, 3), expected)


@pytest.mark.parametrize("sets", list(itertools.product((1, 3), repeat=3)), ids=str)
def test_tables_and_masses(sets):
    """Lists of all samples and lists of each, side by side; a query of two blocks."""
    (of_queries, of_keys, of_pairs), queries = sets, torch.tensor([[[0, 1], [1, 3]]])
    keys = torch.tensor([[[0, 2, 4], [1, 3, 3]], [[1, 3, 4], [0, 2, 2]], [[0, 1, 2], [3, 4, 4]]])[:of_keys]
    pairs = torch.rand(of_pairs, 2, 2, 3) > 0.4
    pairs[:, 1, :, 2] = False  # the same key once more
    blocks = Blocks(queries.expand(of_queries, -1, -1), keys, pairs)
    table = counted([blocks], 5, 5)
    assert torch.equal(blocks.dense(5, 5), table > 0)
    measure = torch.rand(3, 5, dtype=torch.float64)
    torch.testing.assert_close(blocks.mass(measure, 5), (table * measure.unsqueeze(1)).sum(2))


# --- The sum itself


def masked_sum(problem, table: Tensor) -> Tensor:
    """sum_j table_ij omega_j K_ij u_j, from every K_ij."""
    queries = problem.u if problem.queries is None else problem.queries
    x = problem.positions if problem.query_positions is None else problem.query_positions
    matrices = kernel_matrices(queries, problem.u, batched(x), batched(problem.positions), problem.weights)
    omega = table * problem.measure.to(matrices.dtype).unsqueeze(1)
    return torch.einsum("bij,bijhac,bjhc->biha", omega, matrices, problem.u.to(matrices.dtype))


def block_sum(problem, blocks: list[Blocks], backend: str = "tiled") -> Tensor:
    return replace(problem, blocks=blocks).run(backend)


def balls_of(problem, radius: float = 0.4) -> list[Blocks]:
    """Those of the real positions of a problem; its queries are all real."""
    y, real = batched(problem.positions), problem.measure > 0
    x, real_x = (y, real) if problem.queries is None else (batched(problem.query_positions), None)
    return ball_blocks(x, y, radius, real_x, real)


def ragged(problem):
    """Samples of all, of 9 and of 2 positions: the others have measure 0 and stand anywhere."""
    problem.measure[1, 9:] = 0
    problem.measure[2, 2:] = 0
    return problem


LINE, PLANE = {"n": 21, "dim": 1, "regular": True}, {"n": 13, "dim": 2, "regular": True}
LISTS = torch.tensor([[2, 0, -1], [-1, -1, -1], [4, 5, 8]])
CASES = {
    "line": (LINE, lambda p: window_blocks((21,), 2)),
    "line, past": (LINE, lambda p: window_blocks((21,), 3, is_causal=True)),
    "line, positions of each sample": (LINE | {"per_sample": True}, lambda p: window_blocks((21,), 2)),
    "grid and a loose position": (
        PLANE,  # the lattice has rows of 3
        lambda p: window_blocks((4, 3), 1, first=1, middle=torch.tensor([0])),
    ),
    "grid beside scattered points": (
        {"n": 14, "dim": 2},
        lambda p: window_blocks((4, 3), 1, first=2, middle=torch.tensor([0, 1])),
    ),
    "two grids": (
        {"n": 17, "dim": 2},
        lambda p: window_blocks((9,), 1) + window_blocks((2, 4), 1, first=9, middle=torch.tensor([0])),
    ),
    "balls": ({"n": 14}, balls_of),
    "balls of each sample": ({"n": 14, "per_sample": True}, balls_of),
    "balls around queries": ({"n": 14, "num_queries": 9}, balls_of),
    "balls around queries of each sample": ({"n": 14, "num_queries": 9, "per_sample": True}, balls_of),
    "windows of queries": (LINE | {"num_queries": 21}, lambda p: window_blocks((21,), 2)),
    "lists": ({"n": 9}, lambda p: [listed_blocks(LISTS.repeat(3, 3, 1))]),
    "lists of each sample": ({"n": 4}, lambda p: [listed_blocks(torch.arange(36).view(3, 4, 3) % 5 - 1)]),
}
KINDS = {
    "full": {},
    "three layers": {"layers": 3},
    "raw coordinates": {"frequencies": 0},
    "shared output": {"shared_output": True},
}


@pytest.mark.usefixtures("tiling")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", CASES)
def test_float64(problem, same, case, kind):
    sizes, find = CASES[case]
    problem_ = ragged(problem(batch=3, **sizes | KINDS[kind]))
    blocks = find(problem_)
    count = problem_.u.shape[1]
    table = counted(blocks, count if problem_.queries is None else problem_.queries.shape[1], count)
    assert table.max() == 1 and not table.all()
    expected = problem_.gradients(lambda p: masked_sum(p, table))
    for backend in ("tiled", "reference"):
        same(problem_.gradients(lambda p, backend=backend: block_sum(p, blocks, backend)), expected, 1e-10)


@pytest.mark.usefixtures("tiling")
@pytest.mark.parametrize("per_sample", [False, True], ids=["shared", "per-sample"])
@pytest.mark.parametrize("sets", list(itertools.product((1, 3), repeat=3)), ids=str)
def test_lists_of_all_samples_and_of_each(problem, same, sets, per_sample):
    problem_ = problem(n=8, batch=3, per_sample=per_sample)
    queries = torch.arange(8).view(1, 4, 2).expand(sets[0], -1, -1).clone()
    keys = torch.stack([torch.randperm(8)[:3] for _ in range(sets[1] * 4)]).view(sets[1], 4, 3)
    blocks = Blocks(queries.flip(1) if sets[0] == 3 else queries, keys, torch.rand(sets[2], 4, 2, 3) > 0.4)
    expected = problem_.gradients(lambda p: masked_sum(p, counted([blocks], 8, 8)))
    same(problem_.gradients(lambda p: block_sum(p, [blocks])), expected, 1e-10)


@pytest.mark.parametrize("shared", ["query_positions", "positions"])
@pytest.mark.parametrize("regular", [False, True], ids=["irregular", "lattice"])
def test_one_domain_is_shared_and_the_other_is_not(problem, same, shared, regular):
    problem_ = problem(n=12, batch=3, dim=1, num_queries=12, per_sample=True, regular=regular)
    problem_ = replace(problem_, **{shared: getattr(problem_, shared)[0]})
    blocks = window_blocks((12,), 2)
    expected = problem_.gradients(lambda p: masked_sum(p, counted(blocks, 12, 12)))
    same(problem_.gradients(lambda p: block_sum(p, blocks)), expected, 1e-10)


@pytest.mark.usefixtures("tiling")
@pytest.mark.parametrize(
    "inputs",
    [(), ("x",), ("y",), ("x-y",), ("distance",), ("u_x",), ("u_y",), ("u_x*u_y",), ("x", "u_x"), ("y", "distance")],
    ids="+".join,
)
def test_subsets_of_kernel_inputs(problem, same, inputs):
    for frequencies, regular in itertools.product((0, 2), (False, True)):
        problem_ = problem(n=7, dim=1, inputs=inputs, frequencies=frequencies, regular=regular)
        blocks = window_blocks((7,), 1)
        expected = problem_.gradients(lambda p, blocks=blocks: masked_sum(p, counted(blocks, 7, 7)))
        same(problem_.gradients(lambda p, blocks=blocks: block_sum(p, blocks)), expected, 1e-10)


def test_blocks_of_everything_are_the_whole_sum(problem, same):
    problem_ = problem(n=11, batch=3)
    expected = problem_.run_backward("reference")
    for blocks in (window_blocks((11,), 10), balls_of(problem_, 9.0)):
        same(problem_.gradients(lambda p, blocks=blocks: block_sum(p, blocks)), expected, 1e-10)


def test_without_a_measure(problem):
    problem_ = problem(n=9, dim=1)
    blocks = window_blocks((9,), 1)
    uniform = replace(problem_, measure=torch.full_like(problem_.measure, 1 / 9), blocks=blocks)
    actual = integral_transform(problem_.u, problem_.positions, problem_.weights, blocks=blocks)
    torch.testing.assert_close(actual, uniform.run("reference"), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", ["line, past", "balls of each sample", "balls around queries"])
def test_lower_precision(problem, same, case, dtype):
    """Rounded inputs are nobody's error: what remains is that of float32 sums, and of the rounded results."""
    sizes, find = CASES[case]
    problem_ = ragged(problem(batch=3, **sizes)).to(dtype).to(torch.float64)
    blocks = find(problem_)
    table = counted(blocks, problem_.u.shape[1] if problem_.queries is None else 9, problem_.u.shape[1])
    expected = problem_.gradients(lambda p: masked_sum(p, table), position_gradients=False)
    actual = problem_.to(dtype).gradients(lambda p: block_sum(p, blocks), position_gradients=False)
    assert actual["out"].dtype == dtype
    # The functional that gradients are taken of is rounded as well.
    same(actual, expected, 2 * torch.finfo(dtype).eps if dtype != torch.float32 else 20 * torch.finfo(dtype).eps)


def test_tensors_that_are_not_contiguous(problem, same):
    problem_ = problem(n=14, batch=3, per_sample=True, num_queries=9)
    blocks = balls_of(problem_)

    def strided(tensor: Tensor) -> Tensor:
        return tensor.mT.contiguous().mT if tensor.dim() > 1 else torch.stack([tensor, tensor], 1)[:, 0]

    expected = problem_.gradients(lambda p: block_sum(p, blocks))
    actual = problem_.gradients(
        lambda p: block_sum(
            p.with_tensors({name: strided(tensor) for name, tensor in p.tensors().items()}),
            [Blocks(each.queries.mT.contiguous().mT, each.keys.mT.contiguous().mT, each.pairs) for each in blocks],
        )
    )
    same(actual, expected, 1e-12)


def test_padding_and_batch_mates_change_nothing(problem):
    problem_ = ragged(problem(n=12, batch=3, per_sample=True))
    together = block_sum(problem_, balls_of(problem_))
    for sample, length in enumerate((12, 9, 2)):
        own, one = slice(0, length), slice(sample, sample + 1)
        parts = {name: getattr(problem_, name)[one, own] for name in ("u", "positions", "measure")}
        alone = replace(problem_, **parts)
        expected = block_sum(alone, balls_of(alone))
        torch.testing.assert_close(together[one, own], expected, rtol=1e-12, atol=1e-13)
        assert not together[sample, length:].any()


def test_repeats_bit_by_bit(problem):
    problem_ = ragged(problem(n=30, batch=3, per_sample=True)).to(torch.float32)
    blocks = balls_of(problem_)
    first, second = (problem_.gradients(lambda p: block_sum(p, blocks)) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_prepared_coordinates(problem):
    problem_ = problem(n=21, dim=1, regular=True)
    blocks = window_blocks((21,), 2)
    places = Coordinates(problem_.positions, problem_.weights.fourier)
    settings = {"measure": problem_.measure, "blocks": blocks}
    actual = [integral_transform(problem_.u, places, problem_.weights, **settings) for _ in range(2)]
    torch.testing.assert_close(actual[0], masked_sum(problem_, counted(blocks, 21, 21)), rtol=1e-10, atol=1e-11)
    assert torch.equal(*actual)


class TestDerivatives:
    """Whatever is no first derivative in reverse mode goes through ``plain_block_sum``."""

    SIZES = {"n": 5, "batch": 2, "heads": 2, "head_dim": 2, "width": 3, "frequencies": 2, "dim": 1}
    CASES = {
        "window": ({}, lambda p: window_blocks((5,), 1)),
        "three layers": ({"layers": 3}, lambda p: window_blocks((5,), 2, is_causal=True)),
        "lists": ({"per_sample": True}, lambda p: [listed_blocks(torch.tensor([[0, 3], [2, -1]] * 5).view(2, 5, 2))]),
    }

    @pytest.fixture(params=CASES)
    def functions(self, request, problem):
        sizes, find = self.CASES[request.param]
        problem_ = problem(**self.SIZES | sizes)
        problem_ = replace(problem_, blocks=find(problem_))
        names = list(problem_.tensors())
        table = counted(problem_.blocks, 5, 5)

        def given(values):
            return problem_.with_tensors(dict(zip(names, values, strict=True)))

        def run(*values):
            return given(values).run("tiled")

        def literal(*values):
            return masked_sum(given(values), table)

        return run, literal, tuple(problem_.tensors().values())

    @staticmethod
    def close(actual, expected):
        torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-11)

    def test_forward_mode(self, functions):
        run, literal, values = functions
        tangents = tuple(map(torch.randn_like, values))
        self.close(jvp(run, values, tangents), jvp(literal, values, tangents))

    def test_transforms(self, functions):
        run, literal, values = functions
        every = tuple(range(len(values)))
        self.close(*(grad(lambda *v, f=function: f(*v).square().sum(), every)(*values) for function in (run, literal)))
        self.close(*(hessian(lambda u, f=f: f(u, *values[1:]).square().sum())(values[0]) for f in (run, literal)))

    def test_vmap(self, functions):
        run, _, values = functions
        for index in range(len(values)):
            many = torch.stack([values[index], 1.25 * values[index]])
            expected = torch.stack([run(*values[:index], value, *values[index + 1 :]) for value in many])
            in_dims = tuple(0 if other == index else None for other in range(len(values)))
            self.close(vmap(run, in_dims)(*values[:index], many, *values[index + 1 :]), expected)

    def test_derivatives_of_derivatives(self, functions):
        run, literal, values = functions
        found = []
        for function in (run, literal):
            leaves = [value.detach().clone().requires_grad_() for value in values]
            gradients = torch.autograd.grad(function(*leaves).square().sum(), leaves, create_graph=True)
            total = sum((gradient * gradient.detach().cos()).sum() for gradient in gradients)
            found.append(torch.autograd.grad(total, leaves))
        self.close(*found)


CUSTOM = {
    "window": ({"n": 6, "dim": 1}, lambda p: window_blocks((6,), 1)),
    "lists": ({"n": 4, "per_sample": True}, lambda p: [listed_blocks(torch.arange(24).view(2, 4, 3) % 5 - 1)]),
    "three layers": ({"n": 5, "layers": 3}, lambda p: window_blocks((5,), 1, is_causal=True)),
}


@pytest.mark.parametrize("name", CUSTOM)
def test_opcheck(problem, pair_sum_arguments, name):
    sizes, find = CUSTOM[name]
    problem_ = problem(**sizes)
    arguments = pair_sum_arguments(replace(problem_, blocks=find(problem_)), "tiled")
    torch.library.opcheck(torch.ops.itnet.pair_sum, arguments)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiles_to_one_graph(problem, same, backend):
    """Windows and balls are found in the graph; where values are unknown, balls are a table of all pairs."""
    torch._dynamo.reset()
    problem_ = problem(n=12, dim=1, per_sample=True)

    def windows(u, positions, weights, measure):
        return integral_transform(u, positions, weights, measure=measure, blocks=window_blocks((12,), 2))

    def balls(u, positions, weights, measure):
        found = ball_blocks(positions, positions, 0.2, measure > 0.3, measure > 0.3)
        return integral_transform(u, positions, weights, measure=measure, blocks=found)

    for function in (windows, balls):
        compiled = torch.compile(function, fullgraph=True, backend=backend)
        expected, actual = (
            problem_.gradients(lambda p, f=f: f(p.u, p.positions, p.weights, p.measure)) for f in (function, compiled)
        )
        same(actual, expected, 1e-10)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"queries": torch.zeros(3, 4, 2, dtype=torch.long)}, r"`blocks` \[\[3, 4, 2\], .* B = 2"),
        ({"keys": torch.zeros(1, 5, 3, dtype=torch.long)}, r"`blocks` .* must be \[B or 1, N, t\], \[B or 1, N, m\]"),
        ({"keys": torch.zeros(1, 4, dtype=torch.long)}, r"`blocks` \[\[1, 4, 2\], \[1, 4\]"),
        ({"pairs": torch.ones(1, 4, 2, 3)}, r"booleans \[B or 1, N, t, m\]"),
        ({"pairs": torch.ones(1, 4, 3, 2, dtype=torch.bool)}, r"`blocks` .*\[1, 4, 3, 2\]"),
        ({"is_causal": True}, r"`blocks` does not go with `is_causal`"),
        ({"backend": "triton"}, r"`backend` \(\"triton\"\) cannot run: it needs tensors on cuda"),
    ],
    ids=["samples", "number", "dimensions", "floats", "pairs", "causal", "triton"],
)
def test_errors(problem, change, message):
    problem_ = problem(n=8)
    lists = {"queries": torch.arange(8).view(1, 4, 2), "keys": torch.zeros(1, 4, 3, dtype=torch.long)}
    lists |= {"pairs": torch.ones(1, 4, 2, 3, dtype=torch.bool)}
    settings = {name: value for name, value in change.items() if name not in lists}
    blocks = Blocks(**lists | {name: value for name, value in change.items() if name in lists})
    with pytest.raises(ValueError, match=message):
        integral_transform(problem_.u, problem_.positions, problem_.weights, blocks=blocks, **settings)


def test_what_is_kept_and_computed_is_linear(problem):
    """Twice the points in twice the volume: twice the numbers that are kept for the backward, and the pairs."""
    kept, pairs = {}, {}
    for n in (256, 512):
        problem_ = problem(n=n, batch=1, per_sample=True)
        problem_ = replace(problem_, positions=problem_.positions * torch.tensor([n / 256, 1]))
        blocks, sizes = balls_of(problem_, 0.1), {}
        problem_.u.requires_grad_()
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t, sizes=sizes: sizes.update({t.data_ptr(): t.numel()}) or t, lambda t: t
        ):
            block_sum(problem_, blocks)
        kept[n] = sum(sizes.values())
        pairs[n] = sum(each.pairs.numel() for each in blocks)
    assert kept[512] < 2.5 * kept[256]
    assert pairs[512] < 2.5 * pairs[256]
