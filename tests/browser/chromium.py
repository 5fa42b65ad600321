"""The browser of these tests: the system's own Chromium or Chrome, driven by Playwright, never a downloaded one.

`python tests/browser/chromium.py` installs Debian's package where it is missing, if it may. `make setup` and
`make test` call it; where it may not, it says what to do and leaves the verdict to the tests.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

BROWSER = "RL_NOTEBOOK_BROWSER"  # path or name of the browser to use
SKIP = "RL_NOTEBOOK_SKIP_BROWSER"  # anything but 0: leave the browser tests out
NAMES = (
    "chromium",
    "chromium-browser",
    "google-chrome",
    "google-chrome-stable",
    "/Applications/Google Chrome.app/Contents/MacOS/Google Chrome",
    "/Applications/Chromium.app/Contents/MacOS/Chromium",
)


def switched_off() -> bool:
    "Whether the user left the browser tests out by name."
    return os.environ.get(SKIP, "0") not in ("", "0")


def find() -> str | None:
    "Path of the browser; None when there is none."
    names = (os.environ[BROWSER],) if os.environ.get(BROWSER) else NAMES
    return next(filter(None, map(shutil.which, names)), None)


def missing() -> str:
    "What is missing and how to get it."
    named = os.environ.get(BROWSER)
    looked = f"{BROWSER}={named}, which is no program" if named else ", ".join(NAMES[:4])
    return (
        f"the browser tests found no browser (looked for: {looked}).\n"
        "  Debian, Ubuntu:   apt-get install chromium   (as root; `make setup` does it where it may)\n"
        f"  elsewhere:        install Chromium or Chrome, or name one: {BROWSER}=/path/to/chrome\n"
        f"  or leave them out: {SKIP}=1"
    )


def as_root() -> list[str] | None:
    "What to put before a command so that it runs as root; None when that is not allowed without asking."
    if os.geteuid() == 0:
        return []
    sudo = shutil.which("sudo")
    may = sudo and subprocess.run([sudo, "-n", "true"], capture_output=True).returncode == 0
    return ["sudo", "-n"] if may else None


def install() -> None:
    "Debian's chromium and a font to render with; says why when it may not or cannot."
    prefix = as_root()
    if shutil.which("apt-get") is None or prefix is None or os.environ.get(BROWSER):
        print(missing(), file=sys.stderr)
        return
    print("installing Debian's chromium for the browser tests")
    apt = [*prefix, "env", "DEBIAN_FRONTEND=noninteractive", "apt-get", "-qq"]
    packages = ["install", "-y", "--no-install-recommends", "chromium", "fonts-dejavu-core"]
    for command in (["update"], packages):
        if subprocess.run([*apt, *command], stdout=subprocess.DEVNULL).returncode:
            print(f"apt-get {command[0]} failed; {missing()}", file=sys.stderr)
            return


if __name__ == "__main__" and not switched_off() and find() is None:
    install()
