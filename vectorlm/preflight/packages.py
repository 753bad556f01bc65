"""The rules that concern packages which not every run needs."""

from __future__ import annotations

import netrc
import os
from collections.abc import Iterator, Mapping
from urllib.parse import urlsplit

from vectorlm.config.schema import Config
from vectorlm.config.setting import refuse
from vectorlm.packages import is_installed
from vectorlm.report.trackers import PACKAGES
from vectorlm.settings import nearest

WANDB_KEYS = ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE")
"""What wandb takes instead of a line in ~/.netrc."""

NO_PICTURES = "pictures: none, for the package matplotlib is not installed. Run `pip install matplotlib`."


def package_problems(config: Config) -> Iterator[str]:
    """Find packages that the run would miss after it has begun."""
    if config.rl is None and not is_installed("datasets"):
        yield (
            "fine-tuning (the section 'dataset') needs the package datasets, which is not installed. Run `pip install "
            "datasets`."
        )
    yield from _wandb_problems(config)
    yield from _tracker_problems(config)


def _tracker_problems(config: Config) -> Iterator[str]:
    """Find trackers that are unknown or not installed."""
    for name, arguments in config.trackers.items():
        path = f"trackers.{name}"
        if name == "wandb":
            yield refuse(
                config, path, "has settings of its own", "Set enable_wandb_logging and wandb_config."
            )
        elif name not in PACKAGES:
            fix = nearest(name, PACKAGES) or f"Use {' or '.join(PACKAGES)}."
            yield refuse(config, path, "is not a tracker that exists", fix, arguments)
        elif not is_installed(package := PACKAGES[name]):
            yield refuse(
                config, path, f"needs the package {package}", f"Run `pip install {package}`.", arguments
            )
        elif not isinstance(arguments or {}, Mapping):
            rule = "must be a mapping of the tracker's arguments"
            yield refuse(config, path, rule, "Use {} for none.", arguments)


def _wandb_problems(config: Config) -> Iterator[str]:
    """Say that wandb is not there or has no key, before a run has loaded its model."""
    if config.enable_wandb_logging and not is_installed("wandb"):
        yield refuse(config, "enable_wandb_logging", "needs the package wandb", "Run `pip install wandb`.")
        return
    mode = config.wandb_config.get("mode") or os.environ.get("WANDB_MODE", "online")
    if not config.enable_wandb_logging or mode != "online" or any(map(os.environ.get, WANDB_KEYS)):
        return
    host = urlsplit(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname
    try:
        keys = netrc.netrc(os.environ.get("NETRC")).hosts
    except (OSError, netrc.NetrcParseError):
        keys = {}
    if host not in keys:
        fix = "Run `wandb login`, or set wandb_config.mode: offline."
        yield refuse(config, "enable_wandb_logging", f"needs a key for {host}", fix)
