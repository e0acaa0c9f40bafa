"""Packaging of mrlhf: the ranges it works with; `constraints-cpu.txt` pins what was tested without
a GPU.
"""

from pathlib import Path

from setuptools import find_packages, setup

setup(
    name="mrlhf",
    version="0.7.0",
    description="RLHF for language models on Megatron-style model parallelism, by plain torchrun",
    long_description=Path(__file__).with_name("README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.10",
    packages=find_packages(include=["mrlhf", "mrlhf.*"]),
    package_data={
        "mrlhf": [
            "compiled/*.h",
            "inference/native/*.cpp",
            "models/*.cpp",
            "report/page/*",
            "report/page/uplot/*",
        ]
    },
    install_requires=[
        "torch>=2.6",
        "megatron-core>=0.16,<0.17",
        "transformers>=5.17,<5.20",
        "tokenizers",
        "safetensors",
        "sentencepiece",
        "protobuf",
        "pydantic>=2.7,<3",
        "pyyaml",
        "pyarrow",
        "numpy",
        "jinja2",
        "rich",
        "tensorboard",
        "matplotlib",
        "xxhash",
    ],
    extras_require={
        "gpu": ["transformer-engine[pytorch]"],
        "vllm": ["vllm==0.32.*"],
        "trackers": ["wandb", "trackio"],
        # what megatron-core's own checkpoints need, to come and go with Megatron-LM
        "megatron-lm": ["psutil"],
        "dev": [
            "psutil",
            "pytest",
            "pytest-timeout",
            "pytest-xdist",
            "filelock",
            "playwright",
            "pyte",
            "hypothesis",
            "ruff",
            "mypy",
            "types-PyYAML",
            "pre-commit",
        ],
    },
)
