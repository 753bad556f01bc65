"""Workers whose updates check the cache of image embeddings for leftovers of the previous update."""

import os
from pathlib import Path

import torch
from server_process import LEAVES

from vectorlm.errors import EngineError
from vectorlm.sampling.backends.server.extension import ServerExtension
from vectorlm.sampling.backends.vllm.extension import WeightExtension


def leave(cache):
    if cache:
        raise EngineError(f"the weights before this update have left {sorted(cache)}")
    cache["image"] = torch.zeros(1)


class LeavesAnEmbedding(WeightExtension):
    def vectorlm_load(self, *args):
        try:
            leave(self.model_runner.encoder_cache)
        except EngineError as error:
            return None, error
        return super().vectorlm_load(*args)


class ServerLeavesAnEmbedding(ServerExtension):
    """A server's extension whose class body runs in every worker before the worker is built.

    It checks an update only while the file that `LEAVES` names exists, and adds a line to the file.
    """

    from vllm.v1.worker.gpu_worker import Worker

    def update_weights_and_leave(self, update_info, update=Worker.update_weights):
        path = Path(os.environ[LEAVES])
        if update_info["method"] == "vectorlm_load" and path.exists():
            leave(self.model_runner.encoder_cache)
            with path.open("a") as file:
                file.write("left\n")
        return update(self, update_info)

    Worker.update_weights = update_weights_and_leave
    del Worker
