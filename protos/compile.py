"""Regenerates the committed stubs of the public API: `python -m protos.compile`.

Compiled from the repository root, so that stubs import each other as `protos.paceline.v1.*`.
"""

from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def compile_protos(out: Path) -> None:
    """Write the stubs of every public .proto under `out`. Raises RuntimeError if protoc fails."""
    from grpc_tools import protoc  # a development dependency, needed by nothing else

    sources = sorted((ROOT / "protos" / "paceline").rglob("*.proto"))
    plugins = [f"--{plugin}_out={out}" for plugin in ("python", "pyi", "grpc_python")]
    status = protoc.main(["protoc", f"-I{ROOT}", *plugins, *map(str, sources)])
    if status != 0:
        raise RuntimeError(f"protoc failed with status {status}; its messages are above")


if __name__ == "__main__":
    compile_protos(ROOT)
