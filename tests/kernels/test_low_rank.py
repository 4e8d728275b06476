"""Low-rank integration against the sum over all pairs, in both forms of the factors."""

import pytest
import torch

from itnet_kernels import Factor, LowRankState, low_rank_transform, sampled_low_rank_transform

B, N, H, R, D, W = 2, 9, 2, 3, 4, 5
NAMES = ("u", "measure", "bias", "phi_hidden", "phi_weight", "phi_bias", "psi_hidden", "psi_weight", "psi_bias")


def make(num_queries=N, n=N, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    tensors = {"u": normal(B, n, H, D), "measure": normal(B, n).abs(), "bias": normal(H, D, D)}
    for name, count in (("phi", num_queries), ("psi", n)):
        tensors |= {
            f"{name}_hidden": normal(B, count, H, W),
            f"{name}_weight": normal(H, R, D, W),
            f"{name}_bias": normal(H, R, D),
        }
    return tensors


def factor(tensors, name, form):
    parts = Factor(*(tensors[f"{name}_{part}"] for part in ("hidden", "weight", "bias")))
    if form == "mlp":
        return parts
    return torch.einsum("bnhk,hrak->bnhra", parts.hidden, parts.weight) + parts.bias


def run(tensors, form, **settings):
    phi, psi = factor(tensors, "phi", form), factor(tensors, "psi", form)
    return low_rank_transform(tensors["u"], phi, psi, measure=tensors["measure"], bias=tensors["bias"], **settings)


def plain(tensors, is_causal=False):
    """Every K_ij = sum_r e^(-lambda_r (x_i - x_j)) Phi_i[r] Psi_j[r]^T + bias, then the sum."""
    phi, psi = factor(tensors, "phi", "tensor"), factor(tensors, "psi", "tensor")
    num_queries, n = phi.shape[1], psi.shape[1]
    factors = torch.ones(1, 1, 1, H, R, dtype=torch.float64)
    if "decay" in tensors:
        x = tensors["positions"][..., 0]
        factors = torch.exp(-tensors["decay"] * (x[:, n - num_queries :, None] - x[:, None])[..., None, None])
    matrices = torch.einsum("bijhr,bihra,bjhrc->bijhac", factors.expand(B, num_queries, n, H, R), phi, psi)
    matrices = matrices + tensors["bias"]
    omega = tensors["measure"].unsqueeze(1).expand(B, num_queries, n)
    if is_causal:
        omega = omega * torch.ones(num_queries, n, dtype=torch.bool).tril(n - num_queries)
        mass = omega.sum(-1, keepdim=True)
        omega = omega / mass.where(mass > 0, 1)
    return torch.einsum("bij,bijhac,bjhc->biha", omega, matrices, tensors["u"])


@pytest.fixture(params=["one chunk", "many chunks"])
def chunks(request, monkeypatch):
    if request.param == "many chunks":
        monkeypatch.setattr("itnet_kernels.low_rank.vector._CHUNK_ELEMENTS", 100)  # two positions at a time


@pytest.mark.parametrize("form", ["tensor", "mlp"])
@pytest.mark.parametrize("is_causal", [False, True], ids=["complete", "causal"])
@pytest.mark.parametrize("num_queries", [N, 4], ids=["same domain", "query domain"])
def test_value_and_gradients(form, is_causal, num_queries, chunks):
    results = []
    for compute in (lambda t: run(t, form, is_causal=is_causal), lambda t: plain(t, is_causal)):
        leaves = {name: tensor.requires_grad_() for name, tensor in make(num_queries).items()}
        out = compute(leaves)
        generator = torch.Generator().manual_seed(1)
        out.backward(torch.randn(out.shape, generator=generator, dtype=out.dtype))
        results.append([out.detach(), *(leaves[name].grad for name in NAMES)])
    for name, actual, expected in zip(("out", *NAMES), *results, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-9, msg=lambda m, name=name: f"{name}: {m}")


@pytest.mark.parametrize("form", ["tensor", "mlp"])
def test_without_measure_it_is_uniform(form):
    tensors = make()
    phi, psi = factor(tensors, "phi", form), factor(tensors, "psi", form)
    for is_causal in (False, True):
        tensors["measure"] = torch.full((B, N), 1 / N, dtype=torch.float64)
        expected = run(tensors, form, is_causal=is_causal)
        actual = low_rank_transform(tensors["u"], phi, psi, bias=tensors["bias"], is_causal=is_causal)
        torch.testing.assert_close(actual, expected)


def test_without_bias_the_kernel_is_the_product():
    tensors = make()
    phi, psi = factor(tensors, "phi", "tensor"), factor(tensors, "psi", "tensor")
    actual = low_rank_transform(tensors["u"], phi, psi, measure=tensors["measure"])
    torch.testing.assert_close(actual, plain(tensors | {"bias": torch.zeros(H, D, D, dtype=torch.float64)}))


@pytest.mark.parametrize("form", ["tensor", "mlp"])
@pytest.mark.parametrize("is_causal", [False, True], ids=["complete", "causal"])
def test_padding_contributes_nothing(form, is_causal):
    tensors = make()
    tensors["measure"][:, :2] = 0  # left padding: early queries of a causal operator see nothing at all
    out = run(tensors, form, is_causal=is_causal)
    assert out.isfinite().all()
    if is_causal:
        assert (out[:, :2] == 0).all()
    tensors["u"][:, :2] += 1
    torch.testing.assert_close(run(tensors, form, is_causal=is_causal), out)


@pytest.mark.parametrize("form", ["tensor", "mlp"])
@pytest.mark.parametrize("sizes", [(1,) * N, (4, 1, 4), (N,)], ids=["one by one", "pieces", "whole"])
def test_the_state_continues(form, sizes):
    tensors = make()
    expected = run(tensors, form, is_causal=True)
    outs, state, start = [], None, 0
    for size in sizes:
        rows = slice(start, start + size)
        per_position = ("u", "measure", "phi_hidden", "psi_hidden")
        piece = tensors | {name: tensors[name][:, rows] for name in per_position}
        out, state = run(piece, form, is_causal=True, state=state, return_state=True)
        outs.append(out)
        start += size
    torch.testing.assert_close(torch.cat(outs, dim=1), expected)
    assert [tuple(t.shape) for t in state[:3]] == [(B, H, R), (B, H, D), (B,)]  # whatever came before
    assert state.position is None


@pytest.mark.parametrize("form", ["tensor", "mlp"])
@pytest.mark.parametrize("num_queries", [N, 4], ids=["same domain", "query domain"])
def test_a_decay(form, num_queries):
    names = (*NAMES, "decay", "positions")
    results = []
    for compute in (lambda t: run(t, form, is_causal=True, **{k: t[k] for k in names[-2:]}), lambda t: plain(t, True)):
        leaves = make(num_queries)
        generator = torch.Generator().manual_seed(2)
        leaves["decay"] = torch.rand(H, R, generator=generator, dtype=torch.float64)
        leaves["positions"] = torch.rand(B, N, 1, generator=generator, dtype=torch.float64).cumsum(1)
        leaves = {name: tensor.requires_grad_() for name, tensor in leaves.items()}
        out = compute(leaves)
        out.backward(torch.randn(out.shape, generator=generator, dtype=out.dtype))
        results.append([out.detach(), *(leaves[name].grad for name in names)])
    for name, actual, expected in zip(("out", *names), *results, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-9, msg=lambda m, name=name: f"{name}: {m}")


def test_pieces_of_a_complete_operator_add_up():
    tensors = make()
    state = None
    for rows in (slice(0, 5), slice(5, N)):
        piece = {name: tensors[name][:, rows] for name in ("u", "measure", "psi_hidden")}
        out, state = run(tensors | piece, "mlp", state=state, return_state=True)
    torch.testing.assert_close(out, plain(tensors))  # the queries of the last call see all keys


def test_uniform_pieces_of_any_length_agree():
    tensors = make()
    phi, psi = factor(tensors, "phi", "tensor"), factor(tensors, "psi", "tensor")
    expected = low_rank_transform(tensors["u"], phi, psi, is_causal=True)
    _, state = low_rank_transform(tensors["u"][:, :2], phi[:, :2], psi[:, :2], is_causal=True, return_state=True)
    rest = low_rank_transform(tensors["u"][:, 2:], phi[:, 2:], psi[:, 2:], is_causal=True, state=state)
    torch.testing.assert_close(rest, expected[:, 2:])


@pytest.mark.parametrize("form", ["tensor", "mlp"])
def test_over_chosen_keys(form, chunks):
    tensors = make()
    generator = torch.Generator().manual_seed(3)
    indices = torch.randint(0, N, (B, N, 5), generator=generator)
    coefficients = torch.randn(B, N, 5, generator=generator, dtype=torch.float64)
    phi, psi = factor(tensors, "phi", "tensor"), factor(tensors, "psi", "tensor")
    matrices = torch.einsum("bihra,bjhrc->bijhac", phi, psi) + tensors["bias"]
    weights = torch.zeros(B, N, N, dtype=torch.float64).scatter_add(2, indices, coefficients)
    expected = torch.einsum("bij,bijhac,bjhc->biha", weights, matrices, tensors["u"])
    actual = sampled_low_rank_transform(
        tensors["u"],
        factor(tensors, "phi", form),
        factor(tensors, "psi", form),
        indices=indices,
        coefficients=coefficients,
        bias=tensors["bias"],
    )
    torch.testing.assert_close(actual, expected)


def test_half_precision_keeps_its_dtype():
    tensors = make()
    expected = run(tensors, "mlp")
    actual = run({name: t.to(torch.float16) for name, t in tensors.items()}, "mlp")
    assert actual.dtype == torch.float16
    assert (actual.double() - expected).norm() < 0.01 * expected.norm()


def test_an_mlp_is_never_multiplied_out():
    """No tensor with positions, rank and head size is kept; what is kept grows linearly with n."""
    kept = {}
    for n in (16, 64):
        tensors = make(n, n)
        tensors["u"].requires_grad_()
        sizes = []
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t, sizes=sizes: sizes.append(t.numel()) or t, lambda t: t
        ):
            run(tensors, "mlp")
        kept[n] = max(sizes)
    assert kept[64] <= 4 * kept[16]
    assert kept[64] <= B * 64 * H * max(D, W)


