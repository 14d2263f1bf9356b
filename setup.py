"""Packages are listed by hand: kernels/ is a folder, not a package; as one it would shadow Hugging Face's `kernels`."""

from setuptools import find_packages, setup

setup(
    name="megarl",
    version="0.1.0",
    description="Megatron-centric reinforcement learning for language models",
    license="Apache-2.0",
    python_requires=">=3.11",
    packages=[*find_packages(include=["megarl", "megarl.*"])],
    include_package_data=True,
    package_data={"megarl.rollout.sglang": ["stubs/**/*", "stubs/*"]},
    entry_points={"console_scripts": ["megarl=megarl.cli.main:main"]},
    install_requires=[
        "megatron-core>=0.16.1",
        "torch>=2.6",
        "ray[default]",
        "huggingface_hub",
        "transformers",
        "tokenizers",
        "jinja2",
        "safetensors",
        "pydantic>=2",
        "pyyaml",
        "numpy",
        "pyarrow",
        "rich",
        "psutil",
        "tensorboard",
        "math-verify",
        "regex",
        "scipy",
        "matplotlib",
    ],
)
