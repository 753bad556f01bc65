"""Workers whose updates check the cache of image embeddings for leftovers of the previous update."""

import torch

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
    """A server's extension whose class body runs in every worker before the worker is built."""

    from vllm.v1.worker.gpu_worker import Worker

    def update_weights_and_leave(self, update_info, update=Worker.update_weights):
        if update_info["method"] == "vectorlm_load":
            leave(self.model_runner.encoder_cache)
        return update(self, update_info)

    Worker.update_weights = update_weights_and_leave
    del Worker
