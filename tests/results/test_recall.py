"""Answers of the tasks follow from their context, models have one size, and tables and plots follow from logs."""

import json
import sys
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

MODELS = (
    *("exact", "near_far", "near_far-gated", "low_rank"),
    *("gpt2", "llama", "linear_attention", "mamba"),
)
REPAIRS = ("low_rank-vector", "low_rank-decay", "low_rank-32", "near_far-16")


@pytest.fixture(scope="module")
def tasks(load_script):
    return load_script("recall_tasks")


@pytest.fixture(scope="module")
def script(load_script):
    return load_script("recall")


@pytest.fixture(scope="module")
def found(script):
    """The problems, with two steps of two samples."""
    return {
        name: replace(problem, steps=2, batch_size=2, held_out=8, curve=2)
        for name, problem in script.problems().items()
    }


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def asked(batch):
    """(tokens before, answer) of every label."""
    for ids, labels in zip(batch["input_ids"].tolist(), batch["labels"].tolist(), strict=True):
        for place, label in enumerate(labels):
            if label != -100:
                assert ids[place] in (label, 0)  # itself, or a blank
                yield ids[:place], label


def recalled(before, keys=16):
    """The value behind the last token where it stood first."""
    assert 1 <= before[-1] <= keys
    return before[before.index(before[-1]) + 1]


def induced(before):
    """What followed the last token before, which is always the same, if it is no blank."""
    assert before[-1]
    (found,) = {after for token, after in pairwise(before) if token == before[-1] and after}
    return found


def copied(before, symbols=16):
    """The next of the symbols among blanks before the mark."""
    mark = before.index(symbols + 1)
    return [token for token in before[:mark] if token][len(before) - mark - 1]


def offset(before, symbols=16):
    """The token that stands as far back as the last token says."""
    answer = before[len(before) - 1 - (before[-1] - symbols + 1)]
    assert answer < symbols
    return answer


@pytest.mark.parametrize(
    ("name", "size", "solve", "count"),
    [
        ("associative_recall", {"length": 40, "pairs": 8}, recalled, 12),
        ("associative_recall", {"length": 34, "pairs": 16}, recalled, 1),
        ("induction", {"length": 64}, induced, None),
        ("selective_copying", {"length": 40, "copied": 6}, copied, 6),
        ("offset_copying", {"length": 64}, offset, None),
    ],
)
def test_answers_follow_from_the_context(tasks, name, size, solve, count):
    batch = getattr(tasks, name)(64, generator(), **size)
    assert batch["input_ids"].shape == batch["labels"].shape == (64, size["length"])
    questions = list(asked(batch))
    for before, answer in questions:
        assert solve(before) == answer
    per_row = (batch["labels"] != -100).sum(1)
    assert (per_row == count).all() if count else per_row.float().mean() > 5
    assert len({answer for _, answer in questions}) >= 10
    again, other = (getattr(tasks, name)(64, generator(seed), **size) for seed in (0, 1))
    assert torch.equal(again["input_ids"], batch["input_ids"])
    assert not torch.equal(other["input_ids"], batch["input_ids"])


def test_keys_and_offsets(tasks):
    """Keys of a sample differ, all of them are asked, and answers do not stand in the text; every offset occurs."""
    batch = tasks.associative_recall(64, generator(), length=64, pairs=6)
    for ids, labels in zip(batch["input_ids"].tolist(), batch["labels"].tolist(), strict=True):
        assert len(set(ids[:12:2])) == 6 and all(1 <= key <= 16 for key in ids[:12:2])
        assert all(17 <= value <= 32 for value in ids[1:12:2])
        assert set(ids[12::2]) <= set(ids[:12:2]) and set(ids[13::2]) == {0}
        assert labels[:13] == [-100] * 13 and set(labels[12::2]) == {-100} and -100 not in labels[13::2]
    batch = tasks.offset_copying(64, generator(), length=64)
    assert {before[-1] for before, _ in asked(batch)} == set(range(16, 32))


def test_sizes_that_do_not_fit(tasks):
    with pytest.raises(ValueError, match=r"`pairs` \(8\) must be .* and below `length` \(16, even\) / 2"):
        tasks.associative_recall(1, generator(), length=16, pairs=8)
    with pytest.raises(ValueError, match=r"`pairs` \(17\) must be at most `keys` \(16\)"):
        tasks.associative_recall(1, generator(), length=64, pairs=17)
    with pytest.raises(ValueError, match=r"`copied` \(17\) must be at most `symbols` \(16\)"):
        tasks.selective_copying(1, generator(), length=64, copied=17)


def test_models_have_one_size(found):
    problem = found["selective"]
    assert tuple(problem.contestants) == MODELS + REPAIRS and tuple(found["offset"].contestants) == MODELS
    counts = {name: sum(p.numel() for p in problem.build(name).parameters()) for name in problem.contestants}
    reference = counts["near_far"]
    assert all(abs(count - reference) < 0.1 * reference for count in counts.values()), counts


@pytest.mark.parametrize("model", MODELS + REPAIRS)
def test_two_steps_make_a_log(load_script, found, tmp_path, model):
    trials, problem = load_script("trials"), found["selective" if model in REPAIRS else "offset"]
    log = trials.Trial(problem, model, 1e-3, seed=1).run(tmp_path)
    assert [step for step, _ in log["validation"]] == [1, 2] and len(log["validation_cpu_seconds"]) == 2
    if model in REPAIRS:
        sizes = ((12, 3), (24, 3), (48, 3), (24, 2), (24, 4), (24, 6))
        assert list(log["test"]) == [f"n = {length}, copied = {copied}" for length, copied in sizes]
    else:
        assert list(log["test"]) == ["n = 16", "n = 24", "n = 48"]
    assert all(0 <= score <= 1 for score in log["test"].values())
    assert log["state_size"] > 0 and log["state_length"] == 24


