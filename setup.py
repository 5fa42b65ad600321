"Reads settings.ini, the one source of the package's metadata, and hands it to setuptools."

import configparser
from pathlib import Path

from setuptools import find_packages, setup

here = Path(__file__).parent
config = configparser.ConfigParser(delimiters=["="])
config.read(here / "settings.ini", encoding="utf-8")
settings = config["DEFAULT"]

suffix = "_requirements"
extras = {
    key.removesuffix(suffix): value.split()
    for key, value in settings.items()
    if key.endswith(suffix)
}

setup(
    name=settings["lib_name"],
    version=settings["version"],
    description=settings["description"],
    long_description=(here / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    author=settings["author"],
    url=settings["git_url"],
    keywords=settings["keywords"].split(),
    license="Apache-2.0",
    python_requires=f">={settings['min_python']}",
    packages=find_packages(include=[settings["lib_path"], settings["lib_path"] + ".*"]),
    package_data={settings["lib_path"]: ["py.typed", "assets/**/*"]},
    install_requires=settings["requirements"].split(),
    extras_require=extras,
    entry_points={"console_scripts": settings["console_scripts"].split()},
    zip_safe=False,
)
