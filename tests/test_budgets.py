"""What the package may cost its readers: its size, the density of its expressions, names without content, and doors.

The core is what people import: neither the experiments nor the command line nor the estimators. Make room instead of
raising a number.
"""

from __future__ import annotations

import ast
from pathlib import Path

import bprong

ROOT = Path(bprong.__file__).parent
NODES = 42_000
NODES_A_STATEMENT = 7.4
LARGEST_CLASS = 160  # statements
EMPTY_NAMES = 0.01  # of all assignments
EMPTY = {
    "found", "own", "given", "known", "left", "kept", "moved", "seen", "several", "together", "mine", "alike", "usual",
    "noted", "most", "least",
}  # fmt: skip
UNCOUNTED = (ast.expr_context, ast.operator, ast.cmpop, ast.unaryop, ast.boolop)
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def core() -> dict[str, ast.Module]:
    """The parsed modules of the core, without annotations and docstrings."""
    modules = {}
    for path in sorted(ROOT.rglob("*.py")):
        name = path.relative_to(ROOT).as_posix()
        if not name.startswith(("experiments/", "sklearn/", "cli.py")):
            modules[name] = stripped(ast.parse(path.read_text()))
    return modules


def stripped(tree: ast.Module) -> ast.Module:
    for node in ast.walk(tree):
        if isinstance(node, FUNCTIONS):
            node.returns = None
            for argument in ast.walk(node.args):
                if isinstance(argument, ast.arg):
                    argument.annotation = None
        if isinstance(node, ast.AnnAssign):
            node.annotation = ast.Constant(0)
        documented = isinstance(node, (*FUNCTIONS, ast.ClassDef, ast.Module))
        if documented and ast.get_docstring(node, clean=False) is not None:
            node.body = node.body[1:] or [ast.Pass()]
    return tree


def statements(tree: ast.AST) -> int:
    return sum(isinstance(node, ast.stmt) for node in ast.walk(tree))


def nodes(tree: ast.AST) -> int:
    return sum(not isinstance(node, UNCOUNTED) for node in ast.walk(tree))


def assigned_names(tree: ast.AST) -> list[str]:
    names = []
    for node in ast.walk(tree):
        if isinstance(node, (ast.Assign, ast.AnnAssign, ast.AugAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for target in targets:
                stored = [name for name in ast.walk(target) if isinstance(name, ast.Name)]
                names += [name.id for name in stored if isinstance(name.ctx, ast.Store)]
    return names


def test_the_size_of_the_core():
    assert sum(map(nodes, core().values())) <= NODES


def test_the_density_of_the_core():
    modules = core().values()
    assert sum(map(nodes, modules)) <= NODES_A_STATEMENT * sum(map(statements, modules))


def test_the_largest_class():
    classes = {}
    for tree in core().values():
        classes |= {node.name: statements(node) for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}
    assert max(classes.values()) <= LARGEST_CLASS, classes


def test_names_say_what_things_are():
    names = [name for tree in core().values() for name in assigned_names(tree)]
    empty = [name for name in names if name in EMPTY]
    assert len(empty) <= EMPTY_NAMES * len(names), empty


def test_a_function_is_measured_as_it_should_be():
    tree = stripped(ast.parse("def f(x: int) -> int:\n    'Doubles.'\n    found: int = 2 * x\n    return found\n"))
    assert statements(tree) == 3
    assert assigned_names(tree) == ["found"]
    assert nodes(tree) == nodes(stripped(ast.parse("def f(x):\n    found: 0 = 2 * x\n    return found\n")))


# Doors ----------------------------------------------------------------------------------------------------------------


def attributes(tree: ast.AST) -> set[str]:
    """Dotted names that a module uses, such as torch._C."""
    return {ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}


def imported(tree: ast.AST) -> set[str]:
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            names.add(node.module)
    return names


def test_one_folder_talks_to_other_processes():
    users = set()
    for name, tree in core().items():
        if any(module.startswith("torch.distributed") for module in imported(tree)):
            users.add(name.partition("/")[0])
    assert users == {"parallel"}


def test_hooks_and_private_functions_of_torch_are_used_in_one_folder():
    doors = (
        "torch._C",
        "register_forward_hook",
        "register_forward_pre_hook",
        "register_hook",
        "register_full_backward",
    )
    users = set()
    for name, tree in core().items():
        if any(door in attribute for attribute in attributes(tree) for door in doors):
            users.add(name.partition("/")[0])
    assert users == {"capture"}


def test_low_precision_is_raised_in_one_way():
    users = [name for name, tree in core().items() if "torch.promote_types" in attributes(tree)]
    assert users == ["linalg/moments.py"], "at_least_float32"
