"""Typed particles follow their law, peers know no order of particles, and tables follow from the logs of trials."""

import json
import math
import statistics
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from modeling_itnet import ITNetConfig

PARTICLE_MODELS = (
    "exact-32",
    "exact-16",
    "exact-8",
    "exact-4",
    "near_far-32",
    "near_far-8",
    "low_rank",
    "low_rank-query",
    "interaction_network",
    "transformer",
    "transformer-bias",
)
IMAGE_MODELS = ("exact", "near_far", "low_rank", "mlp")


@pytest.fixture(scope="module")
def particles(load_script):
    return load_script("typed_particles")


@pytest.fixture(scope="module")
def trials(load_script):
    return load_script("trials")


@pytest.fixture(scope="module")
def found(load_script, tiny_data):
    """Both problems, with data of a few rows: two steps of two samples."""
    problems = load_script("mode_problems").problems(tiny_data["run_image_classification"].parent)
    small = {
        "particles-32": {"num_particles": 8, "held_out": 4},
        "particles-256": {"num_particles": 12, "held_out": 2},
        "cifar10": {"held_out": 4, "folder": tiny_data["run_image_classification"]},
    }
    return {name: replace(problem, steps=2, batch_size=2, **small[name]) for name, problem in problems.items()}


def test_forces_are_the_double_loop(particles):
    law = particles.ForceLaw.draw(num_types=3, num_waves=3, scale=0.2, seed=5)
    generator = particles.seeded(1)
    positions = torch.rand(2, 7, 2, generator=generator, dtype=torch.float64)
    types = torch.randint(3, (2, 7), generator=generator)
    expected = torch.zeros(2, 7, 2, dtype=torch.float64)
    for sample in range(2):
        for i in range(7):
            for j in range(7):
                (a, b), (c, d) = positions[sample, i].tolist(), positions[sample, j].tolist()
                distance = math.hypot(a - c, b - d)
                profile = 0.0
                for k, amplitude in enumerate(law.coefficients[types[sample, i], types[sample, j]].tolist()):
                    profile += amplitude * math.cos(math.pi * k * distance / (2 * 0.2))
                profile *= math.exp(-((distance / 0.2) ** 2))
                expected[sample, i, 0] += profile * (a - c) / 7
                expected[sample, i, 1] += profile * (b - d) / 7
    torch.testing.assert_close(law.forces(positions, types), expected, rtol=1e-12, atol=1e-14)


def test_profiles_are_of_ordered_pairs_and_of_short_range(particles):
    law = particles.ForceLaw.draw()
    first, second = torch.arange(4).view(-1, 1), torch.arange(4)
    near = law.profile(first, second, torch.tensor(0.05))
    assert near.shape == (4, 4) and near.unique().numel() == 16
    assert not torch.allclose(near, near.T, rtol=0.1)
    far = law.profile(first, second, torch.tensor(4 * law.scale))
    assert far.abs().max() < 1e-5 * near.abs().max()


def test_batches_follow_from_their_seeds(particles):
    data = particles.TypedParticles.normalised(particles.ForceLaw.draw(), 8)
    first, again, other = (data.batch(64, 8, particles.seeded(*seed)) for seed in ((1, 2, 3), (1, 2, 3), (1, 3, 2)))
    for name, values in first.items():
        assert torch.equal(values, again[name])
        assert not torch.equal(values, other[name])
    assert 0.8 < first["labels"].square().mean().sqrt() < 1.25  # the unit was taken of other samples
    types = first["signal_values"].argmax(-1)
    unit = data.law.forces(first["positions"], types) / first["labels"]
    torch.testing.assert_close(unit, torch.full_like(unit, data.unit))


