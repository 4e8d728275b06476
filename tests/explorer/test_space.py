"""The Gradio app: it starts without a display and shows the page of an image, a text or a cloud."""

import html
import importlib.util
import re
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

pytest.importorskip("gradio", reason="no Gradio: pip install 'itnet[space]'")

from gradio_client import Client, handle_file

SPACE = Path(__file__).resolve().parents[2] / "examples" / "space"


@pytest.fixture(scope="module")
def client():
    """A client of the running app."""
    spec = importlib.util.spec_from_file_location("space_app", SPACE / "app.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    app = module.build(
        module.CHECKPOINTS / "itnet-tiny-fashion-mnist", None, module.CHECKPOINTS / "itnet-tiny-modelnet10"
    )
    _, url, _ = app.launch(prevent_thread_lock=True, quiet=True, server_name="127.0.0.1")
    yield Client(url, verbose=False)
    app.close()


def page_of(frame: str) -> str:
    """The page inside of the frame that the app shows."""
    return html.unescape(re.search('srcdoc="(.*?)" title', frame, re.S).group(1))


def test_every_modality(client, tmp_path):
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (40, 30, 3), dtype=np.uint8)).save(tmp_path / "x.png")
    np.save(tmp_path / "cloud.npy", np.random.default_rng(0).normal(size=(3000, 3)))
    answers = {
        "/image": (handle_file(tmp_path / "x.png"), "itnet-tiny-fashion-mnist", '"count":17,'),
        "/text": ("Hello, kernel", "itnet-tiny-text-untrained", '"labels":["'),
        "/cloud": (handle_file(tmp_path / "cloud.npy"), "itnet-tiny-modelnet10", '"kind":"points"'),
    }
    for name, (given, title, part) in answers.items():
        page = page_of(client.predict(given, api_name=name))
        assert f"<title>{title} · kernel explorer</title>" in page and part in page
        assert len(page.encode()) < 5_000_000


def test_metadata():
    """What the Hub reads: a Gradio app of the tested version."""
    text = (SPACE / "README.md").read_text(encoding="utf-8")
    constraints = (SPACE.parents[1] / "constraints.txt").read_text(encoding="utf-8")
    version = re.search(r"sdk_version: (\S+)", text).group(1)
    assert "sdk: gradio\n" in text and f"\ngradio=={version}\n" in constraints and "app_file: app.py\n" in text
