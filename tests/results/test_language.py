"""n-grams against counts by hand, batches of bytes, and the tables of language.py from logs."""

import json
import math
import sys
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch

MODELS = ("near_far", "near_far-2", "near_far-plain", "exact", "low_rank-decay", "low_rank")
MODELS += ("gpt2", "gpt2_conv", "llama", "llama-0.05", "llama_conv", "mamba")


@pytest.fixture(scope="module")
def script(load_script):
    return load_script("language")


@pytest.fixture(scope="module")
def ngrams(load_script):
    return load_script("ngrams")


@pytest.fixture(scope="module")
def problem(script, tiny_data):
    found = script.problems(tiny_data["run_clm"].parent)["gutenberg"]
    small = {"folder": tiny_data["run_clm"], "length": 16, "validated": 4, "tested": 8}
    return replace(found, steps=2, batch_size=2, curve=2, **small)


def as_bytes(text):
    return np.frombuffer(text.encode(), dtype=np.uint8)


class TestNgrams:
    def test_by_hand(self, ngrams):
        """abab: a twice, b twice; after a came b twice, after b came a once."""
        unigram = (2 + 2 / 256) / (4 + 2)  # c = 2 of 4, two kinds
        model = ngrams.WittenBell(as_bytes("abab"), 1)
        assert model.probabilities(as_bytes("ab")) == pytest.approx([unigram, unigram])
        unseen = (2 / 256) / 6
        assert model.probabilities(as_bytes("c")) == pytest.approx([unseen])
        model = ngrams.WittenBell(as_bytes("abab"), 2)
        expected = [unigram, (2 + unigram) / 3, (1 + unigram) / 2, (unseen) / 3, unigram]
        assert model.probabilities(as_bytes("abaca")) == pytest.approx(expected)
        bits = -sum(map(math.log2, expected)) / 5
        assert model.bits_per_byte(as_bytes("abaca")) == pytest.approx(bits)

    @pytest.mark.parametrize("order", [1, 2, 3, 5])
    def test_by_a_plain_loop(self, ngrams, order):
        random = np.random.default_rng(0)
        train, test = (random.integers(97, 101, count).astype(np.uint8) for count in (300, 60))
        text = bytes(train)

        def probability(context: bytes, byte: int) -> float:
            lower = 1 / 256 if not context else probability(context[1:], byte)
            lower = lower if context else 1 / 256
            size = len(context)
            followers = Counter(text[i + size] for i in range(len(text) - size) if text[i : i + size] == context)
            total, kinds = sum(followers.values()), len(followers)
            return (followers[byte] + kinds * lower) / (total + kinds) if total else lower

        expected = [probability(bytes(test[max(0, i - order + 1) : i]), test[i]) for i in range(len(test))]
        assert ngrams.WittenBell(train, order).probabilities(test) == pytest.approx(expected)

    def test_probabilities_sum_to_one(self, ngrams):
        model = ngrams.WittenBell(as_bytes("the cat sat on the mat"), 3)
        ends = [np.append(as_bytes("at"), np.uint8(byte)) for byte in range(256)]
        assert sum(model.probabilities(end)[-1] for end in ends) == pytest.approx(1)

    def test_what_cannot_be(self, ngrams):
        with pytest.raises(ValueError, match=r"`order` \(8\) must be from 1 to 7"):
            ngrams.WittenBell(as_bytes("abc"), 8)
        with pytest.raises(ValueError, match=r"`stream` has 3 bytes, fewer than `order` \(5\)"):
            ngrams.WittenBell(as_bytes("abc"), 5)


def test_batches_are_bytes_of_the_split(load_script, problem):
    stream = bytes(load_script("language_problems").corpus(problem.folder, "train"))
    batch, again = problem.batch(1, 5), problem.batch(1, 5)
    assert torch.equal(batch["input_ids"], again["input_ids"])
    assert not torch.equal(batch["input_ids"], problem.batch(2, 5)["input_ids"])
    assert all(bytes(row.tolist()) in stream for row in batch["input_ids"])
    assert sum(len(part["input_ids"]) for part in problem.validation()) == 4
    whole = replace(problem, tested=None)
    labels = torch.cat([part["labels"][:, 1:].flatten() for part in whole.tests()["test"]])
    test = load_script("language_problems").corpus(problem.folder, "test")
    assert labels.tolist() == test[1 : 1 + len(labels)].tolist() and len(test) - 1 - len(labels) < 15


def test_score_is_bits_per_byte(problem):
    class Uniform(torch.nn.Module):
        def forward(self, input_ids):
            return type("Output", (), {"logits": torch.zeros(*input_ids.shape, 256)})()

    assert problem.score(Uniform(), problem.validation()) == pytest.approx(8)


