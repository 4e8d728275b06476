"""Sampled integration: the plain formula and its gradients, unbiasedness, variance, and the optimal proposal."""

import math

import pytest
import torch

from itnet_kernels import (
    integral_transform,
    integrand_norms,
    kernel_matrices,
    monte_carlo_transform,
    sampled_transform,
)


@pytest.fixture(params=["one tile", "many tiles"])
def tiles(request, monkeypatch):
    if request.param == "many tiles":
        monkeypatch.setattr("itnet_kernels.sampled.sampled._TILE_ELEMENTS", 30)  # one query at a time


def draw(pmf, count, seed=0):
    """Keys and their probabilities, pmf [B, n_q, n] -> [B, n_q, count]."""
    generator = torch.Generator().manual_seed(seed)
    batch, num_queries, n = pmf.shape
    indices = torch.multinomial(pmf.reshape(-1, n), count, replacement=True, generator=generator)
    indices = indices.view(batch, num_queries, count)
    return indices, pmf.gather(2, indices)


def random_pmf(batch, num_queries, n, seed=5):
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(batch, num_queries, n, generator=generator, dtype=torch.float64).add(0.1).softmax(-1)


def plain_sum(problem, indices, coefficients):
    """sum_m c_im K_ij u_j with every K_ij formed."""
    queries = problem.u if problem.queries is None else problem.queries
    query_positions = problem.positions if problem.queries is None else problem.query_positions
    x, y = (p if p.dim() == 3 else p.unsqueeze(0) for p in (query_positions, problem.positions))
    matrices = kernel_matrices(queries, problem.u, x, y, problem.weights)  # [B, n_q, n, H, a, c]
    values = torch.einsum("bijhac,bjhc->bijha", matrices, problem.u)
    chosen = values.gather(2, indices[..., None, None].expand(*indices.shape, *values.shape[3:]))
    return (coefficients[..., None, None] * chosen).sum(2)


def plain_estimate(problem, indices, probabilities):
    """1/M sum_m omega_j / p_ij K_ij u_j, with omega normalised over the visible keys where it is causal."""
    batch, num_queries, count = indices.shape
    n = problem.u.shape[1]
    omega = problem.measure.unsqueeze(1).expand(batch, num_queries, n)
    if problem.is_causal:
        omega = omega * torch.ones(num_queries, n, dtype=torch.bool).tril(n - num_queries)
        omega = omega / omega.sum(-1, keepdim=True)
    return plain_sum(problem, indices, omega.gather(2, indices) / (count * probabilities))


def with_gradients(problem, run):
    """Output and all gradients of ``run(problem)``, by name."""
    leaves = {name: tensor.detach().clone().requires_grad_() for name, tensor in problem.tensors().items()}
    out = run(problem.with_tensors(leaves))
    generator = torch.Generator().manual_seed(1)
    out.backward(torch.randn(out.shape, generator=generator, dtype=out.dtype))
    gradients = {name: torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for name, leaf in leaves.items()}
    return {"out": out.detach()} | gradients


def estimate(problem, indices, probabilities):
    return monte_carlo_transform(
        problem.u,
        problem.positions,
        problem.weights,
        indices=indices,
        probabilities=probabilities,
        measure=problem.measure,
        is_causal=problem.is_causal,
        queries=problem.queries,
        query_positions=problem.query_positions,
    )


