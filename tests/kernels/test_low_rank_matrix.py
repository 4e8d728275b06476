"""The low-rank kernel K_ij = sum_r f_i[r] g_j[r] M_r, with and without decay, against the sum over all pairs."""

import pytest
import torch

from itnet_kernels import LowRankState, low_rank_matrix_transform, sampled_low_rank_matrix_transform

B, N, H, R, D, OUT = 2, 11, 2, 3, 4, 5
TIGHT = {"rtol": 1e-10, "atol": 1e-10}  # float64, sums of a few hundred terms of order 1


def make(num_queries=N, n=N, has_decay=False, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    tensors = {
        "u": normal(B, n, H, D),
        "f": normal(B, num_queries, H, R),
        "g": normal(B, n, H, R),
        "matrices": normal(H, R, OUT, D),
        "bias": normal(H, OUT, D),
        "measure": normal(B, n).abs(),
    }
    if has_decay:
        tensors |= {"decay": normal(H, R).abs(), "positions": normal(B, n, 1).abs().cumsum(1)}
    return tensors


def run(tensors, **settings):
    return low_rank_matrix_transform(**tensors, **settings)


def kernels(tensors):
    """Every K_ij: [B, n_q, n, H, d_out, d_h]."""
    f, g = tensors["f"], tensors["g"]
    products = f.unsqueeze(2) * g.unsqueeze(1)  # [B, n_q, n, H, r]
    if "decay" in tensors:
        x = tensors["positions"][..., 0]
        spans = x[:, x.shape[1] - f.shape[1] :, None] - x[:, None]
        products = products * torch.exp(-tensors["decay"] * spans.clamp(min=0)[..., None, None])
    return torch.einsum("bijhr,hrac->bijhac", products, tensors["matrices"]) + tensors["bias"]


def plain(tensors, is_causal=False):
    """The literal sum."""
    num_queries, n = tensors["f"].shape[1], tensors["u"].shape[1]
    omega = tensors["measure"].unsqueeze(1).expand(B, num_queries, n)
    if is_causal:
        omega = omega * torch.ones(num_queries, n, dtype=torch.bool).tril(n - num_queries)
        mass = omega.sum(-1, keepdim=True)
        omega = omega / mass.where(mass > 0, 1)
    return torch.einsum("bij,bijhac,bjhc->biha", omega, kernels(tensors), tensors["u"])


def with_gradients(compute, tensors, real=None):
    """Output and gradients, without what comes out at padded queries and what depends on the measure of padding."""
    real = torch.ones(B, tensors["u"].shape[1]) if real is None else real
    leaves = {name: tensor.clone().requires_grad_() for name, tensor in tensors.items()}
    out = compute(leaves)
    generator = torch.Generator().manual_seed(1)
    if out.shape[1] <= real.shape[1]:
        out = out * real[:, real.shape[1] - out.shape[1] :, None, None]
    out.backward(torch.randn(out.shape, generator=generator, dtype=out.dtype))
    gradients = {name: leaf.grad for name, leaf in leaves.items()}
    if "measure" in gradients:
        gradients["measure"] *= real
    return {"out": out.detach(), **gradients}


def assert_same(actual, expected):
    for name, value in expected.items():
        torch.testing.assert_close(actual[name], value, **TIGHT, msg=lambda m, name=name: f"{name}: {m}")


@pytest.fixture(params=["one chunk", "many chunks"])
def chunks(request, monkeypatch):
    """One block, or blocks of 3 positions, one at a time."""
    if request.param == "many chunks":
        monkeypatch.setattr("itnet_kernels.low_rank.matrix._BLOCK", 3)
        monkeypatch.setattr("itnet_kernels.low_rank.matrix._CHUNK_ELEMENTS", 1)


CASES = {"complete": (False, False), "causal": (True, False), "decaying": (True, True)}


@pytest.mark.parametrize(("is_causal", "has_decay"), CASES.values(), ids=CASES)
@pytest.mark.parametrize("num_queries", [N, 4, 1], ids=["same domain", "query domain", "one query"])
@pytest.mark.parametrize("padded", [slice(0), slice(0, 5), slice(3, 6), slice(7, N)], ids=["full", *"lmr"])
def test_value_and_gradients(is_causal, has_decay, num_queries, padded, chunks):
    tensors = make(num_queries, has_decay=has_decay)
    tensors["measure"][1, padded] = 0
    real = (tensors["measure"] > 0).double()
    actual = with_gradients(lambda t: run(t, is_causal=is_causal), tensors, real)
    assert_same(actual, with_gradients(lambda t: plain(t, is_causal), tensors, real))


def test_more_queries_than_keys():
    tensors = make(17, 6)
    assert_same(with_gradients(run, tensors), with_gradients(plain, tensors))


def test_without_measure_it_is_uniform():
    for is_causal in (False, True):
        tensors = make() | {"measure": None}
        uniform = tensors | {"measure": torch.full((B, N), 1 / N, dtype=torch.float64)}
        torch.testing.assert_close(run(tensors, is_causal=is_causal), plain(uniform, is_causal), **TIGHT)


@pytest.mark.parametrize("where", [-7.0, 50.0], ids=["before", "after"])
def test_padding_may_lie_anywhere(where, chunks):
    tensors = make(has_decay=True)
    tensors["measure"][:, [0, 1, 5, N - 1]] = 0
    expected = run(tensors, is_causal=True, return_state=True)
    tensors["positions"][:, [0, 1, 5, N - 1]] = where
    tensors["u"][:, [0, 1, 5, N - 1]] += 1
    actual = run(tensors, is_causal=True, return_state=True)
    real = tensors["measure"][0] > 0
    torch.testing.assert_close(actual[0][:, real], expected[0][:, real], **TIGHT)
    assert actual[0].isfinite().all()
    for one, other in zip(actual[1], expected[1], strict=True):
        torch.testing.assert_close(one, other, **TIGHT)


@pytest.mark.parametrize("has_decay", [False, True], ids=["plain", "decaying"])
@pytest.mark.parametrize("seed", range(6))
def test_the_state_continues(has_decay, seed, chunks):
    tensors = make(has_decay=has_decay)
    tensors["measure"][1, :4] = 0  # the first piece of a sample may be padding alone
    generator = torch.Generator().manual_seed(seed)
    cuts = (torch.randperm(N - 1, generator=generator)[: 1 + 2 * seed] + 1).sort().values.tolist()

    def in_pieces(leaves):
        outs, state = [], None
        for start, stop in zip([0, *cuts], [*cuts, N], strict=True):
            names = ("u", "f", "g", "measure", "positions")
            piece = {k: t[:, start:stop] if k in names else t for k, t in leaves.items()}
            out, state = run(piece, is_causal=True, state=state, return_state=True)
            outs.append(out)
        assert [tuple(t.shape) for t in state[:3]] == [(B, H, R, D), (B, H, D), (B,)]  # whatever came before
        return torch.cat(outs, dim=1)

    real = (tensors["measure"] > 0).double()
    expected = with_gradients(lambda t: plain(t, is_causal=True), tensors, real)
    assert_same(with_gradients(in_pieces, tensors, real), expected)


def test_pieces_of_a_complete_operator_add_up():
    tensors, state = make(), None
    for rows in (slice(0, 5), slice(5, N)):
        piece = {name: tensors[name][:, rows] for name in ("u", "measure", "g")}
        out, state = run(tensors | piece, state=state, return_state=True)
    torch.testing.assert_close(out, plain(tensors), **TIGHT)  # the queries of the last call see all keys


def test_retention_is_contained():
    """S_n = gamma S_(n-1) + k_n^T v_n, o_n = q_n S_n (Sun et al., 2023), a rate gamma per head."""
    tensors = make(n=40, num_queries=40)
    queries, keys, values = tensors["f"], tensors["g"], tensors["u"]
    gamma = 1 - 2 ** (-5 - torch.arange(H, dtype=torch.float64))
    state, expected = torch.zeros(B, H, R, D, dtype=torch.float64), []
    for i in range(40):
        state = gamma[:, None, None] * state + keys[:, i].unsqueeze(-1) * values[:, i].unsqueeze(-2)
        expected.append((queries[:, i].unsqueeze(-2) @ state).squeeze(-2))
    index = torch.arange(40, dtype=torch.float64)
    actual = low_rank_matrix_transform(
        *(values, queries, keys, torch.eye(D, dtype=torch.float64).expand(H, R, D, D)),
        is_causal=True,
        decay=-gamma.log()[:, None].expand(H, R),
        positions=index.unsqueeze(-1),
    )
    actual = actual * (index + 1)[:, None, None]  # the measure of the i + 1 visible keys is 1 in all
    torch.testing.assert_close(actual, torch.stack(expected, dim=1), **TIGHT)


def test_fast_decay_over_long_distances_stays_finite():
    """e^(lambda x) would overflow: only differences of positions may be exponentiated."""
    tensors = make(100, 100, has_decay=True) | {"decay": torch.full((H, R), 1e3, dtype=torch.float64)}
    tensors["positions"] = torch.arange(1e6, 1e6 + 100, dtype=torch.float64).unsqueeze(-1)
    results = with_gradients(lambda t: run(t, is_causal=True), tensors)
    assert all(value.isfinite().all() for value in results.values())
    own = torch.einsum("bnhr,bnhr,hrac,bnhc->bnha", *(tensors[k] for k in ("f", "g", "matrices", "u")))
    mass = tensors["measure"].cumsum(1)
    mean = (tensors["u"] * tensors["measure"][..., None, None]).cumsum(1)
    total = own * tensors["measure"][..., None, None] + torch.einsum("bnhc,hac->bnha", mean, tensors["bias"])
    torch.testing.assert_close(results["out"], total / mass[..., None, None], **TIGHT)


def test_over_chosen_keys(chunks):
    tensors = make(7)
    del tensors["measure"]
    generator = torch.Generator().manual_seed(3)
    indices = torch.randint(0, N, (B, 7, 5), generator=generator)
    tensors["coefficients"] = torch.randn(B, 7, 5, generator=generator, dtype=torch.float64)

    def dense(t):
        weights = torch.zeros(B, 7, N, dtype=torch.float64).scatter_add(2, indices, t["coefficients"])
        return torch.einsum("bij,bijhac,bjhc->biha", weights, kernels(t), t["u"])

    actual = with_gradients(lambda t: sampled_low_rank_matrix_transform(**t, indices=indices), tensors)
    assert_same(actual, with_gradients(dense, tensors))


def test_half_precision_keeps_its_dtype():
    for is_causal in (False, True):
        tensors = make()
        expected = run(tensors, is_causal=is_causal)
        half = {name: t.to(torch.float16) for name, t in tensors.items()}
        actual, state = run(half, is_causal=is_causal, return_state=True)
        assert actual.dtype == torch.float16 and state.moments.dtype == torch.float32
        assert (actual.double() - expected).norm() < 0.01 * expected.norm()


@pytest.mark.parametrize("has_decay", [False, True], ids=["plain", "decaying"])
def test_no_state_per_position_is_kept(has_decay, monkeypatch):
    """What is kept for the backward is linear in n, with no tensor of positions, rank and head size."""
    monkeypatch.setattr("itnet_kernels.low_rank.matrix._CHUNK_ELEMENTS", 4000)
    kept = {}
    for n in (64, 256):
        tensors = {name: t.requires_grad_() for name, t in make(n, n, has_decay).items()}
        sizes = []
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t, sizes=sizes: sizes.append(t.numel()) or t, lambda t: t
        ):
            run(tensors, is_causal=True)
        kept[n] = max(sizes)
    assert kept[256] <= 4 * kept[64]
    assert kept[256] < B * 256 * H * R * D


