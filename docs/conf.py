"""The documentation site. `make docs` builds it into outputs/docs/html; every warning is an error."""

import os
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE / "_ext")]
os.environ["TQDM_DISABLE"] = "1"  # no progress bars in what guides print

from modeling_itnet import __version__  # noqa: E402

project = "ITNet"
author = "The ITNet Authors"
copyright = author
version = release = __version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "sphinx_gallery.gen_gallery",
    "docstrings",
    "explorer_page",
    "repository_links",
]
exclude_patterns = ["results", "kernels_learned_notes.md", "guides", "generated/guides/*.ipynb"]
templates_path = ["_templates"]
myst_heading_anchors = 4  # as on GitHub
default_role = "code"

autosummary_generate = True
autodoc_inherit_docstrings = False  # what Transformers says of its own methods is in its own documentation
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
maximum_signature_line_length = 88
napoleon_use_rtype = False

# Guides run one after the other in this process, in their folder; one that fails fails the build.
sphinx_gallery_conf = {
    "examples_dirs": "guides",
    "gallery_dirs": "generated/guides",
    "filename_pattern": r"\.py$",
    "within_subsection_order": "guides.place",
    "download_all_examples": False,
    "write_computation_times": False,
    "show_signature": False,
    "min_reported_time": 0,
    "capture_repr": (),
    "plot_gallery": True,
    "default_thumb_file": str(HERE / "_static" / "integral.png"),
}

html_theme = "furo"
html_title = f"ITNet {version}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_favicon = "_static/integral.png"
html_show_sphinx = False
html_show_copyright = False
