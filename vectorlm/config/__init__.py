"""The settings of a run: their schema, their reading from YAML and the rules that they are held to."""

from vectorlm.config.arguments import add_config_arguments, add_node_arguments, config_from_arguments
from vectorlm.config.check import check_config
from vectorlm.config.load import load_config
from vectorlm.config.rl import AsyncSettings, CorrectionSettings, CriticSettings, RLSettings, RolloutSettings
from vectorlm.config.save import save_config
from vectorlm.config.schema import (
    Config,
    DatasetSettings,
    OptimizerSettings,
    PreprocessSettings,
    SamplerSettings,
    TrainSettings,
)

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
    "add_node_arguments",
    "check_config",
    "config_from_arguments",
    "load_config",
    "save_config",
]
