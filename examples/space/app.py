"""The kernel explorer for your own image, text or cloud: a Gradio app, here or as a Space of the Hub.

python examples/space/app.py
python examples/space/app.py --image my-image-model --text my-text-model --cloud my-cloud-model

Each input goes through a checkpoint of its modality, and the page that `itnet explore` writes is shown below it. There
is no trained text model in this repository: without `--text`, texts go through a new one with random weights.
"""

import argparse
import html
import tempfile
from functools import cache
from pathlib import Path

import gradio as gr
from PIL import Image

from modeling_itnet.analysis.explorer import explore_kernels
from modeling_itnet.cli.inputs import load_model, process, read_clouds, read_processors
from modeling_itnet.hub import create_checkpoint

HERE = Path(__file__).resolve().parent
CHECKPOINTS = next(folder for folder in (HERE / "checkpoints", HERE.parent / "checkpoints") if folder.is_dir())
# Points of a cloud that a page shows.
MOST_POINTS = 1024


@cache
def opened(folder: Path):
    """Returns the model of a checkpoint and its first processor."""
    processors = read_processors(folder)
    if not processors:
        raise ValueError(f"{folder} has no processor or tokenizer")
    return load_model(folder), processors[0]


@cache
def untrained_text_model() -> Path:
    """Makes a folder with a small text model that was never trained."""
    folder = Path(tempfile.mkdtemp()) / "itnet-tiny-text-untrained"
    create_checkpoint("itnet-tiny", folder, task="masked-lm", integration_mode="exact", kernel_init_scale=1.0)
    return folder


def explore(folder: Path, item) -> str:
    """Returns the page of one input, in a frame."""
    model, processor = opened(folder)
    batch = process(processor, model.config, [item])
    tokenizer = processor if hasattr(processor, "convert_ids_to_tokens") else None
    page = explore_kernels(model, batch, tokenizer=tokenizer, title=folder.name)
    return (
        f'<iframe srcdoc="{html.escape(page)}" title="Kernel explorer" sandbox="allow-scripts" '
        'style="width: 100%; height: 85vh; border: 0"></iframe>'
    )


def build(image: Path, text: Path | None, cloud: Path) -> gr.Blocks:
    """Builds the app, with a tab for each modality."""

    def show_image(picture: Image.Image | None) -> str:
        if picture is None:
            raise gr.Error("Give an image first.")
        channels = opened(image)[0].config.num_channels
        return explore(image, picture.convert("RGB" if channels == 3 else "L"))

    def show_text(words: str) -> str:
        if not words.strip():
            raise gr.Error("Write a text first.")
        return explore(text or untrained_text_model(), words)

    def show_cloud(file: str | None) -> str:
        if file is None:
            raise gr.Error("Give a file first.")
        points = read_clouds(Path(file))[0]
        return explore(cloud, points[:: max(1, -(-len(points) // MOST_POINTS))])

    with gr.Blocks(title="ITNet kernel explorer", analytics_enabled=False) as app:
        gr.Markdown("# ITNet kernel explorer\nMove the query and see what a learned κ(x, y, u(x), u(y)) does.")
        with gr.Tab("Image"):
            given = gr.Image(type="pil", label="Image")
            button, page = gr.Button("Explore", variant="primary"), gr.HTML()
            button.click(show_image, given, page, api_name="image")
        with gr.Tab("Text"):
            given = gr.Textbox(label="Text", value="The kernel sees where two words stand and what they are.")
            if text is None:
                gr.Markdown("The model of this tab was never trained: its weights are random.")
            button, page = gr.Button("Explore", variant="primary"), gr.HTML()
            button.click(show_text, given, page, api_name="text")
        with gr.Tab("Point cloud"):
            given = gr.File(label="Cloud (.npy, .xyz, .csv, .off, .ply)", type="filepath")
            button, page = gr.Button("Explore", variant="primary"), gr.HTML()
            button.click(show_cloud, given, page, api_name="cloud")
    return app


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--image", type=Path, default=CHECKPOINTS / "itnet-tiny-fashion-mnist")
    parser.add_argument("--text", type=Path, help="default: a new model with random weights")
    parser.add_argument("--cloud", type=Path, default=CHECKPOINTS / "itnet-tiny-modelnet10")
    parser.add_argument("--port", type=int, help="default: the first free one from 7860")
    arguments = parser.parse_args()
    build(arguments.image, arguments.text, arguments.cloud).launch(server_port=arguments.port)


if __name__ == "__main__":
    main()
