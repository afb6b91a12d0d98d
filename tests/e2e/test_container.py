"""The container: what its entry point starts, with which rights, and what of the checkout it is
built from.

tools/try_dockerfile.py runs all its steps; that needs root, the network and minutes.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import try_dockerfile
from tests.environment import is_option
from tests.refusals import assert_names

from freight.__main__ import run as main
from freight.base.other_engines import TGI_OPTIONS

ROOT = Path(__file__).parents[2]
DEFAULTS = ["--host", "0.0.0.0", "--insecure"]
PORT = ["--port", "80"]
STEPS = list(try_dockerfile.instructions((ROOT / "Dockerfile").read_text()))


RIGHTS = """#!/bin/sh
id -u; id -g; id -G; sed -n 's/^CapEff:.//p;s/^CapBnd:.//p;s/^NoNewPrivs:.//p' /proc/self/status
exec python3 -c 'import socket; socket.socket().bind(("127.0.0.1", 80)); open("made", "w")'
"""


def program(file: Path, text: str) -> None:
    file.write_text(text)
    file.chmod(0o755)


def start(folder: Path, *options: str, **environ: str) -> tuple[list[str], str]:
    """(what `freight` is called with, what the entry point says before), as in a container started
    without root.
    """
    program(folder / "freight", '#!/bin/sh\nprintf "%s\\n" "$@"\n')
    program(folder / "id", "#!/bin/sh\necho 1000\n")
    env = {"PATH": f"{folder}:{os.environ['PATH']}", "TMPDIR": str(folder)} | environ
    command = [ROOT / "docker" / "entrypoint.sh", *options]
    answer = subprocess.run(
        command, env=env, capture_output=True, text=True, check=True, timeout=300
    )
    return answer.stdout.splitlines(), answer.stderr


@pytest.fixture
def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, Any]]:
    """served(*options, **variables): the server that the container would start with them."""
    asked: list[dict[str, Any]] = []

    def run(settings: Any, options: Any) -> int:
        asked.append(vars(settings) | options.engine_args)
        return 0

    def serve(*options: str, **environ: str) -> dict[str, Any]:
        called, _ = start(tmp_path, *options, **environ)
        with monkeypatch.context() as patch:
            for name in [
                name for name in os.environ if is_option(name) or name.lower() in TGI_OPTIONS
            ]:
                patch.delenv(name)
            for name, value in environ.items():
                patch.setenv(name, value)
            patch.setattr("freight.serve.lifecycle.run", run)
            patch.setattr(sys, "argv", ["freight", *called])
            with pytest.raises(SystemExit) as ended:
                main()
        assert not ended.value.code
        return asked[-1]

    return serve


def test_it_starts_as_tgi_does(tmp_path: Path, served: Callable[..., dict[str, Any]]) -> None:
    options = ["--model-id", "M", "--kv-cache-dtype", "fp8_e5m2"]
    called, said = start(tmp_path, *options)
    assert called == [*DEFAULTS, *PORT, *options]
    assert "no key" in said
    server = served(*options)
    assert (server["model"], server["kv_cache_dtype"]) == ("M", "fp8_e5m2")
    assert (server["host"], server["port"], server["insecure"]) == ("0.0.0.0", 80, True)


def test_the_variables_of_tgis_image_act(served: Callable[..., dict[str, Any]]) -> None:
    variables = {
        "MODEL_ID": "M",
        "KV_CACHE_DTYPE": "fp8_e5m2",
        "PORT": "8080",
        "MAX_TOTAL_TOKENS": "512",
    }
    server = served(**variables, HOSTNAME="3f2a8c")
    assert (server["model"], server["kv_cache_dtype"], server["port"]) == ("M", "fp8_e5m2", 8080)
    assert (server["host"], server["max_model_len"]) == ("0.0.0.0", 512)


def test_our_variables_rank_above_those_of_tgi_and_flags_above_both(
    served: Callable[..., dict[str, Any]],
) -> None:
    assert served("demo", PORT="81", FREIGHT_PORT="82")["port"] == 82
    assert served("demo", FREIGHT_PORT="82")["port"] == 82
    assert served("demo", "--port", "83", PORT="81", FREIGHT_PORT="82")["port"] == 83
    assert served("demo", "--hostname", "127.0.0.2")["host"] == "127.0.0.2"


@pytest.mark.parametrize("options", [["demo"], ["demo", "--kv-cache-dtype", "fp8"]])
def test_the_model_may_be_the_first_word(
    served: Callable[..., dict[str, Any]], options: list[str]
) -> None:
    server = served(*options)
    assert (server["model"], server["kv_cache_dtype"]) == ("demo", "fp8" if options[1:] else "auto")


def test_options_of_the_command_line_come_last_and_keep_their_blanks(tmp_path: Path) -> None:
    called, _ = start(tmp_path, "--port", "3000", "--served-model-name", "a b", PORT="8080")
    assert called == [*DEFAULTS, "--port", "3000", "--served-model-name", "a b"]


@pytest.mark.parametrize("options", [["--api-key", "K"], ["--api-key=K"], ["--api-key-file", "F"]])
def test_with_a_key_it_does_not_warn(tmp_path: Path, options: list[str]) -> None:
    assert start(tmp_path, *options)[1] == ""


@pytest.mark.parametrize("name", ["FREIGHT_API_KEY", "FREIGHT_API_KEY_FILE", "API_KEY"])
def test_with_a_key_in_the_environment_it_does_not_warn(tmp_path: Path, name: str) -> None:
    assert start(tmp_path, **{name: "K"})[1] == ""


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
    alone = [
        "unshare",
        "--net",
        "sh",
        "-c",
        'ip link set lo up && exec "$@"',
        "sh",
        ROOT / "docker" / "entrypoint.sh",
    ]
    ran = subprocess.run(
        [*alone, "demo"],
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
    env = {
        "PATH": f"{data}:{os.environ['PATH']}",
        "HF_HOME": str(data / "home"),
        "TMPDIR": str(data),
    }
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


@pytest.mark.parametrize(
    ("options", "environ", "asked"),
    [
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
    ],
)
def test_its_health_check_asks_where_the_server_listens(
    tmp_path: Path, options: list[str], environ: dict[str, str], asked: str
) -> None:
    assert dict(STEPS)["HEALTHCHECK"].endswith("CMD freight-health")
    start(tmp_path, "demo", *options, **environ)
    program(tmp_path / "python", '#!/bin/sh\necho "$3"\n')
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "TMPDIR": str(tmp_path)}
    check = [ROOT / "docker" / "health.sh"]
    assert (
        subprocess.run(check, env=env, capture_output=True, text=True, check=True).stdout
        == f"{asked}/health\n"
    )


def test_its_health_check_needs_no_file(tmp_path: Path) -> None:
    program(tmp_path / "python", '#!/bin/sh\necho "$3"\n')
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "TMPDIR": str(tmp_path), "PORT": "81"}
    ran = subprocess.run(
        [ROOT / "docker" / "health.sh"], env=env, capture_output=True, text=True, check=True
    )
    assert ran.stdout == "http://127.0.0.1:81/health\n"


@pytest.mark.parametrize(
    ("torch", "asks"),
    [
        ("cpu", "torch==2.13.0+cpu --extra-index-url https://download.pytorch.org/whl/cpu"),
        ("cuda", "torch==2.13.0"),
        (
            "rocm",
            "torch==2.13.0+rocm7.2 --extra-index-url https://download.pytorch.org/whl/rocm7.2",
        ),
        ("gpu", None),
    ],
)
def test_the_build_of_torch(torch: str, asks: str | None) -> None:
    arguments = dict(
        rest.split("=", 1) for word, rest in STEPS if word == "ARG" and "=" in rest
    ) | {"TORCH": torch}
    step = next(rest for word, rest in STEPS if word == "RUN" and "torch==" in rest)
    dry = step.replace("python -m venv /opt/freight", "true").replace(
        "/opt/freight/bin/pip install", "echo"
    )
    ran = subprocess.run(
        ["sh", "-c", dry], env=os.environ | arguments, capture_output=True, text=True, check=False
    )
    if asks is None:
        assert ran.returncode == 1
        assert_names(ran.stderr, "TORCH", "cpu, cuda or rocm", "gpu")
    else:
        assert ran.stdout.splitlines()[0] == f"--no-cache-dir {asks}"
