"""Where the cache is, and how much memory a container really has."""

from pathlib import Path

import pytest

from qinfer import env

KIB = 1024


def test_cache_dir_prefers_own_variable_then_xdg_then_home(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("QINFER_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert env.cache_dir() == tmp_path / ".cache" / "qinfer"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert env.cache_dir() == tmp_path / "xdg" / "qinfer"
    monkeypatch.setenv("QINFER_CACHE", "~/mine")
    assert env.cache_dir() == tmp_path / "mine"


def machine(root: Path, files: dict[str, str]) -> Path:
    meminfo = {"proc/meminfo": "MemTotal:  1000 kB\nMemFree:  10 kB\nMemAvailable:  600 kB\n"}
    for name, text in (meminfo | files).items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


@pytest.mark.parametrize(
    ("files", "total", "available"),
    [
        ({}, 1000 * KIB, 600 * KIB),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.max": "max\n"}, 1000 * KIB, 600 * KIB),
        (
            {
                "proc/self/cgroup": "0::/job\n",
                "sys/fs/cgroup/job/memory.max": f"{500 * KIB}\n",
                "sys/fs/cgroup/job/memory.current": f"{300 * KIB}\n",
                "sys/fs/cgroup/job/memory.stat": f"anon 1\ninactive_file {50 * KIB}\n",
            },
            500 * KIB,
            250 * KIB,
        ),
        (  # version 1, whose path is not mounted inside the container
            {
                "proc/self/cgroup": "5:cpu:/x\n4:memory:/docker/abc\n",
                "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{400 * KIB}\n",
                "sys/fs/cgroup/memory/memory.usage_in_bytes": f"{390 * KIB}\n",
                "sys/fs/cgroup/memory/memory.stat": f"inactive_file 1\ntotal_inactive_file {90 * KIB}\n",
            },
            400 * KIB,
            100 * KIB,
        ),
    ],
)
def test_host_memory_respects_the_container(tmp_path, files, total, available):
    assert env.host_memory(machine(tmp_path, files)) == (total, available)


def test_this_machine_has_memory_and_a_processor():
    memory = env.host_memory()
    assert 1 << 27 < memory.available <= memory.total
    assert env.cpu_name()
    assert set(env.cpu_features()) <= set(env.CPU_FEATURES)
