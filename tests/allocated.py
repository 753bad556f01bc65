"""The most bytes that torch allocates at a time while a function runs."""

from collections.abc import Callable
from itertools import accumulate
from typing import Any

from torch.profiler import ProfilerActivity, profile


def most_allocated(function: Callable[[], Any]) -> int:
    """Return the most bytes that `function` holds at a time beside what there was before."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        function()
    events = [each for each in found.profiler.kineto_results.events() if each.name() == "[memory]"]
    events.sort(key=lambda each: each.start_ns())
    return max(accumulate(each.nbytes() for each in events))
