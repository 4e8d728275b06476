"""Exported folders: they load where the package is not installed, and hold nothing but the package's own code."""

import ast
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from configuration_itnet import MODALITIES, Modality, find_modality
from modeling_itnet import (
    ITNetConfig,
    ITNetGraphProcessor,
    ITNetImageProcessor,
    ITNetModel,
    ITNetPointCloudProcessor,
    ITNetProcessor,
    export_to_hub_folder,
)
from modeling_itnet.hub import flatten
from modeling_itnet.hub.auto import processor_classes
from modeling_itnet.modalities import find_heads, load

# Modes that have code of their own, for some of the models.
MONTE_CARLO = {"integration_mode": "monte_carlo", "num_samples": 3}
NEAR_FAR = {"integration_mode": "near_far", "near_size": 9, "near_radius": 0.8, "rank": 3}
NEAR_FAR_MODELS = (
    "image-classification",
    "causal-lm",
    "sequence-classification",
    "images-and-text",
    "point-cloud",
    "graph",
    "signal",
)
MODES = {"image": MONTE_CARLO, "token-classification": MONTE_CARLO} | dict.fromkeys(NEAR_FAR_MODELS, NEAR_FAR)
# Folders without what other modes need.
SMALL = {
    f"{name} {mode}": (name, {"integration_mode": mode, "rank": 3})
    for name in ("image-classification", "causal-lm", "graph", "signal")
    for mode in ("exact", "low_rank")
}
TABLE = ("MODALITIES", "_ROWS")
VQA = "visual-question-answering"
ISOLATED = Path(__file__).with_name("isolated.py")


@pytest.fixture(scope="module")
def tokenizer():
    words = ["[PAD]", "[UNK]", "[MASK]", "what", "colour", "is", "it", *(f"w{index}" for index in range(33))]
    backend = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="[PAD]", unk_token="[UNK]", mask_token="[MASK]", model_max_length=32
    )


@pytest.fixture(scope="module")
def processors(tokenizer):
    """Modality -> the processor, and what Auto classes make of it."""

    def make(config):
        image = ITNetImageProcessor.from_model_config(config)
        return {
            "image": (image, {"AutoImageProcessor": "ITNetImageProcessor", "AutoProcessor": "ITNetImageProcessor"}),
            "text": (tokenizer, {"AutoTokenizer": "TokenizersBackend"}),
            "multimodal": (ITNetProcessor(image, tokenizer), {"AutoProcessor": "ITNetProcessor"}),
            "point_cloud": (ITNetPointCloudProcessor(), {"AutoFeatureExtractor": "ITNetPointCloudProcessor"}),
            "graph": (ITNetGraphProcessor(), {"AutoFeatureExtractor": "ITNetGraphProcessor"}),
        }.get(config.modality, (None, {}))

    return make


@pytest.fixture(scope="module")
def sources():
    """Modality -> all code that a model of it can bring along."""

    def of(row):
        classes = [load(reference) for reference in row.exported]
        settings = {"position_dim": row.position_dim or 1, "approximate_mode": "near_far", "near_radius": 1.0}
        config = ITNetConfig(modality=row.name, **settings)
        return flatten.flat_sources(config, ITNetConfig, ITNetModel, *classes)

    return {name: of(row) for name, row in MODALITIES.items()}


