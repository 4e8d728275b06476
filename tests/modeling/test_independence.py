"""What a result must not depend on: padding, other samples of a batch and, in a causal model, what comes later."""

import threading

import pytest
import torch

from itnet_kernels import Coordinates
from modeling_itnet import (
    ITNetForMaskedLM,
    ITNetForQuestionAnswering,
    ITNetForSequenceClassification,
    ITNetForSignalRegression,
    ITNetForTokenClassification,
    ITNetModel,
)
from modeling_itnet.integration import anchors as anchors_module
from modeling_itnet.integration.anchors import ITNetAnchors, causal_anchors

AUTO = {
    "to monte_carlo": {"exact_max_positions": 6, "num_samples": 3},
    "to learned monte_carlo": {"exact_max_positions": 6, "num_samples": 3, "approximate_mode": "monte_carlo"},
    "to low_rank": {"exact_max_positions": 6, "rank": 2, "approximate_mode": "low_rank"},
}
LENGTHS, LONGEST = (9, 4, 8, 6), 9  # two on each side of the limit
# float32 rounding of a sum over some 10 positions, through two layers.
TOLERANCE = {"rtol": 1e-4, "atol": 1e-4}


def make_batch(modality, lengths=LENGTHS, size=LONGEST, seed=0):
    """Samples of the given lengths, padded with garbage to ``size``."""
    generator = torch.Generator().manual_seed(seed)
    batch = len(lengths)
    mask = (torch.arange(size) < torch.tensor(lengths)[:, None]).long()
    if modality == "text":
        return {"input_ids": torch.randint(1, 40, (batch, size), generator=generator), "attention_mask": mask}
    if modality == "point_cloud":
        return {"points": torch.rand(batch, size, 3, generator=generator), "attention_mask": mask}
    values = {
        "positions": torch.rand(batch, size, 2, generator=generator),
        "attention_mask": mask,
    }
    if modality == "signal":
        return {"inputs_embeds": torch.randn(batch, size, 16, generator=generator), **values}
    neighbors = torch.full((batch, size, 2), -1)
    for row, length in enumerate(lengths):
        neighbors[row, :length] = torch.randint(0, length, (length, 2), generator=generator)
    features = torch.randn(batch, size, 2, generator=generator)
    return {"node_features": features, "neighbors": neighbors, **values}


def alone(batch, row, length):
    return {key: value[row : row + 1, :length] for key, value in batch.items() if key != "attention_mask"}


SETTINGS = {
    "text": {},
    "signal": {},
    "point_cloud": {"local_neighbors": 0, "position_dim": 3},
    "graph": {"position_dim": 2, "node_feature_size": 2, "edge_gate": True},
}


@pytest.fixture
def auto_model(tiny_config, shake):
    def make(modality, mode, **overrides):
        torch.manual_seed(0)
        config = tiny_config(modality, **SETTINGS[modality], **AUTO[mode], **overrides)
        return shake(ITNetModel(config), 0.2).eval()

    return make


@pytest.mark.parametrize("mode", AUTO)
@pytest.mark.parametrize("modality", SETTINGS)
class TestAutoInAMixedBatch:
    def test_every_sample_is_as_alone(self, auto_model, modality, mode):
        model, batch = auto_model(modality, mode), make_batch(modality)
        with torch.no_grad():
            together = model(**batch, output_hidden_states=True)
            assert len(together.hidden_states) == 3
            for row, length in enumerate(LENGTHS):
                one = model(**alone(batch, row, length))
                actual = together.last_hidden_state[row : row + 1, :length]
                torch.testing.assert_close(actual, one.last_hidden_state, **TOLERANCE)
                torch.testing.assert_close(together.pooler_output[row : row + 1], one.pooler_output, **TOLERANCE)

    def test_short_samples_are_exact_and_long_ones_are_not(self, auto_model, modality, mode):
        """In training too."""
        model, batch = auto_model(modality, mode), make_batch(modality)
        for training in (False, True):
            model.train(training)
            model.config.integration_mode = "auto"
            mixed = model(**batch).last_hidden_state
            model.config.integration_mode = "exact"
            exact = model(**batch).last_hidden_state
            for row, length in enumerate(LENGTHS):
                difference = (mixed - exact)[row, :length].abs().max()
                assert (difference < 1e-4) == (length <= 6), (row, training)


def test_gradients_of_a_mixed_batch_add_up(auto_model):
    model, batch = auto_model("signal", "to low_rank"), make_batch("signal")
    model.train()

    def gradients(*batches):
        model.zero_grad()
        for inputs in batches:
            model(**inputs).pooler_output.square().sum().backward()
        return {name: p.grad.clone() for name, p in model.named_parameters()}

    expected = gradients(*(alone(batch, row, length) for row, length in enumerate(LENGTHS)))
    together = gradients(batch)
    model.gradient_checkpointing_enable()
    recomputed = gradients(batch)
    for name, wanted in expected.items():
        scale = {"rtol": 1e-3, "atol": 1e-4 * float(wanted.abs().max() + 1)}
        torch.testing.assert_close(together[name], wanted, **scale)
        torch.testing.assert_close(recomputed[name], wanted, **scale)


