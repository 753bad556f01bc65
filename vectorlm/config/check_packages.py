"""The rules that concern packages which not every run needs."""

from __future__ import annotations

import netrc
import os
from collections.abc import Iterator
from importlib.util import find_spec
from urllib.parse import urlsplit

from vectorlm.config.schema import Config
from vectorlm.config.setting import refuse

WANDB_KEYS = ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE")
"""What wandb takes instead of a line in ~/.netrc."""

NO_PICTURES = "none: the package matplotlib is not installed. Run `pip install matplotlib`."


def is_installed(package: str) -> bool:
    """Return whether a package can be imported, without importing it."""
    try:
        return find_spec(package) is not None
    except (ImportError, ValueError):
        return False


def package_problems(config: Config) -> Iterator[str]:
    """Find packages that the run would miss after it has begun."""
    if config.rl is None and not is_installed("datasets"):
        yield (
            "fine-tuning (the section 'dataset') needs the package datasets, which is not installed. Run `pip install "
            "datasets`."
        )
    yield from _wandb_problems(config)


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
