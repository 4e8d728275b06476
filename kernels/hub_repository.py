"""Writes itnet_kernels as a kernel repository for the Hugging Face Hub: ``python kernels/hub_repository.py FOLDER``.

The layout is that of a kernel without compiled parts, which ``kernels.get_kernel`` and ``get_local_kernel`` load:

    build.toml                  for kernel-builder
    torch-ext/itnet_kernels/    the sources
    build/torch-universal/      the same, with metadata.json: what is loaded, on every device
"""

import argparse
import hashlib
import json
import shutil
from pathlib import Path

NAME = "itnet-kernels"
VERSION = 1  # of the interface: users ask the Hub for a major version
LICENSE = "apache-2.0"
BACKENDS = ["cpu", "cuda", "rocm", "xpu"]

_BUILD_TOML = """[general]
name = "{name}"
version = {version}
edition = 5
license = "{license}"
backends = [{backends}]

[torch-noarch]
"""


def write_kernel_repository(folder: Path) -> Path:
    """Writes the repository and returns its path. Existing sources in it are replaced."""
    package = Path(__file__).parent / "itnet_kernels"
    sources = [path.relative_to(package) for path in sorted(package.rglob("*.py"))]
    digest = hashlib.sha256(
        b"".join(path.as_posix().encode() + (package / path).read_bytes() for path in sources)
    ).hexdigest()
    for target in (folder / "torch-ext" / package.name, folder / "build" / "torch-universal"):
        shutil.rmtree(target, ignore_errors=True)
        target.mkdir(parents=True)
        for path in sources:
            (target / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(package / path, target / path)
    metadata = {
        "name": NAME,
        "id": f"_{package.name}_{digest[:12]}",
        "version": VERSION,
        "license": LICENSE,
        "python-depends": [],
        "backend": {"type": "cuda"},
    }
    (folder / "build" / "torch-universal" / "metadata.json").write_text(
        json.dumps(metadata, indent=2) + "\n", encoding="utf-8"
    )
    backends = ", ".join(f'"{backend}"' for backend in BACKENDS)
    build = _BUILD_TOML.format(name=NAME, version=VERSION, license=LICENSE, backends=backends)
    (folder / "build.toml").write_text(build, encoding="utf-8")
    shutil.copy(package / "README.md", folder / "README.md")
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    print(write_kernel_repository(parser.parse_args().folder))


if __name__ == "__main__":
    main()
