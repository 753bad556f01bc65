from pathlib import Path

TESTS = Path(__file__).parent


def test_every_test_file_is_collected(pytestconfig):
    """Pytest leaves out folders with names of its own, such as `dist` and `build`."""
    paths = [
        path for file in TESTS.rglob("test_*.py") for path in (file, *file.parents) if TESTS in path.parents
    ]
    is_ignored = pytestconfig.hook.pytest_ignore_collect
    assert [path for path in paths if is_ignored(collection_path=path, config=pytestconfig)] == []
