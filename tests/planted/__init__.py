"Short scripts as a researcher writes them, each with one bug that raises nothing. `tests/test_reader.py` reads what they display."