def test_the_proposal_is_trained_on_the_long_samples(auto_model, monkeypatch):
    model, batch = auto_model("signal", "to learned monte_carlo").train(), make_batch("signal")
    seen = []
    proposal = model.layers[0].operator.proposal
    loss = proposal.loss
    monkeypatch.setattr(proposal, "loss", lambda features, *rest: seen.append(len(features)) or loss(features, *rest))
    assert model(**batch).proposal_loss.isfinite()
    assert seen == [2]
    assert "proposal_loss" not in model(**{key: value[[1, 3]] for key, value in batch.items()})


@pytest.fixture
def process_group(tmp_path):
    """This process as a group of one: what DistributedDataParallel demands of a model, it demands of that too."""
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("lengths", [(9, 4), (4, 5), (9, 8)], ids=["mixed", "short", "long"])
@pytest.mark.parametrize("mode", ["to learned monte_carlo", "to low_rank"])
def test_every_parameter_takes_part_in_distributed_training(auto_model, process_group, mode, lengths):
    """Also those of the mode that no sample of the batch needs, as other processes may: with a gradient of 0."""
    model = auto_model("signal", mode).train()
    model.gradient_checkpointing_enable()
    parallel = torch.nn.parallel.DistributedDataParallel(model)  # does not look for unused parameters
    for seed in range(2):  # the second step would find the first one unfinished
        output = parallel(**make_batch("signal", lengths=lengths, seed=seed))
        loss = output.pooler_output.square().sum()
        (loss + output.proposal_loss if "proposal_loss" in output else loss).backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


class TestAutoInAGraph:
    """A compiled or exported graph cannot count real positions."""

    def test_short_tensors_are_exact(self, auto_model):
        model, batch = auto_model("signal", "to low_rank"), make_batch("signal", lengths=(6, 4), size=6)
        compiled = torch.compile(model, backend="eager", fullgraph=True)
        torch.testing.assert_close(compiled(**batch).last_hidden_state, model(**batch).last_hidden_state)
        torch.export.export(model, (), batch, strict=False)

    def test_nothing_is_padded_without_a_mask(self, tiny_model):
        model = tiny_model("image", image_size=32, exact_max_positions=6, num_samples=3)
        image = torch.randn(2, 3, 32, 32)
        compiled = torch.compile(model, backend="eager", fullgraph=True)
        torch.testing.assert_close(compiled(image).last_hidden_state, model(image).last_hidden_state)

    def test_otherwise_a_mode_has_to_be_named(self, auto_model):
        model, batch = auto_model("signal", "to low_rank"), make_batch("signal")
        with pytest.raises(ValueError, match=r"`integration_mode` \('auto'\).*Name a mode"):
            torch.export.export(model, (), batch, strict=False)
        with pytest.raises(Exception, match="Name a mode"):
            torch.compile(model, backend="eager", fullgraph=True)(**batch)
        # Where the graph may break, the choice is made between its pieces.
        torch._dynamo.reset()
        broken = torch.compile(model, backend="eager")(**batch)
        torch.testing.assert_close(broken.last_hidden_state, model(**batch).last_hidden_state)
        model.config.integration_mode = "low_rank"
        torch.export.export(model, (), batch, strict=False)


CAUSAL_MODES = {
    "exact": {"integration_mode": "exact"},
    "monte_carlo": {"integration_mode": "monte_carlo", "num_samples": 16},
    "low_rank": {"integration_mode": "low_rank", "rank": 2},
    "auto, exact": {"max_position_embeddings": 100, "exact_max_positions": 100},
    "auto, monte_carlo": {"max_position_embeddings": 100, "exact_max_positions": 70, "num_samples": 16},
    "auto, low_rank": {
        "max_position_embeddings": 100,
        "exact_max_positions": 70,
        "approximate_mode": "low_rank",
        "rank": 2,
    },
}
# class -> modality, settings, its outputs per position
CAUSAL_HEADS = {
    "text": (ITNetModel, "text", {}, ("last_hidden_state",)),
    "masked-lm": (ITNetForMaskedLM, "text", {}, ("logits",)),
    "token-classification": (ITNetForTokenClassification, "text", {}, ("logits",)),
    "question-answering": (ITNetForQuestionAnswering, "text", {"num_labels": 2}, ("start_logits", "end_logits")),
    "signal": (ITNetModel, "signal", {"signal_feature_size": 2}, ("last_hidden_state",)),
    "signal-regression": (ITNetForSignalRegression, "signal", {"signal_feature_size": 2}, ("predictions",)),
}


