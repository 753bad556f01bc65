"""What a run reports about itself: numbers per step, time per phase, pictures of both."""

from vectorlm.telemetry.metrics import FanOut, JsonlSink, MetricSink, ProgressSink, WandbSink
from vectorlm.telemetry.plots import plot_correction, plot_run
from vectorlm.telemetry.timers import Timer

__all__ = [
    "FanOut",
    "JsonlSink",
    "MetricSink",
    "ProgressSink",
    "Timer",
    "WandbSink",
    "plot_correction",
    "plot_run",
]
