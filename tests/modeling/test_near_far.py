"""Near and far fields: every operator against a dense sum, and what a neighbourhood does not depend on."""

import copy
import itertools
import math
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from itnet_kernels import kernel_matrices
from itnet_kernels.validation import batched
from modeling_itnet import Domain, ITNetForSignalRegression, ITNetModel, ITNetOperator
from modeling_itnet.heads.interpolation import local_interpolation, shepard_interpolation
from modeling_itnet.integration import near as near_module
from modeling_itnet.integration.capture import operator_inputs
from modeling_itnet.operator import near_integral

NEAR_FAR = {"integration_mode": "near_far", "rank": 3, "near_size": 9}
FORMS = ("vector", "matrix")
BATCH, COUNT = 3, 22
#: The real positions of each sample: all, with padding at the end and at the beginning, with holes.
LENGTHS = torch.ones(BATCH, COUNT, dtype=torch.long)
LENGTHS[1, -9:] = 0
LENGTHS[1, :4] = 0
HOLES = LENGTHS.clone()
HOLES[2, [3, 4, 11, 20]] = 0


class Case(NamedTuple):
    modality: str
    settings: dict = {}
    mask: Tensor | None = None


CASES = {
    "image": Case("image", {"patch_size": 4}),
    "image, [CLS]": Case("image", {"patch_size": 4, "pooling": "cls"}),
    "image, two scales": Case("image", {"patch_size": [4, 2], "image_size": 16}),
    "text": Case("text", {"near_size": 5}),
    "text, padded": Case("text", {"near_size": 5}, LENGTHS),
    "text, holes": Case("text", {"near_size": 5}, HOLES),
    "causal text": Case("text", {"near_size": 4, "is_causal": True}),
    "causal text, holes": Case("text", {"near_size": 4, "is_causal": True}, HOLES),
    "image and text": Case("multimodal", {"patch_size": 4, "pooling": "cls", "measure": "balanced"}, HOLES),
    "points": Case("point_cloud", {"near_radius": 0.9, "local_neighbors": 3}),
    "points, padded": Case("point_cloud", {"near_radius": 0.9, "local_neighbors": 0}, HOLES),
    "graph": Case("graph", {"num_node_types": 5, "edge_gate_init": 0.4}, HOLES),
    "graph without edges": Case("graph", {"num_node_types": 5, "edge_gate": False, "near_radius": 2.0}, HOLES),
    "signal": Case("signal", {"near_radius": 0.3}, HOLES),
    "signal, positions of each sample": Case("signal", {"near_radius": 0.3}),
    "causal signal": Case("signal", {"near_size": 4, "is_causal": True, "position_dim": 1}, HOLES),
}  # fmt: skip


def make_inputs(name: str, seed: int = 0) -> dict[str, Tensor]:
    modality, settings, mask = CASES[name]
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator)

    masked = {} if mask is None else {"attention_mask": mask}
    image = {"pixel_values": normal(BATCH, 3, 16, 16)}
    text = {"input_ids": torch.randint(1, 40, (BATCH, COUNT), generator=generator)}
    if modality in ("image", "text", "multimodal"):
        return (image if modality != "text" else {}) | (text | masked if modality != "image" else {})
    if modality == "point_cloud":
        return {"points": normal(BATCH, COUNT, 3), **masked}
    if modality == "graph":
        lists = [torch.randperm(COUNT, generator=generator)[:4] for _ in range(BATCH * COUNT)]
        neighbors = torch.stack(lists).view(BATCH, COUNT, 4)
        neighbors = neighbors.where(torch.rand(neighbors.shape, generator=generator) < 0.7, -1)
        types = torch.randint(5, (BATCH, COUNT), generator=generator)
        return {"node_types": types, "positions": normal(BATCH, COUNT, 8) / 2, "neighbors": neighbors, **masked}
    dim = settings.get("position_dim", 2)
    positions = torch.rand(BATCH, COUNT, dim, generator=generator).sort(1).values
    measure = torch.rand(BATCH, COUNT, generator=generator) + 0.1
    shared = positions if "each sample" in name else positions[0]
    return {"inputs_embeds": normal(BATCH, COUNT, 16), "positions": shared, "measure": measure, **masked}


