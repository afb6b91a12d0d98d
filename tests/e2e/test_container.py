"""The container: what its entry point starts, with which rights, and what of the checkout it is
built from.

tools/try_dockerfile.py runs all its steps; that needs root, the network and minutes.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import try_dockerfile
from tests.container import ROOT, entry_point, program, would_serve
from tests.refusals import assert_names

DEFAULTS = ["--host", "0.0.0.0", "--insecure"]
STEPS = list(try_dockerfile.instructions((ROOT / "Dockerfile").read_text()))


RIGHTS = """#!/bin/sh
id -u; id -g; id -G; sed -n 's/^CapEff:.//p;s/^CapBnd:.//p;s/^NoNewPrivs:.//p' /proc/self/status
exec python3 -c 'import socket; socket.socket().bind(("127.0.0.1", 80)); open("made", "w")'
"""


SERVED: list[tuple[list[str], dict[str, str], dict[str, Any]]] = [
    (
        ["--model-id", "M", "--kv-cache-dtype", "fp8_e5m2"],
        {},
        {
            "model": "M",
            "kv_cache_dtype": "fp8_e5m2",
            "host": "0.0.0.0",
            "port": 80,
            "insecure": True,
        },
    ),
    (
        [],
        {
            "MODEL_ID": "M",
            "KV_CACHE_DTYPE": "fp8_e5m2",
            "PORT": "8080",
            "MAX_TOTAL_TOKENS": "512",
            "HOSTNAME": "3f2a8c",
        },
        {
            "model": "M",
            "kv_cache_dtype": "fp8_e5m2",
            "port": 8080,
            "host": "0.0.0.0",
            "max_model_len": 512,
        },
    ),
    # our variables rank above those of TGI, and flags above both; the model may be the first word
    (["demo"], {"PORT": "81", "FREIGHT_PORT": "82"}, {"port": 82, "kv_cache_dtype": "auto"}),
    (["demo"], {"FREIGHT_PORT": "82"}, {"port": 82}),
    (["demo", "--port", "83"], {"PORT": "81", "FREIGHT_PORT": "82"}, {"port": 83}),
    (["demo", "--hostname", "127.0.0.2"], {}, {"host": "127.0.0.2"}),
    (["demo", "--kv-cache-dtype", "fp8"], {}, {"model": "demo", "kv_cache_dtype": "fp8"}),
]


def test_it_serves_as_tgis_image_does(tmp_path: Path) -> None:
    for options, environ, expected in SERVED:
        called, _ = entry_point(tmp_path, *options, **environ)
        status, server = would_serve(["freight", *called], environ)
        assert status == 0
        assert server is not None
        settings = server[0] | server[1]
        assert {name: settings[name] for name in expected} == expected, (options, environ)


def test_options_of_the_command_line_come_last_and_keep_their_blanks(tmp_path: Path) -> None:
    options = ["--port", "3000", "--served-model-name", "a b"]
    assert entry_point(tmp_path, *options, PORT="8080")[0] == [*DEFAULTS, *options]
    called, warning = entry_point(tmp_path, "--model-id", "M")
    assert called == [*DEFAULTS, "--port", "80", "--model-id", "M"]
    assert "no key" in warning


def test_with_a_key_it_does_not_warn(tmp_path: Path) -> None:
    for options in (["--api-key", "K"], ["--api-key=K"], ["--api-key-file", "F"]):
        assert entry_point(tmp_path, *options)[1] == "", options
    for name in ("FREIGHT_API_KEY", "FREIGHT_API_KEY_FILE", "API_KEY"):
        assert entry_point(tmp_path, **{name: "K"})[1] == "", name


def test_it_is_built_from_the_package_alone() -> None:
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    sent = {str(path) for path in try_dockerfile.in_context(ROOT, lines)}
    assert {
        "pyproject.toml",
        "LICENSE",
        "csrc/linear.cpp",
        "src/freight/demo/model.safetensors",
    } <= sent
    assert not [
        path
        for path in sent
        if path.endswith((".so", ".pyc")) or path.startswith(("tests/", ".venv/"))
    ]
    copies = [rest.split()[:-1] for word, rest in STEPS if word == "COPY" and "--from" not in rest]
    for path in (path for paths in copies for path in paths):
        assert any(
            name == path.rstrip("/") or name.startswith(f"{path.rstrip('/')}/") for name in sent
        ), path


@pytest.fixture
def data() -> Iterator[Path]:
    """A folder that every user can enter."""
    folder = Path(tempfile.mkdtemp(prefix="freight-data-"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, and a network of its own")
@pytest.mark.parametrize(("owner", "groups"), [(0, ()), (0, (44, 992)), (4321, ())])
def test_started_as_root_it_gives_root_s_rights_up_and_can_open_its_port(
    data: Path, owner: int, groups: tuple[int, ...]
) -> None:
    program(data / "freight", RIGHTS)
    checkpoint = data / "models--x" / "blobs" / "weights"
    checkpoint.parent.mkdir(parents=True)
    checkpoint.touch()
    (data / "link").symlink_to("/etc/passwd")
    others = data / "of-somebody"
    others.touch()
    os.chown(others, 77, 77)
    for path in (data, checkpoint.parents[1], checkpoint.parent, checkpoint):
        os.chown(path, owner, owner)
    env = {"PATH": f"{data}:{os.environ['PATH']}", "HF_HOME": str(data), "TMPDIR": str(data)}
    # ports below 1024 are root's in a new network, as they are with `docker run --net host`
    alone = ["unshare", "--net", "sh", "-c", 'ip link set lo up && exec "$@"', "sh"]
    ran = subprocess.run(
        [*alone, ROOT / "docker" / "entrypoint.sh", "demo"],
        env=env,
        cwd=data,
        extra_groups=[0, *groups],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert ran.returncode == 0, ran.stderr
    uid, gid, all_groups, effective, bounding, no_new = ran.stdout.splitlines()
    assert (uid, gid) == (("1000", "1000") if owner == 0 else ("4321", "4321"))
    assert set(map(int, all_groups.split())) >= {int(gid), *groups}
    assert "0" not in all_groups.split()
    assert {int(effective, 16), int(bounding, 16)} <= {
        1 << 10
    }  # CAP_NET_BIND_SERVICE, and nothing else
    assert no_new == "1"
    for path in (data, checkpoint.parent, checkpoint, data / "made"):
        assert path.stat().st_uid == int(uid)
    assert others.stat().st_uid == 77
    assert Path("/etc/passwd").stat().st_uid == 0


def as_root(data: Path, *before: str) -> subprocess.CompletedProcess[str]:
    env = {"PATH": f"{data}:{os.environ['PATH']}", "HF_HOME": str(data / "home")}
    env["TMPDIR"] = str(data)
    command = [*before, str(ROOT / "docker" / "entrypoint.sh"), "demo"]
    return subprocess.run(
        command, env=env, capture_output=True, text=True, check=False, timeout=300
    )


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_a_link_to_the_folder_of_models_is_followed(data: Path) -> None:
    program(data / "freight", "#!/bin/sh\nid -u; echo > $HF_HOME/made\n")
    (data / "disk").mkdir()
    (data / "home").symlink_to(data / "disk")
    ran = as_root(data)
    assert (ran.returncode, ran.stdout) == (0, "1000\n"), ran.stderr
    assert (data / "disk").stat().st_uid == (data / "disk" / "made").stat().st_uid == 1000
    assert (data / "home").lstat().st_uid == 0


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
@pytest.mark.parametrize("taken", ["setuid", "setgid"])
def test_root_without_its_rights_is_told_the_way_out(data: Path, taken: str) -> None:
    program(data / "freight", "#!/bin/sh\nid -u\n")
    ran = as_root(data, "setpriv", f"--bounding-set=-{taken}", "--inh-caps=-all")
    assert (ran.returncode, ran.stdout) == (1, "")
    assert "--cap-drop" in ran.stderr
    assert "--user" in ran.stderr


def test_nothing_else_gives_the_rights_of_root_up() -> None:
    last = [word for word, _ in STEPS][::-1].index("FROM")
    assert "USER" not in dict(
        STEPS[-last:]
    )  # the entry point starts as root, or as the user of `docker run --user`


ASKED: list[tuple[list[str], dict[str, str], str]] = [
    ([], {}, "http://127.0.0.1:80"),
    ([], {"PORT": "81"}, "http://127.0.0.1:81"),
    ([], {"PORT": "81", "FREIGHT_PORT": "82"}, "http://127.0.0.1:82"),
    (["--port", "83"], {"PORT": "81"}, "http://127.0.0.1:83"),
    (["-p", "84"], {}, "http://127.0.0.1:84"),
    (["--port=85", "--ssl-certfile", "F"], {}, "https://127.0.0.1:85"),
    ([], {"FREIGHT_SSL_CERTFILE": "F"}, "https://127.0.0.1:80"),
    (["-p86"], {}, "http://127.0.0.1:86"),
    (["--host", "::1", "--port", "87"], {}, "http://[::1]:87"),
    (["--host=::"], {}, "http://[::1]:80"),
    (["--hostname", "10.0.0.5"], {}, "http://10.0.0.5:80"),
    (["--host", "0.0.0.0"], {}, "http://127.0.0.1:80"),
]


def health_url(folder: Path, **environ: str) -> str:
    """What the health check asks."""
    program(folder / "python", '#!/bin/sh\necho "$3"\n')
    env = {"PATH": f"{folder}:{os.environ['PATH']}", "TMPDIR": str(folder)} | environ
    command = [ROOT / "docker" / "health.sh"]
    return subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout


def test_its_health_check_asks_where_the_server_listens(tmp_path: Path) -> None:
    assert dict(STEPS)["HEALTHCHECK"].endswith("CMD freight-health")
    assert health_url(tmp_path, PORT="81") == "http://127.0.0.1:81/health\n"  # without a file
    for options, environ, asked in ASKED:
        entry_point(tmp_path, "demo", *options, **environ)
        assert health_url(tmp_path) == f"{asked}/health\n", (options, environ)


def test_the_build_of_torch() -> None:
    given = dict(rest.split("=", 1) for word, rest in STEPS if word == "ARG" and "=" in rest)
    step = next(rest for word, rest in STEPS if word == "RUN" and "torch==" in rest)
    dry = step.replace("python -m venv /opt/freight", "true")
    dry = dry.replace("/opt/freight/bin/pip install", "echo")

    def build(torch: str) -> subprocess.CompletedProcess[str]:
        env = os.environ | given | {"TORCH": torch}
        return subprocess.run(
            ["sh", "-c", dry], env=env, capture_output=True, text=True, check=False
        )

    index = "--extra-index-url https://download.pytorch.org/whl"
    for torch, asks in (
        ("cpu", f"torch==2.13.0+cpu {index}/cpu"),
        ("cuda", "torch==2.13.0"),
        ("rocm", f"torch==2.13.0+rocm7.2 {index}/rocm7.2"),
    ):
        assert build(torch).stdout.splitlines()[0] == f"--no-cache-dir {asks}"
    refused = build("gpu")
    assert refused.returncode == 1
    assert_names(refused.stderr, "TORCH", "cpu, cuda or rocm", "gpu")