class TestFormula:
    CASES = {
        "plain": {},
        "per-sample positions": {"per_sample": True},
        "three layers": {"layers": 3},
        "raw coordinates": {"frequencies": 0, "per_sample": True},
        "one group": {"inputs": ("x-y",)},
        "content only": {"inputs": ("u_y", "u_x*u_y")},
        "no groups": {"inputs": ()},
        "shared output": {"shared_output": True},
        "query domain": {"num_queries": 5, "per_sample": True},
        "causal": {"is_causal": True},
        "causal, few queries": {"is_causal": True, "num_queries": 3},
    }

    @pytest.mark.parametrize("case", CASES, ids=str)
    def test_value_and_gradients(self, problem, same, tiles, case):
        given = problem(**self.CASES[case])
        num_queries = given.u.shape[1] if given.queries is None else given.queries.shape[1]
        indices, probabilities = draw(random_pmf(2, num_queries, 7), 9)  # more samples than keys
        actual = with_gradients(given, lambda p: estimate(p, indices, probabilities))
        expected = with_gradients(given, lambda p: plain_estimate(p, indices, probabilities))
        same(actual, expected, 1e-10)

    def test_gradient_of_the_coefficients(self, problem, tiles):
        given = problem()
        indices, coefficients = draw(random_pmf(2, 7, 7), 4)
        grads = []
        for run in (plain_sum, None):
            leaf = coefficients.clone().requires_grad_()
            if run is None:
                out = sampled_transform(given.u, given.positions, given.weights, indices=indices, coefficients=leaf)
            else:
                out = run(given, indices, leaf)
            grads.append(torch.autograd.grad(out.square().sum(), leaf)[0])
        torch.testing.assert_close(*grads, rtol=1e-10, atol=1e-10)

    def test_all_keys_with_their_own_measure_are_exact(self, problem):
        given = problem(is_causal=True)
        indices = torch.arange(7).expand(2, 7, 7)
        uniform = torch.full(indices.shape, 1 / 7, dtype=torch.float64)
        torch.testing.assert_close(estimate(given, indices, uniform), given.run("reference"), rtol=1e-12, atol=1e-12)

    def test_no_measure_is_uniform(self, problem):
        given = problem()
        indices, probabilities = draw(random_pmf(2, 7, 7), 4)
        sampling = {"indices": indices, "probabilities": probabilities}
        actual = monte_carlo_transform(given.u, given.positions, given.weights, **sampling)
        uniform = torch.full((2, 7), 1 / 7, dtype=torch.float64)
        expected = monte_carlo_transform(given.u, given.positions, given.weights, measure=uniform, **sampling)
        torch.testing.assert_close(actual, expected, rtol=1e-7, atol=1e-7)

    def test_drawn_padding_and_hidden_keys_contribute_nothing(self, problem):
        given = problem(is_causal=True)
        given.measure[:, 5] = 0
        indices, probabilities = draw(random_pmf(2, 7, 7), 20)  # p is positive on both
        out = estimate(given, indices, probabilities)
        given.u = given.u.clone()
        given.u[:, 5] += 1.0
        assert torch.equal(estimate(given, indices, probabilities)[:, :5], out[:, :5])
        assert torch.equal(estimate(given, indices, probabilities)[:, 6], out[:, 6])

    def test_half_precision_keeps_its_dtype(self, problem):
        given = problem()
        indices, probabilities = draw(random_pmf(2, 7, 7), 5)
        expected = estimate(given, indices, probabilities)
        actual = estimate(given.to(torch.bfloat16), indices, probabilities)
        assert actual.dtype == torch.bfloat16
        assert (actual.double() - expected).norm() < 0.02 * expected.norm()

    def test_norms(self, problem, tiles):
        given = problem(num_queries=3, per_sample=True)
        indices, _ = draw(random_pmf(2, 3, 7), 4)
        single = [plain_sum(given, indices[..., m : m + 1], torch.ones(2, 3, 1)) for m in range(4)]
        expected = torch.stack([value.flatten(2).norm(dim=-1) for value in single], dim=-1)
        actual = integrand_norms(
            given.u,
            given.positions,
            given.weights,
            indices=indices,
            queries=given.queries,
            query_positions=given.query_positions,
        )
        torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-10)


class TestStatistics:
    """Many independent draws at once, as queries that are copies of one another."""

    DRAWS = 20_000

    def samples(self, problem, pmf, count):
        """Estimates of query 0 of sample 0: [draws, H * d_h]; and the exact integral."""
        given = problem(batch=1, n=6)
        indices, probabilities = draw(pmf.expand(1, self.DRAWS, 6), count)
        out = monte_carlo_transform(
            given.u,
            given.positions,
            given.weights,
            indices=indices,
            probabilities=probabilities,
            measure=given.measure,
            queries=given.u[:, :1].expand(-1, self.DRAWS, -1, -1),
            query_positions=given.positions[:1].expand(self.DRAWS, -1),
        )
        return out[0].flatten(1), given.run("reference")[0, 0].flatten(), given

    @staticmethod
    def integrand(given):
        """omega_j K_0j u_j: [n, H * d_h]."""
        positions = given.positions[None]
        matrices = kernel_matrices(given.u[:, :1], given.u, positions[:, :1], positions, given.weights)
        values = torch.einsum("bijhac,bjhc->bijha", matrices, given.u)[0, 0].flatten(1)
        return given.measure[0, :, None] * values

    @pytest.mark.parametrize("proposal", ["uniform", "random"])
    @pytest.mark.parametrize("measure", ["uniform", "random"])
    def test_unbiased_with_the_variance_of_the_paper(self, problem, proposal, measure):
        def make(**arguments):
            given = problem(**arguments)
            if measure == "uniform":
                given.measure = torch.full_like(given.measure, 1 / given.measure.shape[1])
            return given

        count = 4
        pmf = random_pmf(1, 1, 6) if proposal == "random" else torch.full((1, 1, 6), 1 / 6, dtype=torch.float64)
        samples, exact, given = self.samples(make, pmf, count)
        variance = samples.var(0)
        error = (samples.mean(0) - exact).abs() / (variance / self.DRAWS).sqrt()
        assert error.max() < 4
        # Eq. app_var_exact for a pmf: (sum_j |omega_j K u_j|^2 / p_j - |I|^2) / M
        values = self.integrand(given)
        expected = ((values.square().sum(1) / pmf[0, 0]).sum() - exact.square().sum()) / count
        assert abs(variance.sum() / expected - 1) < 0.1

    def test_the_optimal_proposal_has_the_least_variance(self, problem):
        given = problem(batch=1, n=6)
        norms = self.integrand(given).norm(dim=1)
        optimal = (norms / norms.sum())[None, None]
        count = 4
        samples, exact, _ = self.samples(problem, optimal, count)
        least = (norms.sum() ** 2 - exact.square().sum()) / count  # Eq. app_min_var
        assert abs(samples.var(0).sum() / least - 1) < 0.1
        for seed in range(3):
            other, _, _ = self.samples(problem, random_pmf(1, 1, 6, seed), count)
            assert other.var(0).sum() > samples.var(0).sum()

    def test_error_falls_with_the_root_of_the_samples(self, problem):
        given = problem(n=40, batch=1)
        exact = given.run("tiled")
        errors = []
        counts = (16, 64, 256, 1024)
        for count in counts:
            indices, probabilities = draw(torch.full((1, 40, 40), 1 / 40, dtype=torch.float64), count)
            errors.append(float((estimate(given, indices, probabilities) - exact).norm()))
        slope = math.log(errors[-1] / errors[0]) / math.log(counts[-1] / counts[0])
        assert abs(slope + 0.5) < 0.1


