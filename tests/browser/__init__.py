"What a reader sees and presses: JupyterLab and pages in a real browser. `conftest.py` holds the fixtures."
