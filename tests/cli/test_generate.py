"""New language models, and ``itnet generate``."""

import re
import sys

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

from configuration_itnet import ITNetConfig, task_settings
from modeling_itnet import ITNetForCausalLM
from modeling_itnet.cli import app
from modeling_itnet.hub import create_checkpoint, make_tokenizer, model_card

SMALL = ("--set", "num_hidden_layers=1", "--set", "max_position_embeddings=64")


@pytest.fixture(scope="module")
def language_model(tmp_path_factory):
    """A new model; its draws are many tokens, its likeliest one is what it reads."""
    folder = tmp_path_factory.mktemp("models") / "m"
    settings = {"num_hidden_layers": 1, "max_position_embeddings": 64}
    create_checkpoint("itnet-tiny", folder, task="causal-lm", **settings)
    return folder


def expected(folder, prompt, seed=None, **settings) -> str:
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    if seed is not None:
        torch.manual_seed(seed)
    tokens = model.generate(**tokenizer(prompt, return_tensors="pt"), **settings)[0]
    return tokenizer.decode(tokens, skip_special_tokens=True)


class TestCreate:
    @pytest.mark.parametrize("task", ["causal-lm", "text-generation"])
    def test_a_language_model(self, task, run):
        run("create", "itnet-tiny", "m", "--task", task, *SMALL)
        model, tokenizer = AutoModelForCausalLM.from_pretrained("m"), AutoTokenizer.from_pretrained("m")
        config = model.config
        assert type(model) is ITNetForCausalLM and config.is_causal
        assert (config.integration_mode, config.near_size, config.kernel_hidden_size) == ("near_far", 4, 8)
        assert config.fourier_scale == 3 / 8 * config.max_position_embeddings  # waves between neighbours
        assert (config.factor_form, config.factor_decay) == ("matrix", True)
        assert config.bos_token_id == config.eos_token_id == tokenizer.eos_token_id == tokenizer.bos_token_id
        assert config.vocab_size == len(tokenizer) and config.pad_token_id == tokenizer.pad_token_id == 0
        assert model.generation_config.eos_token_id == config.eos_token_id

    def test_what_the_user_says_wins(self, run, fail):
        run("create", "itnet-tiny", "m", "--task", "causal-lm", *SMALL, "--mode", "exact", "--set", "near_size=8")
        config = ITNetConfig.from_pretrained("m")
        assert (config.integration_mode, config.near_size, config.is_causal) == ("exact", 8, True)
        run(*("create", "itnet-tiny", "w", "--task", "causal-lm", *SMALL, "--set", "kernel_hidden_size=24"))
        assert ITNetConfig.from_pretrained("w").kernel_hidden_size == 24
        words = ("--set", "is_causal=false", "--set", "factor_decay=false", "--mode", "exact")
        assert "`is_causal` (False) must be True" in fail("create", "itnet-tiny", "n", "--task", "causal-lm", *words)

    def test_presets_read_the_same_table(self):
        config = ITNetConfig.from_preset("itnet-small", task="text-generation", near_size=8)
        assert (config.modality, config.is_causal, config.near_size) == ("text", True, 8)
        assert (config.fourier_scale, config.kernel_inputs) == (192.0, ("x-y", "u_x", "u_y", "u_x*u_y"))
        own = ITNetConfig.from_preset("itnet-small", task="text-generation", fourier_scale=7.0)
        longer = ITNetConfig.from_preset("itnet-small", task="text-generation", max_position_embeddings=2048)
        assert (own.fourier_scale, longer.fourier_scale) == (7.0, 768.0)
        assert task_settings("masked-lm") == {"modality": "text"}
        with pytest.raises(ValueError, match="there is no task 'flying'; there are image-classification"):
            ITNetConfig.from_preset("itnet-small", task="flying")

    def test_prompts_stay_open_and_pads_are_on_the_left(self, tmp_path):
        (tmp_path / "corpus.txt").write_text("the kernel of the integral\n" * 50, encoding="utf-8")
        trained = make_tokenizer([tmp_path / "corpus.txt"], 300, 32, is_causal=True)
        trained.save_pretrained(tmp_path / "t")
        for tokenizer in (trained, AutoTokenizer.from_pretrained(tmp_path / "t")):
            ids = tokenizer("the kernel")["input_ids"]
            assert tokenizer.decode(ids) == "the kernel" and tokenizer.eos_token_id not in ids
            batch = tokenizer(["the", "the kernel of"], padding=True)
            assert batch["attention_mask"][0] == [0, 0, 1] and batch["input_ids"][0][:2] == [0, 0]
            assert "token_type_ids" not in batch

    def test_another_tokenizer_is_told_not_to_end_prompts(self, run, tmp_path):
        make_tokenizer([], 300, 32).save_pretrained(tmp_path / "t")  # [CLS] text [SEP]
        run("create", "itnet-tiny", "m", "--task", "causal-lm", *SMALL, "--tokenizer", "t")
        tokenizer, config = AutoTokenizer.from_pretrained("m"), ITNetConfig.from_pretrained("m")
        ids = tokenizer("ab")["input_ids"]
        assert tokenizer.decode(ids) == "[CLS]ab" and tokenizer.padding_side == "left"
        assert config.eos_token_id == tokenizer.sep_token_id

    def test_code_of_the_card_generates(self, language_model, monkeypatch, capsys):
        monkeypatch.chdir(language_model.parent)
        text = (language_model / "README.md").read_text(encoding="utf-8")
        assert "pipeline_tag: text-generation" in text and "Integration mode `near_far`: the full kernel" in text
        blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
        names = {}
        exec(blocks[1], names)
        exec(blocks[-1], names)
        assert capsys.readouterr().out.startswith("Once upon a time")
        masked = str(model_card("x/y", ITNetConfig.from_preset("itnet-tiny", modality="text")))
        assert "generate" not in masked


