"""Rules of the code: imports point down, modules do not import each other in circles, and functions stay short."""

import ast
from functools import cache
from pathlib import Path

import pytest

import vectorlm

PACKAGE = Path(vectorlm.__file__).parent
FLOORS = [
    {"errors"},
    {"types", "settings", "packages"},
    {"plugin"},
    {"ranks", "algorithms"},
    {"data"},
    {"sampling"},
    {"train", "transfer"},
    {"report"},
    {"rl"},
    {"runs"},
    {"cli"},
]
HEIGHT = {room: height for height, rooms in enumerate(FLOORS) for room in rooms}
ENTRANCES = ("__init__", "__main__")
MAX_FUNCTION_LINES = 80


def room_of(path):
    return path.relative_to(PACKAGE).with_suffix("").parts[0]


@cache
def sources():
    return sorted(path for path in PACKAGE.rglob("*.py"))


@cache
def tree_of(path):
    return ast.parse(path.read_text())


def module_of(path):
    parts = ("vectorlm", *path.relative_to(PACKAGE).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def modules():
    return {module_of(source) for source in sources()}


@cache
def imported_modules(path):
    """Return the modules of this package that a file imports anywhere, also in functions and for type checkers."""
    known, names = modules(), set()
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            # `from vectorlm.sampling import messages` names a module too.
            whole = {f"{node.module}.{alias.name}" for alias in node.names}
            names |= (whole & known) or {node.module}
    return sorted(name for name in names if name in known and "." in name)


def imports():
    for path in sources():
        if room_of(path) not in ENTRANCES:
            for name in imported_modules(path):
                if name.split(".")[1] != room_of(path):
                    yield path, name


def test_every_room_has_a_floor():
    assert {room_of(path) for path in sources()} - set(ENTRANCES) == set(HEIGHT)


def test_imports_point_down_or_stay_in_the_room():
    wrong = [
        f"{path.relative_to(PACKAGE)} imports {name}"
        for path, name in imports()
        if HEIGHT[name.split(".")[1]] >= HEIGHT[room_of(path)]
    ]
    assert wrong == []


def test_reading_a_config_imports_settings_alone():
    """Exceptions are a user's algorithm or optimizer, which defines settings, and the options of adapters."""
    wrong = [
        f"{path.relative_to(PACKAGE)} imports {name}"
        for path, name in imports()
        if path.parent.name == "config"
        and not name.endswith((".settings", ".errors", ".registry", ".optimizers", ".lora_factors"))
    ]
    assert wrong == []


def test_no_module_imports_itself_through_others():
    graph = {
        module_of(path): set(imported_modules(path)) for path in sources() if room_of(path) not in ENTRANCES
    }
    circles = []

    def visit(module, trail):
        if module in trail:
            circles.append(" -> ".join([*trail[trail.index(module) :], module]))
        elif module not in done:
            for name in sorted(graph.get(module, ())):
                visit(name, [*trail, module])
            done.add(module)

    done = set()
    for module in sorted(graph):
        visit(module, [])
    assert circles == []


@pytest.mark.parametrize(
    ("package", "homes"),
    [
        # engine.py needs vLLM only for an annotation.
        ("vllm", ("sampling/backends/", "sampling/weights/lora_receive.py", "sampling/engine.py")),
        ("wandb", ("report/metrics.py",)),
        ("lm_eval", ("rl/evaluation/harness.py", "rl/rewards/shape.py")),
    ],
)
def test_heavy_packages_are_imported_where_they_belong(package, homes):
    users = set()
    for path in (path for path in sources() if package in path.read_text()):
        for node in ast.walk(tree_of(path)):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else []
            if any(name.split(".")[0] == package for name in names):
                users.add(str(path.relative_to(PACKAGE)))
    assert users
    assert [user for user in sorted(users) if not user.startswith(homes)] == []


def test_functions_stay_short():
    assert [
        f"{path.relative_to(PACKAGE)}: {node.name} has {node.end_lineno - node.lineno + 1} lines"
        for path in sources()
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.FunctionDef) and node.end_lineno - node.lineno + 1 > MAX_FUNCTION_LINES
    ] == []


def test_every_test_file_is_collected(pytestconfig):
    """Pytest ignores folders with certain names, for example `dist` and `build`."""
    tests, ignores = Path(__file__).parent, pytestconfig.hook.pytest_ignore_collect
    paths = {
        path for file in tests.rglob("test_*.py") for path in (file, *file.parents) if tests in path.parents
    }
    assert [path for path in paths if ignores(collection_path=path, config=pytestconfig)] == []