class TestErrors:
    def test_rank(self):
        tensors = make()
        empty = torch.zeros(B, N, H, 0, D, dtype=torch.float64)
        with pytest.raises(ValueError, match="rank of at least 1"):
            low_rank_transform(tensors["u"], empty, empty)
        with pytest.raises(ValueError, match=r"`phi` .* must be"):
            low_rank_transform(
                tensors["u"], factor(tensors, "phi", "tensor")[..., :2, :], factor(tensors, "psi", "mlp")
            )

    def test_shapes(self):
        tensors = make()
        phi, psi = factor(tensors, "phi", "mlp"), factor(tensors, "psi", "mlp")
        with pytest.raises(ValueError, match=r"`phi.hidden` .* must be"):
            low_rank_transform(tensors["u"], phi._replace(weight=phi.weight[..., :2]), psi)
        with pytest.raises(ValueError, match=r"`psi` \[2, 9, 2, 3, 4\] must be \[2, 8"):
            low_rank_transform(tensors["u"][:, :8], phi, psi)
        with pytest.raises(ValueError, match=r"`bias` .* must be"):
            low_rank_transform(tensors["u"], phi, psi, bias=tensors["bias"][0])
        with pytest.raises(ValueError, match=r"`phi` \[2, 9, 2\] must have shape"):
            low_rank_transform(tensors["u"], torch.zeros(2, 9, 2), psi)

    def test_state(self):
        tensors = make()
        phi, psi = factor(tensors, "phi", "mlp"), factor(tensors, "psi", "mlp")
        state = LowRankState(torch.zeros(B, H, R), torch.zeros(B, H, D), torch.zeros(B))
        with pytest.raises(ValueError, match="`state` without `is_causal` needs a `measure`"):
            low_rank_transform(tensors["u"], phi, psi, state=state)
        wrong = state._replace(moments=torch.zeros(B, H, R + 1))
        with pytest.raises(ValueError, match=r"`state.moments` \[2, 2, 4\] must be \[2, 2, 3\]"):
            low_rank_transform(tensors["u"], phi, psi, is_causal=True, state=wrong)

    def test_more_causal_queries_than_keys(self):
        tensors = make(N, 4)
        with pytest.raises(ValueError, match="at least as many keys as queries"):
            run(tensors, "mlp", is_causal=True)
