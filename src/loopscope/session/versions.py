"""Versions of the packages that a run's numbers depend on."""

from importlib.metadata import PackageNotFoundError, version

from loopscope import __version__

_REPORTED = ("torch", "torchtitan", "transformers", "numpy", "pyarrow")


def versions() -> dict[str, str]:
    """Package → version, of those that are installed; loopscope's own among them."""
    found = {"loopscope": __version__}
    for name in _REPORTED:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
