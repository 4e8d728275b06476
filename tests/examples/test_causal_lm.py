"""Parts of run_clm.py: tokenizers, blocks, bits per byte, samples, and peers of the same size."""

import math

import numpy as np
import pytest
import torch
from datasets import Dataset
from torch.nn import functional as F
from transformers import AutoTokenizer, MambaForCausalLM, pipeline
from transformers.utils.generic import find_labels

from modeling_itnet import ITNetConfig, ITNetForCausalLM
from modeling_itnet.training.recipes import RECIPES

TEXT = "Grüße, 世界! 𝛼\tand\n  two  spaces.\x00 "
SMALL = ["num_hidden_layers=1", "hidden_size=16", "num_attention_heads=2", "intermediate_size=16", "rank=2"]
SMALL += ["kernel_hidden_size=4", "num_fourier_features=4", "factor_hidden_size=4"]
PEERS = ("gpt2", "gpt2_conv", "llama", "llama_conv", "mamba", "linear_attention")


@pytest.fixture(scope="module")
def tokenizers(load_script):
    return load_script("common.byte_tokenizers")


@pytest.fixture(scope="module")
def streams(load_script):
    return load_script("common.streams")


@pytest.fixture(scope="module")
def peers(load_script):
    return load_script("common.peers.causal_lm")


@pytest.fixture
def config(tiny_sizes):
    mode = {"integration_mode": "near_far", "near_size": 4, "factor_form": "matrix"}
    return ITNetConfig(modality="text", is_causal=True, **{**tiny_sizes, "vocab_size": 258}, **mode)


class TestTokenizers:
    def test_bytes(self, tokenizers, tmp_path):
        tokenizers.byte_tokenizer(64).save_pretrained(tmp_path)
        tokenizer = AutoTokenizer.from_pretrained(tmp_path)
        ids = tokenizer(TEXT)["input_ids"]
        assert ids == list(TEXT.encode())
        assert tokenizer.decode(ids) == TEXT
        assert (len(tokenizer), tokenizer.eos_token_id, tokenizer.pad_token_id) == (258, 256, 257)
        assert tokenizer.model_max_length == 64
        batch = tokenizer(["ab", "a"], padding=True)["input_ids"]
        assert batch == [[97, 98], [257, 97]]
        assert tokenizer.decode([256, 97], skip_special_tokens=True) == "a"

    def test_trained_pieces_of_bytes(self, tokenizers, tmp_path):
        trained = tokenizers.train_tokenizer(["the cat and the dog"] * 9, 270, 64)
        trained.save_pretrained(tmp_path)
        tokenizer = AutoTokenizer.from_pretrained(tmp_path)
        assert len(tokenizer) == 270
        assert len(tokenizer("the the")["input_ids"]) < 7
        assert tokenizer.decode(tokenizer(TEXT)["input_ids"]) == TEXT
        with pytest.raises(ValueError, match=r"`vocab_size` \(200\) must be at least 258"):
            tokenizers.train_tokenizer(["a"], 200, 64)


class TestBlocks:
    def test_each_token_is_predicted_once(self, streams):
        """From the tokens before it in its block; the last tokens, which fill no block, are left out."""
        stream = np.arange(100, 117, dtype=np.uint32)
        blocks = streams.TokenBlocks(stream, 5)
        assert len(blocks) == 4
        batch = streams.collate_blocks(list(blocks))
        assert batch["labels"][:, 0].eq(-100).all()
        assert batch["labels"][:, 1:].flatten().tolist() == list(range(101, 117))
        assert batch["input_ids"][:, 1:].equal(batch["labels"][:, 1:])
        assert batch["input_ids"][:, 0].tolist() == [100, 104, 108, 112]
        assert len(streams.TokenBlocks(stream[:16], 5)) == 3
        with pytest.raises(ValueError, match=r"have 4 tokens, fewer than one block of `length` \(5\)"):
            streams.TokenBlocks(stream[:4], 5)

    @pytest.mark.parametrize("kind", ["lines", "documents"])
    def test_streams_and_their_bytes(self, load_script, streams, tokenizers, tmp_path, kind):
        args = load_script("common.arguments").ExampleTrainingArguments(output_dir=str(tmp_path), use_cpu=True)
        rows = Dataset.from_dict({"text": ["ä b\n", " ", "", "c"]})
        tokenizer = tokenizers.byte_tokenizer(8)
        end = "\n" if kind == "lines" else tokenizer.eos_token_id
        stream = streams.token_stream(rows, "text", tokenizer, end, tmp_path / f"{kind}.bin", args)
        expected = [*"ä b\nc\n".encode()] if kind == "lines" else [*"ä b\n".encode(), 256, *b"c", 256]
        assert stream.tolist() == expected
        assert streams.count_bytes(rows, "text", end) == len(expected)