@pytest.fixture(scope="module")
def make_model(tiny_config, shake):
    """make_model(name, **overrides): a shaken model of CASES in evaluation mode."""

    def make(name, **overrides):
        torch.manual_seed(0)
        case = CASES[name]
        return shake(ITNetModel(tiny_config(case.modality, **NEAR_FAR | case.settings | overrides))).eval()

    return make


# --- The oracle: which pairs are near, and the two sums over all pairs


def near_table(config, domain: Domain) -> Tensor:
    """Which keys are near to which queries, [B, n, n], pair by pair; rows of padding mean nothing."""
    batch, count = domain.measure.shape
    real, table = domain.measure > 0, torch.zeros(batch, count, count, dtype=torch.bool)
    layout = ((count,),) if config.is_causal else domain.layout
    if layout is None:
        positions = batched(domain.positions).double().expand(batch, -1, -1)
        for b, i, j in itertools.product(range(batch), range(count), range(count)):
            if domain.neighbors is None:
                table[b, i, j] = math.dist(positions[b, i], positions[b, j]) <= config.near_radius
            else:
                table[b, i, j] = i == j or j in domain.neighbors[b, i].tolist()
        return table & real.unsqueeze(1)
    starts = [0, *itertools.accumulate(map(math.prod, layout))]
    loose = [start for start, shape in zip(starts, layout, strict=False) if not shape]
    for b, (start, shape) in itertools.product(range(batch), zip(starts, layout, strict=False)):
        rank = (real[b, start : start + math.prod(shape)].cumsum(0) - 1).tolist()
        places = [(k,) for k in rank] if len(shape) == 1 else list(itertools.product(*map(range, shape)))
        behind = ahead = (round(config.near_size ** (1 / max(len(shape), 1))) - 1) // 2
        if config.is_causal:
            behind, ahead = config.near_size - 1, 0
        for (i, x), (j, y) in itertools.product(enumerate(places), repeat=2):
            steps = [a - c for a, c in zip(x, y, strict=True)]
            table[b, start + i, start + j] = all(-ahead <= step <= behind for step in steps)
            if len(shape) == 2:  # [CLS] is a point in the middle of the image
                table[b, start + i, loose] = all(
                    k - behind <= count / 2 <= k + 1 + behind for k, count in zip(x, shape, strict=True)
                )
        if not shape:
            table[b, start] = True
    return table & real.unsqueeze(1)


def near_scale(config, domain: Domain, table: Tensor) -> Tensor:
    """[B, n]: 1 / mu(N(i)) in windows, 1 over the mean of that on graphs, 1 over the volume of a ball elsewhere."""
    masses = (table * domain.measure.unsqueeze(1)).sum(2)
    if domain.layout is None and domain.neighbors is None and not config.is_causal:
        radius, dim = config.near_radius, config.position_dim
        volume = {1: 2, 2: math.pi, 3: 4 / 3 * math.pi, 8: math.pi**4 / 24}[dim] * radius**dim
        masses = torch.full_like(masses, min(volume, 1))
    elif domain.layout is None and not config.is_causal:
        masses = (domain.measure * masses).sum(1, keepdim=True) / domain.measure.sum(1, keepdim=True)
    return (1 / masses.where(masses > 0, 1)).expand_as(domain.measure)


@pytest.fixture(scope="session")
def dense_operator(low_rank_kernels):
    """dense_operator(operator, features, domain): the operator by its definition, from every pair."""

    def compute(operator: ITNetOperator, features: Tensor, domain: Domain) -> Tensor:
        heads = features.unflatten(-1, (operator.num_heads, -1))
        places, omega = batched(domain.positions), domain.measure.unsqueeze(1).expand(-1, features.shape[1], -1)
        table = near_table(operator.config, domain).to(omega.dtype)
        near = near_scale(operator.config, domain, table).unsqueeze(2) * omega * table
        far = omega
        if operator.is_causal:
            far = omega.tril()
            mass = far.sum(2, keepdim=True)
            far = far / mass.where(mass > 0, 1)
        if domain.neighbors is not None:
            joined = torch.nn.functional.one_hot(domain.neighbors + 1, features.shape[1] + 1).sum(2)[..., 1:]
            scale = near_scale(operator.config, domain, table).unsqueeze(2)
            near, far = domain.edge_gate * near + scale * omega * joined, (domain.edge_gate + joined) * omega
        kernels = kernel_matrices(heads, heads, places, places, operator.kernel(domain.frequencies))
        total = torch.einsum("bij,bijhac,bjhc->biha", near, kernels, heads)
        kernels = low_rank_kernels(operator.factors, heads, domain, heads, domain)
        total = total + torch.einsum("bij,bijhac,bjhc->biha", far, kernels, heads)
        return operator.output(total.flatten(2)) + operator.residual(features)

    return compute