def test_forces_move_with_their_particles(particles):
    data = particles.TypedParticles(particles.ForceLaw.draw())
    batch = data.batch(2, 9, particles.seeded(4))
    order = torch.randperm(9)
    moved = data.law.forces(batch["positions"][:, order], batch["signal_values"].argmax(-1)[:, order])
    torch.testing.assert_close(moved, batch["labels"][:, order], rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("name", PARTICLE_MODELS)
def test_models_know_no_order_of_particles(found, name):
    problem = found["particles-32"]
    model, batch = problem.build(name).eval(), problem.batch(1, 0)
    order = torch.tensor([3, 0, 7, 1, 2, 6, 5, 4])
    with torch.no_grad():
        output = model(**batch)
        moved = model(**{key: values[:, order] for key, values in batch.items()})
    assert output.predictions.shape == batch["labels"].shape
    torch.testing.assert_close(moved.predictions, output.predictions[:, order], rtol=1e-4, atol=1e-5)
    errors = (output.predictions - batch["labels"]).flatten(1).norm(dim=1) / batch["labels"].flatten(1).norm(dim=1)
    torch.testing.assert_close(output.loss, errors.mean())


def test_interactions_are_means_of_an_mlp_of_pairs(load_script):
    """The message MLP is applied to each pair, then averaged: the layer takes parts of it before and after the sum."""
    peers = load_script("common.peers.interaction_network")
    layer = peers.Interaction(6, 10, 3).double()
    features, pairs = torch.randn(2, 5, 6).double(), torch.randn(2, 5, 5, 3).double()
    normed = layer.norm(features)
    first = torch.cat([layer.receiver.weight, layer.sender.weight, layer.pair.weight], dim=1)  # [10, 6 + 6 + 3]
    expected = features.clone()
    for sample in range(2):
        for i in range(5):
            messages = []
            for j in range(5):
                joint = torch.cat([normed[sample, i], normed[sample, j], pairs[sample, i, j]])
                messages.append(layer.message(torch.nn.functional.gelu(first @ joint + layer.receiver.bias)))
            joint = torch.cat([normed[sample, i], torch.stack(messages).mean(0)])
            expected[sample, i] += layer.update(joint)
    found = layer(features, pairs, torch.full((2, 5), 1 / 5, dtype=torch.float64))
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_attention_is_the_softmax_of_scores_and_biases(load_script, tiny_sizes):
    peers = load_script("common.peers.signal_transformer")
    layer = peers.AttentionLayer(ITNetConfig(**tiny_sizes), pair_size=3).double()  # d = 16, two heads
    features, pairs = torch.randn(2, 5, 16).double(), torch.randn(2, 5, 5, 3).double()
    query, key, value = layer.projection(layer.norm(features)).chunk(3, dim=-1)
    bias = layer.bias(pairs)
    attended = torch.zeros_like(features)
    for head, columns in enumerate((slice(0, 8), slice(8, 16))):
        scores = query[..., columns] @ key[..., columns].transpose(1, 2) / math.sqrt(8) + bias[..., head]
        weights = scores.exp() / scores.exp().sum(-1, keepdim=True)
        attended[..., columns] = weights @ value[..., columns]
    hidden = features + layer.output(attended)
    expected = hidden + layer.feed_forward(layer.feed_forward_norm(hidden))
    found = layer(features, SimpleNamespace(pairs=pairs, log_measure=None))
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("name", "model"),
    [("particles-32", model) for model in PARTICLE_MODELS] + [("cifar10", model) for model in IMAGE_MODELS],
)
def test_two_steps_of_every_model_make_a_log(trials, found, tmp_path, name, model):
    problem = found[name]
    assert set(problem.contestants) == set(PARTICLE_MODELS if name == "particles-32" else IMAGE_MODELS)
    trial = trials.Trial(problem, model, 1e-3, seed=1)
    trial.run(tmp_path)
    log = trial.read(tmp_path)
    assert (log["steps"], log["seed"], log["learning_rate"]) == (2, 1, 1e-3)
    assert log["parameters"] == sum(p.numel() for p in problem.build(model).parameters())
    assert [step for step, _ in log["validation"]] == [1, 2]
    expected = {"n = 4", "n = 8", "n = 32"} if name == "particles-32" else {"test"}
    assert log["test"].keys() == expected
    scores = [*log["test"].values(), *(score for _, score in log["validation"])]
    assert all(0 <= score < 10 for score in scores)
    again = trials.Trial(problem, model, 1e-3, seed=1).run(tmp_path / "again")
    assert again["validation"] == log["validation"] and again["test"] == log["test"]
    longer = replace(problem, steps=3)
    with pytest.raises(ValueError, match=r"has `steps` 2, not 3"):
        trials.Trial(longer, model, 1e-3, seed=1).read(tmp_path)


def test_held_out_data_are_not_trained_on(found):
    problem = found["cifar10"]
    images, labels = problem.train
    drawn = torch.cat([problem.batch(1, step)["pixel_values"] for step in range(40)])
    kept = {tuple(image.flatten().tolist()) for image in torch.cat([drawn, drawn.flip(-1)])}
    pixels = images.float() / 127.5 - 1
    seen = [tuple(image.flatten().tolist()) in kept for image in pixels]
    assert seen == [True] * (len(images) - 4) + [False] * 4
    held_out = torch.cat([batch["labels"] for batch in problem.validation()])
    assert torch.equal(held_out, labels[-4:])


def write_log(trial, folder, validation, test=None):
    log = {
        "problem": trial.problem.name,
        "model": trial.model,
        "seed": trial.seed,
        "learning_rate": trial.rate,
        "steps": 2,
        "batch_size": 2,
        "parameters": 1234,
        "validation": [[2, validation]],
        "test": test or {},
        "training_cpu_seconds": 0.5,
        "cpu_seconds": 60,
    }
    (folder / f"{trial.name}.json").write_text(json.dumps(log), encoding="utf-8")


def test_an_edge_that_wins_is_extended(trials, found, tmp_path):
    problem = found["particles-32"]
    scores = {1e-2: 0.5, 3e-2: 0.4, 1e-1: 0.3, 3e-1: None}  # the last one diverged
    for rates in ((1e-2, 3e-2, 1e-1), (3e-1,)):
        rate, missing = trials.tuned(problem, "low_rank", tmp_path)
        assert rate is None and [trial.rate for trial in missing] == list(rates)
        assert all(trial.is_tuning for trial in missing)
        for trial in missing:
            write_log(trial, tmp_path, scores[trial.rate])
    assert trials.tuned(problem, "low_rank", tmp_path) == (1e-1, [])


