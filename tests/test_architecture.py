"""Who may import whom, and what must stay light: the layout as a test."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("protos", "orchestrator", "services", "target_workers", "drafter_workers")
ALLOWED = {
    "protos": set(),
    "orchestrator": {"protos"},
    "services": {"orchestrator", "protos"},
    "target_workers": {"protos"},
    "drafter_workers": {"target_workers.model", "protos"},
    "target_workers.model": {"protos.sampling", "protos.pieces", "protos.grammar"},
}
# Where all packages come together: serving, and making drafters.
COMPOSITION_ROOTS = {
    "services/launch.py",
    "services/shapes.py",
    "services/capturing.py",
    "services/distilling.py",
    "services/train_cli.py",
    "services/training_report.py",
}
TORCH_FREE = ("protos", "orchestrator", "services")


def sources(package: str) -> list[Path]:
    return [p for p in (ROOT / package).rglob("*.py") if "_pb2" not in p.name]


def imports(path: Path) -> set[str]:
    """Every module a file imports, wherever in it."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def owner(path: Path) -> str:
    name = path.relative_to(ROOT).as_posix()
    return (
        "target_workers.model" if name.startswith("target_workers/model/") else name.split("/")[0]
    )


def violations(path: Path, allowed: set[str], own: str) -> list[str]:
    ours = {m for m in imports(path) if m.split(".")[0] in PACKAGES}
    permitted = {*allowed, own}
    return sorted(
        m
        for m in ours
        if not any(m == p or m.startswith(p + ".") or p.startswith(m + ".") for p in permitted)
    )


@pytest.mark.parametrize("package", PACKAGES)
def test_packages_import_only_what_they_may(package: str) -> None:
    for path in sources(package):
        if path.relative_to(ROOT).as_posix() in COMPOSITION_ROOTS:
            continue
        own = owner(path)
        wrong = violations(path, ALLOWED[own], own)
        assert not wrong, f"{path.relative_to(ROOT)} imports {wrong}"


def test_a_forbidden_import_would_be_seen(tmp_path: Path) -> None:
    file = tmp_path / "x.py"
    file.write_text("def f():\n    from orchestrator.core import Core\n")
    assert violations(file, ALLOWED["drafter_workers"], "drafter_workers")
    file.write_text("from target_workers.engine import TargetEngine\n")
    assert violations(file, ALLOWED["drafter_workers"], "drafter_workers")


@pytest.mark.parametrize("package", TORCH_FREE)
def test_only_workers_import_torch(package: str) -> None:
    for path in sources(package):
        heavy = {m.split(".")[0] for m in imports(path)} & {"torch", "transformers"}
        assert not heavy, f"{path.relative_to(ROOT)} imports {heavy}"


@pytest.mark.parametrize("path", sorted((ROOT / "orchestrator").glob("*.py")))
def test_the_core_knows_no_clock_no_chance_and_no_network(path: Path) -> None:
    ports = {"ports.py", "stream_port.py", "local_port.py", "sharded_port.py"}
    shell = {"runtime.py", "mailbox.py", *ports}
    if path.name in shell:
        return
    impure = {"asyncio", "time", "random", "grpc", "os", "threading", "socket", "datetime"}
    assert not {m.split(".")[0] for m in imports(path)} & impure


LIGHT = "import sys; import {module}; print(*sorted(m for m in {heavy} if m in sys.modules))"


@pytest.mark.parametrize(
    ("module", "heavy"),
    [
        ("orchestrator.runtime", ("torch", "ray", "grpc", "numpy")),
        ("services.client", ("torch", "ray", "numpy", "tokenizers", "msgpack")),
        ("services.cli", ("torch", "ray", "numpy", "tokenizers", "msgpack")),
        ("services.server", ("torch", "ray")),
    ],
)
def test_importing_a_module_pulls_in_nothing_heavy(module: str, heavy: tuple[str, ...]) -> None:
    code = LIGHT.format(module=module, heavy=heavy)
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == ""


def test_no_top_level_package_is_added() -> None:
    known = {*PACKAGES, "tests", "k8s"}
    found = {p.name for p in ROOT.iterdir() if p.is_dir() and not p.name.startswith(".")}
    tracked = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split()
    folders = {name.split("/")[0] for name in tracked if "/" in name} & found
    assert folders <= known