def in_float64(features: Tensor, domain: Domain) -> tuple[Tensor, Domain, list[Tensor]]:
    """Both with leaves in float64: features, measure, which is 1 to all its digits, and positions."""
    measure = domain.measure.double() / domain.measure.double().sum(1, keepdim=True)
    leaves = [t.detach().double().requires_grad_() for t in (features, measure, domain.positions)]
    gate = None if domain.edge_gate is None else domain.edge_gate.detach().double().requires_grad_()
    given = {"neighbors": domain.neighbors, "edge_gate": gate, "is_padded": domain.is_padded, "layout": domain.layout}
    new = Domain(leaves[2], leaves[1], domain.frequencies.double(), **given)
    return leaves[0], new, leaves if gate is None else [*leaves, gate]


def assert_close(actual: Tensor, expected: Tensor, tolerance: float, name: str = "") -> None:
    error = float((actual.detach() - expected.detach()).norm())
    assert error <= tolerance * max(float(expected.detach().norm()), 1e-3), f"{name}: {error:.3e}"


class TestOperator:
    @pytest.mark.parametrize("form", FORMS)
    @pytest.mark.parametrize("name", CASES)
    def test_equals_the_dense_sums(self, make_model, dense_operator, name, form):
        """Both layers of a model, in float64: the output at real positions, and every gradient of it."""
        model = make_model(name, factor_form=form)
        for layer, (features, domain) in zip(model.layers, operator_inputs(model, make_inputs(name)), strict=True):
            operator = copy.deepcopy(layer.operator).double()
            results = []
            for function in (operator, lambda *given, operator=operator: dense_operator(operator, *given)):
                features_, domain_, leaves = in_float64(features, domain)
                out = function(features_, domain_)[domain.measure > 0]
                upstream = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=out.dtype)
                wanted = [*leaves, *operator.parameters()]
                found = [out.detach(), *torch.autograd.grad(out, wanted, upstream)]
                found[2] = found[2] * (domain.measure > 0)  # padding is no position
                results.append(found)
            names = ["out", "features", "measure", "positions", *(["gate"] if domain.neighbors is not None else [])]
            names += [name for name, _ in operator.named_parameters()]
            for key, actual, expected in zip(names, *results, strict=True):
                assert_close(actual, expected, 1e-10, key)
                assert expected.any(), key

    @pytest.mark.parametrize("sharing", ["shared", "per_head"])
    def test_kernel_variants(self, make_model, dense_operator, sharing):
        name = "points, padded"
        settings = {"kernel_num_layers": 3, "kernel_input_sharing": sharing, "kernel_inputs": ["x-y", "u_y"]}
        model = make_model(name, **settings)
        features, domain, _ = in_float64(*operator_inputs(model, make_inputs(name))[0])
        operator, real = model.layers[0].operator.double(), domain.measure > 0
        assert_close(operator(features, domain)[real], dense_operator(operator, features, domain)[real], 1e-10)

    @pytest.mark.parametrize("name", ["text, holes", "causal text", "image", "points, padded", "signal", "graph"])
    def test_the_near_part_of_everything_is_exact(self, make_model, name):
        """Windows and balls that hold all positions, and complete graphs; the causal window normalises as exact."""
        settings = {"near_size": 961 if CASES[name].modality == "image" else 101, "near_radius": 100.0}
        model, inputs = make_model(name, **settings), make_inputs(name)
        if name == "graph":
            inputs["neighbors"] = torch.arange(COUNT).expand(BATCH, COUNT, -1)
        features, domain, _ = in_float64(*operator_inputs(model, inputs)[0])
        operator, real = model.layers[0].operator.double(), domain.measure > 0
        with torch.no_grad():
            both = operator.integral(features, domain)
            far, exact = [], copy.deepcopy(operator)
            for one, mode in ((operator, "low_rank"), (exact, "exact")):
                one.config = copy.deepcopy(one.config)
                one.config.integration_mode = mode
                far.append(one.integral(features, domain.replaced()))
        assert_close(both[real], sum(far)[real], 1e-12)

    @pytest.mark.parametrize("is_causal", [False, True], ids=["balls", "causal windows"])
    def test_alone(self, tiny_config, dense_operator, shake, is_causal):
        """An operator without a model, with positions instead of a domain; a causal one never looks ahead."""
        settings = {"near_radius": 0.4, "is_causal": is_causal}
        operator = shake(ITNetOperator(tiny_config("signal", **NEAR_FAR, **settings))).double()
        features, positions = torch.randn(2, 30, 16, dtype=torch.float64), torch.rand(30, 2, dtype=torch.float64)
        domain = Domain(positions, torch.full((2, 30), 1 / 30, dtype=torch.float64), operator.frequencies)
        assert_close(operator(features, positions), dense_operator(operator, features, domain), 1e-10)