class TestErrors:
    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"indices": torch.zeros(2, 6, 3, dtype=torch.long)}, r"`indices` \[2, 6, 3\] must be \[2, 7, M\]"),
            ({"indices": torch.zeros(2, 7, 3)}, "`indices` must be an integer tensor"),
            ({"indices": torch.full((2, 7, 3), 7)}, r"`indices` must be in \[0, 7\)"),
            ({"probabilities": torch.ones(2, 7, 2)}, "`probabilities` must be .* of the shape of `indices`"),
            ({"probabilities": torch.zeros(2, 7, 3)}, "`probabilities` must be positive"),
            (
                {"indices": torch.zeros(2, 7, 0, dtype=torch.long), "probabilities": torch.ones(2, 7, 0)},
                "`indices` holds no key",
            ),
            ({"measure": torch.ones(2, 6)}, r"`measure` \[2, 6\] must be \[2, 7\]"),
            ({"queries": torch.ones(2, 3, 2, 4)}, "`queries` was given without `query_positions`"),
        ],
        ids=["rows", "float", "range", "shape", "zero", "none", "measure", "queries"],
    )
    def test_arguments(self, problem, change, message):
        given = problem()
        arguments = {"indices": torch.zeros(2, 7, 3, dtype=torch.long), "probabilities": torch.ones(2, 7, 3)}
        with pytest.raises(ValueError, match=message):
            monte_carlo_transform(given.u, given.positions, given.weights, **(arguments | change))

    def test_no_keys_give_zero(self, problem):
        given = problem()
        nothing = {"indices": torch.zeros(2, 7, 0, dtype=torch.long), "coefficients": torch.ones(2, 7, 0)}
        out = sampled_transform(given.u, given.positions, given.weights, **nothing)
        assert torch.equal(out, torch.zeros_like(given.u))


def test_memory_does_not_grow_with_the_pairs(problem):
    """What a forward keeps for its backward is linear in n: no tensor with a query and a sample index in features."""
    kept = {}
    for n in (16, 64):
        given = problem(n=n, batch=1, heads=2, head_dim=8, width=16)
        indices, probabilities = draw(torch.full((1, n, n), 1 / n, dtype=torch.float64), 8)
        sizes = []
        given.u.requires_grad_()
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t, sizes=sizes: sizes.append(t.numel()) or t, lambda t: t
        ):
            estimate(given, indices, probabilities)
        kept[n] = max(sizes)
    assert kept[64] <= 4 * kept[16]
    assert kept[64] <= 64 * max(2 * 8, 2 * 3, 8)  # features, Fourier features, samples


def test_exact_on_the_anchors_is_a_query_domain(problem):
    """The deterministic rule of evaluation is the same sum, once per pair and once over a key domain."""
    given = problem(per_sample=True)
    chosen = torch.tensor([1, 4, 6])
    weights = torch.rand(2, 3, dtype=torch.float64)
    expected = integral_transform(
        given.u[:, chosen],
        given.positions[:, chosen],
        given.weights,
        measure=weights,
        queries=given.u,
        query_positions=given.positions,
    )
    actual = sampled_transform(
        given.u,
        given.positions,
        given.weights,
        indices=chosen.expand(2, 7, 3),
        coefficients=weights.unsqueeze(1).expand(2, 7, 3),
    )
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-10)
