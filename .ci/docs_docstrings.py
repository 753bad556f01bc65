"""Shows the ``>>>`` examples of docstrings as code: Markdown would take them for quotations."""

import re

import griffe

EXAMPLE = re.compile(r"^(?:(?:>>>|\.\.\.).*(?:\n|\Z))+", re.M)


class FenceExamples(griffe.Extension):
    """Puts a fence around each example."""

    def on_object(self, *, obj, **_):
        """Rewrite the docstring of an object, if it has one."""
        if obj.docstring is not None:
            obj.docstring.value = EXAMPLE.sub(_fenced, obj.docstring.value)


def _fenced(match):
    return f"```pycon\n{match[0].replace('  # doctest: +SKIP', '').rstrip()}\n```\n"
