"""Entry point of setuptools for tools that call setup.py; all metadata is in pyproject.toml."""

from setuptools import setup

setup()