class TestCausal:
    @pytest.mark.parametrize("mode", CAUSAL_MODES)
    @pytest.mark.parametrize("head", CAUSAL_HEADS)
    def test_neither_what_comes_later_nor_how_much(self, tiny_config, shake, head, mode):
        model_class, modality, settings, outputs = CAUSAL_HEADS[head]
        settings = {"max_position_embeddings": 100, **settings, **CAUSAL_MODES[mode]}
        model = shake(model_class(tiny_config(modality, is_causal=True, **settings)), 0.2).eval()
        if modality == "text":
            inputs = {"input_ids": torch.randint(1, 40, (2, 80))}
        else:
            inputs = {"signal_values": torch.randn(2, 80, 2), "positions": torch.rand(2, 80, 2)}
        prefix = {key: value[:, :60] for key, value in inputs.items()}
        other = {key: torch.cat([value[:, :60], value[:, 60:].flip(1)], 1) for key, value in inputs.items()}
        with torch.no_grad():
            whole, changed, alone = model(**inputs), model(**other), model(**prefix)
        for name in outputs:
            torch.testing.assert_close(changed[name][:, :60], whole[name][:, :60], **TOLERANCE)
            torch.testing.assert_close(whole[name][:, :60], alone[name], **TOLERANCE)
            assert not torch.allclose(whole[name][:, 60:], changed[name][:, 60:], atol=1e-2)

    @pytest.mark.parametrize("mode", CAUSAL_MODES)
    def test_a_pooled_head_ignores_padding(self, tiny_config, shake, mode):
        settings = {"max_position_embeddings": 100, **CAUSAL_MODES[mode]}
        model = shake(ITNetForSequenceClassification(tiny_config("text", is_causal=True, **settings)), 0.2).eval()
        batch = make_batch("text", lengths=(80, 30), size=80)
        with torch.no_grad():
            together = model(**batch).logits
            for row, length in enumerate((80, 30)):
                torch.testing.assert_close(together[row], model(**alone(batch, row, length)).logits[0], **TOLERANCE)

    def test_a_causal_signal_is_read_at_its_positions(self, tiny_config):
        config = tiny_config("signal", is_causal=True, signal_feature_size=2, num_labels=1)
        model, values = ITNetForSignalRegression(config).eval(), torch.randn(2, 7, 2)
        with pytest.raises(ValueError, match=r"`query_positions` \[5, 2\] cannot be given to a causal model"):
            model(signal_values=values, positions=torch.rand(7, 2), query_positions=torch.rand(5, 2))


class TestCausalAnchors:
    @pytest.mark.parametrize("count", [1, 2, 3, 5, 8])
    def test_blocks_of_what_a_query_sees(self, count):
        """Against the rule, written out for one query after the other."""
        measure = torch.rand(2, 41, dtype=torch.float64) + 0.1
        measure[0, :3] = measure[0, 7] = measure[1, -9:] = 0
        anchors = causal_anchors(measure, count)
        for sample, omega in enumerate(measure):
            for query in range(41):
                keys = [j for j in range(query + 1) if omega[j] > 0]
                size = 1
                while size < len(keys) and -(-len(keys) // (2 * size)) >= count:
                    size *= 2
                blocks = [keys[i : i + size] for i in range(0, len(keys), size)]
                joined = max(len(blocks) - count, 0)
                blocks = [a + b for a, b in zip(blocks[: 2 * joined : 2], blocks[1 : 2 * joined : 2], strict=True)] + (
                    blocks[2 * joined :]
                )
                assert len(blocks) == min(count, len(keys))
                mass = sum(float(omega[j]) for j in keys) or 1.0
                weights = anchors.measure[sample, query]
                for block, index, weight in zip(blocks, anchors.indices[sample, query], weights, strict=False):
                    assert int(index) == block[(len(block) - 1) // 2]
                    assert float(weight) == pytest.approx(sum(float(omega[j]) for j in block) / mass, rel=1e-9)
                assert not weights[len(blocks) :].any()


class TestThreads:
    """Monte Carlo evaluation keeps the anchors of the last domain; threads that share a model must get their own."""

    def test_another_domain_comes_between(self, monkeypatch):
        measure = torch.full((1, 20), 1 / 20)
        places = [Coordinates(torch.rand(20, 2), torch.randn(3, 2)) for _ in range(2)]
        domains = [(coordinates, measure, 4, False) for coordinates in places]
        anchors = ITNetAnchors()
        expected = anchors(*domains[0])
        same, others = anchors_module._same, [domains[1]]

        def interrupted(*args):
            result = same(*args)
            if others:  # another thread takes over just here
                anchors(*others.pop())
            return result

        monkeypatch.setattr(anchors_module, "_same", interrupted)
        actual = anchors(*domains[0])
        assert torch.equal(actual.indices, expected.indices)
        assert torch.equal(actual.measure, expected.measure)

    def test_a_shared_model(self, tiny_model):
        model = tiny_model("image", integration_mode="monte_carlo", num_samples=4, image_size=32)
        images = [torch.randn(1, 3, side, side) for side in (24, 32, 40)]
        with torch.no_grad():
            expected = [model(image).pooler_output for image in images]
        wrong, barrier = [], threading.Barrier(3)

        def work(number):
            barrier.wait()
            with torch.no_grad():
                for step in range(20):
                    which = (number + step) % 3
                    if not torch.allclose(model(images[which]).pooler_output, expected[which], rtol=1e-4, atol=1e-4):
                        wrong.append(which)

        threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not wrong
