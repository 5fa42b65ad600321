"""Plays a dashboard in JupyterLab and keeps what it showed: `python docs/moving.py nbs/images/dashboard.webp`."""

from __future__ import annotations

import io
import sys
import tempfile
from pathlib import Path

from PIL import Image
from playwright.sync_api import sync_playwright

sys.path[:0] = [
    str(Path(__file__).resolve().parent.parent),
    str(Path(__file__).resolve().parent.parent / "tests"),
]

from tests.browser import chromium
from tests.browser.conftest import FLAGS
from tests.browser.lab import HEAT, jupyter_lab

# every fourth step is a picture, the first ones and the last as well
STEPS = 28
SHOWN = 4
# how long a picture stays
MILLIS = 350
LAST = 4000
CELLS = [
    "import rl_notebook as rln\n"
    "cfg = rln.Config(prompt_groups_per_step=8, completions_per_prompt=8, max_completion_tokens=24,\n"
    "                 learning_rate=2e-4, kl_beta=0.001, temperature=1.0)\n"
    "loop = rln.GRPOLoop(rln.open_local(*rln.load_model('tiny')), rln.toy_rows(512), rln.toy_reward, cfg)",
    "dashboard = rln.Dashboard(loop)\ndashboard",
]


def frames() -> list[Image.Image]:
    "The dashboard phase by phase in its first step, then every few steps, and at last with a completion open."
    images: list[Image.Image] = []
    with sync_playwright() as playwright, tempfile.TemporaryDirectory() as home:
        browser = playwright.chromium.launch(executable_path=chromium.find(), args=FLAGS)
        context = browser.new_context(viewport={"width": 1240, "height": 1400})
        with jupyter_lab(Path(home), context) as lab:
            notebook = lab.open(CELLS, "moving.ipynb")
            notebook.run_cells(0, 1)
            board = notebook.show(1).locator(".rld").first

            def press(name):
                return board.locator(f".rld-{name}").first.click()

            def take() -> None:
                notebook.page.wait_for_timeout(500)  # plotly renders
                board.locator(".rld-behind").wait_for(state="detached")
                images.append(Image.open(io.BytesIO(board.screenshot())).convert("RGB"))

            def rest() -> None:
                while notebook.ask("dashboard.doing"):
                    notebook.page.wait_for_timeout(100)

            take()
            for _ in range(3):
                press("phase")
                rest()
                take()
            for step in range(1, STEPS + 1):
                press("step")
                rest()
                if step < SHOWN or step % SHOWN == 0:
                    take()
            heat = board.locator(".js-plotly-plot").filter(
                has=notebook.page.locator(".heatmaplayer image")
            )
            notebook.page.mouse.move(*heat.evaluate(HEAT, [1, 2]))
            notebook.page.wait_for_timeout(1000)  # plotly sees what the mouse is on
            notebook.page.mouse.down()
            notebook.page.mouse.up()
            take()
    return images


def main(target: str) -> None:
    "Writes one moving WebP picture."
    images = frames()
    size = (images[-1].width, max(f.height for f in images))
    pages = [Image.new("RGB", size, "white") for _ in images]
    for page, frame in zip(pages, images, strict=True):
        page.paste(frame)
    stays = [MILLIS * 2] * 4 + [MILLIS] * (len(pages) - 5) + [LAST]
    pages[0].save(
        target, save_all=True, append_images=pages[1:], duration=stays, loop=0, quality=55, method=6
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