class TestGenerate:
    def test_greedy_and_beams(self, run, language_model):
        printed = run("generate", language_model, "Once", "upon", "--greedy", "--max-new-tokens", 6)
        wanted = [expected(language_model, text, max_new_tokens=6, do_sample=False) for text in ("Once", "upon")]
        assert printed == "".join(f"{text}\n" for text in wanted)
        printed = run("generate", language_model, "Once", "--num-beams", 3, "--max-new-tokens", 6)
        assert printed == expected(language_model, "Once", max_new_tokens=6, num_beams=3, do_sample=False) + "\n"

    def test_draws(self, run, language_model):
        words = ("generate", language_model, "Once", "--max-new-tokens", 12)
        chances = ("--temperature", 0.7, "--top-k", 20, "--top-p", 0.9)
        settings = {"do_sample": True, "temperature": 0.7, "top_k": 20, "top_p": 0.9}
        assert run(*words, "--seed", 3) == run(*words, "--seed", 3) != run(*words, "--seed", 4)
        printed = run(*words, *chances, "--seed", 3)
        assert printed == expected(language_model, "Once", 3, max_new_tokens=12, **settings) + "\n"

    def test_stream(self, run, language_model, monkeypatch):
        words = ("generate", language_model, "Once", "--greedy", "--max-new-tokens", 6)
        whole, calls = run(*words), []
        monkeypatch.setattr(
            "modeling_itnet.cli.generate.TextStreamer.on_finalized_text",
            lambda self, text, stream_end=False: calls.append(text),
        )
        assert run(*words) == whole and not calls  # not on a terminal
        assert run(*words, "--stream") == "" and len(calls) > 1
        assert "".join(calls) == whole.removesuffix("\n")

    def test_standard_input(self, language_model):
        words = ["generate", str(language_model), "-", "--greedy", "--max-new-tokens", "4"]
        printed = CliRunner().invoke(app, words, input="two\nlines\n").stdout
        assert printed.startswith("two\nlines") and not printed.startswith("two\nlines\n")

    def test_mistakes(self, run, fail, language_model, tmp_path):
        assert "a prompt is empty: there is nothing to continue" in fail("generate", language_model, "")
        assert "the standard input is empty" in fail("generate", language_model, "-")
        assert "no such checkpoint folder: nowhere" in fail("generate", "nowhere", "a")
        run("create", "itnet-tiny", "masked", "--task", "masked-lm", *SMALL)
        assert "masked holds an ITNetForMaskedLM, which cannot generate" in fail("generate", "masked", "a")
        AutoModelForCausalLM.from_pretrained(language_model).save_pretrained(tmp_path / "bare")
        assert "bare has no tokenizer" in fail("generate", "bare", "a")
        words = ("generate", language_model, "a")
        assert "`--top-k` (3) is about tokens that are drawn" in fail(*words, "--greedy", "--top-k", 3)
        assert "with `--num-beams` none are" in fail(*words, "--num-beams", 2, "--temperature", 2)
        assert "`--greedy` does not go with `--num-beams` (2)" in fail(*words, "--greedy", "--num-beams", 2)
        assert "`--temperature` (0.0) must be positive" in fail(*words, "--temperature", 0)
        assert "`--top-p` (1.5) must be in (0, 1]" in fail(*words, "--top-p", 1.5)

    def test_a_terminal_is_streamed_to(self, run, language_model, monkeypatch):
        seen = []
        monkeypatch.setattr("modeling_itnet.cli.generate._continue", lambda *arguments: seen.append(arguments[3]))
        for is_terminal in (True, False):
            monkeypatch.setattr("modeling_itnet.cli.generate.sys", Terminal(is_terminal))
            run("generate", language_model, "a")
        assert seen == [True, False]


class Terminal:
    """`sys` with a standard output that is a terminal, or is none."""

    def __init__(self, is_terminal: bool):
        self.stdout = type("Stream", (), {"isatty": lambda self: is_terminal, "write": sys.stdout.write})()
