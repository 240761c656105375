"""Packaging of kerasfeed. The folder `callbacks/` is installed as `kerasfeed.callbacks`.

Where TensorFlow can be imported (`pip install --no-build-isolation .`), the native engine is built for it and comes
along. Else, or where that fails, it is built where and when it is first needed.
"""

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

from setuptools import Distribution, find_packages, setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
README = ROOT / "README.md"
BUILD_SECONDS = 900
# An editable installation has the sources, which change: it builds at first use.
BRINGS_ENGINE = (
    not {"editable_wheel", "develop"} & set(sys.argv)
    and os.environ.get("KERASFEED_ENGINE") != "python"
    and importlib.util.find_spec("tensorflow") is not None
)


class BuildWithEngine(build_py):
    """Builds the native engine beside the Python files. What becomes of that is no reason not to install."""

    def run(self) -> None:
        super().run()
        folder = Path(self.build_lib, "kerasfeed", "native", "prebuilt")
        # Of an earlier build with other sources or another TensorFlow.
        shutil.rmtree(folder, ignore_errors=True)
        if BRINGS_ENGINE and not self.editable_mode:
            print(f"kerasfeed: building the native engine in {folder}")
            # In a process of its own, since TensorFlow may end it. -P: not with kerasfeed/native/ in the path.
            command = [sys.executable, "-P", str(ROOT / "kerasfeed" / "native" / "build.py"), str(folder)]
            try:
                subprocess.run(command, stdin=subprocess.DEVNULL, timeout=BUILD_SECONDS, check=True)
            except (OSError, subprocess.SubprocessError) as error:
                print(f"kerasfeed: the native engine is not built now, but at first use: {error}", file=sys.stderr)

    def get_outputs(self, include_bytecode: bool = True) -> list[str]:
        built = Path(self.build_lib, "kerasfeed", "native", "prebuilt").glob("*.so")
        return [*super().get_outputs(include_bytecode), *map(str, built)]


class MaybeBinary(Distribution):
    """A wheel with the engine is for this platform only."""

    def has_ext_modules(self) -> bool:
        return BRINGS_ENGINE


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
    package_data={
        "kerasfeed": ["py.typed"],
        "kerasfeed.native": ["core/*.cc", "core/*.h", "ops/*.cc", "ops/*.h"],
        "kerasfeed.proto": ["*.proto", "*.pyi"],
    },
    cmdclass={"build_py": BuildWithEngine},
    distclass=MaybeBinary,
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
