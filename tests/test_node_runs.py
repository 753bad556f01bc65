"""Whole runs on two nodes: two launchers, or two torchruns, on loopback."""

import json
import os
import subprocess
import sys

import pytest
from ranks.test_nodes import free_endpoint
from test_finetune import ROOT, inputs, lines, make_config  # noqa: F401 (a fixture)

SCRIPT = "examples/llama_example_mp.py"


def own_flags(rank, endpoint):
    return [SCRIPT, "--world_size", "2", "--nnodes", "2", "--node_rank", str(rank), "--rdzv_endpoint", endpoint]


def under_torchrun(rank, endpoint):
    agent = ["-m", "torch.distributed.run", "--nnodes", "2", "--nproc_per_node", "1", "--node_rank", str(rank)]
    return [*agent, "--rdzv_backend", "c10d", "--rdzv_endpoint", endpoint, "--rdzv_id", "a-run", SCRIPT]