def test_rates_are_tuned_once_and_tests_read_at_the_end(trials, found, tmp_path, monkeypatch):
    """A problem may take the rates of another; logs that are there are not made again."""
    problem, tuner = found["particles-256"], found["particles-32"]
    made = []
    original = trials.Trial.run

    def run(trial, folder):
        made.append(trial.name)
        return original(trial, folder)

    monkeypatch.setattr(trials.Trial, "run", run)
    trials.run_model(problem, tuner, "transformer", (1, 2), tmp_path)
    first = list(made)
    tuning, final = first[:-2], first[-2:]
    assert {name.rpartition(".rate-")[0] for name in tuning} == {"particles-32.transformer"}
    assert final == ["particles-256.transformer.seed-1", "particles-256.transformer.seed-2"]
    assert not any(json.loads((tmp_path / f"{name}.json").read_text(encoding="utf-8"))["test"] for name in tuning)
    rate, _ = trials.tuned(tuner, "transformer", tmp_path)
    for name in final:
        log = json.loads((tmp_path / f"{name}.json").read_text(encoding="utf-8"))
        assert log["learning_rate"] == rate and len(log["test"]) == 3
    trials.run_model(problem, tuner, "transformer", (1, 2), tmp_path)
    assert made == first


def test_divergence_is_recorded(trials, found, tmp_path, monkeypatch):
    problem = found["particles-32"]
    bad = {name: values * float("nan") for name, values in problem.batch(1, 1).items()}
    monkeypatch.setattr(type(problem), "batch", lambda *_: bad)
    log = trials.Trial(problem, "transformer", 1e-3, seed=0).run(tmp_path)
    assert log["validation"] == [[1, None]]
    with pytest.raises(ValueError, match=r"no learning rate of 0.001 converged"):
        problem.better({1e-3: None})


def test_tables_are_made_of_logs(load_script, trials, found, tmp_path):
    table = load_script("trial_tables")
    problem = found["particles-32"]
    for rate, score in ((1e-2, 0.5), (3e-2, 0.25), (1e-1, 0.75)):
        write_log(trials.Trial(problem, "exact-8", rate, 0), tmp_path, score)
    values = [0.1, 0.2, 0.4]
    for seed, value in enumerate(values, start=1):
        test = {"n = 4": value, "n = 8": 0.5}
        write_log(trials.Trial(problem, "exact-8", 3e-2, seed), tmp_path, 0.3, test)
    text = table.page(found, tmp_path, "mode_accuracy")
    spread = f"{statistics.mean(values):.3f} ± {statistics.stdev(values):.3f}"
    assert f"| ITNet, exact, w = 8 | {spread} | 0.500 ± 0.000 | 0.03 | 1,234 | 250 | 3 of 3 |" in text
    assert "| ITNet, exact, w = 8 | 0.500 | **0.250** | 0.750 |" in text
    assert "| ITNet, low rank | not run | not run |  |  |  | 0 of 3 |" in text
    assert "CIFAR" not in text  # no log of it
    document = tmp_path / "page.md"
    begin, end = table.marks("mode_accuracy")
    document.write_text(f"before\n{begin}\nold\n{end}\nafter\n", encoding="utf-8")
    table.write(document, text, "mode_accuracy")
    assert document.read_text(encoding="utf-8") == f"before\n{begin}\n\n{text}\n\n{end}\nafter\n"
    (tmp_path / "other.md").write_text("nothing", encoding="utf-8")
    with pytest.raises(ValueError, match=r"other.md has no lines"):
        table.write(tmp_path / "other.md", text, "mode_accuracy")


def test_command_line(load_script, monkeypatch, tmp_path):
    script = load_script("mode_accuracy")
    options = ["--logs", str(tmp_path / "logs"), "--page", str(tmp_path / "page.md")]
    shorter = ["--only", "particles-32", "--models", "transformer", "--steps", "1", "--seeds", "1"]
    shorter += ["--threads", str(torch.get_num_threads())]
    for words in (shorter, ["--table"]):
        monkeypatch.setattr(sys, "argv", ["mode_accuracy.py", *words, *options])
        script.main()
    text = (tmp_path / "page.md").read_text(encoding="utf-8")
    assert "### Typed particles, trained at n = 32" in text and "| 1 of 3 |" in text
    monkeypatch.setattr(sys, "argv", ["mode_accuracy.py", "--models", "nobody"])
    with pytest.raises(SystemExit, match=r"--models \(nobody\) must be among exact, exact-16"):
        script.main()


def test_page_matches_the_logs(load_script):
    script = load_script("mode_accuracy")
    table = load_script("trial_tables")
    text = script.PAGE.read_text(encoding="utf-8")
    begin, end = table.marks("mode_accuracy")
    block = text.partition(begin)[2].partition(end)[0].strip()
    assert block == script.page(script.problems(script.ROOT / "data"), script.LOGS)
