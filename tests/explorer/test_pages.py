"""Pages of every modality: they load alone, the query moves, and their numbers are those of Python."""

import pytest
import torch

from itnet_kernels import kernel_matrices
from modeling_itnet.analysis.explorer import explore_kernels
from modeling_itnet.analysis.explorer.collect import collect
from modeling_itnet.analysis.kernels import layer_kernels
from modeling_itnet.integration.capture import operator_inputs
from modeling_itnet.operator import find_operators

from .cases import CASES

TOLERANCE = {"rtol": 1e-4, "atol": 1e-4}
LAYER, HEAD = 1, 1


@pytest.fixture
def opened(visit, tmp_path):
    """opened(name) -> a visit to the page of a case, its model and inputs."""
    pages = []

    def open_case(name):
        model, inputs = CASES[name].make()
        explore_kernels(model, inputs, tmp_path / "page.html", title=name)
        pages.append(visit())
        return pages[-1].open(tmp_path / "page.html"), model, inputs

    yield open_case
    for opened_page in pages:
        opened_page.page.close()


def close(values, expected, seen):
    """The page's values of the keys that are seen, and nothing for the others."""
    assert [value is not None for value in values] == seen.tolist()
    found = torch.tensor([0.0 if value is None else value for value in values], dtype=torch.float64)
    torch.testing.assert_close(found[seen], expected.double()[seen], **TOLERANCE)


def factor_matrices(operator, heads, domain):
    """K_ij [n, n, H, d_h, d_h] of a low-rank kernel, by its definition."""
    factors, count = operator.factors, heads.shape[1]
    phi, psi = factors.factors(heads, domain)
    decay = torch.ones(count, count, heads.shape[2], operator.config.rank)
    if factors.log_decay is not None:
        x = domain.positions.view(-1, count, 1)[0, :, 0]
        decay = torch.exp(-factors.log_decay.exp() * (x[:, None] - x[None]).clamp(min=0)[..., None, None])
    if factors.is_matrix:
        pairs = torch.einsum("ihr,jhr,ijhr,hrac->ijhac", phi[0], psi[0], decay, factors.matrices)
    else:
        phi, psi = (torch.einsum("bnhk,hrak->bnhra", f.hidden, f.weight) + f.bias for f in (phi, psi))
        pairs = torch.einsum("ihra,jhrc,ijhr->ijhac", phi[0], psi[0], decay)
    return pairs + factors.bias


@pytest.mark.parametrize("name", CASES)
@torch.no_grad()
def test_numbers(opened, name):
    """Norms, entries, actions and contributions of all kernels, and the integral that the model takes."""
    page, model, inputs = opened(name)
    assert not page.errors and not page.requests
    operator, (features, domain) = find_operators(model)[LAYER], operator_inputs(model, inputs)[LAYER]
    integrals = operator.integral(features, domain)
    _, samples = collect(model, inputs)
    fields = page.page.evaluate("explorer.page.fields")
    for number in {0, len(samples) - 1}:
        sample = samples[number]
        query = sample.count // 2
        heads = sample.features[LAYER].unflatten(-1, (operator.num_heads, -1))[None]  # [1, n, H, d_h]
        positions, u = sample.domain.positions, heads[0, :, HEAD]
        for field in fields:
            chosen = {"sample": number, "layer": LAYER, "head": HEAD, "query": query, "field": field["name"]}
            if field["source"] == "kernel":
                kernel = operator.kernel(domain.frequencies)
                matrices = kernel_matrices(
                    heads[:, query : query + 1], heads, positions[query : query + 1], positions, kernel
                )
                matrices = matrices[0, 0, :, HEAD]  # [n, d_h, d_h]
                bias = kernel.b2[min(HEAD, len(kernel.b2) - 1)].view(matrices.shape[1:])
            else:
                matrices = factor_matrices(operator, heads, sample.domain)[query, :, HEAD]
                bias = operator.factors.bias[HEAD]
            script = "chosen => Array.from(explorer.evaluate({...explorer.state, ...chosen}).weights)"
            weights = torch.tensor(page.page.evaluate(script, chosen))
            seen = weights > 0
            if field["weights"] == "near":
                assert seen.tolist() == sample.near_pairs[query].tolist()
            elif operator.is_causal:
                assert seen.tolist() == [key <= query for key in range(sample.count)]
            mean = torch.einsum("j,jac->ac", (weights / weights.sum()).to(matrices), matrices)
            action = torch.einsum("jac,jc->ja", matrices, u)
            out = torch.einsum("j,ja->a", weights.to(action), action)
            expected = {
                "full": matrices.flatten(1).norm(dim=1),
                "learned": (matrices - bias).flatten(1).norm(dim=1),
                "variation": (matrices - mean).flatten(1).norm(dim=1),
                "entry": matrices[:, 2, 1],
                "action": action.norm(dim=1),
                "output": weights.to(action) * (action @ out) / out.norm(),
                "component": weights.to(action) * action[:, 2],
            }
            for quantity, wanted in expected.items():
                close(page.values(**chosen, quantity=quantity, row=2, column=1), wanted, seen)
        page.page.evaluate("chosen => explorer.set(chosen)", chosen)
        found = page.page.evaluate("Array.from(explorer.integrate(explorer.modelMode()))")
        wanted = integrals[sample.row, sample.kept].unflatten(-1, (operator.num_heads, -1))[query, HEAD]
        torch.testing.assert_close(torch.tensor(found), wanted, **TOLERANCE)


