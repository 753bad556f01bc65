"""An engine made of transformers alone, for machines and models that vLLM does not support."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from vectorlm.ranks.topology import Topology
from vectorlm.sampling.engine import SamplingEngine


class HFEngine(SamplingEngine):
    """A `SamplingEngine` that samples with transformers in the ranks' own processes.

    Rank 0 holds a copy of the model and samples (on several nodes the first rank of each does); the others wait for its
    results. There is no second process and no thread: requests in flight go on inside `poll`, `done` and `result`.
    Log-probabilities are of what was drawn from: after penalties, temperature and cuts.

    >>> with HFEngine("path/to/model") as engine:  # doctest: +SKIP
    ...     engine.update(model, train_step=10)
    ...     print(engine.generate_text(["2 + 2 ="]))

    Args:
        model_path: A Hugging Face model folder.
        topology: This rank's place in the run; read from the environment when omitted.
        sampling_params: Used where a call gives none: a mapping with the fields of `parameters.Parameters`.
        dtype: The copy's precision, as torch spells it.
        batch_size: Completions that are continued together.
        max_model_len: Longest prompt and completion together, in tokens; the model's own limit when omitted.
        logprobs_mode: `processed_logprobs`, or `raw_logprobs` for those before penalties, temperature and cuts.
        timeout_s: Longest silence tolerated from a rank, in seconds.

    Raises:
        EngineError: The model cannot be loaded.
    """

    def __init__(
        self,
        model_path: str | Path,
        *,
        topology: Topology | None = None,
        sampling_params: Any = None,
        dtype: str = "float32",
        batch_size: int = 64,
        max_model_len: int | None = None,
        logprobs_mode: str = "processed_logprobs",
        timeout_s: float = 300.0,
    ) -> None:
        topology = Topology.from_environment() if topology is None else topology
        super().__init__(
            model_path,
            topology=topology,
            sampling_params=sampling_params,
            inference="transformers",
            channel="inline",
            timeout_s=timeout_s,
            dtype=dtype,
            max_num_seqs=batch_size,
            max_model_len=max_model_len,
            logprobs_mode=logprobs_mode,
            device=topology.device,
        )
        self.wait_until_ready()