def test_every_head_in_isolation(tmp_path, cases, make_model, make_inputs, predictions, processors):
    """`python -I`, our packages, Triton and SciPy not importable, no network: the same outputs."""
    requests, expected_processors = {}, {}
    exported = {name: (name, MODES.get(name, {})) for name in cases} | SMALL
    for name, (kind, settings) in exported.items():
        case = cases[kind]
        model, inputs, folder = make_model(kind, **settings), make_inputs(kind), tmp_path / name
        processor, expected_processors[name] = processors(model.config)
        model.save_pretrained(folder, with_code=True, processor=processor)
        with torch.no_grad():
            outputs = predictions(model(**inputs))
        save_file({key: value.contiguous() for key, value in inputs.items()}, tmp_path / f"{name}-in.safetensors")
        save_file({key: value.contiguous() for key, value in outputs.items()}, tmp_path / f"{name}-out.safetensors")
        requests[name] = {
            "auto_class": case.auto_class,
            "folder": str(folder),
            "inputs": str(tmp_path / f"{name}-in.safetensors"),
            "outputs": str(tmp_path / f"{name}-out.safetensors"),
            "processors": list(expected_processors[name]),
        }
    prompt, generation = make_inputs("causal-lm")["input_ids"], {"max_new_tokens": 6, "num_beams": 2}
    requests["causal-lm"] |= {"prompt": prompt.tolist(), "generation": generation}
    for name in ("image", "masked-lm", VQA):
        requests[name]["resave"] = str(tmp_path / f"{name}-again")
    image, question = tmp_path / "image.png", "what colour is it"
    Image.effect_noise((16, 16), 90).convert("RGB").save(image)
    requests[VQA] |= {"pipeline": "itnet-visual-question-answering", "image": str(image), "question": question}
    # A repository that was downloaded earlier: the Hub's cache, as it lies on the disk.
    repository, commit = tmp_path / "hub" / "models--someone--itnet", "0123456789" * 4
    shutil.copytree(tmp_path / "masked-lm", repository / "snapshots" / commit)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit, encoding="utf-8")
    requests["repository"] = {**requests["masked-lm"], "folder": "someone/itnet"}
    expected_processors["repository"] = expected_processors["masked-lm"]
    result = subprocess.run(
        [sys.executable, "-I", str(ISOLATED)],
        input=json.dumps(requests),
        capture_output=True,
        text=True,
        env={
            **os.environ,
            "HF_MODULES_CACHE": str(tmp_path / "modules"),
            "HF_HUB_CACHE": str(tmp_path / "hub"),
            "HF_HUB_OFFLINE": "1",
        },
    )
    assert result.returncode == 0, result.stderr[-4000:]
    report = json.loads(result.stdout.splitlines()[-1])
    assert report.pop("blocked") == []
    assert report.keys() == requests.keys()
    for name, found in report.items():
        assert found["module"].startswith("transformers_modules."), name
        assert found["equal"] and all(found["equal"].values()), (name, found)
        assert found["equal at the end"], name
        assert found.get("processors", {}) == expected_processors[name]
    for name in ("image", "masked-lm", VQA):
        assert all(report[name]["equal again"].values())
        assert names_only_what_is_there(tmp_path / f"{name}-again")
    expected = make_model("causal-lm", **NEAR_FAR).generate(
        prompt, attention_mask=torch.ones_like(prompt), **generation
    )
    assert report["causal-lm"]["generated"] == expected.tolist()
    inputs = processors(make_model(VQA).config)[0](Image.open(image), question, return_tensors="pt")
    with torch.no_grad():
        scores = make_model(VQA)(**inputs).logits[0].sigmoid().sort(descending=True)
    answers = report[VQA]["answers"]
    assert [row["answer"] for row in answers] == [f"LABEL_{index}" for index in scores.indices.tolist()]
    assert [row["score"] for row in answers] == pytest.approx(scores.values.tolist(), rel=1e-4)


def test_folder_holds_what_the_model_needs(tmp_path, cases, make_model, processors):
    """No pickle, no code of other modalities, and an `auto_map` that names the classes that are there alone."""
    for name, case in cases.items():
        model, folder = make_model(name), tmp_path / name
        export_to_hub_folder(model, folder, processors(model.config)[0], max_shard_size="20KB")
        assert {path.suffix for path in folder.iterdir()} <= {".json", ".jinja", ".md", ".py", ".safetensors"}
        assert len(list(folder.glob("*.safetensors"))) > 1
        mapped = json.loads((folder / "config.json").read_text(encoding="utf-8"))["auto_map"]
        for reference in mapped.values():
            file, class_name = reference.split(".")
            assert f"class {class_name}(" in (folder / f"{file}.py").read_text(encoding="utf-8")
        own = [(cls, head.auto_class) for cls, head, row in find_heads() if row.name == case.modality]
        is_bare, file = case.model_class is ITNetModel, case.model_class.__module__
        heads = {auto_class for cls, auto_class in own if is_bare or cls.__module__ == file}
        assert mapped.keys() == {"AutoConfig", "AutoModel", *heads}
        files = {path.stem.removeprefix("modeling_itnet_") for path in folder.glob("modeling_itnet_*.py")}
        modalities = {case.modality, *find_modality(case.modality).parts}
        heads_file = "causal_lm" if name == "causal-lm" else case.modality
        rooms = {"encoders": (case.modality, modalities), "heads": (heads_file, {heads_file})}
        rooms["processing"] = (None, modalities)
        for room, (needed, expected) in rooms.items():
            found = {file.removeprefix(f"{room}_") for file in files if file.startswith(room)}
            found &= {*MODALITIES, "causal_lm"}
            assert found <= expected and (needed in found or needed is None), (name, room)
        assert not {file for file in files if file.startswith(("analysis", "cli", "special_cases", "training"))}
        assert ("hub_pipelines" in files) == (name == VQA)
        assert ("generation_cache" in files) == (name == "causal-lm")
        assert "integration_fit" not in files
        assert not hasattr(model.config, "auto_map")


