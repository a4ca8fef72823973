"""Call the user's training function with the values of a trial, in a process of its own."""

from sweep.errors import SweepError
from sweep.script import settings
from sweep.usercode.objects import load_object, use_code_folder


def call_function(name: str, code_folder: str | None) -> None:
    """Import a function and call it with the trial of this process.

    Args:
        name: module:function.
        code_folder: where modules are found, in addition to the current folder.

    Raises:
        SweepError: if it cannot be imported; and whatever the function raises.
    """
    use_code_folder(code_folder)
    trial = settings()
    if trial is None:
        raise SweepError("`sweep` must start this process.")
    load_object(name)(trial)
