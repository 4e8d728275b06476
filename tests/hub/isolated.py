"""Run by test_remote_code.py in a fresh interpreter: loads exported folders where our packages cannot be imported.

Standard input is JSON: for every folder, the Auto class and the files with inputs and expected outputs. Nothing but
torch, transformers and what they need may be imported, and nothing may open a connection.
"""

import json
import socket
import sys

BLOCKED = ("configuration_itnet", "itnet_kernels", "modeling_itnet", "triton", "scipy", "sklearn", "matplotlib")


class Without:
    """A finder that does not find what is blocked."""

    def __init__(self, finder):
        self.finder = finder

    def find_spec(self, name, path=None, target=None):
        return None if name.split(".")[0] in BLOCKED else self.finder.find_spec(name, path, target)

    def __getattr__(self, name):
        return getattr(self.finder, name)


def refuse(*args, **kwargs):
    raise AssertionError("exported code opened a connection")


sys.meta_path[:] = [Without(finder) for finder in sys.meta_path]
socket.socket.connect = socket.create_connection = refuse

import torch  # noqa: E402
import transformers  # noqa: E402
from safetensors.torch import load_file  # noqa: E402

torch.set_num_threads(1)


def same(actual, expected):
    """Up to rounding: the process that saved it may use other threads, and other places in memory."""
    return actual.shape == expected.shape and torch.allclose(actual, expected, rtol=1e-4, atol=1e-5)


report, loaded_models = {}, {}
cases = json.load(sys.stdin)
for name, case in cases.items():
    auto_class = getattr(transformers, case["auto_class"])
    model = auto_class.from_pretrained(case["folder"], trust_remote_code=True).eval()
    with torch.no_grad():
        output = model(**load_file(case["inputs"]))
    expected = load_file(case["outputs"])
    loaded_models[name] = model
    report[name] = {
        "module": type(model).__module__,
        "equal": {key: same(output[key], value) for key, value in expected.items()},
    }
    if case.get("resave"):
        model.save_pretrained(case["resave"])
        again = auto_class.from_pretrained(case["resave"], trust_remote_code=True).eval()
        with torch.no_grad():
            output = again(**load_file(case["inputs"]))
        report[name]["equal again"] = {key: same(output[key], value) for key, value in expected.items()}
    for processor_class in case.get("processors", []):
        loaded = getattr(transformers, processor_class).from_pretrained(case["folder"], trust_remote_code=True)
        report[name].setdefault("processors", {})[processor_class] = type(loaded).__name__
    if "prompt" in case:
        prompt = torch.tensor(case["prompt"])
        generated = model.generate(prompt, attention_mask=torch.ones_like(prompt), **case["generation"])
        report[name]["generated"] = generated.tolist()
    if "pipeline" in case:
        pipe = transformers.pipeline(case["pipeline"], case["folder"], trust_remote_code=True)
        report[name]["answers"] = pipe(case["image"], case["question"])
# All folders brought their own copy of the code, and operators of their own: the last must not replace the first's.
for name, case in cases.items():
    with torch.no_grad():
        output = loaded_models[name](**load_file(case["inputs"]))
    expected = load_file(case["outputs"])
    report[name]["equal at the end"] = all(same(output[key], value) for key, value in expected.items())
report["blocked"] = [name for name in BLOCKED if name in sys.modules]
print(json.dumps(report))