class TestQueryLayer:
    """Signals at other positions: the decoder of operator learning."""

    @pytest.fixture(params=FORMS)
    def decoder(self, request, tiny_config, shake):
        settings = NEAR_FAR | {"near_radius": 0.35, "signal_feature_size": 2, "factor_form": request.param}
        model = shake(ITNetForSignalRegression(tiny_config("signal", **settings)), scale=0.1)
        return model.decoder.double(), model.itnet.fourier.frequencies.double()

    def test_equals_the_dense_sums(self, decoder, low_rank_kernels):
        layer, frequencies = decoder
        features, measure = torch.randn(2, 40, 16, dtype=torch.float64), torch.rand(2, 40, dtype=torch.float64)
        measure[1, 30:] = 0
        measure /= measure.sum(1, keepdim=True)
        positions, queries = torch.rand(2, 40, 2, dtype=torch.float64), torch.rand(2, 9, 2, dtype=torch.float64)

        def dense(features):
            domain = Domain(positions, measure, frequencies)
            places = Domain(queries, torch.full((2, 9), 1 / 9), frequencies)
            v = local_interpolation(features, positions, measure, queries)
            v = v + layer.position_projection(places.gamma(features.dtype))
            q, u = layer.query_norm(v).unflatten(-1, (2, -1)), features.unflatten(-1, (2, -1))
            near = torch.cdist(queries, positions) <= 0.35
            scale = near_scale(layer.config, domain, near_table(layer.config, domain))[:, :1, None]
            omega = measure.unsqueeze(1)
            kernels = kernel_matrices(q, u, queries, positions, layer.kernel(frequencies))
            integral = torch.einsum("bij,bijhac,bjhc->biha", scale * near * omega, kernels, u)
            kernels = low_rank_kernels(layer.factors, u, domain, q, places)
            integral = integral + torch.einsum("bj,bijhac,bjhc->biha", measure, kernels, u)
            z = v + layer.output(integral.flatten(2)) + layer.residual(layer.query_norm(v))
            return layer.layernorm(z + layer.feed_forward(layer.feed_forward_norm(z)))

        def actual(features):
            return layer(features, Domain(positions, measure, frequencies), queries)

        results = []
        for function in (actual, dense):
            leaf = features.clone().requires_grad_()
            out = function(leaf)
            upstream = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=out.dtype)
            results.append([out, *torch.autograd.grad(out, [leaf, *layer.parameters()], upstream)])
        names = ["out", "features", *(name for name, _ in layer.named_parameters())]
        for name, one, other in zip(names, *results, strict=True):
            assert_close(one, other, 1e-10, name)

    def test_the_scale_does_not_depend_on_the_queries(self, decoder):
        layer, frequencies = decoder
        features, positions = torch.randn(1, 40, 16, dtype=torch.float64), torch.rand(40, 2, dtype=torch.float64)
        queries = torch.rand(9, 2, dtype=torch.float64)
        domain = Domain(positions, torch.full((1, 40), 1 / 40, dtype=torch.float64), frequencies)
        together = layer(features, domain, queries)
        for index in range(9):
            alone = layer(features, domain, queries[index : index + 1])
            torch.testing.assert_close(alone[:, 0], together[:, index], rtol=1e-10, atol=1e-11)


