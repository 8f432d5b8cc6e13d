"""The door of the command line: exit codes, one-line errors, quick help, `python -m qinfer`."""

import errno
import subprocess
import sys

import pytest

import qinfer as package
from qinfer.cli import app, main
from qinfer.cli.output import table, to_json
from qinfer.errors import GateError, UserError
from qinfer.testing import tiny_model

COMMANDS = ("quantize", "eval", "generate", "serve", "plan", "inspect", "doctor")


def test_help_lists_every_command_and_loads_nothing_heavy():
    code = (
        "import sys\n"
        "try:\n    from qinfer.cli import main; main(['--help'])\n"
        "finally:\n    print('loaded', {'torch', 'numpy', 'fastapi', 'rich'} & set(sys.modules))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert all(f"\n  {command} " in result.stdout for command in COMMANDS)
    assert "loaded set()" in result.stdout


def test_module_and_version():
    command = [sys.executable, "-m", "qinfer", "--version"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout.strip()) == (0, package.__version__)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_documents_each_of_its_options(qinfer, command):
    code, out, _ = qinfer(command, "--help")
    assert code == 0
    assert "--json" in out
    (registered,) = (c for c in app.registered_commands if c.name == command)
    assert registered.callback
    assert registered.callback.__doc__


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--nonsense"], "no such option: --nonsense; commands: quantize, eval, gate, generate,"),
        (["pln", "x"], "no such command 'pln'. Did you mean 'plan'?; commands: quantize, eval,"),
        (["plan"], "missing argument 'MODEL'; `qinfer plan --help` lists"),
        (["plan", "a", "b"], "got unexpected extra argument(s) (b); `qinfer plan --help`"),
        (["plan", "a", "--jsn"], "no such option: --jsn (Possible options: --json); `qinfer plan --help`"),
        (["plan", "a", "--json=yes"], "option '--json' does not take a value; `qinfer plan --help`"),
        (["quantize", "model"], "missing option '--out' / '-o'; `qinfer quantize --help`"),
        (["serve", "model", "--port"], "option '--port' requires an argument; `qinfer serve --help`"),
        (
            ["serve", "m", "--port", "x\ny"],
            r"invalid value 'x\ny' for '--port': it should be a valid integer;",
        ),
        (
            ["serve", "model", "--port", "99999"],
            "invalid value '99999' for '--port': it should be less than or equal to 65535; `qinfer serve",
        ),
    ],
)
def test_usage_errors_are_one_line_and_leave_with_2(qinfer, arguments, said):
    code, out, err = qinfer(*arguments)
    assert (code, out) == (2, "")
    assert err.startswith(f"qinfer: {said}")
    assert err.count("\n") == 1


def test_no_arguments_show_the_help(qinfer):
    assert qinfer() == qinfer("--help")
    assert qinfer().stdout.startswith("Usage: qinfer")


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (UserError("group size 7:\n  choose 128"), 2, "qinfer: group size 7: choose 128"),
        (GateError("no verdict"), 1, "qinfer: no verdict"),
        (NotImplementedError("best_of is not there yet"), 2, "qinfer: best_of is not there yet"),
        (PermissionError(errno.EACCES, "Permission denied", "/out"), 2, "qinfer: Permission denied: /out"),
        (
            OSError(errno.ENOSPC, "No space left on device"),
            2,
            "qinfer: No space left on device; make room there, or name another folder",
        ),
        (
            OSError(errno.EROFS, "Read-only file system", b"/out"),
            2,
            "qinfer: Read-only file system: b'/out'; name a place that may be written to",
        ),
        (
            OSError(errno.EXDEV, "Cross-device link", "/a", None, "/b"),
            2,
            "qinfer: Cross-device link: /a -> /b",
        ),
        (OSError(errno.EBADF, "Bad file descriptor", 99), 2, "qinfer: Bad file descriptor: 99"),
        (OSError(errno.EIO, "Input/output error", "/out"), 2, "qinfer: Input/output error: /out"),
        (KeyboardInterrupt(), 130, "qinfer: interrupted"),
    ],
)
def test_errors_are_one_line_on_stderr_with_their_code(qinfer, monkeypatch, error, code, line):
    def fail(path):
        raise error

    monkeypatch.setattr("qinfer.checkpoint.checkpoint.open_checkpoint", fail)
    result = qinfer("inspect", "somewhere", "--json")
    assert result.code == code
    assert result.stdout == ""
    assert result.stderr.strip() == line


def test_our_own_bugs_keep_their_traceback(monkeypatch):
    def fail(path):
        raise AssertionError("a bug")

    monkeypatch.setattr("qinfer.checkpoint.checkpoint.open_checkpoint", fail)
    with pytest.raises(AssertionError, match="a bug"):
        main(["inspect", "somewhere"])


def test_what_libraries_print_stays_out_of_the_result(qinfer, monkeypatch, tmp_path):
    def loud(path):
        print("a library says hello")
        raise UserError("and then it failed")

    monkeypatch.setattr("qinfer.checkpoint.checkpoint.open_checkpoint", loud)
    result = qinfer("inspect", tmp_path)
    assert result.stdout == ""
    assert "a library says hello" in result.stderr


def test_json_has_no_nan():
    assert to_json({"a": [1.5, float("nan")], "b": {"c": float("inf")}, "d": (1,)}).split() == [
        "{", '"a":', "[", "1.5,", "null", "],", '"b":', "{", '"c":', "null", "},", '"d":', "[", "1", "]", "}"
    ]  # fmt: skip


def test_table_aligns_its_columns():
    assert table(("name", "n"), [("a", "1"), ("long name", "1000")]) == (
        "name          n\na             1\nlong name  1000"
    )


@pytest.mark.parametrize(("flag", "scheme"), [("--sym", "w8a8-int8"), ("--asym", "int8")])
def test_quantize_names_the_flag_that_a_scheme_does_not_have(qinfer, tmp_path, flag, scheme):
    model = tiny_model("qwen3", tmp_path / "model")
    code, _, err = qinfer("quantize", model, "--scheme", scheme, flag, "--out", tmp_path / "out", "--no-gate")
    assert code == 2
    assert (
        err.splitlines()[-1] == f"qinfer: {flag} is for --scheme w4a16 or awq, not for {scheme}: leave it out"
    )
