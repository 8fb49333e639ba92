"""Everything is in pyproject.toml; the native extension will be described here."""

from setuptools import setup

setup()
