"""The style guide that runs: files and functions that fit in a head."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("protos", "orchestrator", "services", "target_workers", "drafter_workers")
FILE_LINES = 300
FUNCTION_LINES = 50
PARAMETERS = 5
TENSOR_PARAMETERS = 7  # a function over tensors has no dataclass to hide them in
KERNEL_PARAMETERS = 9  # what a compiled kernel reads and writes, piece by piece
NESTING = 3
COLUMNS = 100

KERNELS = "target_workers/model/native/"
LLVM = "target_workers/model/native/tile.py"  # calls that LLVM's builder sees, not people

# Command-line commands take one parameter per option: typer reads the signature.
COMMANDS = {"services/cli.py", "services/train_cli.py"}

SOURCES = sorted(
    p for package in PACKAGES for p in (ROOT / package).rglob("*.py") if "_pb2" not in p.name
)
Function = ast.FunctionDef | ast.AsyncFunctionDef


def functions(tree: ast.AST) -> Iterator[Function]:
    return (n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef))


def parameters(function: Function) -> list[ast.arg]:
    args = function.args
    every = [*args.posonlyargs, *args.args, *args.kwonlyargs]
    return [arg for arg in every if arg.arg not in ("self", "cls")]


def depth(node: ast.AST) -> int:
    """How deep loops, conditions, try and with nest below a function."""
    blocks = (ast.If, ast.For, ast.While, ast.With, ast.AsyncWith, ast.AsyncFor, ast.Try)
    below = [depth(child) for child in ast.iter_child_nodes(node) if not _is_elif(node, child)]
    elifs = [depth(child) - 1 for child in ast.iter_child_nodes(node) if _is_elif(node, child)]
    return max([*below, *elifs], default=0) + isinstance(node, blocks)


def _is_elif(node: ast.AST, child: ast.AST) -> bool:
    return isinstance(node, ast.If) and isinstance(child, ast.If) and node.orelse == [child]


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: p.relative_to(ROOT).as_posix())
def test_files_and_functions_keep_within_their_budgets(path: Path) -> None:
    text = path.read_text()
    tree = ast.parse(text)
    lines = text.splitlines()
    assert len(lines) <= FILE_LINES, f"{len(lines)} lines"
    assert max(map(len, lines), default=0) <= COLUMNS
    assert not lines or ast.get_docstring(tree), "a module says what it is"
    for function in functions(tree):
        _check(function, path)


def _check(function: Function, path: Path) -> None:
    length = (function.end_lineno or 0) - function.lineno + 1
    assert length <= FUNCTION_LINES, f"{function.name}: {length} lines"
    found = depth(function)
    assert found <= NESTING, f"{function.name}: nesting {found}"
    name = path.relative_to(ROOT).as_posix()
    if name in (*COMMANDS, LLVM):
        return
    count = len(parameters(function))
    tensors = any(
        a.annotation and ast.unparse(a.annotation) == "Tensor" for a in parameters(function)
    )
    most = TENSOR_PARAMETERS if tensors else PARAMETERS
    if name.startswith(KERNELS) and function.decorator_list:
        most = KERNEL_PARAMETERS
    assert count <= most, f"{function.name}: {count} parameters"
    for arg in parameters(function):
        assert arg.annotation is not None, f"{function.name}: {arg.arg} has no type"
