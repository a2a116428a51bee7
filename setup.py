"""Names the packages and the module beside them; everything else about the project stands in pyproject.toml."""

from __future__ import annotations

from setuptools import find_packages, setup

setup(
    packages=find_packages(".", include=["megalite", "megalite.*"]) + find_packages("kernels"),
    py_modules=["megalite_trace"],
    package_dir={"megalite_kernels": "kernels/megalite_kernels"},
    package_data={
        "megalite": ["py.typed", "**/*.toml", "**/*.css"],
        "megalite_kernels": ["py.typed"],
    },
)