class TestLocalInterpolation:
    def literal(self, features, positions, measure, query) -> Tensor:
        """One query of one sample, by the formula."""
        distances = [math.dist(query, y) for y in positions]
        chosen = sorted((k for k in range(len(positions)) if measure[k] > 0), key=lambda k: distances[k])[:16]
        met = [k for k in chosen if distances[k] == 0]
        farthest = max(distances[k] for k in chosen)
        power = positions.shape[-1] + 2
        weights = {k: float(measure[k]) * (1 if met else (1 / distances[k] - 1 / farthest) ** power)
                   for k in (met or chosen)}  # fmt: skip
        return sum(weight * features[k] for k, weight in weights.items()) / sum(weights.values())

    @pytest.mark.parametrize("count", [40, 1100])
    def test_formula(self, count):
        features, positions = torch.randn(2, count, 3, dtype=torch.float64), torch.rand(2, count, 2)
        measure, queries = torch.rand(2, count, dtype=torch.float64), torch.rand(2, 8, 2)
        measure[1, count // 2 :] = 0
        queries[:, :3] = positions[:, [0, 3, 5]]  # on positions
        actual = local_interpolation(features, positions, measure, queries)
        for b, i in itertools.product(range(2), range(8)):
            expected = self.literal(features[b], positions[b].double(), measure[b], queries[b, i].double())
            torch.testing.assert_close(actual[b, i], expected, rtol=1e-4, atol=1e-5)  # float32 differences

    def test_few_positions_are_shepards(self):
        arguments = torch.randn(2, 16, 3), torch.rand(16, 2), torch.rand(2, 16), torch.rand(5, 2)
        torch.testing.assert_close(local_interpolation(*arguments), shepard_interpolation(*arguments))

    def test_continuous_where_the_sixteenth_changes(self):
        """Steps of a path through a cloud, halved: the largest change of the value is halved, too."""
        torch.manual_seed(3)
        features, positions = torch.randn(1, 60, 1, dtype=torch.float64), torch.rand(60, 2, dtype=torch.float64)
        measure, largest = torch.full((1, 60), 1 / 60, dtype=torch.float64), []
        for steps in (500, 1000, 2000):
            path = torch.linspace(0.1, 0.9, steps, dtype=torch.float64)
            queries = torch.stack([path, 0.3 + 0.3 * path], -1)
            values = local_interpolation(features, positions, measure, queries)
            largest.append(float(values.diff(dim=1).abs().max()))
        assert largest[1] < 0.65 * largest[0] and largest[2] < 0.65 * largest[1]

    def test_gradients_are_finite(self):
        """On positions, between equally distant ones, and where positions coincide."""
        grid = torch.cartesian_prod(torch.arange(5.0), torch.arange(5.0))
        positions = torch.cat([grid, grid[:3]]).requires_grad_()
        queries = torch.tensor([[0.0, 0.0], [0.5, 0.5], [2.0, 2.0], [9.0, 9.0]], requires_grad=True)
        features, measure = torch.randn(1, 28, 2, requires_grad=True), torch.full((1, 28), 1 / 28, requires_grad=True)
        local_interpolation(features, positions, measure, queries).square().sum().backward()
        for leaf in (positions, queries, features, measure):
            assert leaf.grad.isfinite().all()

    def test_a_sample_of_fewer_real_positions(self):
        """Padding does not count, and an empty sample does not spoil its neighbours."""
        features, positions = torch.randn(3, 30, 2), torch.rand(3, 30, 2)
        measure = torch.zeros(3, 30)
        measure[0], measure[1, 4:9] = 1 / 30, 1 / 5
        queries = torch.rand(3, 7, 2)
        out = local_interpolation(features, positions, measure, queries)
        few = slice(4, 9)
        expected = shepard_interpolation(features[1:2, few], positions[1:2, few], measure[1:2, few], queries[1:2])
        torch.testing.assert_close(out[1:2], expected, rtol=1e-4, atol=1e-5)
        assert out[0].isfinite().all() and not out[2].any()


# --- What a model's output does not depend on


def alone(name: str, inputs: dict[str, Tensor], sample: int) -> dict[str, Tensor]:
    """The inputs of one sample without its padding."""
    real = CASES[name].mask[sample].bool()
    new = {}
    for key, value in inputs.items():
        own = value[sample] if len(value) == BATCH else value
        if key == "neighbors":
            places = torch.where(real, real.cumsum(0) - 1, -1)
            own = torch.where(own >= 0, places[own.clamp(min=0)], -1)
        if key == "pixel_values":
            new[key] = own[None]
        elif key != "attention_mask":
            new[key] = own[real][None]
    return new


class TestIndependence:
    @pytest.mark.parametrize("form", FORMS)
    @pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.mask is not None])
    def test_padding_and_batch_mates(self, make_model, name, form):
        model, inputs = make_model(name, factor_form=form), make_inputs(name)
        together = model(**inputs).last_hidden_state
        for sample in range(BATCH):
            expected = model(**alone(name, inputs, sample)).last_hidden_state[0]
            real = CASES[name].mask[sample].bool()
            real = torch.cat([torch.ones(len(expected) - int(real.sum()), dtype=torch.bool), real])  # an image first
            torch.testing.assert_close(together[sample, real], expected, rtol=1e-4, atol=1e-5)

    @pytest.mark.parametrize("name", ["points, padded", "graph without edges"])
    def test_what_stands_at_padding(self, make_model, name):
        model, inputs = make_model(name), make_inputs(name)
        expected = model(**inputs).last_hidden_state
        key = "points" if "points" in inputs else "positions"
        inputs[key] = inputs[key].where(CASES[name].mask.bool().unsqueeze(-1), -3.0)
        real = CASES[name].mask.bool()
        torch.testing.assert_close(model(**inputs).last_hidden_state[real], expected[real], rtol=1e-4, atol=1e-5)

    @pytest.mark.parametrize("name", ["points", "graph", "signal, positions of each sample"])
    def test_the_order_of_positions(self, make_model, name):
        model, inputs, order = make_model(name), make_inputs(name), torch.randperm(COUNT)
        permuted = {key: value[:, order] for key, value in inputs.items()}
        if "neighbors" in inputs:
            neighbors = permuted["neighbors"]
            permuted["neighbors"] = torch.where(neighbors >= 0, order.argsort()[neighbors.clamp(min=0)], -1)
        expected = model(**inputs).last_hidden_state[:, order]
        torch.testing.assert_close(model(**permuted).last_hidden_state, expected, rtol=1e-4, atol=1e-5)

    @pytest.mark.parametrize("name", ["causal text", "causal text, holes", "causal signal"])
    @pytest.mark.parametrize("form", FORMS)
    def test_the_future(self, make_model, name, form):
        model, inputs = make_model(name, factor_form=form), make_inputs(name)
        expected = model(**inputs).last_hidden_state[:, :12]
        key = "input_ids" if "input_ids" in inputs else "inputs_embeds"
        inputs[key] = inputs[key].clone()
        inputs[key][:, 12:] = inputs[key][:, 12:].flip(1)
        real = HOLES[:, :12].bool() if CASES[name].mask is not None else torch.ones(BATCH, 12, dtype=torch.bool)
        actual = model(**inputs).last_hidden_state[:, :12]
        torch.testing.assert_close(actual[real], expected[real], rtol=1e-4, atol=1e-5)

    def test_far_positions_have_no_part_in_the_near_field(self, make_model):
        """With the factors at zero, a token matters within the windows of two layers and nowhere else."""
        model = make_model("text")
        with torch.no_grad():
            for layer in model.layers:
                for parameter in layer.operator.factors.parameters():
                    parameter.zero_()
        inputs = make_inputs("text")
        expected = model(**inputs).last_hidden_state
        inputs["input_ids"] = inputs["input_ids"].clone()
        inputs["input_ids"][:, 10] = 1 + inputs["input_ids"][:, 10] % 30
        moved = (model(**inputs).last_hidden_state - expected).abs().amax((0, 2)) > 1e-5
        assert moved.nonzero().flatten().tolist() == list(range(6, 15))

    @torch.no_grad()
    def test_a_ball_converges_as_the_mesh_is_refined(self, make_model):
        """A smooth signal on finer and finer grids: the integral at fixed places."""
        model = make_model("signal", fourier_scale=0.5, near_radius=0.2)
        operator = model.layers[0].operator.double()
        kernel, values = operator.kernel(model.fourier.frequencies.double()), []
        for size in (8, 16, 32, 64):
            line = (torch.arange(size, dtype=torch.float64) + 0.5) / size
            positions = torch.cartesian_prod(line, line)
            features = torch.sin(positions @ torch.linspace(-3, 3, 32, dtype=torch.float64).view(2, 16))[None]
            measure = torch.full((1, size**2), 1 / size**2, dtype=torch.float64)
            domain = Domain(positions, measure, model.fourier.frequencies.double(), is_padded=False)
            near = domain.near(model.config)
            u = features.unflatten(2, (2, 8))
            inner = (positions[:, None] - torch.tensor([0.5, 0.5])).norm(dim=-1).flatten()
            field = near_integral(u, domain, kernel, near, model.config)
            # The mean of the field over a disk around the middle: every mesh has points in it.
            values.append(field[0, inner < 0.3].mean(0))
        errors = [float((value - values[-1]).norm() / values[-1].norm()) for value in values[:-1]]
        assert errors[2] < errors[0] / 2 and errors[2] < 0.03, errors


