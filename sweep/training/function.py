"""Call the user's training function with the values of a trial: the process of `run_sweep(train=)`.

python -m sweep.training.function MODULE:FUNCTION CODE_FOLDER
"""

import sys

from sweep.errors import SweepError
from sweep.script import settings
from sweep.usercode.objects import load_object, use_code_folder


def main(name: str, code_folder: str) -> None:
    use_code_folder(code_folder or None)
    trial = settings()
    if trial is None:
        raise SweepError("`sweep` must start this process.")
    load_object(name)(trial)


if __name__ == "__main__":
    main(*sys.argv[1:])
