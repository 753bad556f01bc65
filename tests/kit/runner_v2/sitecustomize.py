"""Run vLLM's Model Runner V2 in sampler processes without a GPU: Triton's interpreter computes its kernels.

Python imports this file at its start if its folder is on PYTHONPATH. `VECTORLM_TRITON` is a folder with Triton's
ordinary wheel, which must not be installed next to vLLM's CPU wheel.
"""

import os
import sys

SAMPLERS = "vectorlm.sampling.sampler.process", "--multiprocessing-fork", "warm_engines.py"
if any(argument.endswith(SAMPLERS) for argument in sys.orig_argv):
    os.environ |= {"TRITON_INTERPRET": "1", "VLLM_USE_V2_MODEL_RUNNER": "1"}
    sys.path.append(os.environ["VECTORLM_TRITON"])

    from types import SimpleNamespace
    from unittest.mock import MagicMock

    import torch
    from triton.backends import backends

    # vLLM's CPU wheel accepts only a Triton with a backend for the CPU, which the ordinary wheel lacks.
    backends["cpu"] = SimpleNamespace(driver=SimpleNamespace(is_active=lambda: True))
    # V2 orders its work with CUDA streams and events; work on the host is already in order.
    torch.Event = torch.cuda.Event = torch.cuda.Stream = torch.cuda.current_stream = torch.cuda.stream = (
        MagicMock()
    )