class TestDomain:
    @pytest.mark.parametrize("name", CASES)
    def test_neighbourhoods_are_found_once_per_forward(self, make_model, monkeypatch, name):
        calls = []
        find = near_module.find_near
        monkeypatch.setattr("modeling_itnet.domain.find_near", lambda *a: calls.append(1) or find(*a))
        model = make_model(name, num_hidden_layers=3)
        for count in (1, 2):
            model(**make_inputs(name))
            assert len(calls) == count

    def test_positions_without_a_radius(self, tiny_config):
        operator = ITNetOperator(tiny_config("image", **NEAR_FAR))
        with pytest.raises(ValueError, match=r"`near_radius` \(None\) must be given: these positions form no grid"):
            operator(torch.randn(1, 5, 16), torch.rand(5, 2))


class TestConfiguration:
    @pytest.mark.parametrize(
        ("modality", "settings", "message"),
        [
            ("text", {"near_size": 8}, r"`near_size` \(8\) must be an odd number for `modality` \('text'\)"),
            ("image", {"near_size": 15}, r"`near_size` \(15\) must be the square of an odd number, such as 9, 25"),
            ("image", {"near_size": 16}, r"`near_size` \(16\) must be the square of an odd number"),
            ("multimodal", {"near_size": 5}, r"`near_size` \(5\) must be the square"),
            ("signal", {}, r"`near_radius` \(None\) must be given for `modality` \('signal'\): the radius of the"),
            ("graph", {"edge_gate": False}, r"`near_radius` \(None\) must be given"),
            ("signal", {"near_radius": 0.0}, r"`near_radius` \(0.0\) must be"),
            ("signal", {"near_radius": -1.0}, r"`near_radius` \(-1.0\) must be"),
            ("text", {"near_size": 0}, r"`near_size` \(0\) must be"),
            ("text", {"near_size": -3}, r"`near_size` \(-3\) must be"),
        ],
        ids=lambda value: str(value) if isinstance(value, dict) else value.partition(" ")[0],
    )
    def test_errors(self, tiny_config, modality, settings, message):
        with pytest.raises(ValueError, match=message):
            tiny_config(modality, integration_mode="near_far", **settings)
        if settings.get("near_size", 1) > 0 and settings.get("near_radius", 1) > 0:
            with pytest.raises(ValueError, match=message):
                tiny_config(modality, approximate_mode="near_far", **settings)
            tiny_config(modality, integration_mode="exact", **settings)  # nobody asks for a neighbourhood

    def test_what_is_allowed(self, tiny_config):
        tiny_config("text", **NEAR_FAR | {"near_size": 1})
        tiny_config("text", **NEAR_FAR | {"near_size": 8, "is_causal": True})
        tiny_config("graph", **NEAR_FAR)  # its neighbourhoods are its edges
        assert tiny_config("point_cloud", **NEAR_FAR).near_radius == 0.25


