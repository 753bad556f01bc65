"""``pytest -p vectorlm.cli.pytest_plugin --vectorlm CONFIG``: run the checks of `vectorlm.cli.project_checks` as tests.

There is no entry point, because pytest would then rewrite the assertions of the whole package.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option ``--vectorlm``."""
    parser.getgroup("vectorlm").addoption(
        "--vectorlm",
        action="append",
        default=[],
        metavar="CONFIG",
        help="check a config for reinforcement learning, its rewards and its environment, on a tiny model",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Make pytest collect the configs like test files."""
    config.args += config.getoption("--vectorlm")


def pytest_collect_file(file_path: Path, parent: pytest.Collector) -> pytest.Collector | None:
    """Collect a config that ``--vectorlm`` names."""
    named = [Path(name).resolve() for name in parent.config.getoption("--vectorlm")]
    return Project.from_parent(parent, path=file_path) if file_path in named else None


class Project(pytest.File):
    """A config, whose items are the checks."""

    def collect(self) -> Iterator[pytest.Item]:
        """Yield an item for each check."""
        from vectorlm.cli.project_checks import PROJECT_CHECKS, ProjectUnderTest

        project = ProjectUnderTest(self.path)
        for check in PROJECT_CHECKS:
            item: Check = Check.from_parent(self, name=check.__name__)
            item.check = partial(check, project)
            yield item


class Check(pytest.Item):
    """One check of a project."""

    check: Callable[[], None]

    def runtest(self) -> None:
        """Run the check."""
        self.check()

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> Any:
        """Return the problem with the project, without the traceback of the check."""
        from vectorlm.errors import VectorLMError

        if excinfo.errisinstance((AssertionError, VectorLMError)):
            return str(excinfo.value)
        return super().repr_failure(excinfo, style)
