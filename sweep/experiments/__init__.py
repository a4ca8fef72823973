"""The shipped experiments, and the models, tasks and workloads that some of them bring.

The wheel has them in this folder; in a checkout they are in the folder `experiments`.
"""

from pathlib import Path

SHIPPED = Path(__file__).parent
if not (SHIPPED / "tinystories.toml").is_file():
    SHIPPED = Path(__file__).parents[2] / "experiments"
    __path__ = [str(SHIPPED)]