def test_training_ends_when_it_is_enough(load_script, found, tmp_path):
    trials, problem = load_script("trials"), replace(found["offset"], enough=0.0)
    log = trials.Trial(problem, "linear_attention", 1e-3, seed=1).run(tmp_path)
    assert [step for step, _ in log["validation"]] == [1] and log["steps"] == 2
    assert problem.is_enough(0.0) and not problem.is_enough(None) and not replace(problem, enough=0.5).is_enough(0.4)
    assert replace(problem, is_error=True, enough=0.5).is_enough(0.4)


def test_best_rate_is_that_of_the_first_to_be_right(found):
    """Above `enough` fewer steps decide, below it the score does."""
    problem = replace(found["offset"], enough=0.9)

    def logs(*ends):
        return [{"learning_rate": rate, "validation": [[5, 0.1], [step, score]]} for rate, step, score in ends]

    assert problem.best_rate(logs((1e-3, 30, 0.91), (3e-3, 20, 0.9), (1e-2, 40, 1.0))) == 3e-3
    assert problem.best_rate(logs((1e-3, 40, 0.8), (3e-3, 40, 0.89), (1e-2, 7, None))) == 3e-3


def test_states(load_script, found):
    """Two layers: by what the definitions of the models say."""
    problems, problem = load_script("recall_problems"), found["selective"]
    expected = {
        "exact": 2 * 64 * 64,
        "near_far": 2 * (4 * 64 + 4 * 8 * 16 + 64),
        "low_rank-vector": 2 * (4 * 8 + 64),
        "low_rank-32": 2 * (4 * 32 * 16 + 64),
    }
    for name, size in expected.items():
        assert problems.state_size(problem.build(name), 64) == size
    gpt2 = problem.build("gpt2")
    assert problems.state_size(gpt2, 64) == 2 * 2 * 64 * gpt2.config.n_embd
    size = problem.build("linear_attention").config.n_embd // 4
    assert problems.state_size(problem.build("linear_attention"), 64) == 2 * 4 * (size * size + size)


def test_accuracy_counts_answers_only(found):
    problem = found["selective"]

    class Oracle(torch.nn.Module):
        """Right about every next token of the first sample, and about none of the second."""

        def forward(self, input_ids):
            logits = torch.nn.functional.one_hot(input_ids.roll(-1, 1), 40).float()
            logits[1] = -logits[1]
            return type("Output", (), {"logits": logits})()

    assert problem.score(Oracle(), iter([problem.batch(1, 0)])) == 0.5


def write_log(problem, model, folder, seed, rate, tests):
    log = {
        "problem": problem.name,
        "model": model,
        "seed": seed,
        "learning_rate": rate,
        "steps": 2,
        "batch_size": 2,
        "parameters": 1234,
        "state_size": 1000,
        "validation": [[2, 0.5]],
        "test": tests,
        "training_cpu_seconds": 0.5,
        "cpu_seconds": 60,
    }
    name = f"{problem.name}.{model}.{'rate' if seed == 0 else 'seed'}-{rate if seed == 0 else seed}.json"
    (folder / name).write_text(json.dumps(log), encoding="utf-8")


def test_tables_and_plots_are_made_of_logs(script, load_script, found, tmp_path):
    problem = found["associative"]
    for rate in problem.rates:
        write_log(problem, "gpt2", tmp_path, 0, rate, {})
    for seed, score in ((1, 0.5), (2, 1.0), (3, 0.75)):
        write_log(problem, "gpt2", tmp_path, seed, 1e-3, dict.fromkeys(problem.tests(), score))
    text = script.page(found, tmp_path)
    assert "### Multi-query associative recall" in text and "Induction" not in text
    assert "| GPT-2 | 0.750 ± 0.250 |" in text and "| ITNet, exact | not run |" in text
    assert "| GPT-2 | 1,000 |" in text and "figures/recall-associative.png" in text
    plots = load_script("recall_plots")
    axes = plots.axes_of(problem)
    assert axes["n"] == [(length, f"n = {length}, pairs = 4") for length in (16, 32, 64)]
    assert [value for value, _ in axes["pairs"]] == [2, 4, 6]
    drawn = plots.draw_all(found, tmp_path, tmp_path / "figures")
    assert [path.name for path in drawn] == ["recall-associative.png"] and drawn[0].stat().st_size > 5000


def test_command_line(script, found, monkeypatch, tmp_path):
    monkeypatch.setattr(script, "problems", lambda data=None: found)
    options = ["--logs", str(tmp_path / "logs"), "--page", str(tmp_path / "page.md")]
    shorter = ["--only", "selective", "--models", "linear_attention", "--seeds", "1"]
    shorter += ["--threads", str(torch.get_num_threads())]
    for words in (shorter, ["--table"]):
        monkeypatch.setattr(sys, "argv", ["recall.py", *words, *options])
        script.main()
    assert "| linear attention |" in (tmp_path / "page.md").read_text(encoding="utf-8")
    assert (tmp_path / "figures" / "recall-selective.png").is_file()


def test_page_matches_the_logs(script, load_script):
    begin, end = load_script("trial_tables").marks("recall")
    block = script.PAGE.read_text(encoding="utf-8").partition(begin)[2].partition(end)[0].strip()
    assert block == script.page(script.problems(), script.LOGS)