DRAGS = (
    "image",
    "text",
    "causal-text",
    "points",
    "mesh",
    "graph",
    "image-text",
    "line",
    "image-near",
    "points-low-rank",
)


@pytest.mark.parametrize("name", DRAGS)
def test_moving_the_query(opened, name):
    """Pointer, slider and keys move the query, and the map, its words and its table follow."""
    page, _, _ = opened(name)

    def shown():
        script = """() => [explorer.state.query, document.getElementById("mapText").textContent,
            document.getElementById("keys").textContent, Array.from(document.querySelectorAll("#view canvas"),
            canvas => canvas.toDataURL()).join() + document.getElementById("view").innerHTML]"""
        return page.page.evaluate(script)

    if page.page.locator("#view canvas").count() == 0:
        page.page.locator("#view button").nth(5).click()
        before = shown()
        page.page.locator("#view button").nth(2).click()
    else:
        target = page.page.locator("#view canvas").first
        target.scroll_into_view_if_needed()
        box = target.bounding_box()
        page.page.mouse.move(box["x"] + 0.1 * box["width"], box["y"] + 0.1 * box["height"])
        page.page.mouse.down()
        before = shown()
        page.page.mouse.move(box["x"] + 0.9 * box["width"], box["y"] + 0.9 * box["height"], steps=3)
        page.page.mouse.up()
    after = shown()
    assert all(new != old for new, old in zip(after, before, strict=True))
    assert page.page.evaluate("document.getElementById('query').value") == str(after[0])
    other = (after[0] + 1) % 3
    page.page.locator("#query").fill(str(other))
    assert shown()[0] == other and shown()[3] != after[3]
    page.page.locator("#view [tabindex='0']").first.focus()
    page.set(query=2)
    page.page.locator("#view [tabindex='0']").first.press("ArrowRight")
    assert shown()[0] != 2
    page.settle()
    assert not page.errors and not page.requests


