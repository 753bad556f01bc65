# The CUDA stack (linux/amd64). Not built or run yet. From the repository's root:
#
#   docker build -f docker/cuda.Dockerfile -t vectorlm:cuda .
#   docker run --rm --gpus all --shm-size 16g --ulimit memlock=-1 \
#     -v "$PWD/benchmarks/results:/vectorlm/benchmarks/results" vectorlm:cuda make gpu
#
# --shm-size: NCCL and the workers of a parallel engine meet in /dev/shm, of which Docker gives 64 MB.
# --ulimit memlock: host memory is pinned for the optimizer's state.
# The host needs driver 580 and the NVIDIA container toolkit; the image brings everything else. nvcc, which `devel` has, and
# gcc are for the kernels that vLLM and Triton compile when they start.
FROM nvidia/cuda:13.0.1-devel-ubuntu24.04

RUN apt-get update \
    && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends \
        build-essential git libnuma1 make python3.12 python3.12-dev python3.12-venv \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /vectorlm

# What the installation reads comes first: a change of the code alone keeps its layer.
ENV VECTORLM_DEVICE=cuda PYTHON=python3.12
COPY Makefile setup.py pyproject.toml README.md LICENSE ./
COPY .ci .ci
COPY requirements requirements
COPY vectorlm vectorlm
RUN make install && rm -rf /root/.cache/pip

COPY . .
ENV PATH=/vectorlm/.venv/bin:$PATH
# Says which driver is too old before anything trains on the CPU instead.
CMD ["bash", "-c", "bash .ci/setup --driver && make run"]
