"""The house's own rules: links, packages, who may import whom, what importing costs, what the wheel holds."""

import ast
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import qinfer

ROOT = Path(__file__).resolve().parent.parent
LINKED = ("kernels", "calibrate", "evals")
TORCH_FREE = tuple(
    f"qinfer.engine.{name}"
    for name in ("request", "pages", "scheduler", "plan", "memory", "footprint", "roster")
)


def source_files() -> Iterator[tuple[str, Path]]:
    """(module name, file) of every module, through the links; os.walk, since rglob passes them by."""
    for folder, _, names in os.walk(ROOT / "qinfer", followlinks=True):
        for name in names:
            if name.endswith(".py"):
                path = Path(folder) / name
                parts = path.relative_to(ROOT).with_suffix("").parts
                yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts), path


def imports_of(module: str, path: Path) -> set[str]:
    """Full names of all that a file imports, wherever in the file; `from a import b` gives a and a.b."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module} uses a relative import"
            assert node.module
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


IMPORTS = {module: imports_of(module, path) for module, path in source_files()}


def importers(*targets: str) -> set[str]:
    """Modules that import one of the targets or something below it."""
    return {
        module
        for module, names in IMPORTS.items()
        if any(name == target or name.startswith(f"{target}.") for name in names for target in targets)
    }


def inside(modules: set[str], *packages: str) -> set[str]:
    return {m for m in modules if any(m == package or m.startswith(f"{package}.") for package in packages)}


def run_python(code: str, **variables: str) -> str:
    result = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env=os.environ | variables,
        cwd="/",
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.mark.parametrize("name", LINKED)
def test_top_folders_are_linked_into_the_package_and_shadow_nothing(name):
    link = ROOT / "qinfer" / name
    assert link.is_symlink()
    assert os.readlink(link) == f"../{name}"
    assert not (ROOT / name / "__init__.py").exists()
    assert not (ROOT / name / "triton.py").exists()
    assert any((ROOT / name).glob("*.py"))


def test_the_walk_sees_every_tracked_module():
    assert set(TORCH_FREE) <= IMPORTS.keys()
    tracked = {path for name in (*LINKED, "qinfer") for path in (ROOT / name).rglob("*.py")}
    assert {path.resolve() for _, path in source_files()} == {path.resolve() for path in tracked}


def test_tests_are_not_a_package():
    assert not list((ROOT / "tests").rglob("__init__.py"))
    assert not (ROOT / "conftest.py").exists()


def test_kernels_know_torch_numpy_triton_and_the_standard_library():
    known = {*sys.stdlib_module_names, "torch", "numpy", "triton"}
    for module in inside(set(IMPORTS), "qinfer.kernels"):
        strangers = {
            n for n in IMPORTS[module] if n.split(".")[0] not in known and not n.startswith("qinfer.kernels")
        }
        assert strangers <= {"qinfer"}, f"{module} imports {strangers}"


def test_only_ops_and_its_choice_of_a_twin_import_kernels():
    outside = importers("qinfer.kernels") - inside(set(IMPORTS), "qinfer.kernels", "qinfer.ops")
    assert outside == {"qinfer.backend"}
    assert not {name for name in IMPORTS["qinfer.backend"] if name.endswith("_triton")} - {
        "qinfer.kernels.ahead_triton"
    }


def test_ops_are_taken_from_the_package_not_from_its_files():
    files = {module for module in IMPORTS if module.startswith("qinfer.ops.")}
    assert len(files) >= 8
    assert importers(*files) == inside(importers(*files), "qinfer.ops")


def test_model_knows_no_engine_calibration_or_evaluation():
    assert not inside(importers("qinfer.engine", "qinfer.calibrate", "qinfer.evals"), "qinfer.model")


def test_calibrate_and_evals_meet_in_jobs_only():
    calibration, evaluation = importers("qinfer.calibrate"), importers("qinfer.evals")
    assert not inside(evaluation, "qinfer.calibrate")
    assert not inside(calibration, "qinfer.evals")
    outsiders = (calibration & evaluation) - inside(set(IMPORTS), "qinfer.calibrate", "qinfer.evals")
    assert outsiders == {"qinfer.jobs"}


def test_benchmarks_know_everyone_and_only_the_command_line_knows_them():
    importers_of_bench = importers("qinfer.bench")
    assert importers_of_bench == inside(importers_of_bench, "qinfer.bench", "qinfer.cli")
    assert not inside(importers("fastapi", "uvicorn", "pydantic", "qinfer.server"), "qinfer.bench")


def test_a_benchmark_needs_no_web_framework():
    code = "import json, sys, qinfer.bench.throughput, qinfer.bench.latency, qinfer.cli.bench"
    loaded = set(json.loads(run_python(f"{code}; print(json.dumps(sorted(sys.modules)))")))
    assert "qinfer.llm" in loaded
    assert not {"fastapi", "uvicorn", "starlette", "prometheus_client"} & loaded


def test_only_the_command_line_imports_typer():
    typer = importers("typer", "click")
    assert typer
    assert typer == inside(typer, "qinfer.cli")


def test_only_tokenizer_and_hub_import_transformers():
    assert importers("transformers") <= {"qinfer.tokenizer", "qinfer.hub"}


def test_torch_free_modules_do_not_import_torch():
    assert not importers("torch") & set(TORCH_FREE)
    loaded = json.loads(
        run_python(f"import json, sys, {', '.join(TORCH_FREE)}; print(json.dumps(sorted(sys.modules)))")
    )
    assert set(TORCH_FREE) <= set(loaded)
    assert not {"torch", "transformers", "numpy"} & set(loaded)


def test_a_server_takes_its_port_before_it_loads_torch():
    code = "import json, sys, qinfer.server.run, qinfer.cli.serve; print(json.dumps(sorted(sys.modules)))"
    loaded = set(json.loads(run_python(code)))
    assert "qinfer.server.waiting" in loaded
    assert not {"torch", "transformers"} & loaded


def test_importing_qinfer_is_cheap():
    loaded = set(json.loads(run_python("import json, sys, qinfer; print(json.dumps(sorted(sys.modules)))")))
    assert not {"torch", "transformers", "typer", "fastapi", "numpy"} & loaded
    assert {name for name in loaded if name.startswith("qinfer.")} == set()


def test_public_names_are_complete_and_load():
    assert set(qinfer.__all__) == {*qinfer._HOMES, "__version__"}
    assert dir(qinfer) == sorted(qinfer.__all__)
    for name in qinfer.__all__:
        assert getattr(qinfer, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = qinfer.nonsense


def test_no_module_is_loaded_under_two_names():
    modules = sorted(module for module in IMPORTS if module != "qinfer.__main__")
    told = run_python(
        "import importlib, json, os, sys\n"
        f"for name in {modules}: importlib.import_module(name)\n"
        "print(json.dumps({n: os.path.realpath(m.__file__) for n, m in sys.modules.items()"
        " if getattr(m, '__file__', None)}))",
        PYTHONPATH=str(ROOT),
    )
    ours = {name: file for name, file in json.loads(told).items() if Path(file).is_relative_to(ROOT)}
    ours = {name: file for name, file in ours.items() if name != "__main__" and ".venv" not in file}
    assert set(modules) <= set(ours)
    assert len(set(ours.values())) == len(ours)
    assert all(name.split(".")[0] == "qinfer" for name in ours)


def test_the_wheel_holds_every_module_and_runs_from_elsewhere(tmp_path):
    copy = tmp_path / "source"
    copy.mkdir()
    for name in (*LINKED, "qinfer"):
        shutil.copytree(ROOT / name, copy / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, copy)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    build = [*pip, "wheel", "--no-deps", "--no-build-isolation", "--no-index", "-w", str(tmp_path), str(copy)]
    result = subprocess.run(build, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    (wheel,) = tmp_path.glob("qinfer-*.whl")
    target = tmp_path / "target"
    install = [*pip, "install", "--no-deps", "--no-index", "--target", str(target), str(wheel)]
    result = subprocess.run(install, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr

    expected = {str(path.relative_to(ROOT)) for _, path in source_files()} | {"qinfer/py.typed"}
    expected |= {str(path.relative_to(ROOT)) for path in (ROOT / "qinfer" / "server" / "web").iterdir()}
    assert expected <= {str(path.relative_to(target)) for path in target.rglob("*")}
    told = run_python(
        "import qinfer, qinfer.ops, qinfer.jobs, json, sys\n"
        "ours = [m for n, m in sys.modules.items() if n.startswith('qinfer.')]\n"
        "print(json.dumps([m.__file__ for m in ours if m.__file__]))",
        PYTHONPATH=str(target),
    )
    assert all(Path(file).is_relative_to(target) for file in json.loads(told))
