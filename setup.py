"""
What pyproject.toml cannot say: the native kernels are compiled when the package is installed.

A plain C++ library, not an extension module: it needs no headers of Python, and a machine without a compiler gets a
package that computes in torch.
"""

import runpy
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.build_py import build_py

NATIVE = Path("engine/device/native")


class BuildWithKernels(build_py):
    """Packages as usual, then the kernels into them."""

    def run(self) -> None:
        """Build.  Without a compiler it says so and goes on."""
        super().run()
        native = NATIVE if self.editable_mode else Path(self.build_lib) / NATIVE
        runpy.run_path(str(NATIVE / "build.py"))["build_or_say_why"](native / "lib")


class WithLibrary(Distribution):
    """A wheel of this package is for one platform."""

    def has_ext_modules(self) -> bool:
        """It holds compiled code."""
        return True


setup(distclass=WithLibrary, cmdclass={"build_py": BuildWithKernels})