def test_models_have_one_size(problem):
    assert tuple(problem.contestants) == MODELS
    counts = {name: sum(p.numel() for p in problem.build(name).parameters()) for name in MODELS}
    assert all(abs(count - counts["near_far"]) < 0.05 * count for count in counts.values()), counts


@pytest.mark.parametrize("model", MODELS)
def test_two_steps_make_a_log(load_script, problem, tmp_path, model):
    trials = load_script("trials")
    log = trials.Trial(problem, model, 1e-3, seed=1).run(tmp_path)
    assert 0 < log["test"]["test"] < 12 and len(log["validation"]) == 2
    assert log["validation_cpu_seconds"][-1] == pytest.approx(log["training_cpu_seconds"], abs=0.02)


def write_log(problem, model, folder, seed, times, scores):
    log = {
        "problem": problem.name,
        "model": model,
        "seed": seed,
        "learning_rate": 1e-3,
        "steps": 2,
        "batch_size": 2,
        "parameters": 1234,
        "validation": [[step, score] for step, score in enumerate(scores, start=1)],
        "validation_cpu_seconds": times,
        "test": {"test": scores[-1]} if seed else {},
        "training_cpu_seconds": times[-1],
        "cpu_seconds": 60,
    }
    (folder / f"{problem.name}.{model}.{seed}.json").write_text(json.dumps(log), encoding="utf-8")


def test_equal_times(script, load_script, problem, tmp_path):
    """Near and far in fewer steps stands beside the peers in all of theirs, and beside no other model."""
    tables, trials = (load_script(name) for name in ("language_tables", "trials"))
    shorter = script.problems(problem.folder.parent)["gutenberg-time-llama"]
    assert list(shorter.contestants) == ["near_far"] and shorter.tuned_on == "gutenberg"
    assert trials.Trial(shorter, "near_far", 1e-3, seed=1).steps == shorter.steps < problem_steps(script, problem)
    write_log(problem, "gpt2", tmp_path, 1, [5.0, 10.0], [3.0, 2.5])
    write_log(problem, "near_far", tmp_path, 1, [10.0, 20.0], [3.0, 1.5])
    assert "Equal times" not in script.page({"gutenberg": problem}, tmp_path)
    write_log(shorter, "near_far", tmp_path, 1, [5.0, 11.0], [3.0, 1.75])
    write_log(shorter, "near_far", tmp_path, 2, [5.0, 9.0], [3.0, 1.65])
    text = script.page({"gutenberg": problem, "gutenberg-time-llama": shorter}, tmp_path).partition("Equal times")[2]
    assert "| GPT-2 | 2 | 2.500 | 10 | 1 |" in text
    assert "| ITNet, near and far | 2 | 1.700 ± 0.071 | 10 | 2 |" in text
    assert tables.equal_time(problem, []) == []


def problem_steps(script, problem) -> int:
    return script.problems(problem.folder.parent)["gutenberg"].steps


def test_timings(load_script, problem, tmp_path):
    tables = load_script("language_tables")
    log = tables.run_timings(problem, tmp_path, ("near_far", "llama"), rounds=2)
    assert all(0 < value < 1e5 for value in log["milliseconds"].values())
    assert "Llama" in tables.timings(tmp_path)[0] and tables.timings(tmp_path / "other") == []


def test_command_line(script, load_script, monkeypatch, tmp_path, problem):
    monkeypatch.setattr(script, "problems", lambda data: {"gutenberg": problem})
    options = ["--logs", str(tmp_path / "logs"), "--page", str(tmp_path / "page.md")]
    shorter = ["--models", "gpt2", "--seeds", "1", "--threads", str(torch.get_num_threads())]
    for words in (shorter, ["--baselines"], ["--table"]):
        monkeypatch.setattr(sys, "argv", ["language.py", *words, *options])
        script.main()
    text = (tmp_path / "page.md").read_text(encoding="utf-8")
    assert "| GPT-2 |" in text and "| 1 of 3 |" in text and "| 5-grams, Witten-Bell |" in text
    log = json.loads((tmp_path / "logs" / "baselines" / "gutenberg.json").read_text(encoding="utf-8"))
    corpus = load_script("language_problems").corpus
    model = load_script("ngrams").WittenBell(corpus(problem.folder, "train"), 5)
    expected = model.bits_per_byte(corpus(problem.folder, "test"))
    assert log["rows"][-1]["test"] == pytest.approx(expected, abs=1e-4)


def test_page_matches_the_logs(script, load_script):
    begin, end = load_script("trial_tables").marks("language")
    block = script.PAGE.read_text(encoding="utf-8").partition(begin)[2].partition(end)[0].strip()
    assert block == script.page(script.problems(script.ROOT / "data"), script.LOGS)
