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


def package_problems(config: Config) -> Iterator[str]:
    """Find packages that the run would miss, and trackers that it could not open."""
    if config.rl is None and not is_installed("datasets"):
        yield (
            "fine-tuning (the section 'dataset') needs the package datasets, which is not installed. "
            "Run `pip install datasets`."
        )
    # All of these cost more than a minute: tasks are read and trackers opened after models are loaded.
    sampler = config.train_parameters.sampler
    if sampler is not None and sampler.evaluation.tasks and not is_installed("lm_eval"):
        fix = "Run `pip install 'vectorlm[eval]'`."
        yield refuse(config, "train_parameters.sampler.tasks", "needs the package lm_eval", fix)
    if config.enable_wandb_logging and not is_installed("wandb"):
        yield refuse(config, "enable_wandb_logging", "needs the package wandb", "Run `pip install wandb`.")
    elif config.enable_wandb_logging and (host := _host_without_key(config)) is not None:
        fix = "Run `wandb login`, or set wandb_config.mode: offline."
        yield refuse(config, "enable_wandb_logging", f"needs a key for {host}", fix)
    for name, arguments in config.trackers.items():
        path, package = f"trackers.{name}", PACKAGES.get(name)
        if name == "wandb":
            fix = "Set enable_wandb_logging and wandb_config."
            yield refuse(config, path, "has settings of its own", fix)
        elif package is None:
            fix = nearest(name, PACKAGES) or f"Use {' or '.join(PACKAGES)}."
            yield refuse(config, path, "is not a tracker that exists", fix, arguments)
        elif not is_installed(package):
            fix = f"Run `pip install {package}`."
            yield refuse(config, path, f"needs the package {package}", fix, arguments)
        elif not isinstance(arguments or {}, Mapping):
            rule = "must be a mapping of the tracker's arguments"
            yield refuse(config, path, rule, "Use {} for none.", arguments)


def _host_without_key(config: Config) -> str | None:
    """Return the host that wandb would ask a key for."""
    mode = config.wandb_config.get("mode") or os.environ.get("WANDB_MODE", "online")
    if mode != "online" or any(map(os.environ.get, WANDB_KEYS)):
        return None
    host = urlsplit(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname
    try:
        return None if host in netrc.netrc(os.environ.get("NETRC")).hosts else host
    except (OSError, netrc.NetrcParseError):
        return host
