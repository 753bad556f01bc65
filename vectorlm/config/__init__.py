"""The settings of a run: their schema, and how they are read from YAML and written back."""

from vectorlm.config.load import add_config_arguments, config_from_arguments, load_config, save_config
from vectorlm.config.schema import (
    AsyncSettings,
    Config,
    CorrectionSettings,
    CriticSettings,
    DatasetSettings,
    OptimizerSettings,
    PreprocessSettings,
    RLSettings,
    RolloutSettings,
    SamplerSettings,
    TrainSettings,
)
from vectorlm.config.setting import to_plain

__all__ = [
    "AsyncSettings",
    "Config",
    "CorrectionSettings",
    "CriticSettings",
    "DatasetSettings",
    "OptimizerSettings",
    "PreprocessSettings",
    "RLSettings",
    "RolloutSettings",
    "SamplerSettings",
    "TrainSettings",
    "add_config_arguments",
    "config_from_arguments",
    "load_config",
    "save_config",
    "to_plain",
]