@torch.no_grad()
def test_switches(opened):
    """An input that is off is 0, and frozen features are their mean over the domain."""
    page, model, inputs = opened("image")
    kernels = layer_kernels(model, inputs)[0]
    positions, heads, query = kernels.positions, kernels.heads[:1], 7
    mean = torch.einsum("bj,bjhc->bhc", kernels.measure[:1].to(heads), heads)[:, None].expand_as(heads)
    sizes = {"x": 6, "y": 6, "x-y": 6, "distance": 1, "u_x": 8, "u_y": 8, "u_x*u_y": 8}

    def compare(weights, queries, keys):
        matrices = kernel_matrices(
            queries[:, query : query + 1], keys, positions[:, query : query + 1], positions, weights
        )
        found = page.page.evaluate("Array.from(explorer.evaluate().values)")
        wanted = matrices[0, 0, :, 0].flatten(1).norm(dim=1)
        torch.testing.assert_close(torch.tensor(found), wanted, **TOLERANCE)
        return found

    page.set(query=query, quantity="full", head=0, layer=0)
    plain = compare(kernels.weights, heads, heads)
    first = 0
    for name, size in sizes.items():
        w1 = kernels.weights.w1.clone()
        w1[:, first : first + size] = 0
        first += size
        box = page.page.locator(f"#switches input[value='{name}']")
        box.uncheck()
        assert compare(kernels.weights._replace(w1=w1), heads, heads) != plain
        box.check()
    page.page.locator("#freezeX").check()
    compare(kernels.weights, mean, heads)
    page.page.locator("#freezeY").check()
    compare(kernels.weights, mean, mean)
    page.settle()
    assert page.page.locator("#changes li").count() == 10


def test_what_tokens_add_to_the_next_prediction(opened):
    """All keys together add what a change of the integral, as a whole, adds by finite differences."""
    page, model, inputs = opened("causal-text")
    query, model = 9, model.double()
    page.set(query=query, sample=0)
    adds = torch.tensor(page.page.evaluate("Array.from(explorer.shown().adds, v => Number.isNaN(v) ? 0 : v)")).view(
        2, -1
    )
    assert (adds[:, query + 1 :] == 0).all()
    for layer, operator in enumerate(find_operators(model)):
        scores = []
        for step in (-1e-3, 1e-3):

            def scaled(_, given, step=step):
                moved = given[0].clone()
                moved[:, query] *= 1 + step
                return (moved,)

            hook = operator.output.register_forward_pre_hook(scaled)
            with torch.no_grad():
                scores.append(model(**inputs).logits[0, query].log_softmax(-1).max())
            hook.remove()
        wanted = (scores[1] - scores[0]) / 2e-3
        torch.testing.assert_close(adds[layer].sum().double(), wanted, rtol=1e-3, atol=1e-4)


def test_ways_of_integrating(opened):
    """Near and far fields add up to the model, and Monte Carlo with every key is exact."""
    page, _, _ = opened("image-near")
    parts = page.page.evaluate("explorer.page.modes.map(mode => Array.from(explorer.integrate(mode)))")
    torch.testing.assert_close(torch.tensor(parts[1]) + torch.tensor(parts[2]), torch.tensor(parts[0]), **TOLERANCE)
    page, _, _ = opened("points")
    for seed in (1, 2):
        page.set(drawCount=20000, seed=seed, query=3)
        errors = {mode["title"]: mode["error"] for mode in page.page.evaluate("explorer.shown().modes")}
        assert errors["exact, all keys"] == 0 < errors["Monte Carlo, random keys"] < 0.2
        assert errors["exact, near keys alone"] > 0 and errors["Monte Carlo, anchors"] > 0


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_narrow_screens(visit, tmp_path, scheme):
    """At 360 pixels nothing is cut off; every figure has its words, and every control a name."""
    model, inputs = CASES["image-text"].make()
    explore_kernels(model, inputs, tmp_path / "page.html")
    page = visit(360, 740, scheme, has_touch=True).open(tmp_path / "page.html")
    assert page.page.evaluate("document.documentElement.scrollWidth") == 360
    words = page.page.evaluate(
        """() => Array.from(document.querySelectorAll("canvas"),
            canvas => canvas.offsetParent ? canvas.getAttribute("aria-label") : "hidden")"""
    )
    assert all(words) and len(words) > 5
    names = "() => Array.from(document.querySelectorAll('select, input'), control => control.labels.length)"
    assert all(page.page.evaluate(names))
    before = page.page.evaluate("explorer.state.query")
    page.page.locator("#view canvas").first.tap()
    assert page.page.evaluate("explorer.state.query") != before
    assert not page.errors
    page.page.close()
