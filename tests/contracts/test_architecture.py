"""The structure that DESIGN.md promises: imports, sizes, names."""

import json
import re
import shutil
import subprocess
import sys
import sysconfig

import pytest

from tests.contracts.figures import (
    ROOT,
    SOURCES,
    code_named_by_strings,
    definitions,
    lines_of,
    long_functions,
    name_of,
    private_interfaces,
)

MAX_LINES, MAX_LINES_OF_TESTS = 19_500, 18_000  # on the way to 12,500 and 13,000
MAX_FUNCTION_LINES = 60
MAX_LOOP_LINES = 120  # one function: the training loop tells the whole story
LOOP_FILE = "sweep/training/loop.py"

FORBIDDEN_PARTS = {"manager", "helper", "util", "handler", "iteration"}  # anywhere in a name
FORBIDDEN_NAMES = {"common"}  # as a whole name: common tokens are a term

IMPORT_ALL = """
import importlib, json, pkgutil, sys
def import_all(package):
    folder = importlib.import_module(package).__path__
    for module in pkgutil.walk_packages(folder, package + "."): importlib.import_module(module.name)
"""


def _run_fresh(code: str) -> object:
    """Run code in a fresh interpreter and return the JSON of its last line."""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_imports_keep_the_contracts_of_the_design() -> None:
    lint_imports = shutil.which("lint-imports", path=sysconfig.get_path("scripts"))
    assert lint_imports, "lint-imports is missing: make install"
    done = subprocess.run(
        [lint_imports, "--no-cache"], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_code_stays_within_its_bounds() -> None:
    assert lines_of("sweep") <= MAX_LINES
    assert lines_of("tests") <= MAX_LINES_OF_TESTS


def test_no_private_interface_of_a_dependency_is_used() -> None:
    assert private_interfaces() == set()


def test_no_internal_code_is_named_by_a_string() -> None:
    assert code_named_by_strings() == set()


def test_functions_are_short_except_the_training_loop() -> None:
    long = long_functions(MAX_FUNCTION_LINES)
    loop = {name: n for name, n in long.items() if name.startswith(f"{LOOP_FILE}:")}
    assert long == loop
    assert len(loop) <= 1
    assert all(n <= MAX_LOOP_LINES for n in loop.values()), loop


def test_training_loads_no_library_of_the_orchestrator() -> None:
    loaded = _run_fresh(
        f"{IMPORT_ALL}\nimport_all('sweep.training')\n"
        "print(json.dumps(sorted({name.partition('.')[0] for name in sys.modules})))"
    )
    assert isinstance(loaded, list)
    assert {"sweep", "torch"} <= set(loaded)
    assert {"pandas", "optuna", "ray", "mlflow", "click"} & set(loaded) == set()


def test_a_bare_worker_needs_only_five_libraries() -> None:
    """DESIGN.md §9: torch, numpy, pydantic, tokenizers and safetensors, with what they need."""
    absent = "click datasets huggingface_hub markdown_it matplotlib mlflow optuna pandas"
    absent += " psutil rich scipy"
    assert _run_fresh(
        f"{IMPORT_ALL}\n"
        f"for name in {absent.split()}: sys.modules[name] = None  # an import of it fails\n"
        "for unit in ('training', 'workloads', 'models', 'data'): import_all('sweep.' + unit)\n"
        "print(json.dumps(True))"
    )


def test_help_loads_only_click_and_the_standard_library() -> None:
    loaded = _run_fresh(
        "import json, sys\n"
        "before = set(sys.modules)\n"
        "sys.argv = ['sweep', '--help']\n"
        "from sweep.cli import main\n"
        "try: main()\n"
        "except SystemExit as end: assert not end.code\n"
        "new = {name.partition('.')[0] for name in set(sys.modules) - before}\n"
        "print(); print(json.dumps(sorted(new - sys.stdlib_module_names)))"
    )
    assert loaded == ["click", "sweep"]


def _words(name: str) -> set[str]:
    """The words of a name, lower case and singular: `build_LogHandlers` has log and handler."""
    found = re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)
    return {word.lower().removesuffix("s") for word in found}


def test_names_say_what_things_are() -> None:
    names = {(name_of(path), path.parent.name if path.stem == "__init__" else path.stem)
             for path in SOURCES}  # fmt: skip
    names |= {(name_of(path), node.name) for path in SOURCES for node in definitions(path)}
    vague = {
        (where, name)
        for where, name in names
        if _words(name) & FORBIDDEN_PARTS or name.strip("_").lower() in FORBIDDEN_NAMES
    }
    assert vague == set()


@pytest.mark.parametrize("name", ["RunManager", "_helpers", "io_utils", "handle", "HTTPHandlers"])
def test_the_name_rule_finds_vague_words_only(name: str) -> None:
    assert bool(_words(name) & FORBIDDEN_PARTS) == (name != "handle")


def test_nothing_is_left_to_do_in_comments() -> None:
    marker = re.compile(r"\b(TO" r"DO|FIX" r"ME|XX" r"X)\b")
    folders = ("sweep", "tests", "benchmarks", "docs", "experiments", ".ci")
    files = [path for folder in folders for path in sorted((ROOT / folder).rglob("*"))]
    texts = [
        path for path in files if path.suffix in {".py", ".toml", ".md", ""} and path.is_file()
    ]
    left = {
        f"{name_of(path)}:{number}"
        for path in texts
        if "__pycache__" not in path.parts
        for number, line in enumerate(path.read_text("utf-8").splitlines(), 1)
        if marker.search(line)
    }
    assert left == set()


@pytest.mark.parametrize("name", ["gpu.py", "memory.py", "throughput.py", "contenders.py"])
def test_what_runs_on_a_lent_gpu_needs_only_what_a_worker_needs(name: str) -> None:
    absent = "click pandas matplotlib mlflow optuna rich scipy psutil markdown_it"
    absent += " datasets huggingface_hub"
    program = (
        f"import sys; [sys.modules.__setitem__(name, None) for name in {absent.split()!r}]; "
        f"sys.path.insert(0, {str(ROOT / 'benchmarks')!r}); "
        f"import runpy; runpy.run_path({str(ROOT / 'benchmarks' / name)!r}, run_name='imported')"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