class TestScript:
    def run(self, run_script, tiny_data, *options, **kwargs):
        words = [str(RECIPES / "gutenberg-clm-cpu.yaml"), "--dataset", str(tiny_data["run_clm"]), "--max_seq_length"]
        words += ["16", "--max_eval_samples", "4", "--max_steps", "2", "--per_device_train_batch_size", "4"]
        return run_script("run_clm", *words, *options, "--config_overrides", *SMALL, **kwargs)

    def test_bits_per_byte(self, run_script, tiny_data, capsys):
        """Of bytes it is the loss in bits; of larger pieces, less by the bytes of a piece."""
        results = self.run(run_script, tiny_data, "--prompt", "the red", "--sample_tokens", "5")
        metrics = results["metrics"]
        assert metrics["bits_per_byte"] == pytest.approx(metrics["loss"] / math.log(2), rel=1e-5)
        assert metrics["perplexity"] == pytest.approx(math.exp(metrics["loss"]), rel=1e-4)
        assert "\nthe red" in capsys.readouterr().out
        pieces = self.run(run_script, tiny_data, "--tokenizer", "train", "--vocab_size", "300", output="pieces")
        ratio = pieces["metrics"]["bits_per_byte"] * math.log(2) / pieces["metrics"]["loss"]
        assert ratio == pytest.approx(pieces["eval_tokens"] / results["eval_tokens"], rel=1e-5)
        assert pieces["eval_tokens"] < 0.7 * results["eval_tokens"]

    def test_the_trainer_finds_the_labels(self):
        """It looks for them in the signature, and evaluates no loss where a batch lacks one that it found there."""
        assert find_labels(ITNetForCausalLM) == ["labels"]

    def test_a_saved_folder_generates(self, run_script, tiny_data, tmp_path):
        self.run(run_script, tiny_data, "--sample_tokens", "0")
        write = pipeline("text-generation", model=str(tmp_path / "output"))
        text = write("the red", max_new_tokens=4, do_sample=False)[0]["generated_text"]
        assert text.startswith("the red")
        further = ["--model_name_or_path", str(tmp_path / "output"), "--sample_tokens", "0"]
        words = [str(RECIPES / "gutenberg-clm-cpu.yaml"), "--dataset", str(tiny_data["run_clm"]), *further]
        words += ["--max_seq_length", "16", "--max_eval_samples", "4", "--max_steps", "1"]
        assert run_script("run_clm", *words, output="further")["width"] == 16

    def test_what_does_not_fit(self, run_script, tiny_data):
        with pytest.raises(ValueError, match=r"`max_seq_length` \(1\) must be at least 2"):
            self.run(run_script, tiny_data, "--max_seq_length", "1")


class TestPeers:
    @pytest.mark.parametrize("name", PEERS)
    def test_as_many_parameters(self, peers, config, name):
        wanted = sum(p.numel() for p in ITNetForCausalLM(config).parameters())
        model = peers.causal_peer(name)(config)
        found = sum(p.numel() for p in model.parameters())
        assert abs(found - wanted) < 0.05 * wanted
        model_class, config_of = peers.CAUSAL_PEERS[name]
        assert peers.count_parameters(model_class, config_of(config)) == found

    def test_settings_of_its_own(self, peers, config):
        """Embeddings of as many rows begin with the standard deviation that is asked for."""
        model = peers.causal_peer("gpt2", initializer_range=0.3)(config)
        weight = model.transformer.wte.weight
        assert abs(weight.std().item() - 0.3) < 4 * 0.3 / (2 * weight.numel()) ** 0.5

    @pytest.mark.parametrize("target", [1, 40, 59, 60, 61, 1000])
    def test_nearest_size(self, peers, target):
        found = peers.nearest_size(lambda size: size**2, target, 3)
        assert found == min(range(3, 60, 3), key=lambda size: abs(size**2 - target))

    @pytest.mark.parametrize("name", PEERS)
    def test_causal_and_trained(self, peers, config, name):
        """Later tokens change nothing before them, every parameter has a gradient, and the loss is of next tokens."""
        model = peers.causal_peer(name)(config).eval()
        ids = torch.randint(256, (2, 9))
        other = ids.clone()
        other[:, 6] = (other[:, 6] + 1) % 256
        output, changed = model(input_ids=ids, labels=ids), model(input_ids=other)
        torch.testing.assert_close(output.logits[:, :6], changed.logits[:, :6], rtol=1e-4, atol=1e-5)
        assert not torch.allclose(output.logits[:, 6:], changed.logits[:, 6:], atol=1e-4)
        torch.testing.assert_close(
            output.loss, F.cross_entropy(output.logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        )
        output.loss.backward()
        assert all(parameter.grad is not None for parameter in model.parameters())

    def test_scan_of_mamba(self, peers, config):
        """Values and gradients of Transformers' own."""
        model = peers.causal_peer("mamba")(config)
        ids = torch.randint(256, (2, 11))
        found = []
        for forward in (type(model).forward, MambaForCausalLM.forward):
            model.zero_grad()
            output = forward(model, input_ids=ids, labels=ids)
            output.loss.backward()
            found.append([output.logits, *(parameter.grad.clone() for parameter in model.parameters())])
        for own, theirs in zip(*found, strict=True):
            torch.testing.assert_close(own, theirs, rtol=1e-4, atol=1e-6)

    def test_linear_attention_is_a_mean_with_weights(self, load_script):
        attend = load_script("common.peers.linear_attention").linear_attention
        query, key, value = torch.randn(3, 1, 1, 5, 4, dtype=torch.float64)
        for i in range(5):
            weights = [((F.elu(query[0, 0, i]) + 1) * (F.elu(key[0, 0, j]) + 1)).sum() for j in range(i + 1)]
            expected = sum(w * value[0, 0, j] for j, w in enumerate(weights)) / sum(weights)
            torch.testing.assert_close(attend(query, key, value)[0, 0, i], expected)

    def test_convolution(self, load_script):
        module = load_script("common.peers.short_convolution").CausalConvolution(3).double()
        features = torch.randn(2, 6, 3, dtype=torch.float64)
        weight, bias = module.convolution.weight, module.convolution.bias
        torch.testing.assert_close(module(features), features)  # at first
        with torch.no_grad():
            weight.normal_(), bias.normal_()
        expected = features + bias
        for i in range(6):
            for back in range(4):
                if i >= back:
                    expected[:, i] += weight[:, 0, 3 - back] * features[:, i - back]
        torch.testing.assert_close(module(features), expected)
