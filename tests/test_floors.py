"""Imports point one way: a room may use the rooms below it, never one beside or above it."""

import ast
from pathlib import Path

import vectorlm

PACKAGE = Path(vectorlm.__file__).parent
FLOORS = [
    {"errors", "types"},
    {"plugin", "receiver", "contracts"},
    {"ranks", "config", "algorithms", "rewards", "data", "telemetry"},
    {"weights", "offload", "memory", "rollout"},
    {"sampling", "model", "checkpoint", "handover"},
    {"trainer", "exam", "testing", "rl"},
    {"build"},
    {"finetune", "reinforce", "ask", "serve"},
    {"cli"},
]
HEIGHT = {room: height for height, rooms in enumerate(FLOORS) for room in rooms}
ENTRANCES = {"__init__", "__main__"}
VLLM_AT_HOME = {
    "sampling/vllm_shim.py",
    "sampling/process.py",
    "sampling/request_outputs.py",
    "sampling/warm_up.py",
    "weights/adapter_receive.py",
    "weights/experts.py",
    "weights/pack.py",
}


def room_of(path):
    return path.relative_to(PACKAGE).with_suffix("").parts[0]


def imported_modules(path):
    """List what a file imports at run time, as dotted names; imports for type checkers do not count."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            node.body = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            # `from vectorlm.sampling import messages` names a module too.
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def sources():
    return [path for path in PACKAGE.rglob("*.py") if room_of(path) not in ENTRANCES]


def test_every_room_has_a_floor():
    assert {room_of(path) for path in sources()} == set(HEIGHT)


def test_imports_point_down_or_stay_in_the_room():
    wrong = []
    for path in sources():
        for name in imported_modules(path):
            parts = name.split(".")
            if (
                parts[0] != "vectorlm"
                or len(parts) < 2
                or parts[1] not in HEIGHT
                or parts[1] == room_of(path)
            ):
                continue
            if HEIGHT[parts[1]] >= HEIGHT[room_of(path)]:
                wrong.append(f"{path.relative_to(PACKAGE)} imports {name}")
    assert wrong == []


def test_vllm_and_wandb_are_imported_where_they_belong():
    users = {
        (name.split(".")[0], str(path.relative_to(PACKAGE)))
        for path in sources()
        for name in imported_modules(path)
        if name.split(".")[0] in ("vllm", "wandb")
    }
    assert {file for package, file in users if package == "vllm"} <= VLLM_AT_HOME
    assert {file for package, file in users if package == "wandb"} == {"telemetry/metrics.py"}
