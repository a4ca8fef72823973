"""Each check of the structure finds a violation in a small checkout."""

from pathlib import Path

import pytest

from tests.contracts.figures import code_named_by_strings, kind_branches, private_interfaces
from tests.contracts.imports import files_that_import, import_cycles, loaders_by_name, reachable
from tests.contracts.sources import Code


@pytest.fixture
def checkout(tmp_path):
    """Write files of a checkout, by their paths, and read its code."""

    def write(files: dict[str, str]) -> Code:
        for file, text in files.items():
            path: Path = tmp_path / file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return Code(tmp_path)

    return write


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("import sweep.b", "from sweep.a import x"),
        ("def f():\n    from sweep import b", "import sweep.a"),
        ("if TYPE_CHECKING:\n    from sweep.b import X", "from . import a"),
    ],
    ids=["at the top", "in a function", "for types, and relative"],
)
def test_a_cycle_is_found(checkout, first, second):
    code = checkout({"sweep/a.py": first, "sweep/b.py": second, "sweep/c.py": "import sweep.a"})
    assert import_cycles(code) == [{"sweep.a", "sweep.b"}]


def test_a_cycle_of_scripts_that_lie_next_to_each_other_is_found(checkout):
    folder = "experiments/studies/x"
    code = checkout({f"{folder}/a.py": "import b", f"{folder}/b.py": "from a import f"})
    assert import_cycles(code) == [{"experiments.studies.x.a", "experiments.studies.x.b"}]


@pytest.mark.parametrize(
    ("file", "text", "interface"),
    [
        ("sweep/a.py", "from torch._inductor import config", "torch._inductor"),
        ("sweep/a.py", "import torch._dynamo", "torch._dynamo"),
        ("experiments/a.py", "import torch\ntorch._C.f()", "torch._C"),
        ("sweep/a.py", "def f(model):\n    model._parameters.clear()", "model._parameters"),
        ("sweep/a.py", "print(_private=1)", "_private"),
    ],
)
def test_a_private_interface_is_found(checkout, file, text, interface):
    assert (file, interface) in private_interfaces(checkout({file: text}))


def test_private_names_of_our_own_and_of_named_tuples_are_no_violation(checkout):
    text = "def _f(): ...\nself._x = 1\nx = b._f() + c._x + d._replace()"
    assert private_interfaces(checkout({"sweep/a.py": text})) == set()


@pytest.mark.parametrize(
    "text",
    [
        "if kind == 'grpo':\n    pass",
        "x = name in ('slurm', 'x')",
        "match kind:\n    case 'tuned':\n        pass",
        "rows = rows[rows['state'].isin(['COMPLETE'])]",
        "x = {'pretrain': 1, 'grpo': 2}[kind]",
        "x = {'transformer': 1}.get(kind, 0)",
        "x = policy.startswith('sqrt')",
        "if isinstance(settings, (int, UserWorkload)):\n    pass",
        "if type(policy) is Tuned:\n    pass",
        "match settings:\n    case HuggingFaceSettings():\n        pass",
    ],
)
def test_a_branch_on_a_kind_is_found_outside_of_its_registry(checkout, text):
    branches = kind_branches(checkout({"sweep/training/a.py": text, "experiments/b.py": text}))
    assert {file for file, _, _ in branches} == {"sweep/training/a.py", "experiments/b.py"}


def test_a_registry_may_tell_its_own_kinds_apart_but_not_those_of_others(checkout):
    text = "x = kind == 'grpo', kind == 'slurm', state == 'FAILED'"
    code = checkout({"sweep/workloads/a.py": text, "sweep/trial/status.py": text})
    assert kind_branches(code) == {
        *(("sweep/workloads/a.py", 1, name) for name in ("slurm", "FAILED")),
        *(("sweep/trial/status.py", 1, name) for name in ("grpo", "slurm")),
    }


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("sweep/a.py", "build('sweep.models.build')"),
        ("sweep/a.py", "build('experiments.elman:Elman')"),
        ("sweep/a.toml", "model = 'sweep.models.build:Model'"),
        ("experiments/a.toml", "[models]\nx = ['sweep.models.build:Model']"),
    ],
)
def test_code_that_a_text_names_is_found(checkout, file, text):
    modules = {"sweep/models/build.py": "", "experiments/elman/__init__.py": ""}
    code = checkout({**modules, file: text})
    assert [found for found, _ in code_named_by_strings(code)] == [file]


@pytest.mark.parametrize(
    "text",
    [
        "import importlib\nimportlib.import_module(name)",
        "from importlib import import_module as load",
        "getattr(importlib, 'import_module')(name)",
        "__import__(name)",
        "from runpy import run_path",
        "pkgutil.resolve_name(name)",
        "exec(text)",
    ],
)
def test_an_import_by_name_is_found(checkout, text):
    code = checkout({"sweep/a.py": text, "sweep/b.py": "model.eval()\nimport importlib.util"})
    assert loaders_by_name(code).keys() == {"sweep/a.py"}


def test_an_entry_reaches_what_it_can_execute(checkout):
    code = checkout(
        {
            "sweep/__init__.py": "import sweep.always\ndef f():\n    import sweep.public",
            "sweep/__main__.py": "from sweep.unit import called",
            "sweep/always.py": "",
            "sweep/public.py": "",
            "sweep/unit/__init__.py": "",
            "sweep/unit/called.py": "def f():\n    import sweep.lazy\nif TYPE_CHECKING:\n"
            "    import sweep.types",
            "sweep/lazy.py": "",
            "sweep/types.py": "",
        }
    )
    of_command = {"", ".__main__", ".always", ".unit", ".unit.called", ".lazy"}
    assert reachable(code, "sweep.__main__") == {f"sweep{name}" for name in of_command}
    assert reachable(code, "sweep") == {"sweep", "sweep.always", "sweep.public"}


def test_the_files_that_import_a_package_are_found(checkout):
    lazily = "def f():\n    import ray\nif TYPE_CHECKING:\n    from ray import x"
    code = checkout({"sweep/a.py": lazily, "sweep/b.py": "from ray.util import x"})
    assert files_that_import(code, "ray") == {"sweep/a.py": True, "sweep/b.py": False}
