"""The set-up script, with stand-ins for the programs that it calls: what it does on which machine."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

pytestmark = pytest.mark.skipif(os.name == "nt", reason="a script for sh")

# Each stand-in writes down how it was called. `ready` stands for an installed python3-venv.
STANDINS = {
    "python3": """\
echo "python3 $*" >> "$LOG"
case "$1 $2" in
    "-c import ensurepip, venv") test -e "$BASE/ready" ;;
    "-m venv") mkdir -p .venv/bin && cp "$BASE/bin/venv-python" .venv/bin/python ;;
esac
""",
    "venv-python": """\
echo ".venv/bin/python $*" >> "$LOG"
""",
    "apt-get": """\
echo "apt-get $*" >> "$LOG"
case "$1" in install) touch "$BASE/ready" ;; esac
""",
    "sudo": """\
echo "sudo $*" >> "$LOG"
"$@"
""",
    "id": """\
echo "$USER_ID"
""",
}
TOOLS = ("sh", "dirname", "mkdir", "cp", "touch", "cat")

VENV = "python3 -m venv .venv"
PIP = ".venv/bin/python -m pip install --quiet -e .[{}]"


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    """A folder with the script in clone/tools, and with bin, which holds all programs there are."""
    for name, text in STANDINS.items():
        path = tmp_path / "bin" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"#!/bin/sh\n{text}")
        path.chmod(0o755)
    for name in TOOLS:
        found = shutil.which(name)
        assert found is not None
        (tmp_path / "bin" / name).symlink_to(found)
    (tmp_path / "clone" / "tools").mkdir(parents=True)
    shutil.copy(ROOT / "tools" / "install.sh", tmp_path / "clone" / "tools")
    return tmp_path


def install(machine: Path, *arguments: str, user: int = 0) -> tuple[int, list[str]]:
    """Run the script: its exit code, and the calls it made, in order, but for questions about what is there."""
    log = machine / "log"
    log.write_text("")
    environment = {"PATH": str(machine / "bin"), "BASE": str(machine), "LOG": str(log), "USER_ID": str(user)}
    script = machine / "clone" / "tools" / "install.sh"
    done = subprocess.run(["sh", script, *arguments], env=environment, cwd=machine, capture_output=True, check=False)
    asked = ("python3 -c", ".venv/bin/python -m pip --version")
    return done.returncode, [line for line in log.read_text().splitlines() if not line.startswith(asked)]


@pytest.mark.parametrize(("arguments", "extra"), [([], "torch"), (["dev"], "dev")])
def test_a_machine_with_venv(arguments: list[str], extra: str, machine: Path) -> None:
    (machine / "ready").touch()
    assert install(machine, *arguments) == (0, [VENV, PIP.format(extra)])


def test_a_machine_without_venv_gets_it(machine: Path) -> None:
    apt = ["apt-get update", "apt-get install -y python3-venv"]
    assert install(machine) == (0, [*apt, VENV, PIP.format("torch")])


def test_a_user_who_is_not_root_uses_sudo(machine: Path) -> None:
    calls = install(machine, user=1000)[1]
    assert calls[:4:2] == ["sudo apt-get update", "sudo apt-get install -y python3-venv"]


def test_venv_alone(machine: Path) -> None:
    (machine / "ready").touch()
    assert install(machine, "venv") == (0, [VENV])


def test_the_second_time_the_environment_stays(machine: Path) -> None:
    (machine / "ready").touch()
    install(machine)
    marker = machine / "clone" / ".venv" / "torch"
    marker.touch()
    assert install(machine, "dev") == (0, [PIP.format("dev")])
    assert marker.exists()


def test_an_environment_without_pip_is_completed(machine: Path) -> None:
    (machine / "ready").touch()
    broken = machine / "clone" / ".venv" / "bin" / "python"
    broken.parent.mkdir(parents=True)
    broken.write_text("#!/bin/sh\nexit 1\n")
    broken.chmod(0o755)
    assert install(machine) == (0, [VENV, PIP.format("torch")])


def test_a_machine_without_python_is_told(machine: Path) -> None:
    (machine / "bin" / "python3").unlink()
    assert install(machine) == (1, [])


def test_a_machine_that_cannot_get_venv_is_told(machine: Path) -> None:
    (machine / "bin" / "apt-get").unlink()
    assert install(machine) == (1, [])


def test_an_unknown_argument_is_refused(machine: Path) -> None:
    assert install(machine, "devel") == (2, [])