class TestErrors:
    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"matrices": torch.zeros(H, R, D, D + 1)}, r"`matrices` \[2, 3, 4, 5\] must be \[2, r, d_out, 4\]"),
            ({"f": torch.zeros(B, N, H)}, r"`f` \[2, 11, 2\] must be \[2, n_q, 2, 3\]"),
            ({"g": torch.zeros(B, N + 1, H, R)}, r"`g` \[2, 12, 2, 3\] must be \[2, 11, 2, 3\]"),
            ({"bias": torch.zeros(H, D, D)}, r"`bias` \[2, 4, 4\] must be \[2, 5, 4\]"),
            ({"is_causal": False}, "`decay` needs `is_causal` and `positions`"),
            ({"positions": None}, "`decay` needs `is_causal` and `positions`"),
            ({"decay": torch.zeros(R)}, r"`decay` \[3\] must be \[2, 3\]"),
            ({"decay": -torch.ones(H, R)}, "`decay` must not be negative"),
            ({"positions": torch.zeros(N, 2)}, r"`positions` \[1, 11, 2\] must be \[11, 1\] or \[2, 11, 1\]"),
            ({"positions": torch.zeros(N, 1).index_fill(0, torch.tensor(0), 1)}, "`positions` must not fall"),
        ],
    )
    def test_arguments(self, change, message):
        with pytest.raises(ValueError, match=message):
            run(make(has_decay=True) | {"is_causal": True} | change)

    def test_state(self):
        state = LowRankState(torch.zeros(B, H, R, D), torch.zeros(B, H, D), torch.ones(B))
        with pytest.raises(ValueError, match=r"`state.moments` \[2, 2, 3\] must be \[2, 2, 3, 4\]"):
            run(make(), is_causal=True, state=state._replace(moments=torch.zeros(B, H, R)))
        with pytest.raises(ValueError, match="both have a `decay`"):
            run(make(has_decay=True), is_causal=True, state=state)
        with pytest.raises(ValueError, match="nor below the state"):
            run(make(has_decay=True), is_causal=True, state=state._replace(position=torch.full((B,), 100.0)))

    def test_more_causal_queries_than_keys(self):
        with pytest.raises(ValueError, match="at least as many keys as queries"):
            run(make(N, 4), is_causal=True)
