"""Policies, executors and checks of other packages, which register them as entry points."""

from dataclasses import dataclass
from functools import cache
from importlib import metadata
from typing import Any, TypeVar

from sweep.errors import SweepError, user_code

Base = TypeVar("Base")


@dataclass(frozen=True)
class Extension:
    """An object that an installed package registers."""

    name: str  # the name of its entry point
    value: str  # module:object, or a module
    package: str
    loaded: Any

    def __str__(self) -> str:
        return f"{self.name!r} of the package {self.package}"


@cache
def load_extensions(group: str) -> tuple[Extension, ...]:
    """Import what installed packages register in a group of entry points, sorted by name.

    Raises:
        SweepError: if one of them cannot be imported.
    """
    extensions = []
    for point in sorted(metadata.entry_points(group=group)):
        package = point.dist.name if point.dist else point.module
        with user_code(f"{point.name!r} of the package {package} ({group}) must be importable"):
            extensions.append(Extension(point.name, point.value, package, point.load()))
    return tuple(extensions)


def all_classes(
    group: str, base: type, shipped: tuple[type[Base], ...], key: str
) -> tuple[type[Base], ...]:
    """Return the shipped classes of a registry, and those that installed packages add to it.

    Args:
        group: the entry points' group, such as sweep.policies.
        base: the class from which all are derived.
        shipped: the classes of this package.
        key: the attribute that names a class; the entry point must have the same name.

    Raises:
        SweepError: if one cannot be imported, is no such class, or has another class's name.
    """
    classes = {getattr(shipped_class, key): shipped_class for shipped_class in shipped}
    for extension in load_extensions(group):
        loaded = extension.loaded
        is_class = isinstance(loaded, type) and issubclass(loaded, base)
        if not is_class or getattr(loaded, key, None) != extension.name:
            raise SweepError(
                f"{extension} ({group}) must be a class derived from {base.__name__} whose {key} "
                f"is this name, got {extension.value}. Correct the package, or uninstall it."
            )
        if extension.name in classes:
            raise SweepError(
                f"each {key} in {group} must be unique, but {extension} has the {key} of another "
                "class. Rename it, or uninstall the package."
            )
        classes[extension.name] = loaded
    return tuple(classes.values())
