"""Workers in which each update finds what the one before left in the cache of image embeddings."""

import torch

from vectorlm.errors import EngineError
from vectorlm.sampling.backends.server.extension import ServerExtension
from vectorlm.sampling.backends.vllm.extension import WeightExtension


class _Leaves:
    def vectorlm_load(self, *args):
        cache = self.model_runner.encoder_cache
        if cache:
            return None, EngineError(f"the weights before this update have left {sorted(cache)}")
        cache["image"] = torch.zeros(1)
        return super().vectorlm_load(*args)


class LeavesAnEmbedding(_Leaves, WeightExtension):
    pass


class ServerLeavesAnEmbedding(_Leaves, ServerExtension):
    pass
