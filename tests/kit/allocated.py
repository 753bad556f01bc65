"""Measure the peak of torch's allocations while a function runs."""

import gc
from collections.abc import Callable, Iterator
from itertools import accumulate
from typing import Any

from torch._C._profiler import _EventType
from torch.profiler import ProfilerActivity, profile


def most_allocated(function: Callable[[], Any]) -> int:
    """Return the peak number of bytes that `function` allocates, without earlier allocations.

    The profiler misses memory that another thread frees, for example when gloo's thread drops a tensor last. These
    bytes count until the allocator reuses their address.
    """
    gc.collect()  # Freeing earlier garbage during the run would lower the peak.
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        function()
    events = [
        (event.start_time_ns, event.extra_fields.ptr, event.extra_fields.alloc_size)
        for event in _all_of(found.profiler.kineto_results.experimental_event_tree())
        if event.tag == _EventType.Allocation
    ]
    changes, sizes = [], {}
    for _, address, size in sorted(events):
        earlier = sizes.pop(address, 0)
        if size > 0:
            sizes[address] = size
            size -= earlier
        changes.append(size)
    return max(accumulate(changes))


def _all_of(events: list[Any]) -> Iterator[Any]:
    for event in events:
        yield event
        yield from _all_of(event.children)
