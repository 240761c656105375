"""Packaging of kerasfeed. The folder `callbacks/` is installed as `kerasfeed.callbacks`."""

from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).resolve().parent
README = ROOT / "README.md"

setup(
    name="kerasfeed",
    version="0.1.0",
    description="One tf.data pipeline feeds every rank of a Horovod job",
    long_description=README.read_text(encoding="utf-8") if README.is_file() else "",
    long_description_content_type="text/markdown",
    author="The kerasfeed authors",
    license="Apache-2.0",
    license_files=["LICENSE"],
    classifiers=[
        "Development Status :: 3 - Alpha",
        "Intended Audience :: Developers",
        "Intended Audience :: Science/Research",
        "License :: OSI Approved :: Apache Software License",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3",
        "Programming Language :: Python :: 3.11",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Typing :: Typed",
    ],
    python_requires=">=3.11",
    packages=[
        *find_packages(include=["kerasfeed", "kerasfeed.*"]),
        "kerasfeed.callbacks",
        *(f"kerasfeed.callbacks.{name}" for name in find_packages("callbacks")),
    ],
    package_dir={"kerasfeed.callbacks": "callbacks"},
    package_data={"kerasfeed": ["py.typed"], "kerasfeed.proto": ["*.proto", "*.pyi"]},
    install_requires=[
        "tensorflow>=2.15",
        "grpcio>=1.60",
        "protobuf>=4.25",
        "cloudpickle",
        "numpy",
        "xxhash",
    ],
    extras_require={"horovod": ["horovod>=0.28.1"]},
    zip_safe=False,
)
