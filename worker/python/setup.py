"""Puts libeverstep.so into the wheel: the one that EVERSTEP_LIBRARY names, or that lies beside the package already."""

import os
import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py
from setuptools.dist import Distribution


class BuildWithLibrary(build_py):
    def run(self):
        super().run()
        source = os.environ.get("EVERSTEP_LIBRARY")
        target = Path(self.build_lib) / "everstep" / "libeverstep.so"
        if source:
            shutil.copyfile(os.path.realpath(source), target)
        if not target.exists():
            raise SystemExit("set EVERSTEP_LIBRARY to the libeverstep.so of a build: a wheel without it is of no use")


class Binary(Distribution):
    def has_ext_modules(self):
        return True  # the wheel is for one platform


try:
    from setuptools.command.bdist_wheel import bdist_wheel
except ImportError:
    from wheel.bdist_wheel import bdist_wheel


class AnyPython(bdist_wheel):
    """The library has no Python in it: one wheel serves all versions."""

    def get_tag(self):
        return ("py3", "none", super().get_tag()[2])


setup(cmdclass={"build_py": BuildWithLibrary, "bdist_wheel": AnyPython}, distclass=Binary)
