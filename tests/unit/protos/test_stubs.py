"""The committed stubs are what the committed .proto files compile to."""

import shutil
import subprocess
import sysconfig
from pathlib import Path

import pytest

from protos.compile import ROOT, compile_protos

STUBS = ("_pb2.py", "_pb2.pyi", "_pb2_grpc.py")


def stubs_under(root: Path) -> dict[str, str]:
    files = (root / "protos" / "paceline").rglob("*_pb2*.py*")
    return {str(f.relative_to(root)): f.read_text() for f in files if f.name.endswith(STUBS)}


def test_committed_stubs_are_up_to_date(tmp_path: Path) -> None:
    pytest.importorskip("grpc_tools", reason="grpcio-tools is needed to compile")
    compile_protos(tmp_path)
    fresh = stubs_under(tmp_path)
    assert len(fresh) >= len(STUBS)
    assert stubs_under(ROOT) == fresh, "run `python -m protos.compile`"


def test_the_protos_are_clean() -> None:
    buf = shutil.which("buf") or shutil.which("buf", path=sysconfig.get_path("scripts"))
    if buf is None:
        pytest.skip("buf is not installed; it comes with the dev dependencies")
    for arguments in (["lint"], ["format", "-d", "--exit-code"]):
        done = subprocess.run([buf, *arguments], cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
