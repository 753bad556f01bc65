"""Puts this folder on the import path, so that tests can share modules; adds the options of the whole suite."""


def pytest_addoption(parser):
    parser.addoption(
        "--record-families",
        action="store_true",
        help="write what the family tests showed to docs/families.json",
    )
