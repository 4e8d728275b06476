"""The documentation builds from a copy of the repository without a warning; every public name and link is there."""

import html.parser
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from urllib.parse import unquote, urlparse

import pytest

import configuration_itnet
import itnet_kernels
import modeling_itnet

from .extract import ROOT


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    """The built pages. The build runs all guides, in a copy, as it writes beside the sources."""
    clone = tmp_path_factory.mktemp("site") / "clone"
    unwanted = shutil.ignore_patterns(".*", "__pycache__", "*.egg-info", "build", "dist", "outputs", "generated")
    shutil.copytree(ROOT, clone, ignore=lambda folder, names: {*unwanted(folder, names), *tests_and_data(folder)})
    target = clone.parent / "html"
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "docs", str(target)]
    paths = os.pathsep.join(str(clone / name) for name in (".", "configuration", "kernels"))
    environment = {**os.environ, "PYTHONPATH": paths, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=clone, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-6000:]}"
    return target


def tests_and_data(folder: str) -> list[str]:
    return ["tests", "data"] if Path(folder) == ROOT else []


class _Page(html.parser.HTMLParser):
    """Anchors of a page, and where it links to or what it loads."""

    def __init__(self, path: Path):
        super().__init__()
        self.anchors, self.targets = set(), []
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attributes):
        values = dict(attributes)
        self.anchors |= {values[name] for name in ("id", "name") if values.get(name)}
        self.targets += [values[name] for name in ("href", "src") if values.get(name)]


@pytest.mark.slow
def test_no_link_is_dead(site):
    pages = {path: _Page(path) for path in site.rglob("*.html") if "_static" not in path.parts}
    assert len(pages) > 100
    dead = []
    for path, page in pages.items():
        for target in page.targets:
            url = urlparse(target)
            if url.scheme or url.netloc:
                continue
            file = (path.parent / unquote(url.path)).resolve() if url.path else path
            anchor = unquote(url.fragment)
            if not file.exists() or (anchor and file in pages and anchor not in pages[file].anchors):
                dead.append(f"{path.relative_to(site)} -> {target}")
    assert dead == []


@pytest.mark.slow
def test_pages_load_nothing_from_elsewhere(site):
    """The site can be read from disk: no script, style, font or picture comes from another host."""
    loaded = re.compile(r'<(?:script|img|iframe)[^>]+src="https?:|<link[^>]+rel="stylesheet"[^>]+href="https?:')
    pages = [path for path in site.rglob("*.html") if loaded.search(path.read_text(encoding="utf-8"))]
    assert pages == []


@pytest.mark.slow
def test_every_public_name_has_a_page(site):
    documented = {path.stem.rpartition(".")[2] for path in (site / "generated" / "api").glob("*.html")}
    for package in (configuration_itnet, itnet_kernels, modeling_itnet):
        missing = {name for name in package.__all__ if not name.startswith("__")} - documented
        assert not missing, f"add to docs/api/: {sorted(missing)} of {package.__name__}"


@pytest.mark.slow
def test_every_guide_was_run(site):
    """A page of each script, with what it printed."""
    scripts = sorted(path.stem for path in (ROOT / "docs" / "guides").glob("*.py"))
    assert len(scripts) >= 12
    for name in scripts:
        page = (site / "generated" / "guides" / f"{name}.html").read_text(encoding="utf-8")
        assert "sphx-glr-script-out" in page and "Total running time" in page, name
