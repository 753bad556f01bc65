# The CPU stack that every test runs on (linux/amd64). Not built yet. From the repository's root:
#
#   docker build -f docker/cpu.Dockerfile -t vectorlm:cpu .
#   docker run --rm --shm-size 2g -v "$PWD/runs:/vectorlm/runs" vectorlm:cpu
#
# --shm-size: the workers of a parallel engine reduce in /dev/shm, of which Docker gives 64 MB.
FROM python:3.12-slim-bookworm

RUN apt-get update \
    && apt-get install -y --no-install-recommends git libnuma1 make \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /vectorlm

# What the installation reads comes first: a change of the code alone keeps its layer.
ENV VECTORLM_DEVICE=cpu PYTHON=python3.12
COPY Makefile setup.py pyproject.toml README.md LICENSE ./
COPY .ci .ci
COPY requirements requirements
COPY vectorlm vectorlm
RUN make install && rm -rf /root/.cache/pip

COPY . .
ENV PATH=/vectorlm/.venv/bin:$PATH
CMD ["make", "run"]