class TestAuto:
    @pytest.mark.parametrize("name", ["text, padded", "points, padded", "graph", "signal"])
    def test_mixes_exact_and_near_far_by_sample(self, make_model, name):
        """Each sample by its own number of real positions: 22, 9 and 18."""
        limits = {"integration_mode": "auto", "approximate_mode": "near_far", "exact_max_positions": 10}
        model, inputs = make_model(name, **limits), make_inputs(name)
        actual = model(**inputs).last_hidden_state
        outputs = {}
        for mode in ("exact", "near_far"):
            model.config.integration_mode = mode
            outputs[mode] = model(**inputs).last_hidden_state
        for sample, mode in enumerate(("near_far", "exact", "near_far")):
            real = CASES[name].mask[sample].bool()
            torch.testing.assert_close(actual[sample, real], outputs[mode][sample, real], rtol=1e-4, atol=1e-5)
        assert not torch.allclose(outputs["exact"], outputs["near_far"], atol=1e-2)


class TestTraining:
    @pytest.mark.parametrize("form", FORMS)
    @pytest.mark.parametrize("name", CASES)
    def test_every_parameter_has_a_gradient(self, make_model, name, form):
        model, inputs = make_model(name, factor_form=form).train(), make_inputs(name)
        out = model(**inputs).last_hidden_state
        out.backward(torch.randn_like(out))
        for key, parameter in model.named_parameters():
            assert parameter.grad is not None and parameter.grad.isfinite().all(), key
            assert parameter.grad.any() or "pool" in key, key

    @pytest.mark.parametrize("use_reentrant", [False, True], ids=["saved-tensor-hooks", "reentrant"])
    @pytest.mark.parametrize("name", ["image", "text, holes", "points", "graph", "signal"])
    def test_gradient_checkpointing_changes_nothing(self, make_model, name, use_reentrant):
        gradients = []
        for checkpointing in (False, True):
            model, inputs = make_model(name).train(), make_inputs(name)
            if checkpointing:
                model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
            if "measure" in inputs:
                inputs["measure"].requires_grad_()
            model(**inputs).last_hidden_state.square().sum().backward()
            found = {key: parameter.grad for key, parameter in model.named_parameters()}
            gradients.append(found | ({"measure": inputs["measure"].grad} if "measure" in inputs else {}))
        for key, gradient in gradients[0].items():
            if gradient is not None:
                torch.testing.assert_close(gradients[1][key], gradient, rtol=1e-4, atol=1e-5)

    def test_what_is_kept_is_linear(self, make_model):
        """Twice the points in twice the volume: twice the numbers that a forward keeps for its backward."""
        kept = {}
        model = make_model("points", local_neighbors=0, near_radius=0.2)
        for count in (400, 800):
            points = torch.rand(1, count, 3, generator=torch.Generator().manual_seed(0))
            points[..., 0] *= count / 400
            sizes = {}
            with torch.autograd.graph.saved_tensors_hooks(
                lambda t, sizes=sizes: sizes.update({t.data_ptr(): t.untyped_storage().nbytes()}) or t, lambda t: t
            ):
                model(points)
            kept[count] = sum(sizes.values())
        assert kept[800] < 2.5 * kept[400]


class TestSaving:
    @pytest.mark.parametrize("form", FORMS)
    @pytest.mark.parametrize("name", ["image", "causal text, holes", "points", "graph", "signal"])
    def test_reloaded_models_agree(self, make_model, tmp_path, name, form):
        model, inputs = make_model(name, factor_form=form, kernel_input_sharing="per_head"), make_inputs(name)
        model.save_pretrained(tmp_path)
        loaded = ITNetModel.from_pretrained(tmp_path).eval()
        names = ("integration_mode", "near_size", "near_radius", "kernel_input_sharing", "factor_form")
        assert all(getattr(loaded.config, name) == getattr(model.config, name) for name in names)
        expected = model(**inputs).last_hidden_state
        torch.testing.assert_close(loaded(**inputs).last_hidden_state, expected, rtol=1e-4, atol=1e-5)

    def test_a_checkpoint_without_factors(self, make_model, tmp_path):
        make_model("image", integration_mode="exact").save_pretrained(tmp_path)
        with pytest.raises(ValueError, match=r"`factors`.*`model.to_near_far`"):
            ITNetModel.from_pretrained(tmp_path, integration_mode="near_far")