def test_code_goes_with_the_processors_that_are_saved(tmp_path, make_model):
    make_model("graph").save_pretrained(tmp_path, with_code=True)
    assert not list(tmp_path.glob("*_processing_*.py"))
    assert {ITNetImageProcessor, ITNetProcessor} < processor_classes().keys()


class TestCode:
    def test_is_the_packages_code(self, sources):
        """Apart from imports and the note on top, every line of a flat file is one of the module it came from; but the
        table has one row, and what finds the encoder imports it."""
        for modality, files in sources.items():
            for file, source in files.items():
                module = source.splitlines()[0].split()[3]
                original = flatten.read_module(module)
                assert flatten.flat_name(module) == file.removesuffix(".py")
                if module == Modality.__module__:
                    assert without_imports(source, TABLE) == without_imports(original.source, TABLE)
                    # Its own row, and that of the default configuration that Transformers compares with.
                    rows = set(re.findall(r"Modality\(name='(\w+)'", source))
                    assert rows == {modality, ITNetConfig().modality}
                elif module == find_heads.__module__:
                    encoder = find_modality(modality).encoder.split(":")[1]
                    assert f"import {encoder}\n\n    return {encoder}\n" in source
                else:
                    assert without_imports(source) == without_imports(original.source), file

    def test_does_nothing_dangerous(self, sources):
        forbidden_calls = {"eval", "exec", "compile", "__import__", "import_module", "system", "popen"}
        forbidden_modules = {"pickle", "requests", "urllib", "http", "socket", "subprocess", "ctypes", "marshal"}
        for file, source in (pair for files in sources.values() for pair in files.items()):
            for node in ast.walk(ast.parse(source)):
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                    assert node.func.id not in forbidden_calls, (file, node.lineno)
                if isinstance(node, (ast.Import, ast.ImportFrom)):
                    names = [alias.name for alias in node.names]
                    names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
                    assert not forbidden_modules & {name.split(".")[0] for name in names}, (file, node.lineno)
                if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                    assert (node.value.id, node.attr) not in {("torch", "load"), ("os", "system")}, file

    @pytest.mark.parametrize(
        "line, complaint",
        [
            ("import itnet_kernels", "not `import package`"),
            ("from itnet_kernels.exact import tiled", "not the module itself"),
            ("from . import heads", "not the module itself"),
        ],
    )
    def test_what_has_no_flat_form_is_an_error(self, monkeypatch, line, complaint):
        module = flatten.read_module("modeling_itnet.operator")
        changed = module._replace(source=line, tree=ast.parse(line))
        with pytest.raises(ValueError, match=complaint):
            flatten._flatten(changed)

    @pytest.mark.parametrize("name", [*flatten.MODE_MODULES, *flatten.CAUSAL_MODULES])
    def test_what_may_be_left_out_is_a_module(self, name):
        assert flatten.read_module(name).name == name

    def test_code_of_a_mode_goes_with_models_that_run_it(self, tmp_path, make_model):
        files = {}
        for mode in ("exact", "near_far", "low_rank", "monte_carlo"):
            make_model("image", integration_mode=mode).save_pretrained(tmp_path / mode, with_code=True)
            files[mode] = {path.stem for path in (tmp_path / mode).glob("*.py")}
        factors = {"modeling_itnet_integration_factors"}
        factors |= {name for name in files["low_rank"] if name.startswith("itnet_kernels_low_rank_")}
        names = ("matrix", "state", "vector", "fused", "step")
        assert factors >= {f"itnet_kernels_low_rank_{name}" for name in names}
        samples = {f"itnet_kernels_sampled_{name}" for name in ("anchors", "monte_carlo")}
        near = {f"itnet_kernels_near_{name}" for name in ("balls", "blocks", "windows")}
        near |= {"modeling_itnet_integration_near"}
        lists = {f"itnet_kernels_sampled_triton_{name}" for name in ("backward", "bias", "forward", "lists", "sums")}
        lists |= {"itnet_kernels_sampled_list_sum", "itnet_kernels_sampled"}
        assert files["low_rank"] - files["exact"] == factors | {"itnet_kernels_sampled"}
        assert files["near_far"] - files["exact"] == factors | near | lists
        assert files["monte_carlo"] - files["exact"] == samples | lists | {"modeling_itnet_integration_proposal"}
        assert files["exact"] <= files["near_far"] & files["monte_carlo"]
        assert not any("integral_transform" in file for file in files["low_rank"])
        make_model("graph", integration_mode="exact").save_pretrained(tmp_path / "graph", with_code=True)
        assert lists <= {path.stem for path in (tmp_path / "graph").glob("*.py")}  # for the sum over edges
        code = (tmp_path / "exact" / "modeling_itnet_operator.py").read_text(encoding="utf-8")
        names = {}
        exec(code[code.index("class ITNetFactors:") :].partition("\n\n")[0], names)
        with pytest.raises(ImportError, match="ITNetFactors is not in this folder, as its model does not use it"):
            names["ITNetFactors"]("config")

    def test_docstring_that_looks_like_an_import(self, tmp_path, monkeypatch):
        monkeypatch.setattr(flatten, "flat_sources", lambda *_: {"a.py": '"""Use it so:\n\nfrom .b import c\n"""\n'})
        with pytest.raises(ValueError, match=r"a.py: the loader takes \['b'\]"):
            flatten.write_flat_sources(tmp_path, ITNetConfig())

    def test_absolute_import_in_try_asks_for_the_installed_package(self, sources):
        assert "        from modeling_itnet.hub import export\n" in sources["image"]["modeling_itnet_pretrained.py"]
        assert "modeling_itnet_hub_export.py" not in sources["image"]


def without_imports(source, names=()):
    """The tree without in-house imports, what stands in for absent ones, line numbers, and what is assigned to
    ``names``."""
    tree = ast.parse(source)

    def is_import(node):
        is_absent = isinstance(node, ast.ClassDef) and "is not in this folder, as its model" in ast.unparse(node)
        return isinstance(node, ast.ImportFrom) or is_absent

    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list):
            kept = [child for child in body if not is_import(child)]
            node.body = [
                c for c in kept if not (isinstance(c, ast.Assign) and getattr(c.targets[0], "id", None) in names)
            ]
    return ast.dump(tree)


def names_only_what_is_there(folder):
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    references = [*config["auto_map"].values(), *(p["impl"] for p in config.get("custom_pipelines", {}).values())]
    return all((folder / f"{reference.split('.')[0]}.py").exists() for reference in references)


class TestSavingAgain:
    def test_a_model_that_came_with_code_is_saved_with_code(self, tmp_path, make_model):
        model = make_model("image-classification")
        model.save_pretrained(tmp_path / "plain")
        assert not list((tmp_path / "plain").glob("*.py"))
        model.save_pretrained(tmp_path / "code", with_code=True)
        again = type(model).from_pretrained(tmp_path / "code")
        again.save_pretrained(tmp_path / "again")
        files = {path.name for path in (tmp_path / "code").iterdir()}
        assert {path.name for path in (tmp_path / "again").iterdir()} == files
        again.save_pretrained(tmp_path / "without", with_code=False)
        assert not list((tmp_path / "without").glob("*.py"))
        assert "auto_map" not in json.loads((tmp_path / "without" / "config.json").read_text(encoding="utf-8"))

    def test_one_of_several_processes_writes(self, tmp_path, make_model):
        make_model("image").save_pretrained(tmp_path, False, with_code=True)
        assert not list(tmp_path.iterdir())

    def test_push_uploads_the_folder(self, tmp_path, make_model, processors, monkeypatch):
        """What would go to the Hub is what the export writes, with a card that names the repository."""
        sent = {}

        class Repo:
            repo_id = "someone/itnet-test"

        def upload(self, folder, repo_id, files_timestamps, **kwargs):
            sent.update(
                {
                    path.name: path.read_text(encoding="utf-8")
                    for path in Path(folder).iterdir()
                    if path.suffix != ".safetensors"
                }
            )
            sent["arguments"] = (repo_id, kwargs)
            return "commit"

        monkeypatch.setattr("modeling_itnet.hub.export.create_repo", lambda *args, **kwargs: Repo)
        monkeypatch.setattr("transformers.PreTrainedModel._upload_modified_files", upload)
        model = make_model("image-classification")
        result = model.push_to_hub(
            "itnet-test", processor=processors(model.config)[0], commit_message="First", tags="demo"
        )
        assert result == "commit"
        assert sent.pop("arguments") == ("someone/itnet-test", {"commit_message": "First"})
        assert {"config.json", "preprocessor_config.json", "modeling_itnet.py", "README.md"} <= sent.keys()
        assert 'from_pretrained("someone/itnet-test", trust_remote_code=True)' in sent["README.md"]
        assert "- demo" in sent["README.md"]
        assert "ITNetImageProcessor" in json.loads(sent["preprocessor_config.json"])["auto_map"]["AutoImageProcessor"]

    def test_push_while_saving_is_refused(self, tmp_path, make_model):
        with pytest.raises(ValueError, match=r"call `model\.push_to_hub"):
            make_model("image").save_pretrained(tmp_path, with_code=True, push_to_hub=True)
